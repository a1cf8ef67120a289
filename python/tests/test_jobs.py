"""The commands as functions: arguments, results, progress, Ctrl-C, exceptions; and the command of the package."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import harness

import fsdpckpt
from fsdpckpt import _commands, _run

TRAIN = harness.GOOD / "dcp-torch2.15.0-train"


class Jobs(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def test_conversions_and_what_they_return(self):
        full = fsdpckpt.consolidate(TRAIN, self.folder / "full.h5", include="model.*", strip_prefix="model.")
        self.assertEqual((full.ok, full.format, full["target"]), (True, "h5", str(self.folder / "full.h5")))
        sharded = fsdpckpt.reshard(full.target, self.folder / "sharded", to="dcp", dp=4, tp=2)
        self.assertEqual(sharded.files, 9)
        fsdpckpt.convert(sharded.target, self.folder / "shards", to="h5")
        fsdpckpt.average([full.target, full.target], self.folder / "mean.h5", weights="1,3")
        fsdpckpt.view(sharded.target, self.folder / "view.h5")
        with fsdpckpt.open(TRAIN, include="model.*", strip_prefix="model.") as source:
            for name in ("full.h5", "sharded", "shards", "mean.h5", "view.h5"):
                with fsdpckpt.open(self.folder / name, follow_external=True) as target:
                    self.assertEqual(sorted(source), sorted(target))
                    for tensor in target.values():
                        self.assertEqual(tensor.numpy().tobytes(), source[tensor.name].numpy().tobytes())
                self.assertTrue(fsdpckpt.diff(TRAIN, self.folder / name, include="model.*", strip_prefix="model.",
                                              follow_external=True).ok if name != "view.h5" else True)
        plan = fsdpckpt.reshard(TRAIN, dp=2, dry_run=True)
        self.assertTrue(plan.dry_run)
        fsdpckpt.delta(self.folder / "full.h5", TRAIN, self.folder / "weight_v000001", include="model.norm.bias",
                       rename="s/.*/norm.weight/")
        fsdpckpt.consolidate(self.folder / "full.h5", self.folder / "local", to="safetensors", max_shard_size="1M")
        applied = fsdpckpt.apply(self.folder, self.folder / "local", up_to=1)
        self.assertEqual((applied["from_version"], applied["version"], applied["changed"]), (0, 1, 1))
        with fsdpckpt.open(self.folder / "local") as local, fsdpckpt.open(TRAIN) as source:
            self.assertEqual(local["norm.weight"].numpy().tobytes(), source["model.norm.bias"].numpy().tobytes())
        self.assertGreater(len(fsdpckpt.units(TRAIN, include="model.*").units), 0)

    def test_a_file_that_was_asked_for_is_no_directory(self):
        for name in ("m.safetensors", "m.pt", "m.h5"):
            for job in (lambda p: fsdpckpt.convert(TRAIN, p), lambda p: fsdpckpt.reshard(TRAIN, p, dp=2), lambda p: fsdpckpt.export(TRAIN, p),
                        lambda p: fsdpckpt.consolidate(TRAIN, p, to="safetensors", max_shard_size="2KB"),
                        lambda p: fsdpckpt.save({"step": 1}, p, to="dcp")):
                with self.assertRaisesRegex(fsdpckpt.UsageError, f"{name}: names a file, but .* name a directory") as caught:
                    job(self.folder / name)
                self.assertIsInstance(caught.exception, ValueError)
        self.assertEqual(os.listdir(self.folder), [])

    def test_findings_are_results(self):
        self.assertTrue(fsdpckpt.check(TRAIN).ok)
        found = fsdpckpt.check(TRAIN, against=harness.GOOD / "dcp-torch2.15.0-tp")
        self.assertFalse(found.ok)
        self.assertGreater(found.errors, 0)
        self.assertGreater(len(found.findings), 0)
        shutil.copytree(TRAIN, self.folder / "copy")
        data = self.folder / "copy" / "__0_0.distcp"
        content = bytearray(data.read_bytes())
        place = next(c for c in fsdpckpt.open(TRAIN)["model.tok_embeddings.weight"].chunks if c.rank == 0)
        content[content.index(fsdpckpt.open(TRAIN)["model.tok_embeddings.weight"][:1].tobytes())] ^= 1
        data.write_bytes(content)
        self.assertGreater(place.nbytes, 0)
        damaged = fsdpckpt.verify(self.folder / "copy")
        self.assertFalse(damaged.ok)
        with self.assertRaises(fsdpckpt.CorruptError):
            fsdpckpt.open(self.folder / "copy")["model.tok_embeddings.weight"].numpy()
        with self.assertRaises(AttributeError):
            damaged.nothing

    def test_results_are_the_documents_of_the_command(self):
        for command in ("check", "verify", "inspect", "schema"):
            text = subprocess.run(
                [_run.binary(), command, TRAIN, *(["--json"] if command != "schema" else [])],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True,
            ).stdout  # fmt: skip
            self.assertEqual(dict(getattr(fsdpckpt, command)(TRAIN)), json.loads(text))

    def test_exceptions(self):
        bad = harness.CORPUS / "bad" / "dcp-item-crc"
        for kind, call, text in (
            (fsdpckpt.NotFoundError, lambda: fsdpckpt.check(self.folder / "x"), "no such file"),
            (fsdpckpt.CorruptError, lambda: fsdpckpt.consolidate(bad, self.folder / "x.h5"), "offset 46"),
            (fsdpckpt.UsageError, lambda: fsdpckpt.consolidate(TRAIN), "output"),
            (fsdpckpt.UsageError, lambda: fsdpckpt.consolidate(TRAIN, self.folder), "force=True|directory"),
            (fsdpckpt.UsageError, lambda: fsdpckpt.reshard(TRAIN, self.folder / "y", dp=-1), "dp="),
            (fsdpckpt.UnsupportedError, lambda: fsdpckpt.consolidate(
                harness.CORPUS / "unsupported" / "dcp-quantized", self.folder / "x.h5"), "exclude="),
        ):  # fmt: skip
            with self.subTest(text=text), self.assertRaisesRegex(kind, text):
                call()
        with self.assertRaises(fsdpckpt.CorruptError) as caught:
            fsdpckpt.consolidate(bad, self.folder / "x.h5")
        error = caught.exception
        self.assertEqual((error.path, error.tensor, error.offset), (str(bad / "__0_0.distcp"), "w", 46))
        self.assertEqual(os.listdir(self.folder), [])

    def test_notes_are_warnings(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fsdpckpt.consolidate(harness.GOOD / "dcp-torch2.15.0-train", self.folder / "x.safetensors")
        self.assertTrue(any(issubclass(w.category, fsdpckpt.FsdpckptWarning) for w in caught), caught)

    def test_a_conversion_goes_on_after_an_exception(self):
        import numpy as np
        source, whole, target = self.folder / "m.pt", self.folder / "whole.h5", self.folder / "x.h5"
        fsdpckpt.save({f"w{i}": np.random.default_rng(i).integers(0, 9, 1 << 20) for i in range(4)}, source)
        fsdpckpt.consolidate(source, whole)
        kept = self.folder / ".x.h5.fsdpckpt-resume" / "journal"

        def stop(progress):
            if progress.phase in ("copying", "checking", "syncing") and (progress.phase != "copying" or progress.done):
                raise KeyError("stop")

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(20):  # a job can end before it is interrupted, or before anything is worth keeping
                with self.assertRaisesRegex(KeyError, "stop"):
                    fsdpckpt.consolidate(source, target, resume=True, jobs=1, force=True, progress=stop)
                if kept.exists():
                    break
            with self.assertRaisesRegex(fsdpckpt.UsageError, "was begun without 'dtype=bfloat16'"):
                fsdpckpt.consolidate(source, target, resume=True, force=True, dtype="bf16")
            fsdpckpt.consolidate(source, target, resume=True, force=True)
        self.assertRegex(str([str(w.message) for w in told]), "goes on with a conversion of which [0-9]+ % is written")
        self.assertEqual(target.read_bytes(), whole.read_bytes())
        self.assertEqual(sorted(p.name for p in self.folder.iterdir()), ["m.pt", "whole.h5", "x.h5"])

    def test_progress(self):
        seen = []
        fsdpckpt.consolidate(TRAIN, self.folder / "x.h5", progress=seen.append)
        self.assertEqual([u.phase for u in seen if u.phase in ("opening", "copying", "syncing")][0], "opening")
        self.assertIn("copying", {update.phase for update in seen})

        def stop(update):
            raise ZeroDivisionError

        with self.assertRaises(ZeroDivisionError):
            fsdpckpt.consolidate(TRAIN, self.folder / "y.h5", progress=stop)
        left = set(os.listdir(self.folder)) - {"y.h5"}  # which is there if the job ended before it could be interrupted
        self.assertEqual(left, {"x.h5"})

    def test_a_bar_in_a_terminal(self):
        try:
            import tqdm.auto  # noqa: F401
        except ImportError:
            self.skipTest("tqdm is not installed")
        script = (
            "import sys, io, fsdpckpt, tqdm.auto as auto\n"
            "class Terminal(io.StringIO):\n  isatty = lambda self: True\n"
            "sys.stderr = Terminal()\n"
            "plain = auto.tqdm\n"
            "auto.tqdm = lambda **options: plain(**{**options, 'delay': 0, 'mininterval': 0})\n"
            "fsdpckpt.consolidate(sys.argv[1], sys.argv[2])\n"
            "print(sys.stderr.getvalue())"
        )
        line = [sys.executable, "-c", script, TRAIN]
        shown = subprocess.run([*line, self.folder / "x.h5"], stdout=subprocess.PIPE, check=True).stdout
        self.assertIn(b"copying", shown)
        quiet = script.replace("True", "False")
        line[2] = quiet
        self.assertEqual(subprocess.run([*line, self.folder / "y.h5"], stdout=subprocess.PIPE, check=True).stdout, b"\n")

    def test_ctrl_c_leaves_nothing(self):
        import numpy as np

        source = self.folder / "source.h5"
        fsdpckpt.save({"w": np.random.default_rng(0).integers(0, 9, 1 << 26)}, source, progress=None)
        script = (
            "import fsdpckpt, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "def told(update):\n  print(update.phase, flush=True)\n"
            "fsdpckpt.consolidate(sys.argv[1], sys.argv[2], compress=9, jobs=1, progress=told)"
        )
        child = subprocess.Popen(
            [sys.executable, "-c", script, source, self.folder / "x.h5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while child.stdout.readline() not in (b"copying\n", b""):
            pass
        status, error = harness.interrupt(child)
        self.assertNotEqual(status, 0)
        self.assertIn("KeyboardInterrupt", error)
        self.assertEqual(os.listdir(self.folder), ["source.h5"])

    def test_every_option_is_an_argument(self):
        for name in _commands.__all__:
            text = subprocess.run([_run.binary(), name, "--help"], stdout=subprocess.PIPE, check=True, text=True).stdout
            options = {word.replace("-", "_") for word in re.findall(r"^ {2,6}(?:-\w, )?--([a-z0-9-]+)", text, re.M)}
            options -= set("color quiet verbose help version json comm local github all tree sort depth".split())
            taken = set(inspect.signature(getattr(fsdpckpt, name)).parameters)
            self.assertEqual(options - taken, set(), name)
            self.assertGreater(len(options), 3)

    def test_a_page_in_a_notebook(self):
        with fsdpckpt.open(TRAIN, include="model.*") as checkpoint:
            page = checkpoint._repr_html_()
        self.assertTrue(page.startswith("<iframe ") and "model.tok_embeddings.weight" in page)
        self.assertNotIn("optim.state", page)
        self.assertNotIn("<script", page)  # escaped


class Command(unittest.TestCase):
    def test_python_m(self):
        line = [sys.executable, "-m", "fsdpckpt"]
        self.assertTrue(subprocess.run([*line, "--version"], stdout=subprocess.PIPE).stdout.startswith(b"fsdpckpt "))
        self.assertEqual(subprocess.run([*line, "nonsense"], stderr=subprocess.DEVNULL).returncode, 2)

    def test_importing_is_light(self):
        script = "import sys, fsdpckpt; print([m for m in ('numpy', 'torch', 'ml_dtypes', 'tqdm') if m in sys.modules])"
        self.assertEqual(subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE).stdout, b"[]\n")


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes")
