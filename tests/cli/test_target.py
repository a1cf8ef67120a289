"""How -o and --to choose the format. All commands share one rule, and none writes a file under a misleading name."""

import json
import os
import re
import shutil

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

    def test_a_file_that_was_asked_for_is_no_directory(self):
        """Under a name with the extension of a format, no command makes a directory, unless it ends with a slash or is there."""
        hub, ranks = "leave out --max-shard-size, or name a directory", "use 'fsdpckpt consolidate', or name a directory"
        only, one = "is a directory; name a directory", [self.source]
        cases = [(["convert", *one], ranks), (["convert", *one, "--to", "h5"], ranks), (["reshard", *one, "--dp", "2"], ranks),
                 (["reshard", *one, "--dp", "1", "--tp", "2"], ranks), (["reshard", *one, "--dp", "2", "--to", "dcp"], only),
                 (["convert", *one, "--to", "dcp"], only), (["consolidate", *one, "--to", "dcp"], only),
                 (["average", *one * 2, "--dp", "2"], ranks), (["average", *one * 2, "--to", "dcp"], only),
                 (["consolidate", *one, "--to", "safetensors", "--max-shard-size", "2KB"], hub),
                 (["consolidate", *one, "--to", "safetensors", "--max-shard-size", "5GB"], hub),
                 (["export", *one], "or name a directory"), (["export", *one, "--max-shard-size", "2KB"], "or name a directory")]
        extensions = set(re.findall(r"(?<= )[.]\w+", self.ok("--help").partition("chosen by --to or the extension")[2]))
        self.assertLessEqual({".h5", ".hdf5", ".pt", ".pth", ".bin", ".ckpt", ".safetensors"}, extensions)
        for name in ["model" + e for e in sorted(extensions)] + ["MODEL.H5", "./new.pt", "step-1.5.ckpt"]:
            for command, text in cases:
                for extra in ([], ["--force"], ["--dry-run"]):
                    with self.subTest(command=command, name=name, extra=extra):
                        self.fails(2, *command, "-o", name, *extra, contains=[name + ": names a file, but ", text])
        self.assertEqual(self.listing(), [])
        for command, _ in cases:
            with self.subTest(command=command):
                os.mkdir(self.path("old.pt"))
                for name in ("new.pt/", "old.pt"):
                    self.ok(*command, "-o", name, *(["--force"] if name == "old.pt" else []), "-q")
                    self.assertTrue(os.path.isdir(self.path(name)))
                    shutil.rmtree(self.path(name))

    def test_formats_have_several_names(self):
        for word, name in (("hdf5", "h5"), ("HDF5", "h5"), ("H5", "h5"), (".h5", "h5"), ("torch", "pt"), ("PyTorch", "pt"),
                           ("pth", "pt"), ("PT", "pt"), ("st", "safetensors"), ("hf", "safetensors"),
                           ("SafeTensors", "safetensors"), ("DCP", "dcp"), ("distcp", "dcp")):
            with self.subTest(word=word):
                got = json.loads(self.ok("consolidate", self.source, "--to", word, "--dry-run", "--json"))
                self.assertEqual(got["format"], name)
        for word, text in (("safetensr", "did you mean 'safetensors'?"), ("hd5", "did you mean 'h5'?"),
                           ("pytroch", "did you mean 'pt'?"), ("dpc", "did you mean 'dcp'?"), ("gguf", "choose one of accelerate, dcp, h5")):
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

    def test_accelerate_takes_models_and_optimizers_only(self):
        train, to = harness.corpus("dcp-torch2.15.0-train"), ("--to", "accelerate")
        state = ("--include", "model*.*", "--include", "optim*.*")
        for extra in ((), ("--dry-run",)):
            self.fails(2, "reshard", train, "-o", "x", *to, "--dp", "2", *extra, contains=[
                "28 of the 64 values are neither, such as step; --include 'model*.*' --include 'optim*.*' leaves"])
        self.ok("consolidate", train, "-o", "w.h5", "--include", "model.*", "--strip-prefix", "model.", "-q")
        self.fails(2, "convert", "w.h5", "-o", "x", *to, contains=["are neither, such as ", "; --rename 's/^/model./' makes them the model's\n"])
        self.fails(2, "consolidate", train, "-o", "x", *to, "--include", "model.*", "--include", "step", contains=[
            "; --rename 's/^/model./' makes all of them the model's, --include 'model*.*' leaves these out\n"])
        self.fails(2, "consolidate", train, "-o", "x", *to, "--include", "optim.*", "--include", "step", contains=["1 of the 31 values is neither, such as step\n"])
        self.fails(2, "consolidate", train, "-o", "x", *to, "--include", "optim.*", contains=[
            "needs a model in pytorch_model_fsdp_0"])
        self.fails(2, "consolidate", train, "-o", "x", *to, *state, "--rename", "s/^model/model_2/", contains=[
            "needs a model in pytorch_model_fsdp_0"])
        self.fails(2, "consolidate", train, "-o", "x", *to, *state, "--rename", "s/^(model)[.]norm/\\1_2.norm/", contains=[
            "model_2.norm.weight needs a model in pytorch_model_fsdp_1"])
        self.fails(2, "consolidate", train, "-o", "x", *to, *state, "--rename", "s/^optim[.]param/optimizer.param/", contains=[
            "would both be in optimizer_0"])
        self.assertEqual(self.listing(), ["w.h5"])
        self.ok("consolidate", "w.h5", "-o", "hub", *to, "--rename", "s/^/model./", "-q")
        self.assertEqual(os.listdir(self.path("hub")), ["pytorch_model_fsdp_0"])
        self.ok("diff", "hub", "w.h5", "--rename", "s/^model[.]//", "--data")

    def test_accelerate_has_a_checkpoint_for_each_model(self):
        train, to = harness.corpus("dcp-torch2.15.0-train"), ("--to", "accelerate")
        state = ("--include", "model.*", "--include", "optim.*")
        files = ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata"]
        parts = ["optimizer_0", "pytorch_model_fsdp_0"]
        p = self.run_tool("reshard", train, "-o", "one", *to, "--dp", "3", *state)
        self.assertIn(" in 6 accelerate files and 2 .metadata, ", p.stdout)
        self.assertRegex(p.stderr, r"\Afsdpckpt: one: Accelerator.load_state also reads .* scheduler.bin .* copy them there\n")
        self.assertEqual({p: sorted(os.listdir(self.path("one", p))) for p in sorted(os.listdir(self.path("one")))},
                         {p: sorted(files) for p in parts})
        self.assertEqual(self.format_of("one"), "accelerate")
        self.ok("convert", train, "-o", "dcp", "--to", "dcp", "--rename", "s/^optim[.]/optimizer./", *state, "-q")
        self.ok("diff", "one", "dcp", "--data")
        self.ok("verify", "one")
        self.ok("check", "one")
        # Several models: each keeps the names that it has alone.
        for part in parts:
            shutil.copytree(self.path("one", part), self.path("one", part[:-1] + "1"))
        for part in parts:
            self.ok("diff", "one/" + part, "one/" + part[:-1] + "1", "--data")
        names = [t["name"] for t in json.loads(self.ok("inspect", "one", "--json"))["tensors"]]
        self.assertEqual([n for n in names if n.endswith(".norm.weight")], ["model.norm.weight", "model_1.norm.weight"])
        self.assertIn("optimizer_1.state.norm.weight.exp_avg", names)
        self.ok("reshard", "one", "-o", "two", *to, "--dp", "2", "-q")
        self.assertEqual(sorted(os.listdir(self.path("two"))), sorted(p[:-1] + i for p in parts for i in "01"))
        self.ok("diff", "one", "two", "--data")
        for part in sorted(os.listdir(self.path("two"))):
            self.ok("diff", "one/" + part, "two/" + part, "--data")
        # The values of the two may come in any order; a part without tensors has a file of rank 0 only.
        mixed = ("--rename", "s/^optim[.]state[.](.*)[.]step$/model.steps.\\1/", "--exclude", "optim.state.*.exp*")
        self.ok("reshard", train, "-o", "mixed", *to, "--dp", "2", *state, *mixed, "-q")
        self.assertEqual(sorted(os.listdir(self.path("mixed", "optimizer_0"))), [".metadata", "__0_0.distcp"])
        self.ok("convert", train, "-o", "plain", "--to", "dcp", *state, *mixed, "--rename", "s/^optim[.]/optimizer./", "-q")
        self.ok("diff", "mixed", "plain", "--data")

    def test_accelerate_is_replaced_with_force(self):
        train, to = harness.corpus("dcp-torch2.15.0-train"), ("--to", "accelerate", "--include", "model.*", "-q")
        self.ok("reshard", train, "-o", "out", *to, "--dp", "3")
        self.fails(2, "reshard", train, "-o", "out", *to, "--dp", "2", contains=["out: exists", "--force"])
        self.ok("reshard", train, "-o", "out", *to, "--dp", "2", "--force")
        self.assertEqual(len(os.listdir(self.path("out", "pytorch_model_fsdp_0"))), 3)
        self.ok("reshard", "out", "-o", "out", *to, "--dp", "1", "--force")
        self.fails(2, "reshard", "out", "-o", "out/pytorch_model_fsdp_0", "--to", "dcp", "--dp", "2", "--force",
                   contains=["is or contains"])
        with open(self.path("out", "random_states_0.pkl"), "w") as f:
            f.write("theirs")
        self.fails(2, "reshard", train, "-o", "out", *to, "--dp", "2", "--force", contains=["would delete 'random_states_0.pkl'"])


if __name__ == "__main__":
    harness.main()
