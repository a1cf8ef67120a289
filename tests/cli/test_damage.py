"""Flips one bit in data for which the source records a CRC. Not only verify but every command that reads this data must
report it. (Conversions of DCP archives are in test_errors.py, headers in test_verify.py.)"""

import json
import os

import harness

TRAIN = "dcp-torch2.15.0-train"
FLAT = "dcp-torch2.15.0-fsdp1-optim"
TENSOR = "model.tok_embeddings.weight"
INTEGER = "nested.tensors.0"


class Damage(harness.Case):
    def sources(self, *chosen):
        """{name: word}: one checkpoint in all or some formats, and a word of the message about a flipped bit in TENSOR."""
        self.copy(TRAIN, "dcp")
        self.ok("consolidate", "dcp", "-o", "full.pt", "-q")
        self.ok("consolidate", "dcp", "-o", "full.h5", "-q")
        self.ok("reshard", "dcp", "-o", "sharded", "--dp", "3", "-q")
        self.ok("consolidate", "dcp", "-o", "full.safetensors", "-q")
        self.ok("reshard", "dcp", "-o", "shards", "--to", "safetensors", "--dp", "3", "-q")
        kinds = {"dcp": "CRC-32", "full.pt": "CRC-32", "full.h5": "digest", "sharded": "digest",
                 "full.safetensors": "digest", "shards": "CRC-64"}
        return {name: what for name, what in kinds.items() if name in (chosen or kinds)}

    def says(self, source, tensor, what):
        return [f"tensor {tensor}", what, "damaged", "fsdpckpt verify", os.path.basename(source)]

    def test_extract_reports_damage(self):
        for source, what in self.sources().items():
            clean = self.ok("extract", source, TENSOR, "-o", "clean", "--force", "-q")
            self.ok("extract", source, TENSOR, "--dtype", "f64", "-o", "clean", "--force", "-q")
            with self.flipped_chunk(source, TENSOR, 0), self.subTest(source=source):
                for args in ((), ("--dtype", "f64"), ("--to", "npy")):
                    self.fails(3, "extract", source, TENSOR, "-o", "x", *args, contains=self.says(source, TENSOR, what))
                    self.assertNotIn("x", self.listing())
                with open(self.path("stdout"), "wb") as out:  # what was sent stays sent; only the status tells
                    self.fails(3, "extract", source, TENSOR, stdout=out, contains=self.says(source, TENSOR, what))
                self.ok("extract", source, "model.norm.weight", "-o", "other", "--force")
            self.assertEqual(clean, "")

    def test_average_reports_damage(self):
        for source, what in self.sources("dcp", "sharded", "shards").items():
            with self.subTest(source=source):
                others = [harness.corpus(TRAIN), source], [source, harness.corpus(TRAIN)]
                for pair in others:
                    for args in (("--dtype", "bf16", "--dp", "2"), ("--compress", "1", "-j", "3", "--memory", "1M")):
                        with self.flipped_chunk(source, TENSOR, 0):
                            self.fails(3, "average", *pair, "-o", "out", "--to", "h5", "--exclude", "optim*", *args,
                                       contains=self.says(source, TENSOR, what))
                        self.assertNotIn("out", self.listing())
                with self.flipped_chunk(source, INTEGER, 0):  # damage is not a difference that --take-first could settle
                    for pair in others:
                        self.fails(3, "average", *pair, "-o", "out.h5", contains=self.says(source, INTEGER, what))
                    self.fails(3, "average", source, harness.corpus(TRAIN), "-o", "out.pt", "--take-first",
                               contains=self.says(source, INTEGER, what))
                    self.ok("average", harness.corpus(TRAIN), source, "-o", "out.h5", "--take-first", "-q", "--force")
                self.ok("average", *pair, "-o", "out.h5", "-q", "--force")

    def test_diff_reports_damage(self):
        for source, what in self.sources("dcp", "full.pt", "full.h5", "shards").items():
            with self.subTest(source=source):
                for pair in ((harness.corpus(TRAIN), source), (source, harness.corpus(TRAIN)), (source, source)):
                    with self.flipped_chunk(source, TENSOR, 0):
                        p = self.run_tool("diff", *pair, "--data")
                        self.assertEqual((p.returncode, p.stderr.count("\n")), (3, 1), p.stderr)
                        for text in self.says(source, TENSOR, what):
                            self.assertIn(text, p.stderr)
                        self.assertEqual(TENSOR + "  float32[11, 6]  1 of 66 differs" in p.stdout, pair[0] != pair[1])
                        p = self.run_tool("diff", *pair, "--data", "--json")
                        self.assertIn(json.loads(p.stdout)["damage"], p.stderr)
                        self.fails(3, "diff", *pair, "--data", "-q", contains=self.says(source, TENSOR, what))
                        self.ok("diff", *pair, "--data", "--exclude", TENSOR)
                    self.assertIsNone(json.loads(self.ok("diff", *pair, "--data", "--json"))["damage"])

    def test_what_stands_in_place_of_a_file_is_named(self):
        pages = {b"<!DOCTYPE html>\n<html><title>403 Forbidden</title></html>\n": "it is a web page",
                 b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>': "it is an XML document",
                 b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n": "it is a Git LFS pointer",
                 b"": "it is empty", bytes(100): "it begins with zeros"}
        self.copy(TRAIN, "dcp")
        self.ok("reshard", "dcp", "-o", "sharded", "--dp", "3", "-q")
        self.ok("reshard", "dcp", "-o", "pressed", "--dp", "3", "--compress", "1", "-q")
        self.ok("reshard", "dcp", "-o", "walked", "--dp", "3", "-q")
        with open(self.path("walked", "index.h5"), "ab") as f:
            f.write(bytes(8))  # as if another program had changed it: its tables are not used
        shard = "shard-00001-of-00003.h5"
        for folder, name in (("sharded", shard), ("pressed", shard), ("walked", shard), ("dcp", "__1_0.distcp")):
            with open(self.path(folder, name), "rb") as f:
                good = f.read()
            for page, text in pages.items():
                whole = page + bytes(max(0, len(good) - len(page)))  # as long as the file that it replaces
                for content in (page, whole):
                    with self.subTest(folder=folder, text=text, size=len(content)):
                        with open(self.path(folder, name), "wb") as f:
                            f.write(content)
                        if folder == "dcp" and content is not page:
                            continue  # its archives are recognised by their ends
                        wanted = text if content is page or page else "it begins with zeros"
                        self.fails(3, "consolidate", folder, "-o", "x.h5", contains=[name, wanted])
                        self.assertIn(wanted, self.run_tool("check", folder).stdout)
            with open(self.path(folder, name), "wb") as f:
                f.write(good[:len(good) - 9])
            said = self.run_tool("consolidate", folder, "-o", "x.h5").stderr
            self.assertIn("truncated", said)
            with open(self.path(folder, name), "wb") as f:
                f.write(good)

    def test_casts_and_compression_report_damage(self):
        """The digest of the target differs after a cast, so the digest of the data that was read must be compared."""
        for source, what in self.sources().items():
            with self.flipped_chunk(source, TENSOR, 0), self.subTest(source=source):
                for args in (("--to", "pt"), ("--to", "h5", "--compress", "1", "-j", "3", "--memory", "1M")):
                    for cast in (("--dtype", "bf16"), ()):
                        self.fails(3, "consolidate", source, "-o", "out", *cast, *args,
                                   contains=self.says(source, TENSOR, what))
                    self.assertNotIn("out", self.listing())
            self.ok("consolidate", source, "-o", "out.h5", "--dtype", "bf16", "-q", "--force")

    def test_flattening_reports_damage(self):
        """Flat parameters are computed from the parameters of the source, which are compared before the commit."""
        given = ("--to", "pt", "--policy", "blocks", "--schema", "order.pt", "--exclude", "optim*", "--exclude", "nested*",
                 "--exclude", "list*")
        sources = self.sources("dcp", "full.h5", "shards")
        self.ok("consolidate", "dcp", "-o", "order.pt", "--include", "model.*", "-q")
        for source, what in sources.items():
            for args in (("--dp", "2"), ("--dp", "3", "--dtype", "bf16")):
                with self.subTest(source=source, args=args):
                    with self.flipped_chunk(source, TENSOR, 0):
                        self.fails(3, "reshard", source, "-o", "out", *given, *args, contains=self.says(source, TENSOR, what))
                        self.assertNotIn("out", self.listing())
                    self.ok("reshard", source, "-o", "flat", *given, *args, "-q", "--force")

    def test_unflattening_reports_damage(self):
        """Parameters are computed from flat ones. The source also has objects."""
        self.copy(TRAIN, "dcp")
        self.ok("consolidate", "dcp", "-o", "order.pt", "--include", "model.*", "-q")
        self.ok("reshard", "dcp", "-o", "flat", "--to", "pt", "--dp", "2", "--policy", "blocks", "--schema", "order.pt",
                "--exclude", "optim*", "--exclude", "nested*", "--exclude", "list*", "-q")
        self.ok("consolidate", "flat", "-o", "whole", "--to", "dcp", "-q")
        for source in ("flat", "whole"):
            with self.subTest(source=source):
                self.ok("consolidate", source, "-o", "back.h5", "--schema", "order.pt", "-q", "--force")
                self.ok("extract", source, TENSOR, "--schema", "order.pt", "-o", "x", "--force", "-q")
                self.ok("diff", "dcp", "back.h5", "--exclude", "optim*", "--exclude", "nested*", "--exclude", "list*",
                        "--data")
                with self.flipped_chunk(source, "model.layers.0._flat_param", 0):
                    self.fails(3, "consolidate", source, "-o", "out.h5", "--schema", "order.pt", contains=["CRC-32", "damaged"])


if __name__ == "__main__":
    harness.main()
