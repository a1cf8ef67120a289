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
    ) -> None: ...
    def close(self) -> None: ...
    def about(self) -> tuple[str, str | None, str | None]: ...
    def entries(self) -> list[tuple[str, str | None, tuple[int, ...], int]]: ...
    def chunks(self, index: int, /) -> list[tuple[tuple[int, ...], tuple[int, ...], str | None, int | None, int]]: ...
    def layout(self) -> tuple[Pairs, list[Placements]]: ...
    def read(self, index: int, offsets: Sequence[int], sizes: Sequence[int], address: int, /) -> None: ...
    def object_json(self, index: int, /) -> str: ...

def local_box(
    shape: Sequence[int], mesh: Pairs, placements: Placements, rank: int, /
) -> tuple[tuple[int, ...], tuple[int, ...]]: ...
def placements(name: str, ndim: int, mesh: Pairs, tp_plan: str | None, /) -> Placements: ...
def formats() -> list[tuple[str, list[str], bool]]: ...
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
