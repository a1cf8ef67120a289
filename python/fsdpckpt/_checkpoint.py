"""An open checkpoint: a read-only mapping from names to tensors, which read their bytes on demand."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from . import _native, _objects
from ._arguments import checked, flag
from ._dtypes import numpy_dtype
from ._errors import UsageError
from ._index import read_axes, select
from ._opened import Opened
from ._placements import Mesh, MeshLike, Placement, Replicate, parts_of
from ._run import shown_path

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

Path = Union[str, "os.PathLike[str]"]


class Chunk(NamedTuple):
    """A box of a tensor that is stored in one place."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str | None
    rank: int | None
    nbytes: int


class Tensor:
    """A tensor of an open checkpoint. It has no data: indexing and conversion read it."""

    __slots__ = ("_opened", "_index", "name", "shape", "torch_dtype", "_nchunks")

    name: str
    shape: tuple[int, ...]
    torch_dtype: str

    def __init__(self, opened: Opened, index: int, entry: tuple[str, str, tuple[int, ...], int]) -> None:
        self._opened = opened
        self._index = index
        self.name, self.torch_dtype, self.shape, self._nchunks = entry

    # ---- what the headers say ----

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype in NumPy, with ml_dtypes for bfloat16 and the 8-bit floats."""
        return numpy_dtype(self.torch_dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the checkpoint is sharded over; None if it is not."""
        return self._opened.layout()[0]

    @property
    def placements(self) -> tuple[Placement, ...] | None:
        """One placement per dimension of the mesh; None without a mesh."""
        mesh, placements = self._opened.layout()
        return placements[self._index] if mesh else None

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The boxes that are stored, and where."""
        return tuple(Chunk(*parts) for parts in self._opened.handle().chunks(self._index))

    # ---- reading ----

    def __getitem__(self, index: Any) -> Array:
        """Reads a part: integers, slices with steps, Ellipsis and None, as in NumPy."""
        import numpy as np

        selection = select(index, self.shape)
        out = np.empty([axis.length for axis in selection.axes], self.dtype)
        read_axes(selection.axes, self.shape, out, self._read)
        part: Array = out[selection.view]
        return part

    def numpy(self, *, mmap: bool = False) -> Array:
        """Reads the whole tensor, and compares it with its recorded digests.

        With `mmap`, the array is a part of the file in memory: nothing is read or compared before it is used, and what is
        written to the array does not reach the file. `UsageError` if the file has no such elements (docs/PYTHON.md).
        """
        if mmap is not False and flag("mmap", mmap):
            from ._mapped import map_array

            return map_array(self)
        return self[...]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError("a tensor of a checkpoint has no array: reading it makes a copy")
        array = self[...]
        return array if dtype is None else array.astype(dtype, copy=False)

    def torch(self, index: Any = ..., *, mmap: bool = False) -> torch.Tensor:
        """Reads the tensor, or a part of it, as a tensor of PyTorch. With `mmap`, it is a part of the file in memory, as
        in `numpy`."""
        import numpy as np
        import torch

        if mmap is not False and flag("mmap", mmap):
            from ._mapped import map_torch

            return map_torch(self, index)
        out = torch.empty(self.shape if index is ... else (), dtype=getattr(torch, self.torch_dtype))
        if index is ... and out.numel():
            self._read_to([0] * self.ndim, list(self.shape), out.data_ptr(), out.numel() * out.element_size())
        elif index is not ...:
            array = self[index]
            flat = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view("u1"))
            out = flat.view(out.dtype).reshape(array.shape)
        return out

    @checked
    def local(
        self,
        rank: int,
        mesh: MeshLike | None = None,
        placements: Sequence[object] | None = None,
        *,
        tp_plan: str | None = None,
    ) -> Array:
        """Reads the part of one rank.

        Without a mesh, this is the part that the rank has in this checkpoint. With a mesh of the dimensions
        "replicate", "dp" and "tp", it is the part that `reshard` would give it; `placements` says otherwise.
        """
        offsets, sizes = self.local_box(rank, mesh, placements, tp_plan=tp_plan)
        return self[tuple(slice(o, o + n) for o, n in zip(offsets, sizes))]

    @checked
    def local_box(
        self,
        rank: int,
        mesh: MeshLike | None = None,
        placements: Sequence[object] | None = None,
        *,
        tp_plan: str | None = None,
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The offsets and sizes of what `local` reads."""
        on = self.mesh if mesh is None else Mesh.of(mesh)
        if on is None:
            on = Mesh(("dp",), (1,))
        pairs = tuple(zip(on.names, on.shape))
        if placements is not None:
            parts = tuple(parts_of(placement) for placement in placements)
        elif mesh is None:
            parts = tuple(parts_of(placement) for placement in self.placements or (Replicate(),))
        else:
            parts = _native.placements(self.name, self.ndim, pairs, tp_plan)
        return _native.local_box(self.shape, pairs, parts, rank)

    def _read_to(self, offsets: list[int], sizes: list[int], address: int, nbytes: int) -> None:
        """Reads a box to `nbytes` bytes of memory, which the caller keeps."""
        self._opened.handle().read(self._index, offsets, sizes, address, nbytes)

    def _read(self, offsets: list[int], sizes: list[int], out: Array) -> None:
        self._read_to(offsets, sizes, out.__array_interface__["data"][0], out.nbytes)

    # ---- for people and other programs ----

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        parts = f", {self._nchunks} chunks" if self._nchunks > 1 else ""
        return f"<Tensor {self.name!r} {self.torch_dtype} {list(self.shape)}{parts}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tensor, (self._opened, self._index, (self.name, self.torch_dtype, self.shape, self._nchunks))


class Objects(Mapping[str, Any]):
    """The values of a checkpoint that are not tensors, decoded on demand."""

    def __init__(self, opened: Opened, path: str, indices: dict[str, int], sizes: dict[str, int]) -> None:
        self._opened = opened
        self._path = path
        self._indices = indices
        self._sizes = sizes

    def __getitem__(self, name: str) -> Any:
        return _objects.decode(self._opened.handle().object_json(self._indices[name]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def raw(self, name: str) -> bytes:
        """The original bytes of an object, such as the archive that torch.save made."""
        import numpy as np

        size = self._sizes[name]
        out = np.empty(size, "u1")
        address = out.__array_interface__["data"][0]
        self._opened.handle().read(self._indices[name], [0], [size], address, size)
        return out.tobytes()

    def __repr__(self) -> str:
        return f"<{len(self)} objects of {shown_path(self._path)}>"


class Checkpoint(Mapping[str, Tensor]):
    """An open checkpoint; `fsdpckpt.open` makes one."""

    @checked
    def __init__(self, path: Path, **options: Any) -> None:
        self._set_up(os.fspath(path), Opened(os.fspath(path), options))

    def _set_up(self, path: str, opened: Opened) -> None:
        self.path = path
        self._opened = opened
        self.format, self.producer, self.note = opened.native.about()
        self._tensors: dict[str, Tensor] = {}
        objects: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for index, (name, dtype, shape, chunks) in enumerate(opened.native.entries()):
            if dtype is None:
                objects[name] = index
                sizes[name] = shape[0]
            else:
                self._tensors[name] = Tensor(opened, index, (name, dtype, shape, chunks))
        self.objects = Objects(opened, path, objects, sizes)

    def _names(self) -> list[str]:
        """The names of tensors and objects, in the order of the checkpoint."""
        return [name for name, *_ in self._opened.native.entries()]

    # ---- the mapping ----

    def __getitem__(self, name: str) -> Tensor:
        if name in self._tensors:
            return self._tensors[name]
        if name in self.objects:
            raise KeyError(f"{name}: an object, not a tensor; .objects['{name}'] decodes it")
        raise KeyError(f"{name}: no such tensor{_suggest(name, self._tensors)}")

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    # ---- all of it ----

    @checked
    def state_dict(self, *, nested: bool = False) -> dict[str, Any]:
        """Reads all tensors, as tensors of PyTorch by name. With `open(..., model_only=True)`, they fit the
        `load_state_dict` of the model.

        With `nested`, the result is nested as it was saved and has the objects, too. An object that only PyTorch can
        make is a `Foreign`.
        """
        import torch

        native = self._opened.handle()
        state = {name: torch.empty(t.shape, dtype=getattr(torch, t.torch_dtype)) for name, t in self.items()}
        boxes = []
        for name, out in state.items():
            if out.numel():
                nbytes = out.numel() * out.element_size()
                boxes.append((self[name]._index, [0] * out.ndim, list(out.shape), out.data_ptr(), nbytes))
        native.read_many(boxes, 0, 1, _native.fits_cache(sum(box[4] for box in boxes)))
        if not nested:
            return state
        values = [state[name] if name in state else self.objects[name] for name in self._names()]
        return _nest(native.paths(), values)

    # ---- the layout ----

    @property
    def mesh(self) -> Mesh | None:
        """The mesh that the checkpoint is sharded over, recorded or recognised from its chunks; None if there is none."""
        return self._opened.layout()[0]

    # ---- its life ----

    def close(self) -> None:
        """Closes it. Reads that other threads have begun finish."""
        self._opened.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _checkpoint_of, (self._opened,)

    def __repr__(self) -> str:
        objects = f", {len(self.objects)} objects" if self.objects else ""
        return f"<Checkpoint {shown_path(self.path)!r} ({self.format}): {len(self)} tensors{objects}>"

    def _repr_html_(self) -> str:
        from ._html import page

        return page(self)


class _List(dict[int, Any]):
    """A list of the state dict whose elements are not all known yet."""


def _nest(paths: Sequence[Sequence[str | int]], values: Sequence[Any]) -> dict[str, Any]:
    """The state dict whose values are at these paths. A path with a number leads through a list."""
    top: dict[Any, Any] = {}
    for path, value in zip(paths, values):
        at = top
        for key, following in zip(path, path[1:]):
            at = at.setdefault(key, _List() if isinstance(following, int) else {})
        at[path[-1]] = value
    return {key: _listed(value) for key, value in top.items()}


def _listed(value: Any) -> Any:
    """The same with lists in the place of `_List`. An element that was left out is None."""
    if isinstance(value, _List):
        return [_listed(value.get(i)) for i in range(max(value) + 1)]
    return {key: _listed(item) for key, item in value.items()} if type(value) is dict else value


@checked
def load(path: Path, **options: Any) -> dict[str, Any]:
    """Reads a checkpoint of any format and layout as the state dict that was saved: tensors of PyTorch, and objects.

    The options are those of `open`. No code of the checkpoint runs. See `Checkpoint.state_dict`.

    >>> state = load(checkpoint)
    >>> state["model"]["tok_embeddings.weight"].shape
    torch.Size([11, 6])
    >>> list(load(checkpoint, model_only=True))[0]
    'tok_embeddings.weight'
    """
    with open(path, **options) as checkpoint:
        return checkpoint.state_dict(nested=True)


def _suggest(name: object, names: Mapping[str, Tensor]) -> str:
    import difflib

    some = itertools.islice(names, 10_000)  # it is slow
    near = difflib.get_close_matches(name, some, 1) if isinstance(name, str) else []
    return f"; did you mean '{near[0]}'?" if near else ""


def _checkpoint_of(opened: Opened) -> Checkpoint:
    checkpoint = Checkpoint.__new__(Checkpoint)
    checkpoint._set_up(opened.origin.path, opened)
    return checkpoint


@checked
def open(
    path: Path,
    *,
    model_only: bool = False,
    include: Sequence[str] | str | None = None,
    exclude: Sequence[str] | str | None = None,
    strip_prefix: str | None = None,
    rename: Sequence[str] | str | None = None,
    schema: Path | None = None,
    tp_plan: str | None = None,
    recipe: Path | None = None,
    reverse: bool = False,
    config: Path | None = None,
    delta: Sequence[Path] | Path | None = None,
    up_to: int | None = None,
    follow_external: bool = False,
) -> Checkpoint:
    """Opens a checkpoint of any format and layout. Only its headers are read.

    The options are those of the command (`fsdpckpt consolidate --help`): `model_only` takes the parameters and buffers
    of the model, under the names that they have in it, `include` and `exclude` are globs over names,
    `strip_prefix` and `rename` change names, `schema` names the parameters in FSDP1's flat parameters, `tp_plan` says
    how tensor parallelism sharded the tensors in rank files that do not record it.

    `recipe` gives the selected tensors the names and layouts of another program while they are read: the name of a
    shipped recipe (`recipes` lists them), "auto" for the only one that fits, or a JSON file.
    `reverse` applies it in the other direction, and `config` is the model's config.json or its folder, by default the
    one in the checkpoint's folder.

    `delta` is a directory of versions that `delta` or another program wrote, or some of its versions: the checkpoint
    is then the model with these changes, which are applied while it is read. `up_to` is the number of the last version,
    by default the newest. Reading a whole tensor compares its checksum.
    """
    if delta is None and up_to is not None:
        raise UsageError("up_to= needs delta=")
    if recipe is None and (reverse or config is not None):
        raise UsageError(("reverse=" if reverse else "config=") + " needs recipe=")
    if recipe is not None and config is None:
        config = _config_of(os.fspath(path))

    def texts(value: Sequence[str] | str | None) -> Sequence[str] | None:
        return [value] if isinstance(value, str) else value

    return Checkpoint(
        path,
        model_only=model_only,
        include=texts(include),
        exclude=texts(exclude),
        strip_prefix=strip_prefix,
        rename=texts(rename),
        schema=schema,
        tp_plan=tp_plan,
        recipe=recipe,
        reverse=reverse,
        config=config,
        delta=_paths(delta),
        up_to=-1 if up_to is None else up_to,
        follow_external=follow_external,
    )


def _paths(value: Sequence[Path] | Path | None) -> list[str] | None:
    if value is None:
        return None
    several = [value] if isinstance(value, (str, bytes, os.PathLike)) else value
    return [os.path.abspath(os.fsdecode(path)) for path in several]


def _config_of(path: str) -> str | None:
    """The config.json in the folder of a checkpoint, or next to its file."""
    found = (os.path.join(folder, "config.json") for folder in (path, os.path.dirname(path)))
    return next((os.path.abspath(file) for file in found if os.path.exists(file)), None)


def recipes() -> dict[str, dict[str, Any]]:
    """The shipped recipes by name, as in their JSON files (docs/RECIPES.md).

    >>> recipes()["nanogpt"]["description"]
    'GPT-2 of nanoGPT (nn.Linear) as GPT2LMHeadModel of transformers (Conv1D)'
    """
    import json

    return {name: json.loads(text) for name, text in _native.recipes()}
