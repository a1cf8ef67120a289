"""average: the mean of equal checkpoints, refused sources, and refused targets, which must not be written. The arithmetic is tested
by tests/oracle/average.py."""

import os
import zlib

import harness

TRAIN = harness.corpus("dcp-torch2.15.0-train")


class Average(harness.Case):
    def test_mean_of_equal_checkpoints_is_the_checkpoint(self):
        """Also from different formats, and with any weights."""
        self.ok("consolidate", TRAIN, "-o", "one.h5", "-q")
        for args in ([TRAIN, TRAIN], [TRAIN, "one.h5"], ["one.h5", TRAIN, "--weights", "1,3"]):
            self.ok("average", *args, "-o", "mean.h5", "-q", "--force")
            self.ok("diff", "one.h5", "mean.h5", "-q")

    def test_mean_is_sharded(self):
        self.ok("average", TRAIN, TRAIN, "-o", "mean", "--to", "h5", "--dp", "2", "-q")
        self.assertIn("index.h5", os.listdir(self.path("mean")))
        self.ok("diff", TRAIN, "mean", "-q")

    def test_objects_are_compared_by_value(self):
        """Formats store the same object as different bytes, so a recorded digest may differ although the value does not."""
        self.ok("consolidate", TRAIN, "-o", "one.h5", "-q")
        self.ok("average", "one.h5", TRAIN, "-o", "mean.pt", "-q")
        self.ok("diff", "mean.pt", TRAIN, "-q")

    def test_wrong_arguments_are_refused(self):
        self.fails(2, "average", TRAIN, "-o", "x.h5", contains=["average needs SRC SRC..."])
        for weights in ("1", "1,2,3", "1,x", "1,2,", "inf,1", "1;2"):
            self.fails(2, "average", TRAIN, TRAIN, "-o", "x.h5", f"--weights={weights}", contains=["needs 2 numbers"])
        self.fails(2, "average", TRAIN, TRAIN, "-o", "x.h5", "--weights=1,-1", contains=["the sum of the weights is 0"])
        self.fails(3, "average", TRAIN, "missing", "-o", "x.h5", contains=["missing: no such file"])
        self.assertEqual(self.listing(), [])

    def test_schema_is_refused(self):
        with open(self.path("m.json"), "w") as f:
            f.write(self.ok("schema", TRAIN))
        self.fails(2, "average", TRAIN, "m.json", "-o", "x.h5", contains=["m.json: a schema"])

    def test_different_names_are_refused(self):
        self.ok("consolidate", TRAIN, "-o", "model.h5", "--include", "model.*", "-q")
        line = self.fails(2, "average", TRAIN, "model.h5", "-o", "x.h5", contains=["model.h5 lacks names that "])
        self.assertRegex(line, r" has: .* and \d+ more; --exclude leaves it out")
        self.ok("average", TRAIN, "model.h5", "-o", "x.h5", "--include", "model.*", "-q")

    def test_different_shapes_are_refused(self):
        self.fails(2, "average", harness.make_large(self.path("a"), 10), harness.make_large(self.path("b"), 11), "-o",
                   "x.h5", contains=["b: tensor w is ", "in ", "a it is "])

    def test_different_objects_are_refused(self):
        """The second checkpoint has another step count. --exclude or --take-first settles it."""
        other = self.copy("dcp-torch2.15.0-train")
        names = [n for n in os.listdir(other) if n.endswith(".distcp")]
        old = None
        for name in names:
            with open(os.path.join(other, name), "rb") as f:
                data = f.read()
            at = data.find(b"\x80\x02K")  # the pickle of a small integer
            if at >= 0:
                old = data[at : at + 5]
                new = old[:3] + bytes([old[3] ^ 1]) + old[4:]
                changed = data[:at] + new + data[at + 5 :]
                with open(os.path.join(other, name), "wb") as f:
                    f.write(changed.replace(*(zlib.crc32(x).to_bytes(4, "little") for x in (old, new))))
                break
        self.assertIsNotNone(old, "no integer object found in the corpus")
        line = self.fails(2, "average", TRAIN, other, "-o", "x.h5", contains=["differ in values that cannot be averaged"])
        name = line.split("objects): ")[1].split(";")[0]
        self.ok("average", TRAIN, other, "-o", "x.h5", "--exclude", name, "-q")
        self.ok("average", TRAIN, other, "-o", "y.h5", "--take-first", "-q")
        self.ok("diff", TRAIN, "y.h5", "-q")

    def test_target_may_be_a_whole_source_but_not_one_of_its_files(self):
        source = self.copy("dcp-torch2.15.0-train")
        name = next(n for n in os.listdir(source) if n.endswith(".distcp"))
        self.fails(2, "average", TRAIN, source, "-o", os.path.join(source, name), "--to", "pt", "--force",
                   contains=["is a file of"])
        self.ok("consolidate", TRAIN, "-o", "one.h5", "-q")
        self.ok("average", TRAIN, TRAIN, "-o", "one.h5", "--force", "-q")


if __name__ == "__main__":
    harness.main()
