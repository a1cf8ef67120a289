"""Objects: values that are not tensors, from and to the JSON of docs/HDF5_SCHEMA.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Foreign(NamedTuple):
    """A value that only PyTorch can make: `kind` says what it is, such as "$opaque", and `value` which."""

    kind: str
    value: Any


def _bytes(text: str) -> bytes:
    import base64

    return base64.b64decode(text)


def _path(text: str) -> Any:
    from pathlib import PurePosixPath

    return PurePosixPath(text)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$int": lambda value: int(value, 0),
    "$float": float,
    "$complex": lambda value: complex(*value),
    "$dict": dict,
    "$tuple": tuple,
    "$size": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$bytes": _bytes,
    "$bytearray": lambda value: bytearray(_bytes(value)),
    "$surrogates": lambda value: _bytes(value).decode("utf-8", "surrogatepass"),
    "$path": _path,
}


def _unwrap(members: dict[str, Any]) -> Any:
    if len(members) != 1:
        return members
    kind, value = next(iter(members.items()))
    if not kind.startswith("$"):
        return members
    return _DECODERS[kind](value) if kind in _DECODERS else Foreign(kind, value)


def decode(text: str) -> Any:
    """The value of an object from its readable form.

    >>> decode('{"betas": {"$tuple": [0.9, 0.95]}, "lr": {"$float": "inf"}}')
    {'betas': (0.9, 0.95), 'lr': inf}
    """
    import json

    return json.loads(text, object_hook=_unwrap)
