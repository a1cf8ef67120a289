"""HDF5 as a checkpoint format of torch.distributed.checkpoint.

>>> import torch.distributed.checkpoint as dcp
>>> from fsdpckpt.torch import HDF5Reader, HDF5Writer
>>> state = {"model": {"weight": torch.ones(4, 3)}, "step": 100}
>>> _ = dcp.save(state, storage_writer=HDF5Writer(folder / "step-100"))
>>> state = {"model": {"weight": torch.zeros(4, 3)}, "step": 0}
>>> dcp.load(state, storage_reader=HDF5Reader(folder / "step-100"))
>>> state["step"], state["model"]["weight"].sum().item()
(100, 12.0)

`fsdpckpt.open` and the commands read what is written.
"""

from __future__ import annotations

import dataclasses
import io
import os
import uuid
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as AnyPlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from . import _native
from ._arguments import checked, threads
from ._delta_ranks import delta
from ._errors import Error, SystemFailure, UnsupportedError, UsageError, tell
from ._run import is_in_bucket, shown_path
from ._save import as_torch
from ._shards import Box, Element, Job, find_layout
from ._torch_chunks import NamedChunks, Resolver, directory_of
from ._torch_planner import LoadPlanner, SavePlanner
from ._torch_plans import PLANS, Held, is_usable
from ._torch_reader import HDF5Reader, Path, local_ranks

__all__ = ["HDF5Reader", "HDF5Writer", "LoadPlanner", "SavePlanner", "delta"]


_UNEVEN = "if FSDP2 and TP do not divide its rows evenly, pass planner=fsdpckpt.torch.SavePlanner()"


class _Task(NamedTuple):
    """SavePlan.storage_data: what a rank has to write."""

    job: bytes  # Job.packed
    rank: int
    late: bool  # rank 0's file waits for objects that other ranks hold
    apart: bool  # its plan is of no use to another save: it has named chunks, or each rank has a checkpoint of its own
    chunks: NamedChunks
    refusal: str  # see Resolver

    @property
    def prefix(self) -> str:
        """What FileSystemWriter looks for in a plan that the planner has cached."""
        return f"__{self.rank}_"


class _Written(NamedTuple):
    """WriteResult.storage_data: what a rank has written."""

    rank: int
    notes: bytes
    objects: dict[str, bytes]


class HDF5Writer(StorageWriter):
    """Writes the sharded layout of docs/HDF5_SCHEMA.md: one file per rank, and index.h5.

    The checkpoint appears under its name when it is complete and on disk. All ranks need the same file system, or a
    bucket: each rank sends its file there, and rank 0 makes all of them visible.

    Args:
        path: the directory to make, or its name in a bucket (s3://, gs://)
        force: replace an existing checkpoint
        jobs: number of worker threads per rank (default: enough to keep the processors and the disk busy)
    """

    @checked
    def __init__(self, path: Path | None = None, *, force: bool = False, jobs: int = 0) -> None:
        self.path = None if path is None else os.fspath(path)
        self.force = force
        self.jobs = threads(jobs)
        self.save_id = str(uuid.uuid4())
        self._format = "h5"
        self._trust_objects = False
        self._paths: dict[str, tuple[Element, ...]] | None = None
        self._target: str | None = None  # the last one that was begun
        self._begin()

    def _begin(self) -> None:
        self._coordinates = False
        self._chunks = NamedChunks()
        self._apart: int | None = None  # the rank, if each has a checkpoint of its own
        self._staging: _native.Staging | None = None  # of rank 0; in a bucket, of each rank
        self._busy = False
        self._job: Job | None = None
        self._late: tuple[SavePlan, Resolver] | None = None
        self._objects: dict[str, bytes] = {}

    @property
    def checkpoint_id(self) -> str | None:
        return self.path

    def __getstate__(self) -> dict[str, Any]:
        names = ("path", "force", "jobs", "save_id", "_format")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["path"], force=state["force"], jobs=state["jobs"])  # type: ignore[misc]
        self.save_id, self._format = state["save_id"], state["_format"]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Path) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike)) and FileSystemWriter.validate_checkpoint_id(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @checked
    def reset(self, checkpoint_id: Path | None = None) -> None:
        self._abort()
        if checkpoint_id is not None:
            self.path = os.fspath(checkpoint_id)
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._abort()
        self._coordinates = is_coordinator
        if not kwargs.get("use_collectives", True):
            self._apart = kwargs.get("rank") or 0
        _drop_plans_of_others(every=self._apart is not None)
        if self.path is None:
            raise UsageError("no path: pass one to HDF5Writer, or checkpoint_id to save")
        if self._apart is not None and os.path.lexists(os.path.join(self.path, "index.h5")):
            raise UsageError(
                f"{self.path}: has a checkpoint of all ranks, and use_collectives=False makes one for each: "
                "name another directory"
            )

    # ---- planning ----

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not is_usable(plan):
            return plan
        # The planner is about to remove replicas; which rank stores one is decided later.
        return dataclasses.replace(
            plan,
            storage_data=tuple(plan.items),
            planner_data=plan.planner_data if self._paths is None else self._paths,
        )

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self.path is not None
        plans = PLANS.complete(plans)
        path, chunks, refusal = self.path, NamedChunks(), ""
        if self._apart is not None:
            path = directory_of(path, self._apart)
            plans = [chunks.described(chunks.plan(plan)) for plan in plans]
        split: set[str] = set()
        while True:
            held = Held([chunks.described(plans[0]), *plans[1:]] if split else plans)
            try:
                mesh, layout, stored = find_layout(shown_path(path), held.values, held.boxes, len(plans))
                break
            except UnsupportedError as error:
                refusal = f"{error}; {_UNEVEN}"
                name = (error.tensor or "").strip("'")
                if name in split or name not in {value.name for value in held.values} or self._format != "h5":
                    raise UnsupportedError(refusal) from None
                split.add(name)
                plans = [chunks.plan(plan, split) for plan in plans]
        if split:
            tell(
                f"{shown_path(path)}: the chunks of {', '.join(sorted(split))} are not the shards of a mesh: each is stored as a tensor "
                "of its own; HDF5Reader joins them, the commands do not"
            )
        _make_parents(path)
        self._begin_target(path, bytes=held.bytes)
        assert self._staging is not None
        job = Job(path, self._staging.path(), self._format, mesh, held.values, layout, self._trust_objects)
        self._job = job
        items, late = held.take_all() if _is_self_contained(self._format) else held.assign(stored)
        packed = job.packed()
        apart = bool(chunks) or self._apart is not None
        return [
            dataclasses.replace(
                plan,
                items=items[rank],
                storage_data=_Task(packed, rank, late and rank == 0, apart, chunks, refusal),
            )
            for rank, plan in enumerate(plans)
        ]

    def _begin_target(self, path: str, *, bytes: int = 0, joined: str | None = None) -> None:
        """Begins the target, or joins the one that rank 0 has begun. After a failure on another rank, a writer of this process
        may still have a target in a bucket of the same name, so that one is aborted first."""
        for other in list(_WRITERS):
            if other is not self and _place(other._target) == _place(path) and not other._busy and is_in_bucket(path):
                other._abort()
        self._staging = _native.Staging(path, self._format, force=self.force, bytes=bytes, joined=joined)
        self._target = path
        _WRITERS.add(self)
        weakref.finalize(self, self._staging.abort)

    # ---- writing ----

    def write_data(self, plan: SavePlan, planner: AnyPlanner) -> Future[list[WriteResult]]:
        self._busy = True
        try:
            return self._write_data(plan, planner)
        except BaseException:
            self._abort()
            raise
        finally:
            self._busy = False

    def _write_data(self, plan: SavePlan, planner: AnyPlanner) -> Future[list[WriteResult]]:
        task: _Task = plan.storage_data
        if task.apart:
            _drop_plans_of_others(every=False)  # the planner has just cached this one, and FileSystemWriter would use it
        resolver = Resolver(task.chunks, planner, task.refusal)
        self._chunks = task.chunks
        objects = {item.index.fqn: _object(item, resolver) for item in plan.items if item.type == WriteItemType.BYTE_IO}
        job = self._job or Job.unpacked(task.job)
        if self._staging is None and self._coordinates:
            raise UsageError(f"{job.path}: another save to it has begun in this process: let one end before the next begins")
        if self._staging is None and is_in_bucket(job.path):
            self._begin_target(job.path, joined=job.staging)
        notes = b""
        if task.late:
            self._late = (plan, resolver)
        else:
            notes = _write(job, task.rank, plan, resolver, objects, self.jobs)
        if self._coordinates:
            self._objects = objects
            objects = {}
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(""), _size(plan), _Written(task.rank, notes, objects))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        job, staging = self._job, self._staging
        if job is None or staging is None:
            raise UsageError(f"{shown_path(self.path or '')}: another save to it has begun in this process: let one end before the next begins")
        self._busy = True
        written: list[_Written] = sorted(result.storage_data for row in results for result in row)
        try:
            _check_complete(job, metadata, written, self._chunks)
            for part in written:
                self._objects.update(part.objects)
            notes = [part.notes for part in written]
            if self._late:
                notes[0] = _write(job, 0, *self._late, self._objects, self.jobs)
            job.finish(notes, self._objects)
            self._staging = None
            staging.finish()
            metadata.storage_meta = self.storage_meta()
        finally:
            staging.abort()
            self._begin()

    def _abort(self) -> None:
        if self._staging:
            self._staging.abort()
        self._begin()


_WRITERS: weakref.WeakSet[HDF5Writer] = weakref.WeakSet()  # that have begun a target


def _is_self_contained(format: str) -> bool:
    """Whether each file of a rank has all that the rank holds."""
    return any(name == format and contained for name, _, _, contained in _native.formats())


def _place(path: str | None) -> str | None:
    """A path such that equal ones name the same target."""
    return path.rstrip("/") if path else path


def _make_parents(path: str) -> None:
    """Makes the directories above a checkpoint, as FileSystemWriter does. Buckets have none."""
    if is_in_bucket(path):
        return
    if "://" in path:
        raise UsageError(f"{shown_path(path)}: is the address of a remote storage: name a directory, or a place in a bucket (s3://, gs://)")
    parent = os.path.dirname(path.rstrip("/"))
    try:
        if parent:
            os.makedirs(parent, exist_ok=True)
    except OSError as error:
        raise SystemFailure(f"{parent}: cannot be created: {error.strerror}") from error


def _drop_plans_of_others(*, every: bool) -> None:
    """Drops the cached plans that are of no use to another save: the next one plans anew, on every rank."""
    final = getattr(AnyPlanner, "_cached_final_save_plan", {})  # torch 2.6 has no caches

    def usable(plan: SavePlan) -> bool:
        return not every and isinstance(plan.storage_data, _Task) and not plan.storage_data.apart

    for key in [key for key, plan in final.items() if not usable(plan)]:
        for cache in ("save_plan", "all_plans", "global_plan", "metadata", "final_save_plan"):
            getattr(AnyPlanner, f"_cached_{cache}", {}).pop(key, None)


def _check_complete(job: Job, metadata: Metadata, written: list[_Written], chunks: NamedChunks) -> None:
    """Finds what a planner whose cached plans are those of another state dict would leave out."""
    names = chunks.names(value.name for value in job.values)
    expected = set(metadata.state_dict_metadata)
    if names != expected:
        name = min(names ^ expected)
        raise UsageError(f"{job.path}: {name}: the planner's cached plans are those of another state dict")
    if [part.rank for part in written] != list(range(len(written))):
        raise UsageError(f"{job.path}: the ranks have not written one shard each")


# ---- the data of a rank ----


def _object(item: WriteItem, planner: Resolver) -> bytes:
    data = planner.resolve_data(item)
    if not isinstance(data, io.BytesIO):
        raise UsageError(f"object {item.index.fqn}: the planner made no bytes of it")
    return data.getvalue()


def _size(plan: SavePlan) -> int:
    return sum(item.tensor_storage_size() or 0 for item in plan.items)


def _write(job: Job, rank: int, plan: SavePlan, planner: Resolver, objects: dict[str, bytes], jobs: int) -> bytes:
    items = {item.index.fqn: item for item in plan.items if item.type != WriteItemType.BYTE_IO}
    kept: list[torch.Tensor] = []  # what the addresses of the last call point into

    def fetch(names: list[str]) -> list[int]:
        kept.clear()
        kept.extend(_host(items[name], planner.resolve_data(items[name])) for name in names)
        return [host.data_ptr() for host in kept]

    chunks = {name: _planned(item).chunk for name, item in items.items()}
    boxes = {name: Box(rank, tuple(chunk.offsets), tuple(chunk.sizes)) for name, chunk in chunks.items()}
    cached = _native.fits_cache(_size(plan) * local_ranks())
    own = objects if rank == 0 or _is_self_contained(job.format) else {}
    return job.write(rank, boxes, own, fetch, jobs, cached)


def _planned(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None
    return item.tensor_data


def _host(item: WriteItem, data: Any) -> torch.Tensor:
    """The elements of an item, row-major in host memory: a copy only if they are elsewhere."""
    from ._save import host_tensor

    name = item.index.fqn
    if not isinstance(data, torch.Tensor):
        raise UsageError(f"tensor {name}: the planner made a {type(data).__name__} of it")
    host: torch.Tensor = host_tensor(name, data).contiguous()
    plan = _planned(item)
    if tuple(host.shape) != tuple(plan.chunk.sizes) or host.dtype != plan.properties.dtype:
        raise UsageError(f"tensor {name}: its shape or dtype is not the planned one; {_UNEVEN}")
    return host


# ---- fsdpckpt.save ----


def save_shards(
    leaves: Sequence[tuple[str, tuple[Element, ...], Any]],
    path: str,
    *,
    to: str,
    force: bool,
    trust_objects: bool,
    jobs: int,
) -> dict[str, Any]:
    """Saves the shards of all ranks of torch.distributed; all ranks call it. Returns the members of the report."""
    writer = HDF5Writer(path, force=force, jobs=jobs)
    writer._format = to
    writer._trust_objects = trust_objects
    writer._paths = {name: elements for name, elements, _ in leaves}
    state = {name: as_torch(value) for name, _, value in leaves}
    try:
        metadata = save(state, storage_writer=writer, planner=SavePlanner(flatten_state_dict=False))
    except CheckpointException as error:
        raise _one_of(error) from None
    tensors = [value for value in metadata.state_dict_metadata.values() if isinstance(value, TensorStorageMetadata)]
    size = sum(value.size.numel() * torch.empty((), dtype=value.properties.dtype).element_size() for value in tensors)
    return {
        "target": path,
        "format": to,
        "tensors": len(tensors),
        "objects": len(metadata.state_dict_metadata) - len(tensors),
        "files": torch.distributed.get_world_size() + 1,
        "data_bytes": size,
        "stored_bytes": size,
    }


def _one_of(error: CheckpointException) -> BaseException:
    """The error of the first rank that failed."""
    rank = min(error.failures)
    failure = error.failures[rank][0]
    return type(failure)(f"rank {rank}: {failure}") if isinstance(failure, Error) else failure
