"""HDF5 files of other programs, which need more than stock libhdf5: every command on what those programs wrote, with the truth next
to it, and on damaged copies."""

import hashlib
import json
import os
import shutil
import zipfile

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
        self.ok("consolidate", source, "-o", "full.safetensors", "--exclude", "@*", "-q")
        self.ok("reshard", source, "-o", "dp2", "--to", "dcp", "--dp", "2", "-q")
        for target in ("full.h5", "full.safetensors", "dp2"):
            self.ok("diff", source, target, "--exclude", "@*", "-q")
            self.ok("verify", target, "-q")
        self.ok("verify", source, "-q")
        self.ok("check", source, "--against", "full.h5", "-q")
        self.ok("inspect", source)


class Filters(Others):
    """tests/corpus/make_h5_filters.py"""

    SOURCE = os.path.join(harness.CORPUS, "h5-filters.h5")

    def setUp(self):
        super().setUp()
        for library in ("zstd", "bzip2"):
            if "\n%-9s no\n" % library in self.ok("--version"):
                self.skipTest("this build has no " + library)

    def test_every_command(self):
        self.every_command(self.SOURCE)

    def test_elements_equal_the_plain_ones(self):
        names = self.names(self.SOURCE)
        self.assertEqual(len(names), 2 * 27)
        for group in ("f4", "f2"):
            plain = self.raw(self.SOURCE, group + ".plain")
            for name in names:
                if name.startswith(group):
                    self.assertEqual(self.raw(self.SOURCE, name), plain, name)

    def test_text_and_compounds_equal_the_plain_ones(self):
        source = os.path.join(harness.CORPUS, "h5-filters-objects.h5")
        names = [o["name"] for o in json.loads(self.ok("inspect", source, "--json"))["objects"]]
        self.assertEqual(len(names), 2 * 9)
        for group in ("text", "pair"):
            plain = self.raw(source, group + ".plain")
            for name in names:
                if name.startswith(group):
                    self.assertEqual(self.raw(source, name), plain, name)
        self.ok("consolidate", source, "-o", "objects.h5", "-q")
        self.ok("diff", source, "objects.h5", "-q")

    def test_damage_is_found(self):
        shutil.copy(self.SOURCE, self.path("x.h5"))
        for name, where in (("f4.lzf", 0), ("f4.lz4", 7), ("f4.zstd", 0), ("f4.bzip2", 0), ("f4.blosc2", 3), ("f4.bzip2-shuffle", 30), ("f4.bitshuffle-lz4", 7), ("f4.blosc-lz4-byte", 4),
                            ("f4.blosc-zlib-none", 15), ("f4.lzf-shuffle-fletcher32", 20)):
            chunk = json.loads(self.ok("inspect", "x.h5", "--tensor", name, "--json"))["chunks"][0]
            with self.flipped(self.path("x.h5"), chunk["offset"] + where):
                line = self.fails(3, "consolidate", "x.h5", "-o", "y.h5", "--include", name, contains=[name, "x.h5", "offset"])
                self.fails(3, "extract", "x.h5", name, "-o", "y.npy")
                self.assertNotIn("y.h5", self.listing(), line)

    def test_other_filters_are_named(self):
        source = os.path.join(UNSUPPORTED, "h5-filters.h5")
        for name, number in (("zfp", 32013),):
            self.fails(5, "consolidate", source, "-o", "y.h5", "--include", "f4." + name,
                       contains=["compressed with %s (HDF5 filter %d), which cannot be decoded: rewrite it with gzip" % (name, number)])
        self.fails(5, "consolidate", source, "-o", "y.h5", "--include", "f4.blosc-snappy", contains=["Blosc compressed it with Snappy"])
        self.ok("consolidate", source, "-o", "y.h5", "--include", "f4.plain", "-q")


class Blosc2(Others):
    """tests/corpus/make_h5_blosc2.py"""

    SOURCE = os.path.join(harness.CORPUS, "h5-blosc2.h5")

    def setUp(self):
        super().setUp()
        if "\nzstd      no\n" in self.ok("--version"):
            self.skipTest("this build has no zstd")

    def test_every_command(self):
        self.every_command(self.SOURCE)

    def test_elements_equal_the_plain_ones(self):
        names = self.names(self.SOURCE)
        groups = {name.split(".")[0] for name in names}
        self.assertEqual((len(names), len(groups)), (100, 14))
        for group in groups:
            plain = self.raw(self.SOURCE, group + ".plain")
            for name in names:
                if name.startswith(group + "."):
                    self.assertEqual(self.raw(self.SOURCE, name), plain, name)

    def test_damage_is_found(self):
        """In the frame, in what the array says, in the header of a chunk."""
        shutil.copy(self.SOURCE, self.path("x.h5"))
        for name, where in (("f8.edges-byte", 14), ("f8.edges-byte", 3), ("f8.edges-byte", 0x72), ("f8.edges-byte", 0xa4),
                            ("f2.blocks", 0x61 + 4), ("f2.blocks", 0x61 + 32), ("f2.no-frame", 12)):
            chunk = json.loads(self.ok("inspect", "x.h5", "--tensor", name, "--json"))["chunks"][0]
            with self.flipped(self.path("x.h5"), chunk["offset"] + where):
                self.fails(3, "consolidate", "x.h5", "-o", "y.h5", "--include", name, contains=[name, "x.h5", "offset"])
                self.assertNotIn("y.h5", self.listing())

    def test_what_no_filter_writes_is_named(self):
        source = os.path.join(UNSUPPORTED, "h5-blosc2.h5")
        for name, what in (("zfp", "the codec 34 (zfp)"), ("ndlz", "the codec 32 (ndlz)"), ("bytedelta", "the filter 35 (bytedelta)"),
                           ("byte-delta", "a delta of shuffled bytes"), ("dictionary", "a dictionary"), ("chunks", "several chunks")):
            self.fails(5, "consolidate", source, "-o", "y.h5", "--include", "f4." + name,
                       contains=["has %s, which cannot be decoded: rewrite it with gzip" % what])


class Keras(Others):
    """tests/corpus/make_keras.py"""

    HOME = os.path.join(os.path.dirname(harness.CORPUS), "keras")
    SHARDS = ["sharded_%05d.weights.h5" % i for i in range(3)]

    def take(self, *names):
        for name in names:
            shutil.copy(os.path.join(self.HOME, name), self.dir)

    def index(self, change):
        """The index of the shards after `change`."""
        self.take("sharded.weights.json", *self.SHARDS)
        with open(self.path("sharded.weights.json")) as f:
            index = json.load(f)
        change(index["weight_map"])
        with open(self.path("sharded.weights.json"), "w") as f:
            json.dump(index, f)

    def archive(self, change, method=zipfile.ZIP_STORED):
        """The archive with `change` made to its members."""
        with zipfile.ZipFile(os.path.join(self.HOME, "model.keras")) as old:
            members = {i.filename: old.read(i) for i in old.infolist()}
        change(members)
        with zipfile.ZipFile(self.path("x.keras"), "w", method) as new:
            for name, data in members.items():
                new.writestr(name, data)

    def test_every_command(self):
        for name in ("model.keras", "sharded.weights.json"):
            self.every_command(os.path.join(self.HOME, name))
            shutil.rmtree(self.path("dp2"))
            for made in ("full.h5", "full.safetensors"):
                os.remove(self.path(made))

    def test_elements_are_those_of_the_model(self):
        with open(os.path.join(self.HOME, "expected.json")) as f:
            expected = json.load(f)
        for source in ("model.keras", "sharded.weights.json", "model.weights.h5"):
            source = os.path.join(self.HOME, source)
            listed = {t["name"]: t for t in json.loads(self.ok("inspect", source, "--json"))["tensors"]}
            self.assertEqual(set(listed), set(expected))
            for name, want in expected.items():
                self.assertEqual((listed[name]["dtype"], listed[name]["shape"]), (want["dtype"], want["shape"]))
                self.assertEqual(hashlib.sha256(self.raw(source, name)).hexdigest(), want["sha256"], name)

    def test_the_configuration_is_kept(self):
        source = os.path.join(self.HOME, "model.keras")
        with zipfile.ZipFile(source) as archive:
            config = json.loads(archive.read("config.json"))
        self.assertEqual(json.loads(self.ok("extract", source, "@config.json", "--to", "json")), config)
        self.assertIn("3.15.1", self.ok("extract", source, "@metadata.json", "--to", "json"))
        for source in (source, os.path.join(self.HOME, "sharded.weights.json")):
            attributes = json.loads(self.ok("extract", source, "@attributes", "--to", "json"))
            self.assertEqual(attributes["/layers/dense_1/vars"], {"name": "second"})

    def test_an_index_with_one_file_per_group(self):
        def flatten(groups):  # as older versions wrote it
            for group in groups:
                groups[group] = groups[group][0]

        self.index(flatten)
        self.ok("inspect", "sharded.weights.json")

    def test_lies_of_an_index(self):
        for file, text in (("../sharded_00000.weights.h5", "the index may be hostile"), ("/etc/passwd", "the index may be hostile"),
                           ("sharded_00007.weights.h5", "which is missing"), ("sharded_00001.weights.h5", "but it is not"), (7, "not a string")):
            self.index(lambda groups: groups.update({"/layers/dense/vars": [file]}))
            self.fails(3, "inspect", "sharded.weights.json", contains=["sharded.weights.json", text])
        self.index(dict.clear)
        self.fails(3, "inspect", "sharded.weights.json", contains=["weight_map is missing or empty"])
        with open(self.path("sharded.weights.json"), "a") as f:
            f.write("x")
        self.fails(3, "inspect", "sharded.weights.json", contains=["not JSON"])
        self.index(lambda groups: None)
        shutil.copy(self.path("sharded_00001.weights.h5"), self.path("sharded_00002.weights.h5"))
        self.fails(3, "inspect", "sharded.weights.json", contains=["is in another file of the index, too"])

    def test_archives_that_cannot_be_read_in_place(self):
        self.archive(lambda members: None, zipfile.ZIP_DEFLATED)
        self.fails(5, "inspect", "x.keras", contains=["model.weights.h5 is compressed in the archive: unzip it"])
        self.archive(lambda members: members.update({"assets/words.txt": b"a"}))
        self.fails(5, "inspect", "x.keras", contains=["assets/words.txt", "unzip it, and use its model.weights.h5"])
        self.archive(lambda members: members.pop("model.weights.h5"))
        self.fails(3, "inspect", "x.keras", contains=["without model.weights.h5"])
        self.archive(lambda members: members.update({"config.json": b"{"}))
        self.fails(3, "inspect", "x.keras", contains=["config.json is damaged: not JSON"])

    def test_damaged_archives(self):
        self.archive(lambda members: members.update({"model.weights.h5": members["model.weights.h5"][:9000]}))
        self.fails(3, "inspect", "x.keras", contains=["x.keras", "truncated"])
        self.archive(lambda members: members.update({"model.weights.h5": b"no"}))
        self.fails(3, "inspect", "x.keras", contains=["x.keras"])
        self.take("model.keras")
        os.truncate(self.path("model.keras"), 20000)
        self.fails(3, "inspect", "model.keras", contains=["model.keras"])

    def test_verify_compares_the_crc_of_the_archive(self):
        self.take("model.keras")
        place = json.loads(self.ok("inspect", "model.keras", "--tensor", "layers.dense.vars.0", "--json"))["chunks"][0]["offset"]
        with self.flipped(self.path("model.keras"), place):
            p = self.run_tool("verify", "model.keras")
            self.assertEqual(p.returncode, 1)
            self.assertIn("model.weights.h5 is damaged: its CRC-32 is", p.stdout + p.stderr)
        self.ok("verify", "model.keras")

    def test_a_folder_names_the_index(self):
        line = self.fails(3, "inspect", self.HOME)
        for name in ("model.keras", "sharded.weights.json"):
            self.assertIn(name, line)

    def test_chunks_in_an_archive(self):
        """Filters, and datasets that libhdf5 decodes, at their places in the archive."""
        for corpus in ("h5-layouts.h5", "h5-packed.h5"):
            with open(os.path.join(harness.CORPUS, corpus), "rb") as f:
                data = f.read()
            self.archive(lambda members: members.update({"model.weights.h5": data}))
            self.ok("diff", "x.keras", os.path.join(harness.CORPUS, corpus), "--exclude", "@*", "-q")


if __name__ == "__main__":
    harness.main()
