"""The picture of `inspect --html` in a notebook."""

from __future__ import annotations

import html
import os
import tempfile
from typing import TYPE_CHECKING

from . import _run

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint

_MOST = 8 << 20  # bytes of a page that a notebook should hold


def page(checkpoint: Checkpoint) -> str:
    """The page about a checkpoint, in a frame of its own."""
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "page.html")
        options = {name.replace("_", "-"): value for name, value in checkpoint._opened.origin.options.items() if name in _TAKEN}
        _run.run("inspect", [checkpoint._opened.origin.path], {**options, "html": file}, None, json=False)
        if os.path.getsize(file) > _MOST:
            return f"<pre>{html.escape(repr(checkpoint))}</pre>"
        with open(file, encoding="utf-8") as stream:
            text = stream.read()
    return (
        f'<iframe title="{html.escape(_run.shown_path(checkpoint.path))}" style="width:100%;height:32em;border:0" '
        f'sandbox="allow-scripts" srcdoc="{html.escape(text)}"></iframe>'
    )


_TAKEN = ("include", "exclude", "schema", "tp_plan", "follow_external")
