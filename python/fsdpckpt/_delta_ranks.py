"""A delta that the ranks of torch.distributed write together: each compares whole tensors, and writes a file of them.

A frame has all bytes of a tensor in their order, so one rank makes it. A tensor that a rank has as a whole is compared
there. Of a tensor that is sharded, the boxes are sent to one of the ranks that hold it, some tensors at a time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from . import _native
from ._arguments import checked
from ._delta import How, count_objects, how_of, label, members_of, tensors_of
from ._errors import Error, UnsupportedError, UsageError
from ._run import Path, Report, is_in_bucket
from ._save import _name, as_torch, host_tensor, plain_tensor
from ._torch_planner import box_of

Result = TypeVar("Result")
Sizes = tuple[int, ...]

# The most bytes of both versions that a rank receives before it compares them, if that is more than one tensor.
_GATHERED_AT_ONCE = 128 << 20
_SIDES = OLD, NEW = (0, 1)


@checked
def delta(
    old: Path | Mapping[str, Any],
    new: Mapping[str, Any],
    path: Path,
    *,
    encoding: str | None = None,
    checksum: str | None = None,
    level: int | None = None,
    number: int | None = None,
    base: int | None = None,
    dtype: str | None = None,
    force: bool = False,
    jobs: int | None = None,
    memory: int | str | None = None,
    shared: bool = True,
    group: ProcessGroup | None = None,
) -> Report:
    """Writes what changed between two versions, from the tensors of all ranks, which all call this.

    `new`, and `old` unless it is the path of a checkpoint, has the tensors of this rank: DTensors of any mesh, and plain
    tensors, which ranks that have the same name hold alike. The other arguments are those of `fsdpckpt.delta`.

    Args:
        shared: whether all ranks see the directory of `path`. If not, each machine gets a directory with the files of its
            ranks, and that of rank 0 the index: bring them together
        group: the ranks (default: all)
    """
    how = how_of(
        {"encoding": encoding, "checksum": checksum, "level": level, "number": number, "base": base, "jobs": jobs, "memory": memory}
    )
    return _Writer(_Ranks(group), os.fspath(path), how, dtype, force, shared).write(old, new)


class _Ranks:
    """The group of processes."""

    def __init__(self, group: ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise UsageError("torch.distributed is not initialized: call init_process_group first, or use fsdpckpt.delta")
        self.group: Any = group or dist.group.WORLD
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        kinds = {device.type for device in getattr(self.group, "_device_types", ())}
        self.device = torch.device("cpu" if "cpu" in kinds or not torch.cuda.is_available() else "cuda")

    def together(self, work: Callable[[], Result]) -> list[Result]:
        """The results of all ranks. If one fails, all raise its error."""
        try:
            mine: tuple[Any, Any] = (work(), None)
        except Exception as error:
            mine = (None, error)
        rows: list[Any] = [None] * self.count
        known = mine if mine[1] is None else (None, _plain(mine[1]))
        dist.all_gather_object(rows, known, group=self.group)
        if mine[1] is not None:
            raise mine[1]
        failed = next((rank for rank, (_, error) in enumerate(rows) if error), None)
        if failed is not None:
            kind, text = rows[failed][1]
            raise kind(f"rank {failed}: {text}")
        return [result for result, _ in rows]

    def gather(self, mine: Any) -> list[Any]:
        """What all ranks have, on the first one."""
        rows: list[Any] = [None] * self.count
        first = dist.get_global_rank(self.group, 0)
        dist.gather_object(mine, rows if self.rank == 0 else None, dst=first, group=self.group)
        return rows

    def scatter(self, rows: list[Any] | None) -> Any:
        """What the first one has for this rank."""
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, rows, src=dist.get_global_rank(self.group, 0), group=self.group)
        return mine[0]

    def exchange(self, sent: Sequence[tuple[int, int, Any]], received: Sequence[tuple[int, int, int]]) -> list[Any]:
        """Sends and receives flat bytes: (tag, rank, tensor) and (tag, rank, number of bytes), in the order of tags."""
        buffers = [torch.empty(size, dtype=torch.uint8, device=self.device) for _, _, size in received]
        calls: list[tuple[int, Any, int, Any]] = [(tag, dist.isend, rank, data.to(self.device)) for tag, rank, data in sent]
        calls += [(tag, dist.irecv, rank, data) for (tag, rank, _), data in zip(received, buffers)]
        operations = [
            dist.P2POp(call, data, dist.get_global_rank(self.group, rank), self.group, tag)
            for tag, call, rank, data in sorted(calls, key=lambda one: one[0])
        ]
        for request in dist.batch_isend_irecv(operations) if operations else ():
            request.wait()
        return [buffer.cpu() for buffer in buffers]


def _plain(error: Exception) -> tuple[type[Exception], str]:
    """An error in a form that other processes can make again."""
    if isinstance(error, (Error, MemoryError)):
        return type(error), str(error)
    return Error, f"{type(error).__name__}: {error}"


# ---- what the ranks hold ----


class _Box(NamedTuple):
    offsets: Sizes
    sizes: Sizes


class _Held(NamedTuple):
    """What a rank holds of a tensor."""

    dtype: str
    shape: Sizes
    box: _Box | None
    tied_to: str | None


class _Values:
    """The tensors of a side that this rank has, by name."""

    def __init__(self, which: str, side: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Any] = {}
        self.held: dict[str, _Held] = {}
        self.objects = count_objects(side)
        first: dict[Any, str] = {}
        for path, value in tensors_of(side):
            name = _name(path)
            if name in self.held:
                raise UsageError(f"{label(which)}: tensor {name}: the name is used twice")
            value = as_torch(value)
            shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
            box: tuple[Sizes, Sizes] | None = ((0,) * value.ndim, shape)
            if isinstance(value, DTensor):
                if any(placement.is_partial() for placement in value.placements):
                    raise UsageError(f"tensor {name}: its ranks hold parts of a sum: call its full_tensor() first")
                box, value = box_of(name, value), value.to_local()
            tensor = self.tensors[name] = plain_tensor(name, value)
            if box is None or not all(box[1]):
                self.held[name] = _Held(dtype, shape, None, None)
                continue
            origin = first.setdefault((dtype, tensor.data_ptr(), tensor.stride(), *box), name)
            self.held[name] = _Held(dtype, shape, _Box(*box), origin if origin != name else None)


class _Tensor:
    """A tensor of a side as all ranks hold it."""

    def __init__(self, held: _Held) -> None:
        self.dtype, self.shape = held.dtype, held.shape
        self.boxes: dict[_Box, list[int]] = {}
        self.tied_to: set[str | None] = set()

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * int(getattr(torch, self.dtype).itemsize)

    def holders(self) -> set[int]:
        return {rank for ranks in self.boxes.values() for rank in ranks}

    def whole(self) -> set[int]:
        return set(self.boxes.get(_Box((0,) * len(self.shape), self.shape), ()))


def _joined(rows: Sequence[Mapping[str, _Held]]) -> dict[str, _Tensor]:
    """The tensors that the ranks hold together."""
    found: dict[str, _Tensor] = {}
    for rank, row in enumerate(rows):
        for name, held in row.items():
            tensor = found.setdefault(name, _Tensor(held))
            if (tensor.dtype, tensor.shape) != (held.dtype, held.shape):
                raise UsageError(f"tensor {name}: rank {rank} has another shape or dtype than the ranks before it")
            if held.box:
                tensor.boxes.setdefault(held.box, []).append(rank)
                tensor.tied_to.add(held.tied_to)
    return found


# ---- who compares what ----


class _Piece(NamedTuple):
    """A box of a tensor, and the rank that has it or sends it."""

    tag: int
    side: int
    box: _Box
    rank: int


class _Job(NamedTuple):
    """A tensor, and the rank that compares it."""

    name: str
    dtypes: tuple[str, str]
    shapes: tuple[Sizes | None, Sizes]  # the old version may lack the tensor, or be on disk
    owner: int
    turn: int | None  # when its pieces are sent; None: the owner has all
    pieces: tuple[_Piece, ...]


class _Plan(NamedTuple):
    """What a rank has to do."""

    jobs: list[_Job]
    turns: int
    only_old: int


def _plans(ranks: int, sides: tuple[Mapping[str, _Tensor] | None, Mapping[str, _Tensor]], names: set[str]) -> list[_Plan]:
    """Decides which rank compares what. `names` are those of the old version, whose tensors are None if all can read it."""
    old, new = sides
    left_out = {
        name for name, tensor in new.items() if name not in names and tensor.tied_to and tensor.tied_to <= names
    }
    load, sent, gathered, turn = ([0] * ranks for _ in range(4))
    jobs: list[_Job] = []
    tag = 0
    for name in sorted(new.keys() - left_out, key=lambda name: (-new[name].bytes, name)):
        pair = [side[name] if side and name in side else None for side in sides]
        able = new[name].whole()
        for tensor in pair:
            able = able & tensor.whole() if tensor else able
        owner = min(able or new[name].holders() or {0}, key=lambda rank: (load[rank], rank))
        load[owner] += new[name].bytes
        pieces: list[_Piece] = []
        for side, tensor in enumerate(pair):
            for box, holders in tensor.boxes.items() if tensor else ():
                rank = owner if owner in holders else min(holders, key=lambda rank: (sent[rank], rank))
                pieces.append(_Piece(tag, side, box, rank))
                tag += 1
                sent[rank] += torch.Size(box.sizes).numel() if rank != owner else 0
        received = sum(new[name].bytes for side in pair if side) if any(piece.rank != owner for piece in pieces) else 0
        if received and gathered[owner] and gathered[owner] + received > _GATHERED_AT_ONCE:
            turn[owner], gathered[owner] = turn[owner] + 1, 0
        gathered[owner] += received
        before = pair[OLD]
        jobs.append(
            _Job(
                name,
                (before.dtype if before else "", new[name].dtype),
                (before.shape if before else None, new[name].shape),
                owner,
                turn[owner] if received else None,
                tuple(pieces),
            )
        )
    only_old = len(names - new.keys())
    return [
        _Plan([job for job in jobs if rank in {job.owner, *(piece.rank for piece in job.pieces)}], max(turn) + 1, only_old)
        for rank in range(ranks)
    ]


# ---- writing ----


class _Writer:
    """Writes a delta with the other ranks."""

    def __init__(self, ranks: _Ranks, path: str, how: How, cast: str | None, force: bool, shared: bool) -> None:
        self.ranks, self.path, self.how, self.cast, self.force, self.shared = ranks, path, how, cast, force, shared
        self.values: list[_Values | None] = [None, None]
        self.opened: _native.Checkpoint | None = None  # the old version, if it is on disk
        self.staging: _native.Staging | None = None  # of the first rank that sees a directory
        self.part: _native.DeltaPart | None = None

    def write(self, old: Path | Mapping[str, Any], new: Mapping[str, Any]) -> Report:
        started = time.monotonic()
        try:
            where = self.ranks.together(lambda: self._begin(old, new))
            plan = self._plan()
            folder = self._stage(where)
            self.ranks.together(lambda: self._compare(plan))
            found = self.ranks.together(lambda: (*self._part().found(), self._objects()))
            counts, encoding, stored = self._write(found, folder)
            counts["only_old"] = plan.only_old
        finally:
            for made in (self.part, self.staging):
                if made:
                    made.abort() if isinstance(made, _native.Staging) else made.close()
        return Report(
            "delta", members_of(self.path, counts, encoding, self.how.checksum, stored, time.monotonic() - started), True
        )

    def _begin(self, old: Path | Mapping[str, Any], new: Mapping[str, Any]) -> tuple[Any, ...]:
        """Looks at both sides. Returns what tells the directory from those of other machines."""
        if is_in_bucket(self.path):
            raise UnsupportedError(
                f"{self.path}: ranks cannot write a delta to a bucket together: write it to a directory that all see, and upload it"
            )
        if isinstance(old, Mapping):
            self.values[OLD] = _Values("old", old)
        else:
            self.opened = _native.Checkpoint(os.fspath(old))
        self.values[NEW] = _Values("new", new)
        if self.shared:
            return ()
        parent = os.stat(os.path.dirname(os.path.abspath(self.path)))
        return socket.gethostname(), parent.st_dev, parent.st_ino

    def _plan(self) -> _Plan:
        """The first rank plans for all."""
        rows = self.ranks.gather([values.held if values else None for values in self.values])

        def plan() -> list[_Plan] | None:
            if self.ranks.rank > 0:
                return None
            new = _joined([row[NEW] for row in rows])
            old = None if self.opened else _joined([row[OLD] for row in rows])
            names = set(old) if old is not None else self._names()
            return _plans(self.ranks.count, (old, new), names)

        made: list[Any] = []
        self.ranks.together(lambda: made.append(plan()))
        mine: _Plan = self.ranks.scatter(made[0])
        return mine

    def _names(self) -> set[str]:
        assert self.opened is not None
        return {name for name, dtype, _, _ in self.opened.entries() if dtype is not None}

    def _stage(self, where: Sequence[tuple[Any, ...]]) -> str:
        """Makes the staging directory, on the first rank that sees it. Returns its path."""
        first = where.index(where[self.ranks.rank])

        def stage() -> str:
            if first < self.ranks.rank:
                return ""
            self.staging = _native.Staging(self.path, "delta", force=self.force)
            return self.staging.path()

        folder = self.ranks.together(stage)[first]

        def look() -> None:
            if not os.path.isdir(folder):
                raise UsageError(
                    f"{self.path}: this rank does not see the directory that rank {first} has made: name one that all ranks "
                    "see, or pass shared=False"
                )
            self.part = _native.DeltaPart(self.path, self.how)

        self.ranks.together(look)
        return folder

    def _objects(self) -> int:
        values = self.values[NEW]
        return values.objects if values else 0

    def _part(self) -> _native.DeltaPart:
        assert self.part is not None
        return self.part

    # ---- comparing ----

    def _compare(self, plan: _Plan) -> None:
        """Compares the tensors that this rank owns. An error waits until all that others need is sent."""
        failed: Exception | None = None
        for turn in range(plan.turns):
            boxes = self._exchange([job for job in plan.jobs if job.turn == turn])
            mine = [job for job in plan.jobs if job.turn == turn and job.owner == self.ranks.rank]
            try:
                if not failed:
                    self._add(mine, boxes)
            except Exception as error:
                failed = error
        if failed:
            raise failed
        batch: list[_Job] = []
        copied = 0
        for job in (job for job in plan.jobs if job.turn is None):
            size = self._copied(job)
            if copied and copied + size > _GATHERED_AT_ONCE:
                self._add(batch, {})
                batch, copied = [], 0
            batch.append(job)
            copied += size
        self._add(batch, {})

    def _tensor(self, side: int, name: str) -> Any:
        values = self.values[side]
        assert values is not None
        return values.tensors[name]

    def _copied(self, job: _Job) -> int:
        """The bytes of a tensor that are not in host memory."""
        tensors = [self._tensor(piece.side, job.name) for piece in job.pieces]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.device.type != "cpu")

    def _exchange(self, jobs: Sequence[_Job]) -> dict[int, Any]:
        """Sends what others compare. Returns what was received, by tag."""
        me = self.ranks.rank
        sent: list[tuple[int, int, Any]] = []
        received: list[tuple[int, int, int]] = []
        for job in jobs:
            for piece in job.pieces:
                if job.owner == me and piece.rank != me:
                    size = torch.Size(piece.box.sizes).numel() * int(getattr(torch, job.dtypes[piece.side]).itemsize)
                    received.append((piece.tag, piece.rank, size))
                elif job.owner != me and piece.rank == me:
                    tensor = self._tensor(piece.side, job.name).contiguous()
                    sent.append((piece.tag, job.owner, tensor.reshape(-1).view(torch.uint8)))
        return dict(zip((tag for tag, _, _ in received), self.ranks.exchange(sent, received)))

    def _add(self, jobs: Sequence[_Job], boxes: Mapping[int, Any]) -> None:
        """Compares tensors. `boxes` has those that other ranks have sent."""
        if not jobs:
            return
        kept: list[Any] = []  # what the addresses point into
        rows: tuple[list[tuple[Any, ...]], ...] = ([], [])
        for job in jobs:
            for side in _SIDES:
                if job.shapes[side] is not None:
                    chunks = [self._chunk(job, piece, boxes, kept) for piece in job.pieces if piece.side == side]
                    rows[side].append((job.name, (job.name,), job.dtypes[side], None, job.shapes[side], chunks))
        old = self.opened or _native.Checkpoint(label("old"), rows=rows[OLD])
        self._part().add(_native, old, _native.Checkpoint(label("new"), rows=rows[NEW]), self.cast, None)

    def _chunk(self, job: _Job, piece: _Piece, boxes: Mapping[int, Any], kept: list[Any]) -> tuple[Any, ...]:
        if piece.tag in boxes:
            host, strides = boxes[piece.tag], None
        else:
            host = host_tensor(job.name, self._tensor(piece.side, job.name))
            strides = tuple(host.stride())
        kept.append(host)
        return piece.box.offsets, piece.box.sizes, strides, host.data_ptr(), None

    # ---- files ----

    def _write(self, found: Sequence[Any], folder: str) -> tuple[dict[str, int], str, int]:
        """Writes the file of this rank, and the first one the index. Returns counts, encoding and bytes of all ranks."""
        sizes = [sum(row[2] for row in found), sum(row[3] for row in found)]
        smaller = all(row[4] for row in found) and sizes[1] < sizes[0]
        encoding = self.how.encoding if self.how.encoding != "auto" else "overwrite" if smaller else "xor"
        writers = [rank for rank, row in enumerate(found) if row[1]]
        files = {rank: number for number, rank in enumerate(writers, 1)}
        counts = {name: sum(row[0][name] for row in found) for name in found[0][0]}
        counts.update({name: found[0][0][name] for name in ("version", "base_version")}, objects=max(row[5] for row in found))

        def write() -> None:
            if self.ranks.rank in files:
                self._part().write(encoding, folder, files[self.ranks.rank], len(files))

        def publish(first: bool) -> None:
            if self.staging and (self.ranks.rank == 0) == first:
                if first:
                    entries = sorted((name, files[rank]) for rank in writers for name in found[rank][1])
                    numbers = (counts["version"], counts["base_version"])
                    _native.delta_index(folder, *numbers, encoding, self.how.checksum, entries, len(files))
                self.staging.finish()

        self.ranks.together(write)
        self.ranks.together(lambda: publish(False))
        self.ranks.together(lambda: publish(True))
        return counts, encoding, sizes[0 if encoding == "xor" else 1]
