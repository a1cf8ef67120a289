"""fsdpckpt average: what it refuses, and that refused targets are not written. (The numbers: tests/oracle/average.py.)"""

import os
import shutil
import unittest
import zlib

import harness

TRAIN = harness.corpus("dcp-torch2.15.0-train")


class Average(harness.Case):
    def test_of_equal_ones(self):
        """The mean of two or three copies of a checkpoint is the checkpoint, with any weights."""
        self.ok("consolidate", TRAIN, "-o", "one.h5", "-q")
        for args in ([TRAIN, TRAIN], [TRAIN, "one.h5"], ["one.h5", TRAIN, "--weights", "1,3"]):
            self.ok("average", *args, "-o", "mean.h5", "-q", "--force")
            self.ok("diff", "one.h5", "mean.h5", "-q")

    def test_sharded(self):
        self.ok("average", TRAIN, TRAIN, "-o", "mean", "--to", "h5", "--dp", "2", "-q")
        self.assertIn("index.h5", os.listdir(self.path("mean")))
        self.ok("diff", TRAIN, "mean", "-q")

    def test_objects_through_another_format(self):
        """What a digest is recorded of, a format may write in its own way."""
        self.ok("consolidate", TRAIN, "-o", "one.h5", "-q")
        self.ok("average", "one.h5", TRAIN, "-o", "mean.pt", "-q")
        self.ok("diff", "mean.pt", TRAIN, "-q")

    def test_usage(self):
        self.fails(2, "average", TRAIN, "-o", "x.h5", contains=["average needs SRC SRC..."])
        for weights in ("1", "1,2,3", "1,x", "1,2,", "inf,1", "1;2"):
            self.fails(2, "average", TRAIN, TRAIN, "-o", "x.h5", f"--weights={weights}", contains=["needs 2 numbers"])
        self.fails(2, "average", TRAIN, TRAIN, "-o", "x.h5", "--weights=1,-1", contains=["the sum of the weights is 0"])
        self.fails(3, "average", TRAIN, "missing", "-o", "x.h5", contains=["missing: no such file"])
        self.assertEqual(self.listing(), [])

    def test_schema(self):
        with open(self.path("m.json"), "w") as f:
            f.write(self.ok("schema", TRAIN))
        self.fails(2, "average", TRAIN, "m.json", "-o", "x.h5", contains=["m.json: a schema"])

    def test_names(self):
        self.ok("consolidate", TRAIN, "-o", "model.h5", "--include", "model.*", "-q")
        line = self.fails(2, "average", TRAIN, "model.h5", "-o", "x.h5", contains=["model.h5 and ", " have different names: "])
        self.assertRegex(line, r"the first lacks .* and \d+ more; --exclude leaves it out")
        self.ok("average", TRAIN, "model.h5", "-o", "x.h5", "--include", "model.*", "-q")

    def test_shapes(self):
        self.fails(2, "average", harness.make_large(self.path("a"), 10), harness.make_large(self.path("b"), 11), "-o",
                   "x.h5", contains=["b: tensor w is ", "in ", "a it is "])

    def test_what_must_be_equal(self):
        """Another step: an object, whose bytes torch wrote."""
        other = self.copy("dcp-torch2.15.0-train")
        names = [n for n in os.listdir(other) if n.endswith(".distcp")]
        old = None
        for name in names:
            with open(os.path.join(other, name), "rb") as f:
                data = f.read()
            at = data.find(b"\x80\x02K")  # a pickle that is a small integer, and its CRC
            if at >= 0:
                old = data[at : at + 5]
                new = old[:3] + bytes([old[3] ^ 1]) + old[4:]
                changed = data[:at] + new + data[at + 5 :]
                with open(os.path.join(other, name), "wb") as f:
                    f.write(changed.replace(*(zlib.crc32(x).to_bytes(4, "little") for x in (old, new))))
                break
        self.assertIsNotNone(old, "the corpus has no integer object any more")
        line = self.fails(2, "average", TRAIN, other, "-o", "x.h5", contains=["differ in values that cannot be averaged"])
        name = line.split("objects): ")[1].split(";")[0]
        self.ok("average", TRAIN, other, "-o", "x.h5", "--exclude", name, "-q")
        self.ok("average", TRAIN, other, "-o", "y.h5", "--take-first", "-q")
        self.ok("diff", TRAIN, "y.h5", "-q")

    def test_target_among_the_sources(self):
        source = self.copy("dcp-torch2.15.0-train")
        name = next(n for n in os.listdir(source) if n.endswith(".distcp"))
        self.fails(2, "average", TRAIN, source, "-o", os.path.join(source, name), "--to", "pt", "--force",
                   contains=["is a file of"])
        self.ok("consolidate", TRAIN, "-o", "one.h5", "-q")
        self.ok("average", TRAIN, TRAIN, "-o", "one.h5", "--force", "-q")


if __name__ == "__main__":
    harness.main()
