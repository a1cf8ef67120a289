from collections.abc import Callable, Sequence
from typing import Any

version: str

Pairs = tuple[tuple[str, int], ...]
Placements = tuple[tuple[int, int, int], ...]

class Checkpoint:
    def __init__(
        self,
        path: str,
        *,
        headers_only: bool = ...,
        follow_external: bool = ...,
        schema: str | None = ...,
        tp_plan: str | None = ...,
        include: Sequence[str] | None = ...,
        exclude: Sequence[str] | None = ...,
        strip_prefix: str | None = ...,
        rename: Sequence[str] | None = ...,
        recipe: str | None = ...,
        reverse: bool = ...,
        config: str | None = ...,
        model_only: bool = ...,
        delta: Sequence[str] | None = ...,
        up_to: int = ...,
        rows: Sequence[Row] | None = ...,
    ) -> None: ...
    def close(self) -> None: ...
    def about(self) -> tuple[str, str | None, str | None]: ...
    def entries(self) -> list[tuple[str, str | None, tuple[int, ...], int]]: ...
    def chunks(self, index: int, /) -> list[tuple[tuple[int, ...], tuple[int, ...], str | None, int | None, int]]: ...
    def identity(self) -> list[tuple[str | None, int, int, int, int, int]]: ...
    def layout(self) -> tuple[Pairs, list[Placements]]: ...
    def read(self, index: int, offsets: Sequence[int], sizes: Sequence[int], address: int, nbytes: int, /) -> None: ...
    def read_many(
        self, boxes: Sequence[tuple[int, Sequence[int], Sequence[int], int, int]], threads: int, processes: int, cached: bool, /
    ) -> None: ...
    def map(self, index: int, /) -> tuple[object, int, int, tuple[int, ...]] | None: ...
    def paths(self) -> list[list[str | int]]: ...
    def object_json(self, index: int, /) -> str: ...

class Staging:
    def __init__(
        self, path: str, format: str, *, force: bool = ..., bytes: int = ..., joined: str | None = ...
    ) -> None: ...
    def path(self) -> str: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...

def local_box(
    shape: Sequence[int], mesh: Pairs, placements: Placements, rank: int, /
) -> tuple[tuple[int, ...], tuple[int, ...]]: ...
def placements(name: str, ndim: int, mesh: Pairs, tp_plan: str | None, /) -> Placements: ...
def recipes() -> list[tuple[str, str]]: ...
def fits_cache(bytes: int, /) -> bool: ...
def formats() -> list[tuple[str, list[str], bool, bool]]: ...
def save(
    path: str,
    format: str,
    values: Sequence[tuple[object, ...]],
    *,
    force: bool = ...,
    trust_objects: bool = ...,
    compress: int = ...,
    jobs: int = ...,
    update: Callable[[str, str, int, int], object] | None = ...,
) -> dict[str, Any]: ...

# (name, path, dtype, encoding, shape, [(offsets, sizes, strides, address, rank), ...]), and maybe the name it is tied to
Row = tuple[Any, ...]
Layout = Sequence[tuple[Placements, int]]

def layout(path: str, values: Sequence[Row], ranks: int, /) -> tuple[
    Pairs, list[tuple[tuple[Placements, int], list[int]]]
]: ...
def write_shard(
    path: str,
    staging: str,
    format: str,
    values: Sequence[Row],
    mesh: Pairs,
    layout: Layout,
    rank: int,
    fetch: Callable[[list[int]], Sequence[int]],
    batch_bytes: int,
    *,
    trust_objects: bool = ...,
    jobs: int = ...,
    cached: bool = ...,
    update: Callable[[str, str, int, int], object] | None = ...,
) -> bytes: ...
def write_index(
    path: str,
    staging: str,
    format: str,
    values: Sequence[Row],
    mesh: Pairs,
    layout: Layout,
    notes: tuple[bytes, ...],
    trust_objects: bool,
    /,
) -> None: ...

# (encoding, checksum, level, number, base, jobs, memory)
How = tuple[str, str, int, int, int, int, int]

def delta(
    old: Checkpoint,
    new: Checkpoint,
    path: str,
    how: How,
    *,
    force: bool = ...,
    cast: str | None = ...,
    update: Callable[[str, str, int, int], object] | None = ...,
) -> tuple[dict[str, int], str, int]: ...

class DeltaPart:
    def __init__(self, path: str, how: How, /) -> None: ...
    def add(
        self,
        native: object,
        old: Checkpoint,
        new: Checkpoint,
        cast: str | None,
        update: Callable[[str, str, int, int], object] | None,
        /,
    ) -> None: ...
    def found(self) -> tuple[dict[str, int], list[str], int, int, bool]: ...
    def write(self, encoding: str, folder: str, file: int, files: int, /) -> None: ...
    def close(self) -> None: ...

def delta_index(
    folder: str, number: int, base: int, encoding: str, checksum: str, entries: list[tuple[str, int]], files: int, /
) -> None: ...
