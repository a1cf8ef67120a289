"""Saving a state dict of one process: NumPy and PyTorch tensors as tensors, everything else as objects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from . import _native
from ._arguments import checked, threads, within
from ._checkpoint import Tensor
from ._dtypes import torch_name
from ._errors import UnsupportedError, UsageError
from ._run import Path, Progress, Report, Update, _shown, shown_path

# A key of a dict, or the index into a list as (digits, whether it is a tuple).
Element = Any
_ALIGNED = (1980, 1, 1, 0, 0, 0)


@checked
def save(
    state_dict: Mapping[str, Any],
    path: Path,
    *,
    to: str | None = None,
    force: bool = False,
    trust_objects: bool = False,
    compress: int = 0,
    jobs: int = 0,
    progress: Progress = "auto",
) -> Report:
    """Saves a state dict. It appears under its name when it is complete and on disk.

    It becomes a full checkpoint, and a sharded one if it has DTensors of several ranks. Then all ranks call this.

    >>> import numpy as np
    >>> report = save({"model": {"weight": np.ones((2, 3))}, "step": 100}, folder / "step100.h5")
    >>> report.tensors, report.objects
    (1, 1)

    Args:
        state_dict: nested dicts and lists of tensors; a value that is no tensor becomes an object
        to: the format: h5, dcp, pt or safetensors (default: from the extension of `path`; h5 for shards)
        force: replace an existing checkpoint
        trust_objects: also write objects that PyTorch would have to run code for when it loads them
        compress: level of deflate, 1 to 9, for HDF5
        jobs: number of worker threads (default: enough to keep the processors and the disk busy)
        progress: a function that is called with each Update; "auto" shows a bar in a terminal or notebook; None: nothing
    """
    target = os.fspath(path)
    threads(jobs)
    within("compress", compress, 0, 9)
    leaves = list(_leaves(state_dict, ()))
    for elements, value in leaves:
        if _is_masked(value):
            raise UsageError(
                f"{shown_path(target)}: tensor {_name(elements)}: a masked array, and the mask would be lost: save its .filled(), "
                "or its .data and .mask"
            )
    if any(_is_sharded(value) for _, value in leaves):
        from .torch import save_shards

        if compress:
            raise UsageError(f"{shown_path(target)}: compress={compress}: shards in a training loop are not compressed; reshard does that")
        named = [(_name(elements), elements, value) for elements, value in leaves]
        if _named_format(target) and not os.path.isdir(target):
            raise UsageError(f"{shown_path(target)}: names a file, but one file for each rank makes a directory; name a directory")
        how = to or (_format_of(target) if os.path.splitext(target)[1] else "h5")
        return Report(
            "save",
            save_shards(named, target, to=how, force=force, trust_objects=trust_objects, jobs=jobs),
            True,
        )
    kept: list[Any] = []  # what the addresses point into
    rows = [_row(elements, value, kept) for elements, value in leaves]
    with _shown(progress) as show:

        def update(phase: str, unit: str, done: int, total: int) -> None:
            show(Update(phase, unit, done, total or None))

        members = _native.save(
            target,
            to or _format_of(target),
            rows,
            force=force,
            trust_objects=trust_objects,
            compress=compress,
            jobs=jobs,
            update=update,
        )
    return Report("save", members, True)


def _named_format(path: str) -> str | None:
    extension = os.path.splitext(path)[1].lower()
    return next((name for name, extensions, writable, _ in _native.formats() if writable and extension in extensions), None)


def _format_of(path: str) -> str:
    if name := _named_format(path):
        return name
    raise UsageError(f"{shown_path(path)}: its name does not tell the format; give to=, or end the name in .h5, .pt or .safetensors")


# ---- the nested state dict ----


def _leaves(value: Any, path: tuple[Element, ...]) -> Iterator[tuple[tuple[Element, ...], Any]]:
    """The values of a state dict with their paths, as PyTorch's flatten_state_dict visits them."""
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)) and _holds_tensors(value):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, (str(index), isinstance(value, tuple))))
    else:
        yield path, value


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(item) for item in value)
    return _is_tensor(value)


def _is_torch(value: Any) -> bool:
    return any(base.__module__ == "torch" and base.__name__ == "Tensor" for base in type(value).__mro__)


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "full_tensor") and _is_torch(value) and int(value.device_mesh.size()) > 1


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array_interface__") and type(value).__module__.partition(".")[0] == "numpy"


def _is_masked(value: Any) -> bool:
    return any(base.__module__.startswith("numpy.ma") and base.__name__ == "MaskedArray" for base in type(value).__mro__)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or _is_torch(value) or _is_array(value)


def _name(path: tuple[Element, ...]) -> str:
    return ".".join(element if isinstance(element, str) else element[0] for element in path)


# ---- values as the library takes them ----


def _row(path: tuple[Element, ...], value: Any, kept: list[Any]) -> tuple[Any, ...]:
    name = _name(path)
    if _is_torch(value):
        dtype, shape, strides, address = _torch_array(name, value, kept)
    elif _is_tensor(value):
        dtype, shape, strides, address = _numpy_array(value, kept)
    else:
        data = _archive(name, value)
        kept.append(data)
        return name, path, None, "torch.save", (len(data),), [(None, None, None, address_of(data), None)]
    return name, path, dtype, None, shape, [(None, None, strides, address, None)]


def _torch_array(name: str, value: Any, kept: list[Any]) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    if hasattr(value, "full_tensor"):
        value = value.to_local()
    host = host_tensor(name, value)
    kept.append(host)
    return str(host.dtype).removeprefix("torch."), tuple(host.shape), tuple(host.stride()), host.data_ptr()


def host_tensor(name: str, value: Any) -> Any:
    """The elements of a tensor in host memory: a copy only if they are elsewhere."""
    return plain_tensor(name, value).cpu()


def plain_tensor(name: str, value: Any) -> Any:
    """A tensor as nothing but its elements, where they are."""
    if str(value.layout) != "torch.strided" or value.is_quantized:
        raise UnsupportedError(f"{name}: a sparse or quantized tensor; save its parts")
    if type(value).__name__ == "AsyncCollectiveTensor":
        value = value.wait()
    if not has_storage(value):
        raise UsageError(f"{name}: its storage is freed or too small for its shape; save it while it has its elements")
    plain = value.detach().resolve_conj().resolve_neg()
    if type(plain).__name__ != "Tensor":
        raise UnsupportedError(f"{name}: a {type(plain).__name__}, which is more than its elements; save its parts")
    return plain


def as_torch(value: Any) -> Any:
    """Tensors of NumPy and of open checkpoints as those of PyTorch."""
    import numpy as np
    import torch

    if isinstance(value, Tensor):
        return value.torch()
    if not isinstance(value, (np.ndarray, np.generic)):
        return value
    array = np.asarray(value)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("=")).reshape(array.shape)
    flat = torch.from_numpy(array.reshape(-1).view("u1"))
    return flat.view(getattr(torch, torch_name(array.dtype))).reshape(array.shape)


def has_storage(value: Any) -> bool:
    """Whether all elements of a tensor are within its storage, which FSDP1 frees, for example."""
    if str(value.layout) != "torch.strided" or value.numel() == 0:
        return True
    if value.is_meta:
        return False
    try:
        storage = value.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
        return True
    last = value.storage_offset() + sum((n - 1) * step for n, step in zip(value.shape, value.stride()))
    return bool(storage >= (last + 1) * value.element_size())


def _numpy_array(value: Any, kept: list[Any]) -> tuple[str, tuple[int, ...], tuple[int, ...], int]:
    import numpy as np

    array = value.numpy() if isinstance(value, Tensor) else np.asarray(value)
    dtype = value.torch_dtype if isinstance(value, Tensor) else torch_name(array.dtype)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if any(step < 0 or step % array.itemsize for step in array.strides):
        array = np.ascontiguousarray(array).reshape(array.shape)
    kept.append(array)
    return dtype, array.shape, tuple(step // array.itemsize for step in array.strides), address_of(array)


def address_of(data: Any) -> int:
    import numpy as np

    array = np.frombuffer(data, "u1") if isinstance(data, bytes) else data
    return int(array.__array_interface__["data"][0])


# ---- objects ----


def _archive(name: str, value: Any) -> bytes:
    """What torch.save writes of an object. Plain data needs no PyTorch."""
    import io
    import pickle
    import zipfile

    if not _is_plain(value):
        try:
            import torch
        except ImportError:
            raise UsageError(f"{name}: saving a {type(value).__name__} needs PyTorch") from None
        stream = io.BytesIO()
        try:
            torch.save(value, stream)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(f"{name}: torch.save cannot write a {type(value).__name__}: {error}") from error
        return stream.getvalue()
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for record, content in (
            ("data.pkl", pickle.dumps(value, protocol=2)),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"archive/{record}", _ALIGNED), content)
    return stream.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, float, str)
