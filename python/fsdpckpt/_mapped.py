"""Tensors whose elements are those of the mapped file: nothing is copied until it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import UsageError
from ._index import select

if TYPE_CHECKING:
    import numpy as np
    import torch

    from ._checkpoint import Tensor

    Array = np.ndarray[Any, Any]


class _Bytes:
    """Mapped bytes, for NumPy, which keeps this object as long as an array of them is alive."""

    __slots__ = ("_keeper", "__array_interface__")

    def __init__(self, keeper: object, address: int, nbytes: int) -> None:
        self._keeper = keeper
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def map_array(tensor: Tensor) -> Array:
    """The whole tensor."""
    return _map(tensor)[0]


def map_torch(tensor: Tensor, index: Any) -> torch.Tensor:
    """A part of the tensor, as a view of the mapped file."""
    import torch

    selection = select(index, tensor.shape)
    whole, stored = _map(tensor)
    # With an ellipsis, NumPy returns an array even where no dimension is left.
    taken: tuple[Any, ...] = (*(slice(axis.start, axis.start + axis.span, axis.step) for axis in selection.axes), Ellipsis)
    seen = selection.view if Ellipsis in selection.view else (*selection.view, Ellipsis)
    part = whole[taken][seen]
    dtype = getattr(torch, tensor.torch_dtype)
    if part.size == 0:
        return torch.empty(part.shape, dtype=dtype)
    strides = [stride // part.itemsize for stride in part.strides]
    if min(strides, default=0) < 0:
        raise UsageError(
            f"{tensor.name}: PyTorch has no tensors with negative steps, so the index cannot be mapped; mmap=False reads it"
        )
    first = (_address(part) - _address(stored)) // part.itemsize
    return torch.from_numpy(stored).view(dtype).as_strided(part.shape, strides, first)


def _map(tensor: Tensor) -> tuple[Array, Array]:
    """The whole tensor, and its stored bytes."""
    import numpy as np

    found = tensor._opened.handle().map(tensor._index)
    if found is None:
        return np.empty(tensor.shape, tensor.dtype), np.empty(0, "u1")
    keeper, address, nbytes, strides = found
    stored = np.asarray(_Bytes(keeper, address, nbytes))
    dtype = tensor.dtype
    return np.ndarray(tensor.shape, dtype, stored, strides=[stride * dtype.itemsize for stride in strides]), stored


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
