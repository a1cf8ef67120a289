"""The plugin for pytest, which finds it by itself where fsdpckpt is installed: the fixture `assert_checkpoint_compatible`."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from typing import Any, Protocol

import pytest

from . import _commands
from ._arguments import checked
from ._run import Path, Report, shown_path


class HasStateDict(Protocol):
    """A module of PyTorch."""

    def state_dict(self) -> Mapping[str, Any]: ...


class AssertCompatible(Protocol):
    """The type of the fixture: see assert_compatible."""

    def __call__(
        self, checkpoint: Path, reference: Path | Mapping[str, Any] | HasStateDict | None = None, **options: Any
    ) -> Report: ...


@checked
def assert_compatible(
    checkpoint: Path, reference: Path | Mapping[str, Any] | HasStateDict | None = None, **options: Any
) -> Report:
    """Asserts that `fsdpckpt.check` finds no error, and lists all errors otherwise. Reads headers only.

    Args:
        checkpoint: any format and layout
        reference: what it must fit: a module, a state dict (on the meta device is enough), a checkpoint, or a file of
            `fsdpckpt schema`
        options: those of `fsdpckpt.check`, such as model_only=True, include="model.*" or dp=8

    >>> import numpy as np
    >>> weights = {"norm.weight": np.zeros(6, "f4")}
    >>> assert_compatible(checkpoint, weights, include="model.norm.weight", strip_prefix="model.").ok
    True
    """
    __tracebackhide__ = True
    with tempfile.TemporaryDirectory() as folder:
        if reference is not None and not isinstance(reference, (str, os.PathLike)):
            reference = _schema(reference, os.path.join(folder, "the model"))
        report = _commands.check(checkpoint, against=reference, progress=None, **options)
    errors = [finding["message"].replace(folder + os.sep, "") for finding in report.findings if finding["severity"] == "error"]
    if errors:
        raise AssertionError("\n".join([f"{shown_path(os.fspath(checkpoint))} is not compatible:", *errors]))
    return report


def _schema(reference: Mapping[str, Any] | HasStateDict, path: str) -> str:
    """Writes what `fsdpckpt schema` says about a state dict."""
    state = reference if isinstance(reference, Mapping) else reference.state_dict()
    tensors = [
        {"name": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        for name, value in state.items()
        if hasattr(value, "dtype") and hasattr(value, "shape")
    ]
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"fsdpckpt": "schema", "schema": 1, "tensors": tensors}, file)
    return path


def _assert_checkpoint_compatible() -> AssertCompatible:
    """The function `assert_compatible(checkpoint, reference, **options)` of fsdpckpt.pytest."""
    return assert_compatible


# Not as a decorator, which mypy calls untyped where pytest is not installed.
assert_checkpoint_compatible = pytest.fixture(_assert_checkpoint_compatible, name="assert_checkpoint_compatible")
