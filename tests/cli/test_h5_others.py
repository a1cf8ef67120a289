"""HDF5 files of other programs, which need more than stock libhdf5: every command on what those programs wrote, with the truth next
to it, and on damaged copies."""

import json
import os
import shutil

import harness

UNSUPPORTED = os.path.join(os.path.dirname(harness.CORPUS), "unsupported")


class Others(harness.Case):
    def names(self, source):
        return [t["name"] for t in json.loads(self.ok("inspect", source, "--json"))["tensors"]]

    def raw(self, source, name):
        self.ok("extract", source, name, "--to", "raw", "-o", "x.bin", "--force", "-q")
        with open(self.path("x.bin"), "rb") as f:
            return f.read()

    def every_command(self, source):
        """Converts the source in every way, and compares the results with it."""
        self.ok("consolidate", source, "-o", "full.h5", "-q")
        self.ok("consolidate", source, "-o", "full.safetensors", "--exclude", "@attributes", "-q")
        self.ok("reshard", source, "-o", "dp2", "--to", "dcp", "--dp", "2", "-q")
        for target in ("full.h5", "full.safetensors", "dp2"):
            self.ok("diff", source, target, "--exclude", "@attributes", "-q")
            self.ok("verify", target, "-q")
        self.ok("verify", source, "-q")
        self.ok("check", source, "--against", "full.h5", "-q")
        self.ok("inspect", source)


class Filters(Others):
    """tests/corpus/make_h5_filters.py"""

    SOURCE = os.path.join(harness.CORPUS, "h5-filters.h5")

    def setUp(self):
        super().setUp()
        if "\nzstd      no\n" in self.ok("--version"):
            self.skipTest("this build has no zstd")

    def test_every_command(self):
        self.every_command(self.SOURCE)

    def test_elements_equal_the_plain_ones(self):
        names = self.names(self.SOURCE)
        self.assertEqual(len(names), 2 * 24)
        for group in ("f4", "f2"):
            plain = self.raw(self.SOURCE, group + ".plain")
            for name in names:
                if name.startswith(group):
                    self.assertEqual(self.raw(self.SOURCE, name), plain, name)

    def test_damage_is_found(self):
        shutil.copy(self.SOURCE, self.path("x.h5"))
        for name, where in (("f4.lzf", 0), ("f4.lz4", 7), ("f4.zstd", 0), ("f4.bitshuffle-lz4", 7), ("f4.blosc-lz4-byte", 4),
                            ("f4.blosc-zlib-none", 15), ("f4.lzf-shuffle-fletcher32", 20)):
            chunk = json.loads(self.ok("inspect", "x.h5", "--tensor", name, "--json"))["chunks"][0]
            with self.flipped(self.path("x.h5"), chunk["offset"] + where):
                line = self.fails(3, "consolidate", "x.h5", "-o", "y.h5", "--include", name, contains=[name, "x.h5", "offset"])
                self.fails(3, "extract", "x.h5", name, "-o", "y.npy")
                self.assertNotIn("y.h5", self.listing(), line)

    def test_other_filters_are_named(self):
        source = os.path.join(UNSUPPORTED, "h5-filters.h5")
        for name, number in (("blosc2", 32026), ("bzip2", 307), ("zfp", 32013)):
            self.fails(5, "consolidate", source, "-o", "y.h5", "--include", "f4." + name,
                       contains=["compressed with %s (HDF5 filter %d), which cannot be decoded: rewrite it with gzip" % (name, number)])
        self.fails(5, "consolidate", source, "-o", "y.h5", "--include", "f4.blosc-snappy", contains=["Blosc compressed it with Snappy"])
        self.ok("consolidate", source, "-o", "y.h5", "--include", "f4.plain", "-q")


if __name__ == "__main__":
    harness.main()
