"""The HDF5 files that fsdpckpt writes, byte by byte: h5_walk.py reads them by the specification of HDF5, without libhdf5."""

import os
import random

import h5_parts
import h5_walk
import harness
import safetensors_file

NESTED = ("dcp-torch2.15.0-train", "dcp-torch2.15.0-2d-uneven", "dcp-torch2.15.0-dtypes", "dcp-torch2.15.0-shapes")


class Bytes(harness.Case):
    def walk(self, path):
        with open(self.path(path), "rb") as f:
            data = f.read()
        try:
            return h5_walk.Walk(data).kinds
        except h5_parts.Wrong as e:
            self.fail("%s: %s" % (path, e))

    def walk_all(self, folder):
        kinds = {}
        for name in sorted(os.listdir(self.path(folder))):
            for kind, count in self.walk(os.path.join(folder, name)).items():
                kinds[kind] = kinds.get(kind, 0) + count
        return kinds

    def make(self, path, shapes):
        """A safetensors file of float32, half zeros and half noise."""
        head, _, size = safetensors_file.head({name: ("F32", shape) for name, shape in shapes.items()})
        with open(self.path(path), "wb") as f:
            f.write(head + random.Random(1).randbytes(size // 2) + bytes(size - size // 2))

    def test_full_files_of_every_kind_of_value(self):
        for source in NESTED:
            self.ok("consolidate", harness.corpus(source), "-o", "full.h5", "--force", "-q")
            kinds = self.walk("full.h5")
            self.assertEqual(kinds["superblock"], 1)
            self.assertGreater(kinds["data"], 1)

    def test_shards_and_their_index(self):
        for mesh in (("--dp", "3"), ("--dp", "2", "--tp", "2"), ("--replicas", "2", "--dp", "2")):
            self.ok("reshard", harness.corpus(NESTED[0]), "-o", "out", "--to", "h5", *mesh, "--force", "-q")
            self.walk_all("out")

    def test_views(self):
        self.ok("view", harness.corpus("dcp-torch2.15.0-strided"), "-o", "v.h5", "-q")
        self.assertGreater(self.walk("v.h5")["local heap"], 1)
        self.ok("view", harness.corpus("dcp-torch2.15.0-2d-uneven"), "-o", "w.h5", "-q")
        self.walk("w.h5")

    def test_compressed_chunks_in_trees_of_one_and_two_levels(self):
        shapes = {"one": [70, 80], "some": [3, 700, 401], "odd": [1000003], "small": [5], "scalar": [], "empty": [0, 3]}
        self.make("model.safetensors", shapes)
        self.ok("consolidate", "model.safetensors", "-o", "full.h5", "--compress", "1", "-q")
        self.assertEqual(self.walk("full.h5")["chunk"], 1 + 6 + 4)
        for mesh in (("--dp", "3"), ("--replicas", "2", "--dp", "2"), ("--dp", "90")):
            self.ok("reshard", "model.safetensors", "-o", "out", "--to", "h5", "--compress", "1", "--force", "-q", *mesh)
            self.walk_all("out")
        self.make("large.safetensors", {"large": [4200, 4100]})  # 68 chunks, with 64 children per node
        self.ok("consolidate", "large.safetensors", "-o", "large.h5", "--compress", "1", "-q")
        kinds = self.walk("large.h5")
        self.assertGreater(kinds["chunk"], 64)
        self.assertGreater(kinds["chunk node"], 2)

    def test_groups_of_many_members(self):
        for count in (8, 9, 600, 1800, 3000, 9000):  # in the header, in one heap block, in two, in more than four
            self.make("model.safetensors", {"layers.%d.%s" % (i, "x" * (i * 7 % 90)): [2] for i in range(count)})
            self.ok("consolidate", "model.safetensors", "-o", "full.h5", "--force", "-q")
            self.assertEqual(self.walk("full.h5")["fractal heap"], 1 + (count > 8))  # that of the tables has ten

    def test_the_walk_finds_a_wrong_byte(self):
        self.make("model.safetensors", {"layers.%d" % i: [80, 80] for i in range(12)})
        self.ok("consolidate", "model.safetensors", "-o", "full.h5", "--compress", "1", "-q")
        with open(self.path("full.h5"), "rb") as f:
            good = f.read()
        h5_walk.Walk(good)
        start = good.index(b"OHDR")
        found = tried = 0
        for at in range(start, start + 4000, 5):
            bad = bytearray(good)
            bad[at] ^= 1
            tried += 1
            try:
                h5_walk.Walk(bytes(bad))
            except (h5_parts.Wrong, ValueError, IndexError, KeyError):
                found += 1
        self.assertGreater(found / tried, 0.9)


if __name__ == "__main__":
    harness.main()
