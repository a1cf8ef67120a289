"""extract, convert and --rename: options, targets, messages. tests/oracle compares the bytes."""

import json
import os
import subprocess

import harness

TRAIN = "dcp-torch2.15.0-train"
MESH = "dcp-torch2.15.0-2d-dp4tp2"
TENSOR = "model.layers.0.w1.bias"


class Extract(harness.Case):
    def raw(self, *args):
        with open(self.path("stdout"), "wb") as f:
            p = self.run_tool("extract", *args, stdout=f)
        self.assertEqual((p.returncode, p.stderr), (0, ""), args)
        with open(self.path("stdout"), "rb") as f:
            return f.read()

    def test_dequantized(self):
        """A cast of codes is refused with the option that computes the weight, so extract takes that option."""
        source = os.path.join(harness.CORPUS, "..", "recipes", "torchtitan-llama3", "from.safetensors")
        weight = "layers.0.feed_forward.w1.weight"
        self.ok("consolidate", source, "-o", "codes.safetensors", "--quantize", weight)
        self.ok("consolidate", "codes.safetensors", "-o", "numbers.safetensors", "--dequantize", "f32")
        self.fails(5, "extract", "codes.safetensors", weight, "--dtype", "f32", contains=["--dequantize"])
        self.assertEqual(self.raw("codes.safetensors", weight, "--dequantize", "f32"), self.raw("numbers.safetensors", weight))

    def test_output_formats(self):
        source = harness.corpus(TRAIN)
        raw = self.raw(source, TENSOR)
        self.assertEqual(len(raw), 40)
        self.assertEqual(self.raw(source, TENSOR, "-o", "-"), raw)
        self.assertEqual(self.ok("extract", source, TENSOR, "-o", "x.npy"), "")
        with open(self.path("x.npy"), "rb") as f:
            npy = f.read()
        self.assertEqual((npy[:6], len(npy) % 64, npy[-40:]), (b"\x93NUMPY", 40, raw))
        self.assertEqual(self.raw(source, TENSOR, "--to", "npy"), npy)
        self.assertEqual(self.raw(source, "betas")[:2], b"PK")
        self.assertEqual(json.loads(self.ok("extract", source, "betas", "--to", "json")), {"$tuple": [0.9, 0.999]})
        self.ok("extract", source, "amp", "-o", "amp.json")
        with open(self.path("amp.json"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "true\n")

    def test_only_force_replaces_a_target(self):
        source = harness.corpus(TRAIN)
        self.ok("extract", source, TENSOR, "-o", "x")
        self.fails(2, "extract", source, TENSOR, "-o", "x", contains=["x: exists", "--force"])
        self.ok("extract", source, TENSOR, "-o", "x", "--force")
        damaged = self.copy(TRAIN)
        for name in os.listdir(damaged):
            if name.endswith(".distcp"):
                with open(os.path.join(damaged, name), "r+b") as f:
                    f.write(b"\0" * os.path.getsize(f.name))
        self.fails(3, "extract", damaged, TENSOR, "-o", "y", contains=[TENSOR])
        self.assertEqual(self.listing(), ["ckpt", "x"])
        self.fails(2, "extract", damaged, TENSOR, "-o", os.path.join(damaged, "__0_0.distcp"), "-f",
                   contains=["is a file of the check"])

    def test_wrong_names_and_formats_are_explained(self):
        source = harness.corpus(TRAIN)
        self.fails(2, "extract", source, "w1.bias", contains=["did you mean 'model.layers.0.w1.bias'"])
        self.fails(2, "extract", source, "betas", "--to", "npy", contains=["is an object, not a tensor", "--to json"])
        self.fails(2, "extract", source, TENSOR, "--to", "json", contains=["is a tensor, not an object"])
        self.fails(2, "extract", source, TENSOR, "--to", "h5", contains=["choose raw, npy, or json for objects"])
        for name in ("w.pt", "w.h5", "w.safetensors"):  # raw bytes get such a name only with --to raw
            self.fails(2, "extract", source, TENSOR, "-o", name,
                       contains=[f"extract: {name}: the extension names", f"--include '{TENSOR}' -o {name}"])
        self.assertNotIn("w.pt", self.listing())
        self.ok("extract", source, TENSOR, "-o", "w.pt", "--to", "raw")
        self.ok("extract", source, TENSOR, "-o", "w.bin")
        self.fails(2, "extract", source, contains=["SRC NAME"])
        raw = self.raw(source, TENSOR)
        self.assertEqual(self.raw(source, "layers.0.w1.bias", "--strip-prefix", "model", "--include", "model.*"), raw)
        self.assertEqual(self.raw(source, "net.layers.0.w1.bias", "--rename", "s/^model/net/"), raw)
        self.assertEqual(len(self.raw(source, TENSOR, "--dtype", "f64")), 2 * len(raw))

    def test_a_closed_pipe_is_not_an_error(self):
        command = "'%s' extract '%s' %s | true" % (harness.BINARY, harness.corpus(TRAIN), TENSOR)
        env = {**os.environ, "LC_ALL": "C"}  # bash complains about a locale that is not installed
        p = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, check=False, env=env)
        self.assertEqual((p.returncode, p.stderr), (0, b""))


class Convert(harness.Case):
    def names(self, target):
        return {t["name"] for t in json.loads(self.ok("inspect", target, "--json"))["tensors"]}

    def test_layout_is_kept(self):
        self.ok("convert", harness.corpus(MESH), "-o", "out", "--to", "h5")
        self.assertIn("8 ranks, mesh dp 4 × tp 2\n", self.ok("inspect", "out"))
        self.ok("convert", "out", "-o", "back", "--to", "dcp")
        self.assertEqual(sorted(os.listdir(self.path("back"))),
                         [".metadata"] + ["__%d_0.distcp" % r for r in range(8)])
        self.assertIn("8 ranks, mesh dp 4 × tp 2, ", self.ok("inspect", "back"))
        self.ok("consolidate", "out", "-o", "full.h5")
        self.ok("convert", "full.h5", "-o", "full", "--to", "dcp")
        self.assertEqual(sorted(os.listdir(self.path("full"))), [".metadata", "__0_0.distcp"])

    def test_layout_without_a_mesh_is_refused(self):
        source = harness.corpus("dcp-torch2.15.0-sharded-tensor-2d")
        text = self.fails(5, "convert", source, "-o", "out", "--to", "h5", contains=["tensor '", "chunks", "fsdpckpt reshard"])
        self.assertEqual(self.listing(), [])
        name = text.split("tensor '")[1].split("'")[0]
        self.assertNotIn("tensor '%s'" % name, self.run_tool("convert", source, "-o", "x.h5", "--exclude", name).stderr)

    def test_output_is_the_same_every_time(self):
        for out in ("a", "b"):
            self.ok("convert", harness.corpus(TRAIN), "-o", out, "--to", "dcp", "-j", "1" if out == "a" else "4")
        for name in os.listdir(self.path("a")):
            with open(self.path("a", name), "rb") as a, open(self.path("b", name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)

    def test_force_replaces_only_checkpoints(self):
        self.ok("convert", harness.corpus(TRAIN), "-o", "out", "--to", "dcp")
        self.fails(2, "convert", harness.corpus(TRAIN), "-o", "out", "--to", "dcp", contains=["exists"])
        self.ok("convert", harness.corpus(TRAIN), "-o", "out", "--to", "dcp", "--force")
        with open(self.path("out", "notes.txt"), "w", encoding="utf-8"):
            pass
        self.fails(2, "convert", harness.corpus(TRAIN), "-o", "out", "--to", "dcp", "--force", contains=["notes.txt"])

    def test_rename(self):
        source = harness.corpus(MESH)
        before = self.names(source)
        self.ok("convert", source, "-o", "a", "--to", "h5", "--rename", "s/^model\\.//", "--rename", "s,layers\\.([0-9]+),h.\\1,")
        self.assertEqual(self.names("a"), {n[6:].replace("layers.", "h.") for n in before})
        self.fails(2, "convert", source, "-o", "b.h5", "--rename", "s/.*/same/", contains=["would both be renamed to 'same'"])
        self.fails(2, "convert", source, "-o", "b.h5", "--rename", "s/x", contains=["a delimiter is missing"])
        self.fails(2, "convert", source, "-o", "b.h5", "--rename", "s/(/x/", contains=["rename rule 's/(/x/'"])
        self.fails(2, "convert", source, "-o", "b.h5", "--rename", "s/nothing/x/",
                   contains=["the rename rule 's/nothing/x/' matches no name; one is '"])
        self.assertNotIn("b.h5", self.listing())


if __name__ == "__main__":
    harness.main()
