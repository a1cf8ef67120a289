"""diff on real checkpoints: exit status, formats, options, damage. tests/oracle/diff.py tests the numbers."""

import json
import os
import signal
import struct
import subprocess

import harness

MESH = "dcp-torch2.15.0-2d-dp4tp2"
TRAIN = "dcp-torch2.15.0-train"


class Diff(harness.Case):
    def differs(self, *args):
        p = self.run_tool("diff", *args)
        self.assertEqual((p.returncode, p.stderr), (1, ""), p.stdout)
        return p.stdout

    def full(self, name="a.h5", source=MESH, *options):
        self.ok("consolidate", harness.corpus(source), "-o", name, "-q", *options)
        return name

    def plain(self, name):
        """A safetensors file without digests, as other programs write it."""
        path = self.path(self.full(name))
        with open(path, "rb") as f:
            (size,) = struct.unpack("<Q", f.read(8))
            header, data = json.loads(f.read(size)), f.read()
        del header["__metadata__"]
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(path, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + data)
        return name

    def patch(self, path, tensor, index, data):
        """Overwrites bytes of an uncompressed tensor, starting at element `index`."""
        told = json.loads(self.ok("inspect", path, "--tensor", tensor, "--json"))
        size = {"float32": 4, "int64": 8}[told["dtype"]]
        with open(self.path(path), "r+b") as f:
            f.seek(told["chunks"][0]["data_offset"] + index * size)
            f.write(data)

    def test_all_layouts_of_a_checkpoint_are_equal(self):
        source = harness.corpus(TRAIN)
        self.full("full.h5", TRAIN)
        self.full("packed.h5", TRAIN, "--compress", "1")
        self.ok("reshard", source, "-o", "dp", "--dp", "3", "-q")
        self.ok("reshard", source, "-o", "hsdp", "--dp", "2", "--replicas", "2", "-q")
        for a in (source, "full.h5", "packed.h5", "dp", "hsdp"):
            for b in (source, "full.h5", "packed.h5", "dp", "hsdp"):
                self.assertIn(": equal: 64 the same", self.ok("diff", a, b, "--data"))
        # Other versions of torch write the same objects as different bytes.
        self.assertIn(": equal: ", self.ok("diff", source, harness.corpus("dcp-torch2.8.0-train"), "-v"))

    def test_objects_are_compared_by_value(self):
        # Every torch.save writes a new id, so equal values have different bytes, also in files with digests.
        a, b = harness.corpus(TRAIN), harness.corpus("dcp-torch2.3.1-train")
        self.full("a.h5", TRAIN)
        self.full("b.h5", "dcp-torch2.3.1-train")
        for x, y in ((a, b), ("a.h5", "b.h5"), (a, "b.h5")):
            both = [x, y, "--include", "model.*", "--include", "step", "--include", "list"]
            self.assertEqual(self.ok("diff", *both, "-v").count("same value, different bytes"), 2)
            self.assertEqual(self.ok("diff", *both, "-q"), "")
        self.ok("consolidate", a, "-o", "epoch.h5", "-q", "--include", "epoch")
        self.ok("consolidate", a, "-o", "step.h5", "-q", "--include", "step", "--rename", "s/step/epoch/")
        self.assertIn("epoch  object  0 and 1234\n", self.differs("epoch.h5", "step.h5"))
        self.assertEqual(self.differs("epoch.h5", "step.h5", "-q"), "")
        (item,) = json.loads(self.differs("epoch.h5", "step.h5", "--json"))["items"]
        self.assertEqual((item["value_a"], item["value_b"]), (0, 1234))

    def test_equal_digests_save_reading_the_data(self):
        self.full("a.h5", TRAIN)
        self.ok("reshard", harness.corpus(TRAIN), "-o", "s", "--dp", "3", "-q")
        told = json.loads(self.ok("diff", "a.h5", "s", "--json"))
        self.assertEqual((told["by_digest"], told["bytes_read"]), (told["same"], 0))
        # A digest describes the data that was written; --data reads the data that is there now.
        self.patch("a.h5", "model.norm.weight", 0, b"\1\2\3\4")
        self.ok("diff", "a.h5", "s")
        p = self.run_tool("diff", "a.h5", "s", "--data")
        self.assertEqual(p.returncode, 3)
        self.assertIn("model.norm.weight", p.stdout)
        self.assertIn("a.h5: tensor model.norm.weight: damaged: the digest of its data is ", p.stderr)
        # With a tolerance NaN differs from itself, so the digests are not enough and the data is read.
        told = json.loads(self.ok("diff", "s", "s", "--rtol", "0", "--json", "--include", "model.*"))
        self.assertGreater(told["bytes_read"], 0)
        told = json.loads(self.ok("diff", "s", "s", "--rtol", "0", "--equal-nan", "--json", "--include", "model.*"))
        self.assertEqual(told["bytes_read"], 0)

    def test_one_different_element_is_found(self):
        a, b = self.plain("a.safetensors"), self.plain("b.safetensors")
        self.patch(b, "model.layers.0.feed_forward.w1.weight", 13, struct.pack("<f", 1e10))
        text = self.differs(a, b, "--data")
        self.assertEqual(text.count("\n"), 2)
        self.assertIn("model.layers.0.feed_forward.w1.weight  float32[64, 8]  1 of 512 differs, max abs 1e+10 at [1, 5]", text)
        self.assertEqual(self.differs(a, b, "-q", "--data"), "")
        told = json.loads(self.differs(a, b, "--json", "--data"))
        (item,) = told["items"]
        self.assertEqual((item["result"], item["different"], item["first"]["index"]), ("different", 1, [1, 5]))
        self.assertEqual(item["first"]["b"], "1e+10")
        self.assertEqual((told["equal"], told["same"], told["different"]), (False, 10, 1))
        self.assertEqual(told["bytes_read"], 2 * json.loads(self.ok("inspect", a, "--json"))["totals"]["bytes"])
        self.ok("diff", a, b, "--data", "--exclude", "*.w1.*")
        self.ok("diff", a, b, "--data", "--include", "*.bias")
        # The tolerance is relative to the second checkpoint: a small value is close to 1e10, but 1e10 is not close to it.
        self.ok("diff", a, b, "--data", "--rtol", "1.001")
        self.differs(b, a, "--data", "--rtol", "1.001")

    def test_names_are_selected_and_stripped(self):
        self.full("a.h5")
        self.full("b.h5", MESH, "--strip-prefix", "model.")
        self.full("c.h5", MESH, "--exclude", "*.bias")
        text = self.differs("a.h5", "b.h5")
        self.assertEqual((text.count("only in a.h5\n"), text.count("only in b.h5\n")), (11, 11))
        self.ok("diff", "a.h5", "b.h5", "--strip-prefix", "model.")
        self.ok("diff", "b.h5", "a.h5", "--strip-prefix", "model.")
        told = json.loads(self.differs("a.h5", "c.h5", "--json"))
        self.assertTrue(all(i["result"] == "only-a" and i["b"] is None for i in told["items"]))
        self.assertEqual(told["only_a"], len(told["items"]))
        # On both sides, globs match names with the prefix and names without it.
        for glob in ("model.layers.*", "layers.*"):
            text = self.ok("diff", "a.h5", "b.h5", "--strip-prefix", "model.", "--include", glob)
            self.assertIn(": equal: 6 the same (6 by digest), 10 left out\n", text)
            text = self.ok("diff", "a.h5", "b.h5", "--strip-prefix", "model.", "--exclude", glob)
            self.assertIn(": equal: 5 the same (5 by digest), 12 left out\n", text)
        self.fails(2, "diff", "a.h5", "c.h5", "--strip-prefix", "x.", contains=["a.h5 and c.h5: no name has the prefix 'x.'"])
        self.fails(2, "diff", "a.h5", "c.h5", "--exclude", "*", contains=["nothing is left"])
        self.fails(2, "diff", "a.h5", "c.h5", "--include", "nothing", contains=["the glob 'nothing' to include matches none"])

    def test_different_dtypes_are_compared_with_a_tolerance(self):
        self.full("a.h5")
        self.full("b.h5", MESH, "--dtype", "bf16")
        self.assertIn("; --rtol or --atol compares the values", self.differs("a.h5", "b.h5"))
        text = self.ok("diff", "a.h5", "b.h5", "--rtol", "0.01", "-v")
        self.assertIn("within the tolerance, max abs ", text)
        self.assertIn(": equal within the tolerance: ", text)
        self.differs("a.h5", "b.h5", "--rtol", "1e-9", "-q")

    def test_wrong_tolerances_are_refused(self):
        a = self.full()
        for bad in ("-1", "nan", "inf", "1e999", "x", "1x", "", "0x10", " 1"):
            self.fails(2, "diff", a, a, "--rtol=" + bad, contains=["--rtol: "])
        for good in ("0", "1", "1.5", ".5", "1e-5", "1E3"):
            self.ok("diff", a, a, "--atol", good, "--equal-nan")

    def test_unreadable_sources_are_refused(self):
        source, copy = harness.corpus(MESH), self.copy(MESH)
        os.unlink(harness.largest_shard(copy))
        self.fails(3, "diff", source, "ckpt", contains=["ckpt/", "missing"])
        self.fails(3, "diff", "nowhere", source, contains=["nowhere: no such file"])
        self.fails(2, "diff", source, contains=["diff needs A B"])
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", source))
        self.fails(2, "diff", source, "model.json", contains=["a schema", "check --schema"])

    def test_memory_and_threads_do_not_matter(self):
        a, b = self.plain("a.safetensors"), self.plain("b.safetensors")
        self.patch(b, "model.tok_embeddings.weight", 3, b"\1\2\3\4" * 20)
        want = self.differs(a, b, "--data")
        for options in (["-j", "1"], ["-j", "7", "--memory", "1M"], ["--memory", "1G"]):
            self.assertEqual(self.differs(a, b, "--data", *options), want)
        self.fails(2, "diff", a, b, "--memory", "100K", "--data", contains=["at least 1 MiB is needed; raise --memory"])

    def test_sigint_stops_it(self):
        harness.make_large(self.path("a"), 900 << 20)
        harness.make_large(self.path("b"), 900 << 20)
        p = subprocess.Popen([harness.BINARY, "diff", "a", "b", "--progress", "always", "-j", "1", "--rtol", "0"], cwd=self.dir,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.read(p.stderr.fileno(), 1)  # progress output shows that diff has started
        p.send_signal(signal.SIGINT)
        out, err = p.communicate(timeout=harness.HANG)
        self.assertEqual((p.returncode, out), (130, ""))
        self.assertTrue(err.endswith("fsdpckpt: interrupted\n"), err)


if __name__ == "__main__":
    harness.main()
