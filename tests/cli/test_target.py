"""How -o and --to choose the format. All commands share one rule, and none writes a file under a misleading name."""

import json
import os

import harness

FSDP2 = "dcp-torch2.15.0-fsdp2"


class Target(harness.Case):
    def setUp(self):
        super().setUp()
        self.source = harness.corpus(FSDP2)

    def format_of(self, path):
        return json.loads(self.ok("inspect", path, "--json"))["format"]

    def test_misleading_names_are_refused(self):
        cases = [
            ("out.gguf", "no format that can be written has the extension '.gguf'"),
            ("out.npz", "'.npz'"),
            ("out.final", "'.final'"),
            ("out.safetensor", "did you mean '.safetensors'?"),
            ("out.safetensros", "did you mean '.safetensors'?"),
            ("out.hdf", "did you mean '.hdf5'?"),
            ("out.hd5", "did you mean '.h5'?"),
            ("out.pht", "did you mean '.pt"),
            ("out.st", "did you mean --to safetensors?"),
            ("out.dcp", "did you mean --to dcp?"),
            ("hfdir", "the name does not name a format; give --to FORMAT"),
            (".hidden", "the name does not name a format; give --to FORMAT"),
            ("step-1.5", "the name does not name a format; give --to FORMAT"),
            ("ckpt.v2", "the name does not name a format; give --to FORMAT"),
            ("hfdir/", "is a directory, which does not name a format; give --to safetensors or --to dcp"),
        ]
        for command in ("consolidate", "convert", "average"):
            for name, text in cases:
                sources = [self.source] * (1 + (command == "average"))
                with self.subTest(command=command, name=name):
                    self.fails(2, command, *sources, "-o", name, contains=[name, text])
                    self.fails(2, command, *sources, "-o", name, "-q", "--dry-run", contains=[name, text])
        self.assertEqual(self.listing(), [])

    def test_directories_of_shard_files_may_have_any_name(self):
        for name in ("out", "out/", "step-1.5", "ckpt.v2", "Qwen2.5-7B", "run.final", "run.2026-11-22", "a.b.c/"):
            with self.subTest(name=name):
                self.assertIn(" in 2 h5 files and index.h5, ", self.ok("reshard", self.source, "-o", name, "--dp", "2", "--force"))
        for name in ("out.gguf", "out.npz", "out.safetensor", "out.hdf", "x.dcp"):
            with self.subTest(name=name):
                self.fails(2, "reshard", self.source, "-o", name, "--dp", "2", contains=[name])
                self.assertNotIn(name, self.listing())
        self.run_tool("reshard", self.source, "-o", "ranks.pt/", "--dp", "2")
        self.assertEqual(sorted(os.listdir(self.path("ranks.pt"))), ["model_world_size_2_rank_%d.pt" % r for r in range(2)])

    def test_formats_have_several_names(self):
        for word, name in (("hdf5", "h5"), ("HDF5", "h5"), ("H5", "h5"), (".h5", "h5"), ("torch", "pt"), ("PyTorch", "pt"),
                           ("pth", "pt"), ("PT", "pt"), ("st", "safetensors"), ("hf", "safetensors"),
                           ("SafeTensors", "safetensors"), ("DCP", "dcp"), ("distcp", "dcp")):
            with self.subTest(word=word):
                got = json.loads(self.ok("consolidate", self.source, "--to", word, "--dry-run", "--json"))
                self.assertEqual(got["format"], name)
        for word, text in (("safetensr", "did you mean 'safetensors'?"), ("hd5", "did you mean 'h5'?"),
                           ("pytroch", "did you mean 'pt'?"), ("dpc", "did you mean 'dcp'?"), ("gguf", "choose one of dcp, h5")):
            with self.subTest(word=word):
                self.fails(2, "consolidate", self.source, "-o", "x", "--to", word, contains=[f"--to {word}: ", text])
        self.fails(5, "consolidate", self.source, "-o", "x", "--to", "megatron", contains=["can only be read"])
        self.fails(2, "extract", self.source, "model.norm.weight", "--to", "nyp", contains=["did you mean 'npy'?"])
        self.ok("extract", self.source, "model.norm.weight", "--to", "NumPy", "-o", "x")
        with open(self.path("x"), "rb") as f:
            self.assertEqual(f.read(6), b"\x93NUMPY")

    def test_explicit_format_overrides_the_extension(self):
        for name in ("out.gguf", "hfdir", "step-1.5"):
            self.ok("consolidate", self.source, "-o", name, "--to", "pytorch")
            self.assertEqual(self.format_of(name), "pt")

    def test_a_directory_for_hugging_face(self):
        """A trailing slash or an existing directory selects a directory, as for save_pretrained."""
        os.mkdir(self.path("there"))
        os.mkdir(self.path("ranks"))
        for name in ("new/", "there"):
            self.assertIn(" in 1 safetensors file, ", self.ok("consolidate", self.source, "-o", name, "--to", "safetensors"))
            self.assertEqual(os.listdir(self.path(name)), ["model.safetensors"])
        self.fails(2, "consolidate", self.source, "-o", "there", "--to", "safetensors", contains=["exists", "--force"])
        text = self.ok("consolidate", self.source, "-o", "new/", "--to", "safetensors", "--max-shard-size", "1K", "--force")
        files = [n for n in os.listdir(self.path("new")) if n != "model.safetensors.index.json"]
        self.assertIn(f" in {len(files)} safetensors files and model.safetensors.index.json, ", text)
        self.assertGreater(len(files), 1)
        self.fails(2, "consolidate", self.source, "-o", "one/", "--to", "h5", contains=["one/", "one file"])
        self.ok("reshard", self.source, "-o", "ranks", "--dp", "2")
        self.fails(2, "reshard", self.source, "-o", "ranks", "--dp", "2", contains=["exists"])

    def test_names_of_other_output_files(self):
        """The extension of another file type is refused; an unknown extension, or none, is accepted."""
        tensor = "model.norm.weight"
        cases = {
            ("view", self.source, "-o"): (["v.pt", "v.json", "v.safetensors"], ["v.h5", "v.hdf5", "v", "view.of.it"]),
            ("schema", self.source, "-o"): (["s.h5", "s.jsno", "s.html", "s.xml"], ["s.json", "s", "s.schema"]),
            ("inspect", self.source, "--html"): (["p.json", "p.hmtl", "p.h5"], ["p.html", "p.htm", "p"]),
            ("check", self.source, "--junit"): (["r.html", "r.xlm", "r.json"], ["r.xml", "r"]),
            ("extract", self.source, tensor, "-o"): (["t.npz", "t.nyp", "t.pt", "t.csv"],
                                                     ["t.npy", "t.bin", "t.raw", "t", tensor]),
        }
        for command, (wrong, right) in cases.items():
            for name in wrong:
                with self.subTest(command=command[0], name=name):
                    self.fails(2, *command, name, contains=[name])
                    self.assertNotIn(name, self.listing())
            for name in right:
                with self.subTest(command=command[0], name=name):
                    self.assertEqual(self.run_tool(*command, name).returncode, 0)


if __name__ == "__main__":
    harness.main()
