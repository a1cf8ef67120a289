"""What the tensors and objects of an open checkpoint share: the handle that reads, and how to get another one.

They do not refer to the `Checkpoint`, which refers to them: a checkpoint that a loop drops is closed at once, not when
Python next looks for cycles.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from . import _native
from ._origin import Origin, Proof
from ._placements import Mesh, Placement, placement_of


class Opened:
    """An open checkpoint, without the names of what is in it."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self.origin = Origin(path, options)
        self.native = _native.Checkpoint(path, **options)
        self._pid = os.getpid()
        self._closed = False
        self._layout: tuple[Mesh | None, list[tuple[Placement, ...]]] | None = None

    def handle(self) -> _native.Checkpoint:
        """The handle. A forked process opens its own, because it shares processes and locks with its parent."""
        if (self._pid != os.getpid() or self.origin.has_moved()) and not self._closed:
            was = self.origin.proof(self.native)
            again = _native.Checkpoint(self.origin.path, **self.origin.options)
            self.origin = Origin(self.origin.path, self.origin.options)
            self.origin.check(was, self.origin.proof(again))
            self.native = again
            self._pid = os.getpid()
        return self.native

    def layout(self) -> tuple[Mesh | None, list[tuple[Placement, ...]]]:
        """The mesh, or None, and the placements of each value."""
        if self._layout is None:  # without a lock, which a forked process could inherit locked: threads find the same
            try:
                pairs, placements = self.handle().layout()
            except NotImplementedError:  # chunks that follow no mesh
                pairs, placements = (), []
            mesh = Mesh(tuple(n for n, _ in pairs), tuple(s for _, s in pairs)) if pairs else None
            self._layout = mesh, [tuple(placement_of(p) for p in row) for row in placements]
        return self._layout

    def close(self) -> None:
        self._closed = True
        self.native.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.origin, self.origin.proof(self.handle()))


def _reopen(origin: Origin, was: Proof) -> Opened:
    opened = Opened(origin.path, origin.options)
    opened.origin.check(was, opened.origin.proof(opened.native))
    return opened
