"""The fixture in a project of somebody else: pytest finds the plugin by its entry point, as pip installs it."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import harness

TRAIN = harness.GOOD / "dcp-torch2.15.0-train"
PROJECT = f"""
import numpy as np
import pytest

TRAIN = {str(TRAIN)!r}
WEIGHTS = {{"include": "model.norm.*", "strip_prefix": "model."}}


def test_alone(assert_checkpoint_compatible):
    assert assert_checkpoint_compatible(TRAIN).tensors == 28


def test_state_dict(assert_checkpoint_compatible):
    assert_checkpoint_compatible(TRAIN, {{"norm.weight": np.zeros(6, "f4"), "norm.bias": np.zeros(6, "f4"), "note": 1}}, **WEIGHTS)


def test_another_checkpoint_and_mesh(assert_checkpoint_compatible):
    assert_checkpoint_compatible(TRAIN, TRAIN, dp=2)


def test_all_reasons_at_once(assert_checkpoint_compatible):
    with pytest.raises(AssertionError) as caught:
        assert_checkpoint_compatible(TRAIN, {{"norm.weight": np.zeros(7, "f4"), "norm.a": np.zeros((3, 2), "f4")}}, **WEIGHTS)
    for reason in ("norm.a: missing: the model", "norm.bias: unexpected", "norm.weight: shape"):
        assert reason in str(caught.value)


def test_fails(assert_checkpoint_compatible):
    assert_checkpoint_compatible(TRAIN, {{"norm.weight": np.zeros(6, "f2")}}, **WEIGHTS)
"""
MODULE = f"""
import torch


def test_module(assert_checkpoint_compatible):
    with torch.device("meta"):
        norm = torch.nn.LayerNorm(6)
    assert_checkpoint_compatible({str(TRAIN)!r}, norm, include="model.norm.*", strip_prefix="model.norm.")
    assert_checkpoint_compatible({str(TRAIN)!r}, norm.bfloat16(), include="model.norm.*", strip_prefix="model.norm.")
"""


class Plugin(unittest.TestCase):
    def run_pytest(self, text):
        with tempfile.TemporaryDirectory() as folder:
            about = Path(folder, "fsdpckpt-0.dist-info")
            about.mkdir()
            (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdpckpt\nVersion: 0\n")
            entry = harness.CORPUS.parents[1] / "pyproject.toml"
            lines = entry.read_text().split("[project.entry-points.pytest11]\n")[1].split("\n\n")[0]
            (about / "entry_points.txt").write_text("[pytest11]\n" + lines.replace('"', "") + "\n")
            Path(folder, "test_it.py").write_text(text)
            path = os.pathsep.join([folder, os.environ["PYTHONPATH"]])
            line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
            done = subprocess.run(
                line, cwd=folder, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
            )
            return done.stdout

    def test_the_fixture(self):
        output = self.run_pytest(PROJECT)
        self.assertIn("1 failed, 4 passed", output)
        self.assertIn("AssertionError: " + str(TRAIN) + " is not compatible:", output)
        self.assertRegex(output, r"norm\.weight: float32, but float16 in the model")

    def test_a_module_of_torch(self):
        try:
            import torch  # noqa: F401
        except ImportError as error:
            self.skipTest(str(error))
        output = self.run_pytest(MODULE)
        self.assertIn("1 failed", output)
        self.assertIn("bfloat16", output)


if __name__ == "__main__":
    harness.main("pytest", "numpy")
