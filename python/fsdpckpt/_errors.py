"""Exceptions: one class for each kind of failure, all of them `Error`."""

from __future__ import annotations

import os
import re
import warnings


class Error(Exception):
    """A failure, in one line. `path`, `tensor` and `offset` are what the message names, or None."""

    path: str | None
    tensor: str | None
    offset: int | None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path = _path(message)
        self.tensor = _tensor(message)
        self.offset = _offset(message)


class UsageError(Error, ValueError):
    """The call is wrong: a bad value, a target that exists, a name that is not there."""


class NotFoundError(UsageError, FileNotFoundError):
    """There is no file or directory of this name."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.filename = self.path

    def __str__(self) -> str:
        return str(self.args[0])


class CorruptError(Error):
    """The checkpoint is damaged, incomplete, or not a checkpoint."""


class SystemFailure(Error, OSError):
    """The system failed: no space, no permission, an I/O error."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnsupportedError(Error, NotImplementedError):
    """The checkpoint is valid, but this version cannot handle it."""


class FsdpckptWarning(UserWarning):
    """What a command would say on stderr without failing."""


# fc_code, which is the exit status of the command.
_CLASSES: dict[int, type[Error]] = {
    1: Error,
    2: UsageError,
    3: CorruptError,
    4: SystemFailure,
    5: UnsupportedError,
}
_NO_MEMORY, _INTERRUPTED = 6, 130

# What the caller can change, by fc_hint.
_HINTS = {
    "exclude": "exclude it: exclude=['{about}']",
    "trust_objects": "exclude it, or copy it unchanged with trust_objects=True",
    "force": "force=True replaces it",
    "follow_external": "follow_external=True allows it",
    "memory": "raise memory=",
    "tp_plan": "name the modules in a file for tp_plan=",
    "take_first": "take_first=True uses the first source's",
    "dry_run": "dry_run=True only plans",
}


def make(code: int, message: str, hint: str = "", about: str = "") -> BaseException:
    """The exception for an error of the library."""
    if code == _NO_MEMORY:
        return MemoryError(message)
    if code == _INTERRUPTED:
        return KeyboardInterrupt()
    if hint in _HINTS and "{about}" in _HINTS[hint] and not about:
        hint = ""
    text = f"{message}; {_HINTS[hint].format(about=about)}" if hint in _HINTS else message
    kind = _CLASSES.get(code, Error)
    made = kind(text)
    if kind in (UsageError, SystemFailure, CorruptError) and made.path and not os.path.lexists(made.path):
        return NotFoundError(text)
    return made


def tell(line: str) -> None:
    """Passes on what the library tells without failing."""
    warnings.warn(line, FsdpckptWarning, stacklevel=3)


def _path(message: str) -> str | None:
    """The file or directory that a message begins with: the longest prefix that is one, else what is before the colon."""
    ends = [match.start() for match in re.finditer(": ", message)]
    for end in reversed(ends):
        if os.path.lexists(message[:end]):
            return message[:end]
    first = message[: ends[0]] if ends else ""
    return first if "/" in first or "." in first else None


def _tensor(message: str) -> str | None:
    found = re.search(r"\btensor '([^']+)'|\btensor ([^\s:;,]+)|\bfor ([\w.\-/]+\.[\w.\-/]+);", message)
    return next((group for group in found.groups() if group), None) if found else None


def _offset(message: str) -> int | None:
    found = re.search(r"\b(?:offset|byte|at byte) (\d+)\b", message)
    return int(found.group(1)) if found else None
