"""--delta: a model with deltas applied while it is read. The deltas and the model are written by weight_sync.py, which shares no code
with fsdpckpt, and so is the model that should come out."""

import json
import math
import os
import random
import shutil
import struct
import unittest

import delta_case
import harness
import weight_sync

SHAPES = delta_case.shapes(500, 801)


def finite(rng, dtype, count):
    """Bytes without NaN, which diff would report as different."""
    data = bytearray(rng.randbytes(count * delta_case.SIZES[dtype]))
    if dtype in ("BF16", "F16", "F32"):
        for i in range(delta_case.SIZES[dtype] - 1, len(data), delta_case.SIZES[dtype]):
            data[i] &= 0x3b
    return bytes(data)


def changes(a, b):
    return [name for name in a if a[name] != b[name]]


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

    def converted(self, model, *args):
        self.ok("consolidate", model, "-o", "out.safetensors", "-q", "--force", *args)
        return {name: (entry["dtype"], entry["shape"], data)
                for name, (entry, data) in weight_sync.read_file(self.path("out.safetensors"))[1].items()}

    def test_a_model_that_has_some_of_the_versions(self):
        """The state of a model, which apply and SGLang write, says where the deltas begin."""
        updates = self.updates("updates", ("xor", "overwrite", "xor"))
        self.set_state("model1", 1)
        for args, number in ((["--delta", updates], 3), (["--delta", updates, "--up-to", 2], 2), (["--delta", updates, "--up-to", 1], 1),
                             ([arg for n in (1, 2, 3) for arg in ("--delta", f"{updates}/weight_v{n:06d}")], 3),
                             (["--delta", f"{updates}/weight_v000002"], 2), (["--delta", f"{updates}/weight_v000001"], 1)):
            self.assertEqual(self.converted("model1", *args), delta_case.typed(self.models[number], SHAPES))
        report = json.loads(self.ok("verify", "model1", "--delta", updates, "--json"))
        self.assertEqual(report["with_digest"], len({*changes(self.models[1], self.models[3]), "none"}))
        self.fails(2, "consolidate", "model1", "-o", "x.safetensors", "--delta", f"{updates}/weight_v000003",
                   contains=["weight_v000003: it changes version 2, but the model has version 1", "name the versions that follow 1"])
        self.set_state("model3", 3)
        self.fails(2, "inspect", "model3", "--delta", updates, "--up-to", 2, contains=["the model has version 3, which is later than version 2"])
        self.ok("diff", "model3", "model3", "--delta", updates, "-q")
        self.set_state("model1", 3)
        os.rename(self.path(updates, "weight_v000003"), self.path("weight_v000003"))
        weight_sync.write_version(self.path(updates, "weight_v000004"), self.models[2], self.models[3], 4, base=2)
        self.fails(2, "inspect", "model1", "--delta", updates, contains=["weight_v000004: it changes version 2, but the model has version 3"])
        with open(self.path("model1/.weight_sync/state.json"), "w") as f:
            f.write("{}")
        self.fails(3, "inspect", "model1", "--delta", updates, contains=["state.json", "does not say which version"])

    def test_a_model_that_has_a_full_version(self):
        updates = self.updates("updates", ("xor",))
        for number in (2, 3):
            self.save(f"{updates}/weight_v{number:06d}", delta_case.typed(self.models[number], SHAPES), files=2, index=True)
        self.set_state("model2", 2)
        self.fails(2, "inspect", "model2", "--delta", updates, contains=["version 3 is a full version, so no delta leads to it"])
        self.assertEqual(self.converted("model2", "--delta", updates, "--up-to", 2), delta_case.typed(self.models[2], SHAPES))

    def test_a_model_that_apply_has_not_finished(self):
        """A journal that is complete, and changes nothing; so the test needs no run that is killed."""
        updates = self.updates("updates")
        start = b"fcjrnl01"
        end = struct.pack("<IIQII", 5, 0, len(start), 0, 24) + bytes.fromhex(weight_sync.xxh3_128(start)) + struct.pack("<Q", 2)
        os.mkdir(self.path("model0/.weight_sync"))
        with open(self.path("model0/.weight_sync/journal"), "wb") as f:
            f.write(start + end)
        for command in (["inspect", "model0", "--delta", updates], ["delta", "model0", "model1", "-o", "weight_v000003"]):
            self.fails(2, *command, contains=["model0: an earlier run of apply has not put all of version 2 in place", "run apply again first"])
        os.truncate(self.path("model0/.weight_sync/journal"), 30)  # an incomplete one was never used
        self.ok("inspect", "model0", "--delta", updates, "-q")

    def test_one_delta_of_a_chain_of_both_encodings(self):
        """With the model, delta makes what fold cannot. The base is that of the model's state, or is given."""
        updates = self.updates("updates", ("xor", "overwrite", "xor"))
        self.fails(2, "fold", updates, "-o", "weight_v000003", contains=["its encoding is"])
        self.ok("delta", "model0", "model0", "--delta", updates, "-o", "weight_v000003", "--base", 0, "-q")
        self.set_state("model1", 1)
        self.fails(2, "delta", "model1", "model1", "--delta", updates, "-o", "later/weight_v000003", "--base", 0,
                   contains=["model1: the model has version 1, not version 0"])
        os.mkdir(self.path("later"))
        self.ok("delta", "model1", "model1", "--delta", updates, "-o", "later/weight_v000003", "-q")
        for base, folder in ((0, "weight_v000003"), (1, "later/weight_v000003")):
            found = dict(self.models[base])
            self.assertEqual(int(weight_sync.apply(found, self.path(folder))["base_version"]), base)
            self.assertEqual(found, self.models[3])
        self.fails(2, "delta", "model0", "model0", "--delta", updates, "-o", f"{updates}/weight_v000002", "--base", 0, "--force",
                   contains=["weight_v000002"])

    def test_with_a_recipe(self):
        updates = self.updates("updates")
        with open(self.path("recipe.json"), "w") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "others": "keep", "rules": [
                {"from": ["codes.qweight", "codes.qweight2"], "to": "codes", "operations": {"concatenate": 0}},
                {"from": "packed", "to": "flipped", "operations": {"transpose": [0, 1]}}]}, f)
        found = self.converted("model0", "--delta", updates, "--recipe", "recipe.json", "--exclude", "codes*")
        data = self.models[3]["packed"]
        self.assertEqual(found["flipped"], ("U8", [5, 40], b"".join(data[k::5] for k in range(5))))
        self.assertEqual(found["fp8"][2], self.models[3]["fp8"])

    def test_with_an_adapter(self):
        """W + 2 · B·A in whole numbers, which float32 has exactly. The delta changes W first."""
        def floats(numbers):
            return struct.pack(f"<{len(numbers)}f", *numbers)

        rng, rows, columns, rank = random.Random(7), 6, 5, 2
        old, new = ([rng.randrange(-9, 9) for _ in range(rows * columns)] for _ in range(2))
        a, b = ([rng.randrange(-9, 9) for _ in range(size)] for size in (rank * columns, rows * rank))
        for name, numbers in (("old", old), ("new", new)):
            self.save(name, {"proj.weight": ("F32", [rows, columns], floats(numbers))})
        weight_sync.write_version(self.path("weight_v000001"), {"proj.weight": floats(old)}, {"proj.weight": floats(new)}, 1)
        os.mkdir(self.path("lora"))
        weight_sync.write_file(self.path("lora/adapter_model.safetensors"), None, {
            "base_model.model.proj.lora_A.weight": ("F32", [rank, columns], floats(a)),
            "base_model.model.proj.lora_B.weight": ("F32", [rows, rank], floats(b))})
        with open(self.path("lora/adapter_config.json"), "w") as f:
            json.dump({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["proj"]}, f)
        merged = [new[i * columns + k] + 2 * sum(b[i * rank + r] * a[r * columns + k] for r in range(rank))
                  for i in range(rows) for k in range(columns)]
        self.assertEqual(self.converted("old", "--delta", "weight_v000001", "--adapter", "lora"),
                         {"proj.weight": ("F32", [rows, columns], floats(merged))})
        self.fails(3, "consolidate", "new", "-o", "x.safetensors", "--delta", "weight_v000001", "--adapter", "lora",
                   contains=["new is not the version that the first delta changes"])

    def test_with_dequantize_and_dtype(self):
        """The codes of a quantized model change. The weights are those that the package computes of the new ones."""
        case = os.path.join(harness.CORPUS, "..", "quantized", "ct-int4-groups")
        new = {name: (entry["dtype"], entry["shape"], data)
               for name, (entry, data) in weight_sync.read_file(os.path.join(case, "model.safetensors"))[1].items()}
        codes = [name for name in new if name.endswith("weight_packed")]
        self.assertGreater(len(codes), 0)
        old = delta_case.typed(delta_case.changed(delta_case.raw(new), 3, names=codes), new)
        self.save("old", old)
        shutil.copy(os.path.join(case, "config.json"), self.path("old"))
        weight_sync.write_version(self.path("weight_v000001"), delta_case.raw(old), delta_case.raw(new), 1, encoding="overwrite")
        want = {name: (entry["dtype"], entry["shape"], data)
                for name, (entry, data) in weight_sync.read_file(os.path.join(case, "weights.safetensors"))[1].items()}
        kind = {"F32": "f32", "BF16": "bf16", "F16": "f16"}[{want[name][0] for name in want if name not in new}.pop()]
        self.assertEqual(self.converted("old", "--delta", "weight_v000001", "--dequantize", kind), want)
        updates = self.updates("updates")
        found = self.converted("model0", "--delta", updates, "--dtype", "f32", "--include", "layers.*")
        for name in ("layers.0.w", "layers.1.w"):
            data = self.models[3][name]
            self.assertEqual(found[name], ("F32", SHAPES[name][1], b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))))

    def test_commands_that_do_not_take_it(self):
        for command, says in ((["average", "a", "b", "-o", "c.h5"], "write each model with its deltas first"),
                              (["view", "a", "-o", "v.h5"], "a view refers to stored bytes"),
                              (["schema", "a"], "leave it out"), (["units", "a"], "leave it out")):
            self.fails(2, *command, "--delta", "updates", contains=[says])

    def test_a_delta_is_no_model(self):
        """Its tensors are frames; a conversion would write these as weights."""
        updates = self.updates("updates")
        for source, what in ((updates, "directory of versions"), (f"{updates}/weight_v000001", "delta")):
            for command in (["consolidate", source, "-o", "x.safetensors"], ["diff", source, "model0", "--model-only"],
                            ["extract", source, "fp8"], ["export", source, "-o", "x"], ["delta", "model0", source, "-o", "weight_v000009"],
                            ["schema", source], ["average", "model0", source, "-o", "x.h5"], ["inspect", source, "--delta", updates]):
                self.fails(2, *command, contains=[f"{source}: this is a {what}", "give the model, and this as --delta"])
        self.save("full/weight_v000001", delta_case.typed(self.models[1], SHAPES), files=2, index=True)
        self.assertEqual(self.converted("full/weight_v000001"), delta_case.typed(self.models[1], SHAPES))

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
