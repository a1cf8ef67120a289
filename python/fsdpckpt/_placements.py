"""Meshes and placements, as in torch.distributed.tensor, but without PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, Union, runtime_checkable


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
    def of(cls, mesh: MeshLike) -> Mesh:
        """A mesh from {"dp": 4, "tp": 2}, from pairs, or from a torch DeviceMesh."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, DeviceMeshLike):
            names = mesh.mesh_dim_names or ("dp", "tp")[: len(mesh.shape)]
            return cls(tuple(names), tuple(int(n) for n in mesh.shape))
        pairs = list(mesh.items() if isinstance(mesh, Mapping) else mesh)
        return cls(tuple(name for name, _ in pairs), tuple(int(n) for _, n in pairs))

    def __repr__(self) -> str:
        return "Mesh(" + ", ".join(f"{name}={n}" for name, n in zip(self.names, self.shape)) + ")"


@runtime_checkable
class DeviceMeshLike(Protocol):
    """torch.distributed.device_mesh.DeviceMesh."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


MeshLike = Union[Mesh, DeviceMeshLike, Mapping[str, int], Iterable[tuple[str, int]]]

_REPLICATE, _SHARD, _STRIDED_SHARD, _PARTIAL = range(4)  # fc_placement_kind


def placement_of(parts: tuple[int, int, int]) -> Placement:
    """A placement from the three numbers of fsdpckpt._native."""
    kind, dim, split_factor = parts
    if kind == _SHARD:
        return Shard(dim)
    if kind == _STRIDED_SHARD:
        return StridedShard(dim, split_factor)
    return Partial() if kind == _PARTIAL else Replicate()


def parts_of(placement: object) -> tuple[int, int, int]:
    """The three numbers of a placement: ours, or one of torch.distributed.tensor."""
    kind = type(placement).__name__
    dim = int(getattr(placement, "dim", 0))
    if kind == "Shard":
        return (_SHARD, dim, 0)
    if kind in ("StridedShard", "_StridedShard"):
        return (_STRIDED_SHARD, dim, int(getattr(placement, "split_factor")))
    if kind in ("Replicate", "Partial", "_Partial"):
        return (_REPLICATE if kind == "Replicate" else _PARTIAL, 0, 0)
    raise TypeError(f"{placement!r} is not a placement")
