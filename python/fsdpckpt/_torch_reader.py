"""HDF5Reader of fsdpckpt.torch, which loads checkpoints for torch.distributed.checkpoint."""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from . import _checkpoint, _native
from ._arguments import checked, threads
from ._errors import CorruptError, TargetError, UsageError
from ._run import shown_path
from ._save import has_storage
from ._torch_chunks import CHUNKS, NamedChunk, directory_of, read_named_chunks
from ._torch_planner import held_reads

Path = Union[str, "os.PathLike[str]"]
# The most bytes of tensors that are read elsewhere first and then copied, such as those of a GPU.
_COPIED_AT_ONCE = 256 << 20


class HDF5Reader(StorageReader):
    """Loads a checkpoint, on any mesh. Every rank reads only what it needs.

    It reads every format that `fsdpckpt.open` reads. A tensor of which a rank loads a whole chunk is compared with its
    digest.

    Args:
        path: the checkpoint
        jobs: number of worker threads per rank (default: enough to keep the processors and the disk busy)
        options: those of `fsdpckpt.open`, such as `strip_prefix` and `rename`, for another naming of the state dict
    """

    @checked
    def __init__(self, path: Path | None = None, *, jobs: int = 0, **options: Any) -> None:
        self.path = None if path is None else os.fspath(path)
        self.jobs = threads(jobs)
        self.load_id = str(uuid.uuid4())
        self._options = options
        self._checkpoint: _checkpoint.Checkpoint | None = None
        self._metadata: Metadata | None = None
        self._names: dict[tuple[str, tuple[int, ...]], str] = {}  # of named chunks, by name and offsets

    @property
    def checkpoint_id(self) -> str | None:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike)) and FileSystemReader.validate_checkpoint_id(checkpoint_id)

    @checked
    def reset(self, checkpoint_id: Path | None = None) -> None:
        self._checkpoint = None
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self.load_id = str(uuid.uuid4())

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.path is None:
            raise UsageError("no path: pass one to HDF5Reader, or checkpoint_id to load")
        path, rank = self.path, kwargs.get("rank")
        if rank is not None:  # there is no checkpoint of all ranks
            if os.path.lexists(os.path.join(path, "index.h5")):
                raise CorruptError(f"{path}: the checkpoint of all ranks cannot be read")
            path = directory_of(path, rank)
        self._checkpoint = checkpoint = _checkpoint.open(path, **self._options)
        values: dict[str, Any] = {name: BytesStorageMetadata() for name in checkpoint.objects}
        for name, tensor in checkpoint.items():
            size = torch.Size(tensor.shape)
            # One chunk, whatever is stored: the engine finds the bytes of any box.
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=getattr(torch, tensor.torch_dtype))
            values[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
        order = checkpoint._names()
        paths = {name: tuple(path) for name, path in zip(order, checkpoint._opened.handle().paths())}
        self._names = {}
        if CHUNKS in checkpoint.objects:
            order = self._join(read_named_chunks(checkpoint.objects), order, values, paths)
        meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        self._metadata = Metadata({name: values[name] for name in order}, planner_data=paths, storage_meta=meta)
        return self._metadata

    def _join(
        self, chunks: Mapping[str, NamedChunk], order: Sequence[str], values: dict[str, Any], paths: dict[str, Any]
    ) -> list[str]:
        """Makes the tensors that are stored in parts out of these. Returns the names in their order."""
        names: dict[str, None] = {}
        for name in order:
            named = chunks.get(name)
            if named:
                part = values[name]
                chunk = ChunkStorageMetadata(offsets=torch.Size(named.offsets), sizes=part.size)
                whole = TensorStorageMetadata(properties=part.properties, size=torch.Size(named.shape), chunks=[])
                values.setdefault(named.fqn, whole).chunks.append(chunk)
                paths[named.fqn] = named.path or (named.fqn,)
                self._names[named.fqn, named.offsets] = name
            if name != CHUNKS:
                names[named.fqn if named else name] = None
            if named or name == CHUNKS:
                del values[name], paths[name]
        return list(names)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._checkpoint is None:
            self.read_metadata(rank=None if kwargs.get("use_collectives", True) else kwargs.get("rank"))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._checkpoint
        assert checkpoint is not None
        items: Sequence[ReadItem] = plan.items
        state = getattr(planner, "state_dict", None)  # PyTorch's planner may know the boxes wrongly
        if isinstance(state, dict) and self._metadata is not None:
            items = held_reads(items, state, self._metadata)
        if self._names:
            items = [self._stored(item) for item in items]
        ranks = local_ranks()
        cached = _is_cached(items, checkpoint, ranks)
        for batch in _batches(items, checkpoint):
            _read(checkpoint, batch, planner, (self.jobs, ranks, cached))
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(_archive(checkpoint, item.storage_index.fqn)))
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _stored(self, item: ReadItem) -> ReadItem:
        """The item with the name of the named chunk that it reads."""
        index = item.storage_index
        name = self._names.get((index.fqn, tuple(index.offset or ())), index.fqn)
        return dataclasses.replace(item, storage_index=dataclasses.replace(index, fqn=name))


def _archive(checkpoint: _checkpoint.Checkpoint, name: str) -> bytes:
    """An object as torch.save writes it."""
    data = checkpoint.objects.raw(name)
    if data.startswith(b"PK"):
        return data
    stream = io.BytesIO()
    torch.save(checkpoint.objects[name], stream)
    return stream.getvalue()


def _size(item: ReadItem, checkpoint: _checkpoint.Checkpoint) -> int:
    return torch.Size(item.lengths).numel() * checkpoint[item.storage_index.fqn].dtype.itemsize


def local_ranks() -> int:
    """How many ranks load or save on this machine, at most."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    local = os.environ.get("LOCAL_WORLD_SIZE", "")  # of torchrun
    return min(ranks, int(local)) if local.isdigit() and int(local) > 0 else ranks


def _is_cached(items: Sequence[ReadItem], checkpoint: _checkpoint.Checkpoint, ranks: int) -> bool:
    """Whether the ranks of this machine, which may hold the same boxes, read through the page cache."""
    size = sum(_size(item, checkpoint) for item in items if item.type != LoadItemType.BYTE_IO)
    return _native.fits_cache(min(size * ranks, sum(tensor.nbytes for tensor in checkpoint.values())))


def _batches(items: Sequence[ReadItem], checkpoint: _checkpoint.Checkpoint) -> Iterator[list[ReadItem]]:
    """Lists of items with about _COPIED_AT_ONCE bytes each, in case they must be copied."""
    batch: list[ReadItem] = []
    size = 0
    for item in items:
        if item.type == LoadItemType.BYTE_IO:
            continue
        batch.append(item)
        size += _size(item, checkpoint)
        if size >= _COPIED_AT_ONCE:
            yield batch
            batch, size = [], 0
    yield batch


def _read(checkpoint: _checkpoint.Checkpoint, items: Sequence[ReadItem], planner: LoadPlanner, how: tuple[int, int, bool]) -> None:
    requests = []
    copies = []
    targets = []
    for item in items:
        tensor = checkpoint[item.storage_index.fqn]
        target = _target(shown_path(checkpoint.path), tensor, item, planner)
        dtype = getattr(torch, tensor.torch_dtype)
        to = target
        if not _is_plain(target, dtype):
            to = torch.empty(tuple(item.lengths), dtype=dtype)
            copies.append((target, to))
        targets.append((item, target))
        nbytes = to.numel() * to.element_size()
        requests.append((tensor._index, tuple(item.storage_offsets), tuple(item.lengths), to.data_ptr(), nbytes))
    checkpoint._opened.handle().read_many(requests, *how)
    for target, made in copies:
        target.copy_(made)
    for item, target in targets:
        planner.commit_tensor(item, target)


def _target(path: str, tensor: _checkpoint.Tensor, item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    """The tensor of the planner that receives an item, which fits it exactly."""
    offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
    inside = len(offsets) == len(lengths) == tensor.ndim
    inside = inside and all(o >= 0 and n >= 0 and o + n <= size for o, n, size in zip(offsets, lengths, tensor.shape))
    if not inside:
        raise TargetError(
            f"{path}: tensor {tensor.name}: the planner reads {list(lengths)} elements from {list(offsets)} on, "
            f"the tensor has the shape {list(tensor.shape)}"
        )
    target = planner.resolve_tensor(item)
    if not isinstance(target, torch.Tensor):
        raise TargetError(f"{path}: tensor {tensor.name}: the planner's target is a {type(target).__name__}, not a tensor")
    target = target.detach()
    if tuple(target.shape) != lengths:
        raise TargetError(
            f"{path}: tensor {tensor.name}: the planner's target has the shape {list(target.shape)}, "
            f"the part that it reads {list(lengths)}; make the target of this shape"
        )
    if not has_storage(target):
        raise TargetError(f"{path}: tensor {tensor.name}: the storage of the planner's target is freed or too small")
    return target


def _is_plain(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether elements can be read into the memory of a tensor."""
    return (
        target.device.type == "cpu"
        and target.layout == torch.strided
        and target.dtype == dtype
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )
