"""Types and examples: mypy in strict mode, and every example in a docstring or in docs/PYTHON.md."""

import doctest
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import harness

import fsdpckpt

ROOT = harness.CORPUS.parents[1]


def scene():
    """The names that examples may use."""
    folder = Path(tempfile.mkdtemp())
    return {"checkpoint": harness.GOOD / "dcp-torch2.15.0-train", "folder": folder, "fsdpckpt": fsdpckpt}


class Examples(unittest.TestCase):
    def test_docstrings(self):
        tried = 0
        for info in pkgutil.iter_modules(fsdpckpt.__path__):
            if info.name == "__main__":  # runs the command
                continue
            try:
                module = importlib.import_module(f"fsdpckpt.{info.name}")
            except ImportError:
                self.assertIn(info.name, ("pytest", "torch"))
                continue
            names = {**vars(module), **scene()}
            result = doctest.testmod(module, globs=names)
            self.assertEqual(result.failed, 0, info.name)
            tried += result.attempted
            shutil.rmtree(names["folder"])
        names = scene()
        result = doctest.testmod(fsdpckpt, globs=names)
        self.assertEqual(result.failed, 0)
        shutil.rmtree(names["folder"])
        self.assertGreater(tried + result.attempted, 12)

    def test_the_page(self):
        names = scene()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(names["folder"])
        shutil.copytree(names["checkpoint"], "ckpt")
        result = doctest.testfile(
            str(ROOT / "docs" / "PYTHON.md"), module_relative=False, globs=names, optionflags=doctest.ELLIPSIS
        )
        self.assertEqual(result.failed, 0)
        self.assertGreater(result.attempted, 10)
        shutil.rmtree(names["folder"])

    def test_types(self):
        try:
            import mypy  # noqa: F401
        except ImportError:
            self.skipTest("mypy is not installed")
        package = os.path.dirname(fsdpckpt.__file__)
        with tempfile.TemporaryDirectory() as cache:
            line = [sys.executable, "-m", "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", "--cache-dir", cache]
            checked = subprocess.run([*line, package], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual(checked.returncode, 0, checked.stdout)


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes")
