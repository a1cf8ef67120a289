"""delta: what it writes is applied by a reader of the format that shares no code with it (weight_sync.py)."""

import json
import os
import unittest

import delta_case
import harness
import weight_sync
from delta_case import raw

TRAIN = harness.corpus("dcp-torch2.15.0-train")
SHAPES = delta_case.shapes(700, 801)


class Delta(delta_case.Case):
    def changed(self, tensors, seed, **how):
        return delta_case.typed(delta_case.changed(raw(tensors), seed, **how), tensors)

    def setUp(self):
        super().setUp()
        self.old = delta_case.typed(delta_case.random_model(SHAPES, 1), SHAPES)
        self.new = self.changed(self.old, 2)
        self.save("old", self.old)
        self.save("new", self.new)
        os.mkdir(self.path("updates"))

    def test_another_reader_gets_the_new_version(self):
        for encoding in ("xor", "overwrite"):
            for checksum in ("xxh3-128", "adler32"):
                with self.subTest(encoding=encoding, checksum=checksum):
                    self.ok("delta", "old", "new", "-o", "updates/weight_v000007", "-q", "--force", "--encoding", encoding,
                            "--checksum", checksum)
                    found = raw(self.old)
                    metadata = weight_sync.apply(found, self.path("updates/weight_v000007"))
                    self.assertEqual(found, raw(self.new))
                    self.assertEqual(metadata, {"version": "000007", "base_version": "000006", "delta_encoding": encoding,
                                                "compression_format": "zstd", "checksum_format": checksum})
                    _, tensors = weight_sync.read_version(self.path("updates/weight_v000007"))
                    self.assertEqual(sorted(tensors), ["codes.qweight", "fp8", "layers.0.w", "packed", "scalar"])

    def test_frames_hold_what_the_format_says(self):
        for encoding in ("xor", "overwrite"):
            self.ok("delta", "old", "new", "-o", "updates/weight_v000001", "-q", "--force", "--encoding", encoding)
            _, tensors = weight_sync.read_version(self.path("updates/weight_v000001"))
            for name, (frame, _) in tensors.items():
                self.assertEqual(weight_sync.decompress(frame),
                                 weight_sync.encode(encoding, self.old[name][2], self.new[name][2]), name)

    def test_auto_takes_the_smaller_encoding(self):
        self.save("few", self.changed(self.old, 3, names=["layers.0.w"], share=10**9))
        sizes = {}
        for encoding in ("xor", "overwrite", "auto"):
            found = json.loads(self.ok("delta", "old", "few", "-o", "updates/weight_v000001", "--json", "--force", "--encoding",
                                       encoding))
            sizes[encoding] = found["stored_bytes"]
            self.assertEqual(found["stored_bytes"], sum(len(frame) for frame, _ in weight_sync.read_version(
                self.path("updates/weight_v000001"))[1].values()))
        self.assertEqual(found["delta_encoding"], min("xor", "overwrite", key=sizes.get))
        self.assertEqual(sizes["auto"], min(sizes.values()))

    def test_threads_and_memory_do_not_change_a_byte(self):
        for encoding in ("xor", "overwrite"):
            written = []
            for jobs, memory in ((1, "1M"), (8, "64M")):
                self.ok("delta", "old", "new", "-o", "updates/weight_v000001", "-q", "--force", "--encoding", encoding, "-j", jobs,
                        "--memory", memory)
                written.append(self.contents("updates/weight_v000001"))
            self.assertEqual(*written)

    def test_from_shards_of_a_trainer(self):
        """NEW is sharded, has other names and another dtype, and an optimizer. OLD is the model that the engines loaded."""
        self.ok("consolidate", TRAIN, "-o", "hub.safetensors", "-q", "--model-only", "--rename", "s/^/x./", "--dtype", "bf16")
        target = weight_sync.read_file(self.path("hub.safetensors"))[1]
        base = {name: (entry["dtype"], entry["shape"], data) for name, (entry, data) in target.items()}
        stale = self.changed(base, 5, names=list(base)[:3])
        self.save("base", stale, files=2)
        self.ok("delta", "base", TRAIN, "-o", "updates/weight_v000001", "-q", "--model-only", "--rename", "s/^/x./", "--dtype", "bf16")
        found = raw(stale)
        weight_sync.apply(found, self.path("updates/weight_v000001"))
        self.assertEqual(found, raw(base))
        self.assertEqual(len(weight_sync.read_version(self.path("updates/weight_v000001"))[1]), 3)

    def test_nothing_changed(self):
        self.ok("delta", "old", "old", "-o", "updates/weight_v000001", "-q")
        self.assertEqual(os.listdir(self.path("updates/weight_v000001")), ["model.safetensors.index.json"])
        self.assertEqual(weight_sync.read_version(self.path("updates/weight_v000001"))[1], {})

    def test_equal_digests_are_not_read(self):
        """A byte that was changed behind a digest shows that it was not read. verify finds such damage."""
        for name in ("old", "new"):
            self.ok("convert", name, "-o", f"{name}.h5", "-q")
        with open(self.path("new.h5"), "rb") as f:
            at = f.read().index(self.new["same"][2])
        with self.flipped(self.path("new.h5"), at):
            report = json.loads(self.ok("delta", "old.h5", "new.h5", "-o", "updates/weight_v000001", "--json"))
        self.assertEqual((report["same_digest"], report["changed"]), (3, 5))

    def test_numbers(self):
        def numbers(*args):
            self.ok("delta", "old", "new", "-q", *args)
            metadata, _ = weight_sync.read_version(self.path(args[1]))
            return metadata["version"], metadata["base_version"]
        self.assertEqual(numbers("-o", "updates/weight_v000012/"), ("000012", "000011"))
        self.assertEqual(numbers("-o", "updates/weight_v000013", "--base", "9"), ("000013", "000009"))
        self.assertEqual(numbers("-o", "updates/mine", "--number", "1"), ("000001", "000000"))
        for args, text in ((["-o", "updates/x"], "the name does not tell the number of the version"),
                           (["-o", "updates/xweight_v000003"], "the name does not tell the number of the version"),
                           (["-o", "updates/weight_v000003", "--number", "4"], "this is the name of version 3, not of version 4"),
                           (["-o", "updates/weight_v000003", "--base", "3"], "version 3 cannot change version 3"),
                           (["-o", "updates/weight_v000000"], "version 0 cannot change version -1")):
            self.fails(2, "delta", "old", "new", *args, contains=[text])
        self.assertEqual(sorted(os.listdir(self.path("updates"))), ["mine", "weight_v000012", "weight_v000013"])

    def test_what_differs_in_more_than_values_is_named(self):
        cases = {"gone": (lambda t: t.pop("fp8"), "it has no tensor fp8, which new has", "--exclude 'fp8' leaves it out"),
                 "dtype": (lambda t: t.update(fp8=("U8", *t["fp8"][1:])), "tensor fp8: it is uint8 in dtype", "float8_e4m3fn"),
                 "shape": (lambda t: t.update(fp8=("F8_E4M3", [7, 33], t["fp8"][2])), "tensor fp8: it has another shape", "")}
        for name, (change, *texts) in cases.items():
            tensors = dict(self.old)
            change(tensors)
            self.save(name, tensors)
            self.fails(2, "delta", name, "new", "-o", "updates/weight_v000001", contains=texts)
        self.assertEqual(os.listdir(self.path("updates")), [])
        self.assertIn("1 tensor stays as in OLD", self.ok("delta", "old", "gone", "-o", "updates/weight_v000001"))

    def test_refused(self):
        self.fails(5, "delta", "old", "new", "-o", "updates/weight_v000001", "--checksum", "blake3", contains=["xxh3-128 or adler32"])
        self.fails(2, "delta", "old", "new", "-o", "updates/weight_v000001", "--level", "10", contains=["--level"])
        self.fails(2, "delta", "old", "new", "-o", "old", "--number", "1", "--force", contains=["old"])
        self.ok("delta", "old", "new", "-o", "updates/weight_v000001", "-q")
        self.fails(2, "delta", "old", "new", "-o", "updates/weight_v000001", contains=["--force"])
        with open(self.path("updates/weight_v000001/notes.txt"), "w") as f:
            f.write("mine")
        self.fails(2, "delta", "old", "new", "-o", "updates/weight_v000001", "--force", contains=["notes.txt"])

    def test_overwrite_has_positions_below_4_gib(self):
        size = 2**32
        for name, first in (("a", b"\0"), ("b", b"\1")):
            os.mkdir(self.path(name))
            with open(self.path(name, "model.safetensors"), "wb") as f:
                text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
                f.write(len(text).to_bytes(8, "little") + text + first)
                f.truncate(8 + len(text) + size)
        self.fails(5, "delta", "a", "b", "-o", "updates/weight_v000001", "--encoding", "overwrite",
                   contains=["tensor w", "4294967296 bytes", "use the encoding xor"])
        self.assertEqual(os.listdir(self.path("updates")), [])
        self.ok("delta", "a", "b", "-o", "updates/weight_v000001", "--encoding", "auto", "-q")
        self.assertEqual(weight_sync.read_version(self.path("updates/weight_v000001"))[0]["delta_encoding"], "xor")


if __name__ == "__main__":
    unittest.main()
