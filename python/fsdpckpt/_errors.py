"""Exceptions: one class for each kind of failure, all of them `Error`."""

from __future__ import annotations

import os
import re
import sys


class Error(Exception):
    """A failure, in one line. `path`, `tensor` and `offset` are what the message names, or None."""

    path: str | None
    tensor: str | None
    offset: int | None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path, self.tensor, self.offset = _contexts(message)


class UsageError(Error, ValueError):
    """The call is wrong: a bad value, a target that exists, a name that is not there."""


class ArgumentError(UsageError, TypeError):
    """An argument has another type than the function takes, or the function has no such argument."""


class NotFoundError(UsageError, FileNotFoundError):
    """There is no file or directory of this name."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.filename = self.path

    def __str__(self) -> str:
        return str(self.args[0])


class TargetError(UsageError, AssertionError):
    """A planner of torch.distributed.checkpoint gave a tensor that what it reads does not fit.

    It is an AssertionError because FileSystemReader raises one.
    """


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
    "exclude_each": "leave all of them out: exclude={globs}",
    "trust_objects": "exclude it, or copy it unchanged with trust_objects=True",
    "force": "force=True replaces it",
    "follow_external": "follow_external=True allows it",
    "memory": "raise memory=",
    "tp_plan": "name the modules in a file for tp_plan=",
    "take_first": "take_first=True uses the first source's",
    "one_file": "use fsdpckpt.consolidate, or name a directory",
    "unsplit": "leave out max_shard_size=, or name a directory",
    "dry_run": "dry_run=True only plans",
}


def make(code: int, message: str, hint: str = "", about: str = "") -> BaseException:
    """The exception for an error of the library.

    >>> make(5, "ckpt: unreadable", "exclude_each", "a, b.*").args[0]
    "ckpt: unreadable; leave all of them out: exclude=['a', 'b.*']"
    >>> make(5, "ckpt: unreadable", "exclude_each").args[0]
    'ckpt: unreadable'
    """
    if code == _NO_MEMORY:
        return MemoryError(message)
    if code == _INTERRUPTED:
        return KeyboardInterrupt()
    advice = _HINTS.get(hint, "")
    advice = advice if about or "{" not in advice else ""
    text = in_python(message + (f"; {advice.format(about=about, globs=about.split(', '))}" if advice else ""))
    made = _CLASSES.get(code, Error)(text)
    if made.path and not os.path.lexists(made.path) and re.search(r"[Nn]o such file", text):
        made = NotFoundError(text)
    if made.tensor is None and hint == "exclude":
        made.tensor = about or None
    return made


def tell(line: str) -> None:
    """Passes on what the library tells without failing."""
    import warnings

    warnings.warn(in_python(line), FsdpckptWarning, stacklevel=_caller())


def _caller() -> int:
    """How many calls `tell` is below the first one outside of the package."""
    package = os.path.dirname(__file__) + os.sep
    frame, calls = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, calls = frame.f_back, calls + 1
    return calls


def in_python(message: str) -> str:
    """A message that names options of the command, with keyword arguments instead.

    >>> in_python("ckpt: exists; --force replaces it, --strip-prefix model. renames")
    'ckpt: exists; force=True replaces it, strip_prefix=model. renames'
    >>> in_python("a.h5: --hdf5-plugins DIR reads it")
    'a.h5: hdf5_plugins=DIR reads it'
    """
    from ._commands import FLAGS

    def keyword(found: re.Match[str]) -> str:
        name = found[1].replace("-", "_")
        return f"{name}=True{found[2]}" if found[1] in FLAGS else f"{name}="

    return re.sub(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])([ =]?)", keyword, message)


# A message is "context: context: what is wrong", where a context is a path, "tensor NAME" or "offset N".


def _contexts(message: str) -> tuple[str | None, str | None, int | None]:
    path = tensor = offset = None
    rest = message
    while ": " in rest:
        context, after = rest.split(": ", 1)
        named = re.fullmatch(r"(tensor|object|dataset|offset) (.+)", context)
        if named and named[1] == "offset" and named[2].isdigit():
            offset = int(named[2])
        elif named and named[1] != "offset":
            tensor = named[2]
        elif path is None:
            path = _longest_path(rest) or context
            after = rest[len(path) + 2 :]
        else:
            break
        rest = after
    if tensor is None:
        found = re.search(r"\btensor '([^']+)'|\btensor ([^\s:;,]+)|[,;] for ([\w.\-/]+\.[\w.\-/]+)(?:;|$)", message)
        tensor = next((group for group in found.groups() if group), None) if found else None
    return path, tensor, offset


def _longest_path(text: str) -> str | None:
    """The longest beginning that is a file or directory: a name may contain a colon."""
    ends = [match.start() for match in re.finditer(": ", text)]
    return next((text[:end] for end in reversed(ends) if os.path.lexists(text[:end])), None)
