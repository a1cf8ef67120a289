"""Runs the command that the package contains: its options are keyword arguments, its JSON document is the result."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, Union

from ._errors import Error, make, tell

if TYPE_CHECKING:
    import subprocess

Path = Union[str, "os.PathLike[str]"]
Text = Path
Strings = Union[str, Sequence[str]]

_FOUND = 1  # check, diff or verify found something


class Update(NamedTuple):
    """What a job is doing: `done` of `total` bytes, files or tensors of a phase; `total` is None if it is not known."""

    phase: str
    unit: str
    done: int
    total: int | None


Progress = Union[Callable[[Update], object], Literal["auto"], None]


class Report(Mapping[str, Any]):
    """The result of a command: the members of its JSON document (docs/JSON.md), also as attributes.

    `ok` is False if check, diff or verify found something.
    """

    def __init__(self, command: str, members: dict[str, Any], ok: bool, notes: Sequence[str] = ()) -> None:
        self.command = command
        self.members = members
        self.ok = ok
        self.notes = tuple(notes)

    def __getitem__(self, name: str) -> Any:
        return self.members[name]

    def __getattr__(self, name: str) -> Any:
        members = self.__dict__.get("members", {})
        if name in members:
            return members[name]
        raise AttributeError(f"the result of {self.__dict__.get('command')} has no member '{name}'")

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        plain = {name: value for name, value in self.members.items() if not isinstance(value, (list, dict))}
        return f"<{self.command}: {'ok' if self.ok else 'found something'}, {plain}>"


def shown_path(path: str) -> str:
    """A path for people. The query of a URL may be a secret."""
    url, query, _ = path.partition("?") if path.lower().startswith(("https://", "http://")) else (path, "", "")
    return url + "?…" if query else url


def is_in_bucket(path: str) -> bool:
    return path.startswith(("s3://", "gs://"))


def binary() -> str:
    """The path of the command."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "fsdpckpt")


def arguments(options: Mapping[str, object]) -> Iterator[str]:
    """Options as the command line spells them.

    >>> list(arguments({"include": ["a.*", "b.*"], "force": True, "dp": 4, "tp": None, "seal": False}))
    ['--include=a.*', '--include=b.*', '--force', '--dp=4']
    """
    for name, value in options.items():
        if value is True:
            yield f"--{name}"
        elif isinstance(value, (list, tuple)):
            yield from (f"--{name}={item}" for item in value)
        elif value is not None and value is not False:
            yield f"--{name}={os.fspath(value) if isinstance(value, os.PathLike) else value}"


def run(
    command: str, operands: Sequence[Path], options: Mapping[str, object], progress: Progress, *, json: bool
) -> Report:
    """Runs a command, and raises what it reports."""
    import subprocess

    line = [binary(), command, *(["--json"] if json else []), "--progress=json", "--color=never", *arguments(options)]
    line += ["--", *(os.fspath(operand) for operand in operands)]
    pipe = subprocess.PIPE
    # In its own session, the command gets Ctrl-C only from here: a second one would kill it before it cleans up.
    with subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
    ) as process:
        return _finish(process, command, progress)


def _finish(process: subprocess.Popen[bytes], command: str, progress: Progress) -> Report:
    import json
    import signal
    import threading

    assert process.stdout is not None and process.stderr is not None
    out: list[bytes] = []
    reader = threading.Thread(target=lambda stream: out.append(stream.read()), args=(process.stdout,), daemon=True)
    reader.start()
    notes: list[str] = []
    try:
        with _shown(progress) as show:
            for update in _updates(process.stderr, notes):
                show(update)
            process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        process.wait()
        raise
    finally:
        reader.join()
    if process.returncode not in (0, _FOUND):
        _fail(process.returncode, notes)
    members = json.loads(out[0]) if out and out[0].strip() else {}
    for note in notes:
        tell(note)
    return Report(command, members, process.returncode == 0, notes)


def _updates(stream: IO[bytes], notes: list[str]) -> Iterator[Update]:
    """Yields the progress in what a command writes to stderr, and keeps its other lines."""
    import json

    for raw in stream:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        if line.startswith("{"):
            members = json.loads(line)
            yield Update(members["phase"], members["unit"], members["done"], members.get("total"))
        else:
            notes.append(line.removeprefix("fsdpckpt: "))


def _fail(status: int, notes: Sequence[str]) -> None:
    if status < 0:
        raise Error(f"the command was ended by signal {-status}")
    raise make(status, notes[-1] if notes else f"the command failed with status {status}")


class _shown:
    """Calls the caller's function, or moves a tqdm bar in a terminal or notebook."""

    def __init__(self, progress: Progress) -> None:
        self._call = progress if callable(progress) else None
        self._wanted = progress == "auto"
        self._bar: Any = None
        self._phase = ""

    def __enter__(self) -> Callable[[Update], object]:
        if self._call is None and self._wanted and _watched():
            try:
                from tqdm.auto import tqdm
            except ImportError:
                return lambda update: None
            self._bar = tqdm(unit_scale=True, leave=False, delay=1)
            return self._move
        return self._call or (lambda update: None)

    def _move(self, update: Update) -> None:
        if update.phase != self._phase:
            self._phase = update.phase
            self._bar.reset(update.total)
            self._bar.set_description(update.phase)
            self._bar.unit = "B" if update.unit == "bytes" else f" {update.unit}"
        self._bar.total = update.total
        self._bar.update(update.done - self._bar.n)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _watched() -> bool:
    """Whether a person sees stderr or the output of a notebook cell."""
    if "IPython" in sys.modules:
        from IPython import get_ipython  # type: ignore[import-not-found,unused-ignore]

        return get_ipython() is not None  # type: ignore[no-untyped-call,unused-ignore]
    return bool(sys.stderr and sys.stderr.isatty())
