"""Saves without collectives: every rank writes and reads a checkpoint of its own, and none knows what the others hold.

Rank 3 of `HDF5Writer("step-1")` writes the checkpoint step-1/rank-00003. A tensor of which it holds a part is in there as
a tensor of that part, called "weight[4:8, 0:16]". The object `fsdpckpt.pieces` says which part of what it is.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ._save import _archive as archive

# The object that describes the pieces, by their names.
PIECES = "fsdpckpt.pieces"


class Piece(NamedTuple):
    """A part of a tensor that a rank has stored as a tensor."""

    fqn: str
    path: tuple[Any, ...] | None  # in the nested state dict
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]


def directory_of(path: str, rank: int) -> str:
    """Where a rank keeps its checkpoint."""
    return os.path.join(path, f"rank-{rank:05d}")


class Apart:
    """What a rank does to the plan of its own checkpoint. It resolves data in place of the planner."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.pieces: dict[str, Piece] = {}
        self._items: dict[str, WriteItem] = {}  # of pieces, as planned
        self._planner: SavePlanner | None = None

    def plan(self, plan: SavePlan) -> SavePlan:
        """The plan with each part as a tensor."""
        paths = plan.planner_data or {}
        items = [self._whole(item, paths.get(item.index.fqn)) for item in plan.items]
        if self.pieces:
            items.append(WriteItem(MetadataIndex(PIECES), WriteItemType.BYTE_IO))
        return dataclasses.replace(plan, items=items, storage_data=())

    def _whole(self, item: WriteItem, path: Any) -> WriteItem:
        data = item.tensor_data
        if data is None or tuple(data.chunk.sizes) == tuple(data.size):
            return item
        offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        name = item.index.fqn + "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes)) + "]"
        self.pieces[name] = Piece(item.index.fqn, path, tuple(data.size), offsets)
        self._items[name] = item
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(sizes)), sizes=torch.Size(sizes))
        data = dataclasses.replace(data, size=torch.Size(sizes), chunk=chunk)
        return dataclasses.replace(item, index=MetadataIndex(name, chunk.offsets), tensor_data=data)

    def for_planner(self, planner: SavePlanner) -> Apart:
        self._planner = planner
        return self

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        assert self._planner is not None
        if item.index.fqn == PIECES:
            rows = {name: tuple(piece) for name, piece in self.pieces.items()}
            return io.BytesIO(archive(PIECES, rows))
        return self._planner.resolve_data(self._items.get(item.index.fqn, item))

    def names(self, stored: Iterable[str]) -> set[str]:
        """The names in the state dict of the values that are stored."""
        return {self.pieces[name].fqn if name in self.pieces else name for name in stored} - {PIECES}


def read_pieces(objects: Mapping[str, Any]) -> dict[str, Piece]:
    """The pieces of a checkpoint that a rank has written for itself."""
    rows: Mapping[str, Any] = objects[PIECES] if PIECES in objects else {}
    return {name: Piece(row[0], row[1] and tuple(row[1]), tuple(row[2]), tuple(row[3])) for name, row in rows.items()}
