"""Deltas of state dicts: what `fsdpckpt.delta` does where a side is in memory. With two paths it runs the command."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from . import _native
from ._checkpoint import Checkpoint
from ._errors import UsageError
from ._run import Path, Progress, Report, Update, _shown, run
from ._save import _is_masked, _is_sharded, _is_tensor, _leaves, _name, _row

# Options that select and name the values of NEW, wherever it is; and those for a checkpoint on disk.
_NAMES = ("model-only", "include", "exclude", "strip-prefix", "rename", "recipe", "reverse", "config")
_ON_DISK = ("tp-plan", "schema", "follow-external")
_COMPUTED = ("dtype-for", "dequantize", "quantize", "adapter", "hdf5-plugins")
_ENCODINGS, _CHECKSUMS = ("xor", "overwrite", "auto"), ("xxh3-128", "adler32", "blake3")
_NO_NUMBER, _MOST_NUMBER, _MOST_LEVEL, _MOST_THREADS = -1, 999_999_999, 9, 4096


def run_delta(
    command: str, operands: Sequence[Any], options: Mapping[str, Any], progress: Progress, *, json: bool
) -> Report:
    """Writes a delta between two checkpoints or state dicts."""
    old, new = operands
    if not isinstance(old, Mapping) and not isinstance(new, Mapping):
        return run(command, operands, options, progress, json=json)
    if options["output"] is None:
        raise UsageError("delta: output= is missing")
    given = set(_given(options))
    if any(_is_sharded(value) for side in operands if _is_state(side) for _, value in _leaves(side, ())):
        return _write_with_ranks(old, new, options)
    if refused := sorted(given & set(_COMPUTED)):
        raise UsageError(f"{_keyword(refused[0])}: needs both sides on disk, and one is in memory")
    return _write(old, new, os.fspath(options["output"]), options, progress)


class How(NamedTuple):
    """How frames are made, as the library takes it."""

    encoding: str
    checksum: str
    level: int
    number: int
    base: int
    jobs: int
    memory: int


def how_of(options: Mapping[str, Any]) -> How:
    """Checks the options as the command does.

    >>> how_of({"level": 12})
    Traceback (most recent call last):
    fsdpckpt._errors.UsageError: level=: '12' is not a number from 1 to 9
    """
    return How(
        _choice("encoding", options.get("encoding"), _ENCODINGS),
        _choice("checksum", options.get("checksum"), _CHECKSUMS),
        _number("level", options.get("level"), 1, _MOST_LEVEL, 1),
        _number("number", options.get("number"), 0, _MOST_NUMBER, _NO_NUMBER),
        _number("base", options.get("base"), 0, _MOST_NUMBER, _NO_NUMBER),
        _number("jobs", options.get("jobs"), 1, _MOST_THREADS, 0),
        _size("memory", options.get("memory")),
    )


def members_of(
    target: str, counts: Mapping[str, int], encoding: str, checksum: str, stored_bytes: int, seconds: float
) -> dict[str, Any]:
    """The JSON document of the command."""
    head = {name: counts[name] for name in ("version", "base_version")}
    kinds = {"delta_encoding": encoding, "checksum_format": checksum}
    found = {name: value for name, value in counts.items() if name not in head}
    return {
        "fsdpckpt": "delta",
        "schema": 1,
        "target": target,
        **head,
        **kinds,
        **found,
        "stored_bytes": stored_bytes,
        "seconds": seconds,
    }


def _write(old: Any, new: Any, target: str, options: Mapping[str, Any], progress: Progress) -> Report:
    started, how = time.monotonic(), how_of(options)
    on_disk = {name: options[name] for name in ("follow-external",)}
    kept: list[Any] = []  # what the addresses point into
    before, _ = _opened("old", old, on_disk, kept)
    after, objects = _opened("new", new, {name: options[name] for name in (*_NAMES, *_ON_DISK)}, kept)
    with _shown(progress) as show:
        counts, encoding, stored = _native.delta(
            before,
            after,
            target,
            how,
            force=options["force"],
            cast=options["dtype"],
            update=lambda phase, unit, done, total: show(Update(phase, unit, done, total or None)),
        )
    counts["objects"] += objects
    return Report("delta", members_of(target, counts, encoding, how.checksum, stored, time.monotonic() - started), True)


def _write_with_ranks(old: Any, new: Any, options: Mapping[str, Any]) -> Report:
    """Writes the delta of DTensors with the other ranks, which call this, too."""
    from .torch import delta

    given = _given(options)
    if refused := sorted(given.keys() & {*_NAMES, *_ON_DISK, *_COMPUTED}):
        raise UsageError(f"{_keyword(refused[0])}: the tensors of several ranks are taken as they are")
    if not isinstance(new, Mapping):
        raise UsageError("new= is a path, and old= has tensors of several ranks: pass both as state dicts")
    return delta(old, new, given.pop("output"), **given)


# ---- the sides ----


def _is_state(side: Any) -> bool:
    return isinstance(side, Mapping) and not isinstance(side, Checkpoint)


def _opened(which: str, side: Any, options: Mapping[str, Any], kept: list[Any]) -> tuple[_native.Checkpoint, int]:
    """A side as the library takes it, and how many objects it has that the library does not see."""
    words = {name.replace("-", "_"): value for name, value in _given(options).items()}
    if not isinstance(side, Mapping):
        return _native.Checkpoint(os.fspath(side), **words), 0
    if isinstance(side, Checkpoint):
        if words:
            raise UsageError(f"{_keyword(next(iter(words)))}: {which}= is open already; open it with this option")
        return side._opened.handle(), 0
    for name in _ON_DISK:
        if name.replace("-", "_") in words:
            raise UsageError(f"{_keyword(name)}: is about a checkpoint on disk, and {which}= is in memory")
    rows = rows_of(list(tensors_of(side)), kept)
    return _native.Checkpoint(label(which), rows=rows, **words), count_objects(side)


def label(which: str) -> str:
    """What messages call a state dict."""
    return f"the {which} state dict"


def tensors_of(side: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The tensors of a nested state dict, with their paths. One of an open checkpoint is read."""
    for path, value in _leaves(side, ()):
        if _is_masked(value):
            raise UsageError(f"tensor {_name(path)}: a masked array, and the mask would be lost: pass its .filled(), or its .data")
        if _is_tensor(value):
            yield path, value


def count_objects(side: Mapping[str, Any]) -> int:
    """How many values of a nested state dict are no tensors."""
    return sum(not _is_tensor(value) for _, value in _leaves(side, ()))


def rows_of(leaves: Sequence[tuple[tuple[Any, ...], Any]], kept: list[Any]) -> list[tuple[Any, ...]]:
    """Rows of tensors, each with the name of an earlier one that is the same memory."""
    rows: list[tuple[Any, ...]] = []
    first: dict[Any, str] = {}
    for path, value in leaves:
        name, _, dtype, _, shape, chunks = row = _row(path, value, kept)
        origin = first.setdefault((dtype, shape, *chunks[0][2:4]), name) if all(shape) else name
        rows.append((*row, origin if origin != name else None))
    return rows


# ---- options ----


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are not at their defaults."""
    return {name: value for name, value in options.items() if value is not None and value is not False and value not in ((), [])}


def _keyword(option: str) -> str:
    return f"{option.replace('-', '_')}="


def _choice(name: str, value: Path | None, known: Sequence[str]) -> str:
    text = known[0] if value is None else os.fspath(value).lower()
    if text not in known:
        raise UsageError(f"{name}=: '{value}' is not one of {', '.join(known)}")
    return text


def _number(name: str, value: int | None, least: int, most: int, default: int) -> int:
    if value is not None and not least <= value <= most:
        raise UsageError(f"{name}=: '{value}' is not a number from {least} to {most}")
    return default if value is None else value


def _size(name: str, value: int | str | None) -> int:
    """Bytes; 0 is the default.

    >>> _size("memory", "64M"), _size("memory", 1 << 30), _size("memory", None)
    (67108864, 1073741824, 0)
    """
    if value is None:
        return 0
    found = re.fullmatch(r"([0-9]{1,19})(?:([KMGT]?)(?:i?B)?)", str(value), re.IGNORECASE)
    number = int(found[1]) << 10 * " KMGT".index((found[2] or " ").upper()) if found else 0
    if not 0 < number < 1 << 63 or (number < 1_000_000 and str(value).isdigit()):
        raise UsageError(f"{name}=: '{value}' is not a size such as 64M or 2G")
    return number
