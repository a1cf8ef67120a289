"""What callers pass, checked where it enters the package: `checked` reads the annotations of a public function.

A wrong argument is a UsageError that names it: an ArgumentError for another type, a UsageError for a bad value. What
passes is what the annotation says, converted: a path is a str, a number of NumPy is an int.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ._errors import ArgumentError, UsageError

if TYPE_CHECKING:
    import inspect

_Function = TypeVar("_Function", bound=Callable[..., Any])
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1
_MOST_THREADS = (1 << 31) - 1


class _Kind(NamedTuple):
    """A type of an annotation: what messages call it, which values are of it, and what makes a value of it usable."""

    words: str
    fits: Callable[[Any], bool]
    read: Callable[[str, Any], Any]


def checked(function: _Function) -> _Function:
    """Decorates a function: its arguments are checked and converted as their annotations say.

    >>> @checked
    ... def double(count: int | None = None) -> int:
    ...     return 2 * (count or 0)
    >>> double("3")
    Traceback (most recent call last):
    fsdpckpt._errors.ArgumentError: count= must be an integer or None, not str
    """
    plans: list[_Plan] = []  # made at the first call: inspect is slow to import

    @functools.wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        __tracebackhide__ = True
        if not plans:
            plans.append(_plan(function))
        plan = plans[0]
        if not plan.fits(args, keywords):
            try:
                plan.signature.bind(*args, **keywords)
            except TypeError as error:
                _refuse(ArgumentError, f"{function.__qualname__}(): {error}")
        kinds = plan.kinds
        read = [_read(name, value, kinds[name]) if kinds[name] else value for name, value in zip(plan.positional, args)]
        for name, value in keywords.items():
            if kinds.get(name):
                keywords[name] = _read(name, value, kinds[name])
        return function(*read, **keywords)

    return call  # type: ignore[return-value]


def flag(name: str, value: Any) -> bool:
    """A yes or no of a function that is called too often for `checked`."""
    given: bool = _read(name, value, [_KINDS["bool"]])
    return given


class _Plan(NamedTuple):
    """The parameters of a function, none of which is *args."""

    signature: inspect.Signature
    kinds: dict[str, list[_Kind]]  # that each parameter may have; none where everything is allowed
    positional: tuple[str, ...]
    required: frozenset[str]
    takes_any: bool  # it has **options

    def fits(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
        """Whether a call has the right arguments; `inspect.Signature.bind` says why not, but takes longer than opening a
        checkpoint."""
        given = self.positional[: len(args)]
        known = self.takes_any or self.kinds.keys() >= keywords.keys()
        once = len(given) == len(args) and keywords.keys().isdisjoint(given)
        return known and once and self.required <= keywords.keys() | set(given)


def _plan(function: Callable[..., Any]) -> _Plan:
    import inspect

    signature = inspect.signature(function)
    kinds: dict[str, list[_Kind]] = {}
    for name, parameter in signature.parameters.items():
        said = "Any" if parameter.annotation is parameter.empty else str(parameter.annotation)
        kinds[name] = [] if said == "Any" else [_KINDS[part] for part in said.split(" | ")]
    parameters = signature.parameters.values()
    return _Plan(
        signature,
        kinds,
        tuple(one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD),
        frozenset(one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD),
        any(one.kind is one.VAR_KEYWORD for one in parameters),
    )


def _read(name: str, value: Any, kinds: list[_Kind]) -> Any:
    for kind in kinds:
        if kind.fits(value):
            return kind.read(name, value)
    words = list(dict.fromkeys(kind.words for kind in kinds))
    _refuse(ArgumentError, f"{name}= must be {' or '.join(words)}, not {type(value).__name__}")


def _refuse(kind: type[UsageError], message: str) -> NoReturn:
    """Raises an error about an argument, which is about no file and no tensor."""
    error = kind(message)
    error.path = error.tensor = error.offset = None
    raise error


# ---- the readers ----


def integer(name: str, value: Any) -> int:
    """The value as an integer; one of NumPy is one, a float or a bool is none."""
    if not _is_integer(value):
        _refuse(ArgumentError, f"{name}= must be an integer, not {type(value).__name__}")
    return within(name, operator.index(value), _LEAST, _MOST)


def within(name: str, number: int, least: int, most: int) -> int:
    """The number, which is one of least ... most."""
    if not least <= number <= most:
        _refuse(UsageError, f"{name}= must be between {least} and {most}")
    return number


def threads(number: int) -> int:
    """The argument `jobs`; 0 is the default."""
    return within("jobs", number, 0, _MOST_THREADS)


def text(name: str, value: Any) -> str:
    """The value as a text that has an encoding in UTF-8."""
    if not isinstance(value, str):
        _refuse(ArgumentError, f"{name}= must be a str, not {type(value).__name__}")
    try:
        encoded = value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(UsageError, f"{name}={value!a} is no text: it has a surrogate, which UTF-8 cannot encode")
    return _without_null(name, value, encoded)


def _path(name: str, value: Any) -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str):
        _refuse(ArgumentError, f"{name}= must be a str or os.PathLike[str], not {type(value).__name__}")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        _refuse(UsageError, f"{name}={path!a} has a character that no name of a file has")
    return _without_null(name, path, encoded)


def _without_null(name: str, value: str, encoded: bytes) -> str:
    if b"\0" in encoded:
        _refuse(UsageError, f"{name}={value!a} has a null character")
    return value


def _each(read: Callable[[str, Any], str]) -> Callable[[str, Any], list[str]]:
    return lambda name, values: [read(name, value) for value in values]


def _number(name: str, value: Any) -> Any:
    return value if isinstance(value, (int, float)) else float(value)


def _as_it_is(name: str, value: Any) -> Any:
    return value


# ---- which values are of a kind ----


def _is_integer(value: Any) -> bool:
    return hasattr(type(value), "__index__") and not _is_flag(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool) or (type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"))


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, (str, bytes, bytearray, memoryview, Mapping))


def _is_mesh(value: Any) -> bool:
    return isinstance(value, Mapping) or _is_list(value) or hasattr(value, "mesh_dim_names")


def _is_group(value: Any) -> bool:
    return any(base.__name__ == "ProcessGroup" for base in type(value).__mro__)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_strings(value: Any) -> bool:
    return value is None or _is_path(value) or _is_list(value)


def _strings(name: str, value: Any) -> list[str]:
    return [_path(name, item) for item in ([value] if _is_path(value) else () if value is None else value)]


# By the words of the annotations. A public function with another annotation needs another row.
_KINDS = {
    "Path": _Kind("a str or os.PathLike[str]", _is_path, _path),
    "Text": _Kind("a str or os.PathLike[str]", _is_path, _path),
    "str": _Kind("a str", _is_text, text),
    "Strings": _Kind("a str or a list of them", _is_strings, _strings),
    "Sequence[str]": _Kind("a list of str", _is_list, _each(text)),
    "Sequence[Path]": _Kind("a list of paths", _is_list, _each(_path)),
    "Sequence[object]": _Kind("a list", _is_list, lambda name, value: list(value)),
    "int": _Kind("an integer", _is_integer, integer),
    "float": _Kind("a number", lambda value: hasattr(type(value), "__float__") and not _is_flag(value), _number),
    "bool": _Kind("True or False", _is_flag, lambda name, value: bool(value)),
    "None": _Kind("None", lambda value: value is None, _as_it_is),
    "Progress": _Kind(
        "a function, 'auto' or None",
        lambda value: value is None or callable(value) or (isinstance(value, str) and value == "auto"),
        _as_it_is,
    ),
    "Mapping[str, Any]": _Kind("a mapping", lambda value: isinstance(value, Mapping), _as_it_is),
    "HasStateDict": _Kind("a module", lambda value: callable(getattr(value, "state_dict", None)), _as_it_is),
    "MeshLike": _Kind("a mesh", _is_mesh, _as_it_is),
    "ProcessGroup": _Kind("a process group", _is_group, _as_it_is),
}
