"""What a checkpoint was opened from: enough to open it again, and to notice that another one is there by then.

A forked or spawned process, and a process that has changed its directory, open a checkpoint again. The names, shapes and
indices that the tensors hold are those of the first time. If the files are others now, they would describe other bytes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from . import _native
from ._errors import CorruptError
from ._run import shown_path

# Options that name files. Those of the second kind also know names that are not files.
_FILES = ("schema", "config")
_NAMES = ("recipe", "tp_plan")

# Path, device, inode, size, modified, changed.
_Identity = tuple[Any, int, int, int, int, int]


class Proof(NamedTuple):
    """What must be equal when a checkpoint is opened again."""

    machine: str
    files: list[_Identity]
    values: bytes  # a digest of names, dtypes, shapes and numbers of chunks


class Origin:
    """The path and the options of an open checkpoint, such that they stay valid in another directory."""

    def __init__(self, path: str, options: Mapping[str, Any]) -> None:
        self.path = _absolute(path)
        self._directory = "" if path == self.path else os.getcwd()
        self.options = dict(options)
        self._others: list[_Identity] = []
        for name in _FILES + _NAMES:
            value = options.get(name)
            if value and (name in _FILES or (os.path.exists(value) and not _is_known(value))):
                self.options[name] = _absolute(value)
                self._others.append(_identity(self.options[name]))

    def has_moved(self) -> bool:
        """Whether the path as it was given is now another one."""
        try:
            return bool(self._directory) and os.getcwd() != self._directory
        except FileNotFoundError:  # the directory was removed
            return True

    def proof(self, native: _native.Checkpoint) -> Proof:
        values = hashlib.blake2b(repr((native.about(), native.entries())).encode("utf-8", "surrogatepass")).digest()
        return Proof(_machine(), native.identity() + self._others, values)

    def check(self, was: Proof, now: Proof) -> None:
        """Raises CorruptError unless both are of the same files, unchanged."""
        same_machine = was.machine == now.machine
        for before, after in zip(was.files, now.files):
            # Another machine may see the same files on another device.
            if before[1:] != after[1:] if same_machine else (before[3], before[4]) != (after[3], after[4]):
                raise _changed(os.fsdecode(after[0] or before[0] or self.path))
        if len(was.files) != len(now.files) or was.values != now.values:
            raise _changed(self.path)


def _changed(path: str) -> CorruptError:
    return CorruptError(f"{shown_path(path)}: was replaced or changed since the checkpoint was opened: open the checkpoint again")


def _absolute(path: str) -> str:
    """The path from the root. Unlike os.path.abspath, it keeps "..", which may follow a symbolic link. The name of
    something on a server stays as it is."""
    return path if not path or re.match(r"[a-z][a-z0-9]*://", path) else os.path.join(os.getcwd(), path)


def _is_known(name: str) -> bool:
    return name == "auto" or any(name == shipped for shipped, _ in _native.recipes())


def _identity(path: str) -> _Identity:
    try:
        found = os.stat(path)
    except OSError:
        return (None, 0, 0, 0, 0, 0)
    return (path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _machine() -> str:
    """Which machine this is, until it starts again."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read()
    except OSError:
        return os.uname().nodename
