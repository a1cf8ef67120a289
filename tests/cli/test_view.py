"""view: its output and refusals. tests/oracle/view.py reads views with h5py."""

import json
import os

import harness

MESH = "dcp-torch2.15.0-2d-dp4tp2"
STATE = "dcp-torch2.15.0-fsdp1-optim"


class View(harness.Case):
    def test_output_names_the_variable_that_readers_need(self):
        text = self.ok("view", harness.corpus(MESH), "-o", "v.h5")
        self.assertIn("v.h5: 11 tensors, 5.70 kB viewed in 8 files, and 0 objects; 0 bytes copied\n", text)
        self.assertIn("2 tensors are assembled from 4 chunks\n", text)
        self.assertIn("export HDF5_EXTFILE_PREFIX='${ORIGIN}'\n", text)
        out = json.loads(self.ok("view", harness.corpus(MESH), "-o", "w.h5", "--json"))
        self.assertEqual(out["reader_environment"], {"HDF5_EXTFILE_PREFIX": "${ORIGIN}"})
        self.assertEqual((out["tensors"], out["external"], out["assembled"], out["pieces"]), (11, 9, 2, 4))
        self.assertEqual(self.ok("view", harness.corpus(MESH), "-o", "x.h5", "-q"), "")
        with open(self.path("v.h5"), "rb") as a, open(self.path("x.h5"), "rb") as b:
            self.assertEqual(a.read(), b.read())

    def test_view_of_selected_tensors(self):
        out = json.loads(self.ok("view", harness.corpus(STATE), "-o", "v.h5", "--include", "model.*", "--strip-prefix",
                                 "model.", "--json"))
        self.assertEqual((out["objects"], out["copied_bytes"]), (0, 0))
        seen = json.loads(self.ok("inspect", "v.h5", "--follow-external", "--json"))
        self.assertEqual(len(seen["tensors"]), out["tensors"])
        self.assertIn("norm.weight", [t["name"] for t in seen["tensors"]])

    def test_views_are_followed_only_on_request(self):
        self.ok("view", harness.corpus(MESH), "-o", "v.h5", "-q")
        self.fails(2, "inspect", "v.h5", contains=["v.h5: a view", "--follow-external"])
        self.ok("consolidate", "v.h5", "-o", "a.h5", "--follow-external", "-q")
        self.ok("consolidate", harness.corpus(MESH), "-o", "b.h5", "-q")
        with open(self.path("a.h5"), "rb") as a, open(self.path("b.h5"), "rb") as b:
            self.assertEqual(a.read(), b.read())

    def test_files_behind_a_view_must_be_complete(self):
        copy = self.copy(MESH)
        self.ok("view", copy, "-o", "v.h5", "-q")
        shard = harness.largest_shard(copy)
        os.truncate(shard, 2000)
        self.fails(3, "consolidate", "v.h5", "-o", "a.h5", "--follow-external", contains=["truncated"])
        os.unlink(shard)
        self.fails(3, "consolidate", "v.h5", "-o", "a.h5", "--follow-external", contains=["missing"])
        self.assertEqual(self.listing(), ["ckpt", "v.h5"])

    def test_unsuitable_targets_are_refused(self):
        self.fails(2, "view", harness.corpus(MESH), contains=["--output"])
        with open(self.path("v.h5"), "w") as f:
            f.write("mine")
        self.fails(2, "view", harness.corpus(MESH), "-o", "v.h5", contains=["v.h5", "--force"])
        self.fails(2, "view", harness.corpus(MESH), "-o", "v.h5", "--force", contains=["v.h5", "not a checkpoint"])
        with open(self.path("v.h5")) as f:
            self.assertEqual(f.read(), "mine")
        os.unlink(self.path("v.h5"))
        self.ok("view", harness.corpus(MESH), "-o", "v.h5", "-q")
        self.ok("view", harness.corpus(MESH), "-o", "v.h5", "--force", "-q")
        copy = self.copy(MESH)
        for name in sorted(os.listdir(copy)):
            if name.endswith(".distcp") or name == ".metadata":
                self.fails(2, "view", copy, "-o", os.path.join(copy, name), "--force", contains=["name another target"])
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", harness.corpus(MESH)))
        self.fails(2, "view", "model.json", "-o", "s.h5", contains=["no data"])
        self.ok("reshard", harness.corpus(MESH), "-o", "packed", "--dp", "2", "--compress", "1", "-q")
        out = json.loads(self.ok("view", "packed", "-o", "p.h5", "--json"))
        self.assertEqual(out["copied"], 0)  # too small to be compressed
        self.fails(2, "view", "packed", "-o", "packed/index.h5", "--force", contains=["name another target"])


if __name__ == "__main__":
    harness.main()
