"""Meshes and placements, as in torch.distributed.tensor, but without PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol, Union, runtime_checkable

from ._arguments import checked, integer, text, within
from ._errors import ArgumentError


class Replicate(NamedTuple):
    """The tensor is whole on every rank of this mesh dimension."""

    def __repr__(self) -> str:
        return "Replicate()"


class Shard(NamedTuple):
    """Dimension `dim` is sharded like torch.chunk."""

    dim: int

    def __repr__(self) -> str:
        return f"Shard({self.dim})"


class StridedShard(NamedTuple):
    """Dimension `dim` is sharded again after `split_factor` shards of another mesh dimension: FSDP over TP."""

    dim: int
    split_factor: int

    def __repr__(self) -> str:
        return f"_StridedShard({self.dim}, {self.split_factor})"


class Partial(NamedTuple):
    """The ranks hold terms of a sum."""

    def __repr__(self) -> str:
        return "Partial()"


Placement = Union[Replicate, Shard, StridedShard, Partial]


class Mesh(NamedTuple):
    """A device mesh: its dimensions, the last of which varies fastest over the ranks.

    >>> Mesh.of({"dp": 4, "tp": 2})
    Mesh(dp=4, tp=2)
    >>> Mesh.of({"dp": 4, "tp": 2}).size
    8
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks."""
        ranks = 1
        for n in self.shape:
            ranks *= n
        return ranks

    @classmethod
    @checked
    def of(cls, mesh: MeshLike) -> Mesh:
        """A mesh from {"dp": 4, "tp": 2}, from pairs, or from a torch DeviceMesh."""
        pairs: Any
        if isinstance(mesh, Mesh):
            pairs = _pairs(mesh.names, mesh.shape)
        elif isinstance(mesh, DeviceMeshLike):
            pairs = _pairs(mesh.mesh_dim_names or ("dp", "tp")[: len(mesh.shape)], mesh.shape)
        else:
            pairs = mesh.items() if isinstance(mesh, Mapping) else mesh
        dimensions = [_dimension(pair) for pair in pairs]
        made = cls(tuple(name for name, _ in dimensions), tuple(size for _, size in dimensions))
        within("mesh", made.size, 1, _MOST_RANKS)
        return made

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={n}" for name, n in zip(self.names, self.shape)) + ")"


def _pairs(names: Any, sizes: Any) -> list[tuple[Any, Any]]:
    if not isinstance(names, (tuple, list)) or not isinstance(sizes, (tuple, list)) or len(names) != len(sizes):
        raise ArgumentError("mesh= must have as many names as sizes")
    return list(zip(names, sizes))


def _dimension(pair: Any) -> tuple[str, int]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise ArgumentError("mesh= must have a pair of a name and a size for each dimension")
    return text("mesh", pair[0]), within("mesh", integer("mesh", pair[1]), 1, _MOST_RANKS)


@runtime_checkable
class DeviceMeshLike(Protocol):
    """torch.distributed.device_mesh.DeviceMesh."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


MeshLike = Union[Mesh, DeviceMeshLike, Mapping[str, int], Iterable[tuple[str, int]]]

_MOST_RANKS = 1 << 20
_REPLICATE, _SHARD, _STRIDED_SHARD, _PARTIAL = range(4)  # fc_placement_kind


def placement_of(parts: tuple[int, int, int]) -> Placement:
    """A placement from the three numbers of fsdpckpt._native."""
    kind, dim, split_factor = parts
    if kind == _SHARD:
        return Shard(dim)
    if kind == _STRIDED_SHARD:
        return StridedShard(dim, split_factor)
    return Partial() if kind == _PARTIAL else Replicate()


def _number(placement: object, name: str) -> int:
    return within(f"placements.{name}", integer(f"placements.{name}", getattr(placement, name, None)), -_MOST_RANKS, _MOST_RANKS)


def parts_of(placement: object) -> tuple[int, int, int]:
    """The three numbers of a placement: ours, or one of torch.distributed.tensor."""
    kind = type(placement).__name__
    if kind == "Shard":
        return (_SHARD, _number(placement, "dim"), 0)
    if kind in ("StridedShard", "_StridedShard"):
        return (_STRIDED_SHARD, _number(placement, "dim"), _number(placement, "split_factor"))
    if kind in ("Replicate", "Partial", "_Partial"):
        return (_REPLICATE if kind == "Replicate" else _PARTIAL, 0, 0)
    raise ArgumentError(f"placements= must be a list of placements, and a {kind} is none")
