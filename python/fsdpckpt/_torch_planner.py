"""SavePlanner and LoadPlanner of fsdpckpt.torch: planners that know which rows FSDP2 holds on top of tensor parallelism.

PyTorch 2.10 and later compute wrong boxes for such ranks when the rows do not divide (7 rows on dp 3 × tp 2), see
fc_local_box. Its own planners then refuse to save, or save and load other rows than the ranks hold, silently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor

from . import _native
from ._errors import UsageError
from ._placements import parts_of


class SavePlanner(DefaultSavePlanner):
    """PyTorch's DefaultSavePlanner with the boxes that the ranks of FSDP2 over tensor parallelism hold."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = [_held_item(item, self.state_dict) for item in plan.items]
        if items != plan.items:
            plan = dataclasses.replace(plan, items=items)
            self.plan = plan
        return plan


class LoadPlanner(DefaultLoadPlanner):
    """PyTorch's DefaultLoadPlanner with the boxes that the ranks of FSDP2 over tensor parallelism hold."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        assert self.metadata is not None
        return dataclasses.replace(plan, items=held_reads(plan.items, self.state_dict, self.metadata))


def held_reads(items: Sequence[ReadItem], state: Mapping[str, Any], metadata: Metadata) -> list[ReadItem]:
    """The items of a load plan, those of FSDP2 over tensor parallelism for the boxes that this rank holds."""
    boxes = {name: box for name, box in ((name, held_box(name, value)) for name, value in state.items()) if box}
    kept = [item for item in items if item.dest_index.fqn not in boxes]
    for name, box in boxes.items():
        stored = metadata.state_dict_metadata.get(name)
        if isinstance(stored, TensorStorageMetadata):
            kept += create_read_items_for_chunk_list(name, stored, [box])
    return kept


def held_box(name: str, value: object) -> ChunkStorageMetadata | None:
    """The box of a DTensor that this rank holds, or None if PyTorch computes it well: without _StridedShard."""
    if not isinstance(value, DTensor) or not any(type(p).__name__ == "_StridedShard" for p in value.placements):
        return None
    box = box_of(name, value)
    return ChunkStorageMetadata(offsets=torch.Size(box[0]), sizes=torch.Size(box[1])) if box else None


def box_of(name: str, value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The offsets and sizes of what this rank holds of a DTensor, or None if it is not in the mesh."""
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    rank = 0
    for index, size in zip(coordinate, mesh.shape):
        rank = rank * size + index
    names = mesh.mesh_dim_names or tuple(f"dim{m}" for m in range(mesh.ndim))
    parts = tuple(parts_of(placement) for placement in value.placements)
    offsets, sizes = _native.local_box(tuple(value.shape), tuple(zip(names, mesh.shape)), parts, rank)
    local = tuple(value.to_local().shape)
    if local != sizes:
        raise UsageError(f"tensor {name}: this rank holds the shape {local}, but FSDP2 on top of TP gives it {sizes}")
    return offsets, sizes


def _held_item(item: WriteItem, state: Mapping[str, Any]) -> WriteItem:
    data = item.tensor_data
    box = held_box(item.index.fqn, state.get(item.index.fqn)) if data else None
    if data is None or box is None or box == data.chunk:
        return item
    index = MetadataIndex(item.index.fqn, box.offsets)
    return dataclasses.replace(item, index=index, tensor_data=dataclasses.replace(data, chunk=box))
