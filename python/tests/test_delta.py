"""delta and fold, and open(delta=): deltas that a writer of the tests made (weight_sync.py), and the values that should come out."""

import os
import pickle
import sys
import tempfile
import unittest
from pathlib import Path

import harness

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cli"))
import weight_sync  # noqa: E402

import fsdpckpt  # noqa: E402


class Delta(unittest.TestCase):
    def setUp(self):
        import numpy

        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        rng = numpy.random.default_rng(1)
        self.models = [{"a.w": rng.random((300, 500), numpy.float32), "b.w": rng.random(40, numpy.float32), "c": numpy.float32(1)}]
        for k in range(3):
            model = {name: value.copy() for name, value in self.models[-1].items()}
            model["a.w"][rng.integers(0, 300, 100), rng.integers(0, 500, 100)] += 1
            if k > 0:
                model["b.w"][k] = 7 * k
                model["c"] = numpy.float32(k)
            self.models.append(model)
        for encoding in ("xor", "overwrite"):
            for k in range(3):
                weight_sync.write_version(
                    self.path(encoding, f"weight_v{k + 1:06d}"), self.raw(k), self.raw(k + 1), k + 1, encoding=encoding
                )
        for k, model in enumerate(self.models):
            os.mkdir(self.path(f"model{k}"))
            weight_sync.write_file(
                self.path(f"model{k}", "model.safetensors"),
                {"format": "np"},
                {name: ("F32", value.shape, value.tobytes()) for name, value in model.items()},
            )

    def path(self, *names):
        return str(self.folder.joinpath(*names))

    def raw(self, k):
        return {name: value.tobytes() for name, value in self.models[k].items()}

    def read(self, *args, **options):
        with fsdpckpt.open(*args, **options) as checkpoint:
            return {name: tensor.numpy().tobytes() for name, tensor in checkpoint.items()}

    def test_open_reads_the_version(self):
        for encoding in ("xor", "overwrite"):
            updates = self.folder / encoding
            self.assertEqual(self.read(self.path("model0"), delta=updates), self.raw(3))
            self.assertEqual(self.read(self.path("model0"), delta=str(updates), up_to=2), self.raw(2))
            versions = [updates / "weight_v000002", updates / "weight_v000003"]
            self.assertEqual(self.read(self.path("model1"), delta=versions), self.raw(3))
            with fsdpckpt.open(self.path("model0"), delta=updates) as checkpoint:
                part = checkpoint["a.w"][100:110, 5:9]
                self.assertEqual(part.tobytes(), self.models[3]["a.w"][100:110, 5:9].tobytes())
                again = pickle.loads(pickle.dumps(checkpoint["a.w"]))
                self.assertEqual(again.numpy().tobytes(), self.raw(3)["a.w"])
        self.assertEqual(self.read(self.path("model0"), delta=[]), self.raw(0))

    def test_a_wrong_base_is_found(self):
        with fsdpckpt.open(self.path("model1"), delta=self.path("xor")) as checkpoint:
            with self.assertRaisesRegex(fsdpckpt.CorruptError, "not the version that the first delta changes"):
                checkpoint["a.w"].numpy()

    def test_usage(self):
        with self.assertRaisesRegex(fsdpckpt.UsageError, "up_to= needs delta="):
            fsdpckpt.open(self.path("model0"), up_to=2)
        with self.assertRaisesRegex(fsdpckpt.UsageError, "there is no version 9"):
            fsdpckpt.open(self.path("model0"), delta=self.path("xor"), up_to=9)

    def test_fold_and_delta(self):
        report = fsdpckpt.fold([self.path("xor")], self.path("all"), progress=None)
        self.assertEqual((report["base_version"], report["version"], report["deltas"]), (0, 3, 3))
        found = self.raw(0)
        weight_sync.apply(found, self.path("all"))
        self.assertEqual(found, self.raw(3))
        fsdpckpt.delta(self.path("model1"), self.path("model2"), self.path("weight_v000002"), progress=None)
        found = self.raw(1)
        weight_sync.apply(found, self.path("weight_v000002"))
        self.assertEqual(found, self.raw(2))


if __name__ == "__main__":
    harness.main("numpy")
