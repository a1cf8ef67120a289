"""Writing a sharded checkpoint from several processes: what they agree on, and what each of them writes. No PyTorch."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from . import _native

# The most bytes of tensors that are in memory to be written, if they are copies (of those of a GPU, for example).
_FETCHED_AT_ONCE = 128 << 20
# Path of a value in the nested state dict: keys, and list indices as (digits, whether it is a tuple).
Element = Any


class Box(NamedTuple):
    """A box of a tensor that a rank holds."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Value(NamedTuple):
    """A value of the checkpoint as all ranks see it; `dtype` is None for an object."""

    name: str
    path: tuple[Element, ...]
    dtype: str | None
    shape: tuple[int, ...]


class Job(NamedTuple):
    """What the ranks agree on."""

    path: str
    staging: str
    format: str
    mesh: _native.Pairs
    values: list[Value]
    layout: list[tuple[_native.Placements, int]]
    trust_objects: bool

    def packed(self) -> bytes:
        return zlib.compress(pickle.dumps(tuple(self), 4), 1)

    @classmethod
    def unpacked(cls, data: bytes) -> Job:
        fields = pickle.loads(zlib.decompress(data))
        return cls(*fields)._replace(values=[Value(*value) for value in fields[4]])

    def write(
        self,
        rank: int,
        boxes: Mapping[str, Box],
        objects: Mapping[str, bytes],
        fetch: Callable[[list[str]], list[int]],
        jobs: int,
        cached: bool,
    ) -> bytes:
        """Writes the file of a rank. Returns the notes for `finish`.

        `boxes` are those that the rank stores. `fetch` gets names and returns the addresses of their elements, which are
        row-major there. It may free those of the call before. With `cached`, the file stays in the page cache.
        """
        return _native.write_shard(
            self.path,
            self.staging,
            self.format,
            [_row(value, boxes.get(value.name), objects.get(value.name)) for value in self.values],
            self.mesh,
            self.layout,
            rank,
            lambda indices: fetch([self.values[index].name for index in indices]),
            _FETCHED_AT_ONCE,
            trust_objects=self.trust_objects,
            jobs=jobs,
            cached=cached,
        )

    def finish(self, notes: Sequence[bytes], objects: Mapping[str, bytes]) -> None:
        """Writes the index. Notes come in the order of ranks."""
        rows = [_row(value, None, objects.get(value.name)) for value in self.values]
        _native.write_index(
            self.path, self.staging, self.format, rows, self.mesh, self.layout, tuple(notes), self.trust_objects
        )


def find_layout(
    path: str, values: Sequence[Value], boxes: Sequence[Sequence[Box]], ranks: int
) -> tuple[_native.Pairs, list[tuple[_native.Placements, int]], list[list[int]]]:
    """Finds the mesh and the placements from the boxes that ranks hold.

    Returns the mesh; for each value its placements and the number of the holder that stores it; and for each value the
    indices of the boxes that are stored.
    """
    rows = [
        _row(value, None, None)
        if value.dtype is None
        else (
            value.name,
            value.path,
            value.dtype,
            None,
            value.shape,
            [(box.offsets, box.sizes, None, 0, box.rank) for box in held],
        )
        for value, held in zip(values, boxes)
    ]
    mesh, found = _native.layout(path, rows, ranks)
    return mesh, [layout for layout, _ in found], [stored for _, stored in found]


def _row(value: Value, box: Box | None, data: bytes | None) -> _native.Row:
    from ._save import address_of

    if value.dtype is None:
        where = address_of(data) if data else 0
        return (value.name, value.path, None, "torch.save", (len(data or b""),), [(None, None, None, where, None)])
    chunks = [] if box is None else [(box.offsets, box.sizes, None, 0, None)]
    return (value.name, value.path, value.dtype, None, value.shape, chunks)
