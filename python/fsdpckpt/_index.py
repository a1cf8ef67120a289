"""Indexing: from t[3:9, ::2] to boxes that the library reads."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

# Skipped bytes from which on it pays to read the parts between them one by one.
_GAP = 64 << 10
# The most bytes that are read and then thinned out.
_SLAB = 16 << 20


class Axis(NamedTuple):
    """`length` indices of one dimension, in ascending order."""

    start: int
    step: int
    length: int

    @property
    def span(self) -> int:
        return (self.length - 1) * self.step + 1 if self.length else 0


class Selection(NamedTuple):
    """What an index selects: one axis per dimension of the tensor, and how the result is seen."""

    axes: tuple[Axis, ...]
    view: tuple[Any, ...]  # an index into the array of all axes: 0 drops one, a slice turns it round, None adds one


def select(index: Any, shape: Sequence[int]) -> Selection:
    """Reads a basic index of NumPy: integers, slices, Ellipsis and None.

    >>> select((slice(3, 9), 0), (10, 4))
    Selection(axes=(Axis(start=3, step=1, length=6), Axis(start=0, step=1, length=1)), view=(slice(None, None, None), 0))
    """
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    dots = [i for i, part in enumerate(parts) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError("an index can only have a single ellipsis ('...')")
    if used > len(shape):
        raise IndexError(f"too many indices: the tensor has {len(shape)} dimensions, but {used} were indexed")
    rest = [slice(None)] * (len(shape) - used)
    at = dots[0] if dots else len(parts)
    parts[at : at + len(dots)] = rest
    axes: list[Axis] = []
    view: list[Any] = []
    for part in parts:
        if part is None:
            view.append(None)
            continue
        axis, seen = _axis(part, len(axes), shape[len(axes)])
        axes.append(axis)
        view.append(seen)
    if dots:
        view.append(...)  # with it, NumPy returns an array even where no dimension is left
    return Selection(tuple(axes), tuple(view))


def _axis(part: Any, dim: int, size: int) -> tuple[Axis, Any]:
    if isinstance(part, slice):
        taken = range(size)[part]
        if taken.step < 0:
            taken = taken[::-1]
            return Axis(taken.start, taken.step, len(taken)), slice(None, None, -1)
        return Axis(taken.start, taken.step, len(taken)), slice(None)
    if isinstance(part, bool) or not hasattr(part, "__index__"):
        raise IndexError(
            "only integers, slices, ellipsis and None are valid indices; for others, index the array: t.numpy()[...]"
        )
    at = operator.index(part)
    if not -size <= at < size:
        raise IndexError(f"index {at} is out of bounds for dimension {dim} with size {size}")
    return Axis(at % size, 1, 1), 0


def read_axes(
    axes: Sequence[Axis], shape: Sequence[int], out: Array, read: Callable[[list[int], list[int], Array], None]
) -> None:
    """Fills `out` with the elements of all axes. `read` reads one box into a C-contiguous array."""
    if out.size == 0:
        return
    stepped = [d for d, axis in enumerate(axes) if axis.step > 1 and axis.length > 1]
    offsets = [axis.start for axis in axes]
    if not stepped:
        _read_box(offsets, [axis.length for axis in axes], out, read)
        return
    first = stepped[0]
    skipped = (axes[first].step - 1) * prod(shape[first + 1 :]) * out.itemsize
    spans = [axis.span for axis in axes]
    if skipped >= _GAP:
        _read_parts(first, axes, shape, out, read, axes[first].length)
    elif prod(spans) * out.itemsize > _SLAB:
        _read_parts(next(d for d, n in enumerate(out.shape) if n > 1), axes, shape, out, read, 2)
    else:
        import numpy as np

        box = np.empty(spans, out.dtype)
        read(offsets, spans, box)
        out[...] = box[tuple(slice(None, None, axis.step) for axis in axes)]


def _read_box(
    offsets: list[int], sizes: list[int], out: Array, read: Callable[[list[int], list[int], Array], None]
) -> None:
    if out.flags.c_contiguous:
        read(offsets, sizes, out)
        return
    import numpy as np

    box = np.empty(sizes, out.dtype)
    read(offsets, sizes, box)
    out[...] = box


def _read_parts(
    dim: int,
    axes: Sequence[Axis],
    shape: Sequence[int],
    out: Array,
    read: Callable[[list[int], list[int], Array], None],
    parts: int,
) -> None:
    """Reads `parts` parts of dimension `dim` one by one."""
    start, step, count = axes[dim]
    for i in range(parts):
        begin, end = count * i // parts, count * (i + 1) // parts
        part = list(axes)
        part[dim] = Axis(start + begin * step, step, end - begin)
        read_axes(part, shape, out[(slice(None),) * dim + (slice(begin, end),)], read)
