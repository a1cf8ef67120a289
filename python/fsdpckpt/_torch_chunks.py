"""Named chunks: chunks that a checkpoint has as tensors of their own, because it cannot have the tensor.

Such a chunk is called "weight[4:8, 0:16]", and the object `fsdpckpt.chunks` says which box of what it is. This is so in saves
without collectives, in which no rank knows what the others hold: rank 3 of `HDF5Writer("step-1")` writes the checkpoint
step-1/rank-00003. And it is so for a ShardedTensor whose chunks are not the shards of a mesh.
"""

from __future__ import annotations

import dataclasses
import io
import os
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ._errors import UnsupportedError
from ._save import _archive as archive

# The object that describes the named chunks, by their names.
CHUNKS = "fsdpckpt.chunks"


class NamedChunk(NamedTuple):
    """A chunk of a tensor that a rank has stored as a tensor."""

    fqn: str
    path: tuple[Any, ...] | None  # in the nested state dict
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]


def directory_of(path: str, rank: int) -> str:
    """Where a rank keeps its checkpoint."""
    return os.path.join(path, f"rank-{rank:05d}")


class NamedChunks(dict[str, NamedChunk]):
    """The named chunks of a checkpoint, by these names."""

    def plan(self, plan: SavePlan, names: Container[str] | None = None) -> SavePlan:
        """The plan with each chunk of the tensors `names` as a tensor; None: of all tensors."""
        paths = plan.planner_data or {}

        def whole(items: Iterable[WriteItem]) -> list[WriteItem]:
            return [
                self._whole(item, paths.get(item.index.fqn)) if names is None or item.index.fqn in names else item
                for item in items
            ]

        return dataclasses.replace(plan, items=whole(plan.items), storage_data=tuple(whole(plan.storage_data or ())))

    def _whole(self, item: WriteItem, path: Any) -> WriteItem:
        data = item.tensor_data
        if data is None or tuple(data.chunk.sizes) == tuple(data.size):
            return item
        offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
        name = item.index.fqn + "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(offsets, sizes)) + "]"
        self[name] = NamedChunk(item.index.fqn, path, tuple(data.size), offsets)
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(sizes)), sizes=torch.Size(sizes))
        data = dataclasses.replace(data, size=torch.Size(sizes), chunk=chunk)
        return dataclasses.replace(item, index=MetadataIndex(name, chunk.offsets), tensor_data=data)

    def described(self, plan: SavePlan) -> SavePlan:
        """The plan with the object that describes the named chunks."""
        items = [*plan.items, WriteItem(MetadataIndex(CHUNKS), WriteItemType.BYTE_IO)] if self else plan.items
        return dataclasses.replace(plan, items=items)

    def names(self, stored: Iterable[str]) -> set[str]:
        """The names in the state dict of the values that are stored."""
        return {self[name].fqn if name in self else name for name in stored} - {CHUNKS}


class Resolver(NamedTuple):
    """Resolves the data of named chunks in place of the planner."""

    chunks: NamedChunks
    planner: SavePlanner
    refusal: str  # for a named chunk of what is no ShardedTensor, if it is not empty

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = item.index.fqn
        if name == CHUNKS:
            return io.BytesIO(archive(CHUNKS, {name: tuple(chunk) for name, chunk in self.chunks.items()}))
        chunk = self.chunks.get(name)
        if chunk:
            item = dataclasses.replace(item, index=MetadataIndex(chunk.fqn, torch.Size(chunk.offsets)))
        # PyTorch may compute wrong boxes for a DTensor.
        value = getattr(self.planner, "state_dict", {}).get(chunk.fqn) if chunk and self.refusal else None
        if chunk and self.refusal and not isinstance(value, ShardedTensor):
            raise UnsupportedError(self.refusal)
        return self.planner.resolve_data(item)


def read_named_chunks(objects: Mapping[str, Any]) -> dict[str, NamedChunk]:
    """The named chunks of a checkpoint."""
    rows: Mapping[str, Any] = objects[CHUNKS] if CHUNKS in objects else {}
    return {name: NamedChunk(row[0], row[1] and tuple(row[1]), tuple(row[2]), tuple(row[3])) for name, row in rows.items()}
