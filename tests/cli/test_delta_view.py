"""--delta: a model with deltas applied while it is read. The deltas and the model are written by weight_sync.py, which shares no code
with fsdpckpt, and so is the model that should come out."""

import json
import math
import os
import random
import unittest

import delta_case
import weight_sync

SHAPES = delta_case.shapes(500, 801)


def finite(rng, dtype, count):
    """Bytes without NaN, which diff would report as different."""
    data = bytearray(rng.randbytes(count * delta_case.SIZES[dtype]))
    if dtype in ("BF16", "F16", "F32"):
        for i in range(delta_case.SIZES[dtype] - 1, len(data), delta_case.SIZES[dtype]):
            data[i] &= 0x3b
    return bytes(data)


class View(delta_case.Case):
    def setUp(self):
        super().setUp()
        rng = random.Random(1)
        count = {name: math.prod(shape) for name, (_, shape) in SHAPES.items()}
        self.models = [{name: finite(rng, SHAPES[name][0], count[name]) for name in SHAPES}]
        for names in (["layers.0.w", "codes.qweight", "scalar"], ["layers.0.w", "fp8", "packed", "layers.1.w"], ["layers.0.w", "fp8"]):
            model = dict(self.models[-1])
            for name in names:
                size, data = delta_case.SIZES[SHAPES[name][0]], bytearray(model[name])
                for k in [count[name] - 1, *(rng.randrange(count[name]) for _ in range(count[name] // 50))]:
                    data[k * size:(k + 1) * size] = finite(rng, SHAPES[name][0], 1)
                model[name] = bytes(data)
            self.models.append(model)
        for k, model in enumerate(self.models):
            self.save(f"model{k}", delta_case.typed(model, SHAPES), files=2)

    def updates(self, folder, encodings=("xor", "xor", "xor"), checksum="xxh3-128"):
        os.mkdir(self.path(folder))
        for k, encoding in enumerate(encodings):
            weight_sync.write_version(self.path(folder, f"weight_v{k + 1:06d}"), self.models[k], self.models[k + 1], k + 1,
                                      encoding=encoding, checksum=checksum)
        return folder

    def read(self, file):
        return {name: data for name, (_, data) in weight_sync.read_file(self.path(file))[1].items()}

    def test_conversions_write_the_version(self):
        for encodings in (("xor",) * 3, ("overwrite",) * 3, ("xor", "overwrite", "xor")):
            for checksum in ("xxh3-128", "adler32"):
                with self.subTest(encodings=encodings, checksum=checksum):
                    updates = self.updates("-".join((*encodings, checksum)), encodings, checksum)
                    for jobs, memory in ((1, "8M"), (4, "64M")):
                        for n in (1, 2, 3):
                            self.ok("consolidate", "model0", "-o", "out.safetensors", "-q", "--force", "--delta", updates, "--up-to", n,
                                    "-j", jobs, "--memory", memory)
                            self.assertEqual(self.read("out.safetensors"), self.models[n])
        self.ok("consolidate", "model1", "-o", "out.safetensors", "-q", "--force", "--delta", f"{updates}/weight_v000002", "--delta",
                f"{updates}/weight_v000003")
        self.assertEqual(self.read("out.safetensors"), self.models[3])

    def test_shards(self):
        """The blocks of a tensor are not read in order."""
        updates = self.updates("updates", ("xor", "overwrite", "xor"))
        self.ok("reshard", "model0", "-o", "shards", "-q", "--to", "dcp", "--dp", "2", "--tp", "2", "--tp-plan", self.plan(),
                "--delta", updates)
        self.ok("consolidate", "shards", "-o", "out.safetensors", "-q")
        self.assertEqual(self.read("out.safetensors"), self.models[3])

    def plan(self):
        with open(self.path("plan.json"), "w") as f:
            json.dump({"layers.0": "rowwise", "*.w": "rowwise", "layers.*.w": "rowwise", "layers.*": "rowwise"}, f)
        return "plan.json"

    def test_every_command_that_reads(self):
        updates = self.updates("updates")
        self.ok("diff", "model0", "model3", "--delta", updates, "-q")
        self.fails_with_difference("model0", "model2", updates)
        found = json.loads(self.ok("inspect", "model0", "--delta", updates, "--json", "--stats"))
        expected = json.loads(self.ok("inspect", "model3", "--json", "--stats"))
        stats = lambda document: {t["name"]: (t["dtype"], t["shape"], t.get("stats")) for t in document["tensors"]}
        self.assertEqual(stats(found), stats(expected))
        self.ok("extract", "model0", "layers.0.w", "-o", "w.npy", "--delta", updates, "-q")
        with open(self.path("w.npy"), "rb") as f:
            self.assertTrue(f.read().endswith(self.models[3]["layers.0.w"]))
        self.ok("check", "model0", "--against", "model3", "--delta", updates, "-q")
        self.ok("convert", "model0", "-o", "out.h5", "-q", "--delta", updates)
        self.ok("diff", "out.h5", "model3", "-q")
        self.ok("export", "model0", "-o", "hub", "-q", "--delta", updates)
        self.ok("diff", "hub", "model3", "-q")

    def test_verify(self):
        """Every tensor that the deltas change is covered by their checksums. An empty one needs none."""
        updates = self.updates("updates", ("xor", "overwrite", "xor"))
        report = json.loads(self.ok("verify", "model0", "--delta", updates, "--json"))
        changed = {name for name in SHAPES if self.models[0][name] != self.models[3][name] or name == "none"}
        self.assertEqual((report["defects"], report["with_digest"], report["without_digest"]), ([], len(changed), len(SHAPES) - len(changed)))
        self.assertEqual(report["bytes_without_digest"], sum(len(self.models[0][name]) for name in SHAPES if name not in changed))
        wrong = self.run_tool("verify", "model1", "--delta", updates, "-j", 1)
        self.assertEqual((wrong.returncode, wrong.stderr), (1, ""))
        self.assertIn("model1 is not the version that the first delta changes", wrong.stdout)
        self.fails(2, "verify", "model0", "--seal", "--delta", updates, contains=["--seal records", "seal the model without it"])

    def fails_with_difference(self, a, b, updates):
        self.assertEqual(self.run_tool("diff", a, b, "--delta", updates, "-q").returncode, 1)

    def test_with_options_that_come_after(self):
        """A delta changes what is stored: names, dtypes and recipes apply to the result."""
        updates = self.updates("updates")
        more = ("--include", "layers.*", "--rename", "s/^/x./", "--dtype", "f32")
        self.ok("consolidate", "model0", "-o", "out.safetensors", "-q", "--delta", updates, *more)
        self.ok("consolidate", "model3", "-o", "want.safetensors", "-q", *more)
        self.assertEqual(self.read("out.safetensors"), self.read("want.safetensors"))
        more = ("--include", "layers.*", "--quantize", "layers.0.w")
        self.ok("consolidate", "model0", "-o", "out.safetensors", "-q", "--force", "--delta", updates, *more)
        self.ok("consolidate", "model3", "-o", "want.safetensors", "-q", "--force", *more)
        self.assertEqual(self.read("out.safetensors"), self.read("want.safetensors"))

    def test_a_wrong_base_is_found(self):
        updates = self.updates("updates")
        for command in (["consolidate", "model1", "-o", "out.safetensors"], ["reshard", "model1", "-o", "out", "--to", "dcp", "--dp", "2"],
                        ["diff", "model1", "model3"]):
            for jobs in (1, 4):
                self.fails(3, *command, "-q", "--delta", updates, "-j", jobs,
                           contains=["the checksum of the new bytes is", "model1 is not the version that the first delta changes"])
        self.assertEqual({name for name in os.listdir(self.path(".")) if name.startswith("out")}, set())
        self.ok("consolidate", "model1", "-o", "out.safetensors", "-q", "--delta", updates, "--include", "same")

    def test_what_does_not_fit(self):
        updates = self.updates("updates")
        self.save("small", delta_case.typed({name: data for name, data in self.models[0].items() if name != "fp8"}, SHAPES), files=2)
        self.fails(3, "inspect", "small", "--delta", updates, contains=["it changes tensor fp8, which small does not have"])
        self.fails(2, "inspect", "model0", "--up-to", "3", contains=["--up-to needs --delta"])
        self.fails(2, "inspect", "model0", "--delta", updates, "--up-to", "9", contains=["there is no version 9"])
        self.fails(2, "inspect", "model0", "--delta", f"{updates}/weight_v000001", "--delta", f"{updates}/weight_v000003",
                   contains=["it changes version 2, but the version before it is 1"])
        self.fails(2, "inspect", "model0", "--delta", "nothing", contains=["nothing"])
        self.fails(2, "consolidate", "model0", "--delta", updates, "-o", f"{updates}/weight_v000002", "--to", "safetensors", "--force",
                   contains=["weight_v000002"])
        os.mkdir(self.path(updates, "weight_v000004"))
        weight_sync.write_file(self.path(updates, "weight_v000004", "model.safetensors"), None,
                               delta_case.typed(self.models[3], SHAPES))
        self.fails(2, "inspect", "model0", "--delta", updates, contains=["version 4 is a full version"])

    def test_lying_frames(self):
        size = len(self.models[0]["fp8"])
        cases = [*delta_case.lying_frames(size), ("another checksum", weight_sync.compress(bytes(size)), "xor", "the checksum of the new bytes is")]
        file = "model-00000-of-00001.safetensors"
        for k, (what, frame, encoding, text) in enumerate(cases):
            with self.subTest(what):
                folder = self.path(f"lying{k}", "weight_v000001")
                os.makedirs(folder)
                weight_sync.write_file(os.path.join(folder, file), {"fp8": "00" * 16}, {"fp8": ("U8", [len(frame)], frame)})
                weight_sync.write_index(folder, {"fp8": file}, 1, encoding=encoding)
                self.fails(3, "consolidate", "model0", "-o", "out.safetensors", "--delta", folder, contains=["fp8", text])
        self.assertFalse(os.path.exists(self.path("out.safetensors")))


if __name__ == "__main__":
    unittest.main()
