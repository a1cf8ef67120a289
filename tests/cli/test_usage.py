"""Help, version, usage errors and exit statuses."""

import json
import os
import re
import subprocess

import harness


class Usage(harness.Case):
    def test_help_of_every_command(self):
        text = self.ok("--help")
        self.assertEqual(text, self.ok("-h"))
        self.assertEqual(text, self.ok("help"))
        for command in ("consolidate", "reshard", "inspect"):
            self.assertIn(f"\n  {command} ", text)
            help_text = self.ok(command, "--help")
            self.assertIn(f"Usage: fsdpckpt {command} SRC", help_text)
            self.assertIn("--quiet", help_text)
            self.assertEqual(help_text, self.ok("help", command))
            self.assertLessEqual(max(map(len, help_text.splitlines())), 90)
        for absent in ("merge ", "join ", "load "):  # help names no command that does not exist
            self.assertNotIn(f"\n  {absent}", text)
        self.assertIn("--tp-plan plan.json\n", self.ok("consolidate", "--help"))  # the longest example is not cut
        self.assertIn("--tp-plan", self.ok("reshard", "--help"))
        self.assertNotIn("--replicas", self.ok("consolidate", "--help"))

    def test_h_fits_a_screen(self):
        names = re.findall(r"^  ([a-z]+) ", self.ok("--help").split("Commands:")[1].split("\n\n")[0], re.M)
        self.assertGreater(len(names), 10)
        for name in names:
            with self.subTest(command=name):
                brief, whole = self.ok(name, "-h"), self.ok(name, "--help")
                self.assertLessEqual(len(brief.splitlines()), 32)
                options = re.findall(r"^ +(?:-[a-zA-Z], )?--([a-z0-9-]+)", brief, re.M)
                self.assertLessEqual(len(options), 10)
                for option in options:
                    self.assertIn(f"--{option}", whole)
                count = int(re.search(r"--help' shows all (\d+) options", brief)[1])
                self.assertEqual(count, len(re.findall(r"^(?:  -[a-zA-Z], |      )--[a-z0-9-]+", whole, re.M)))

    def test_help_explains_options_for_each_command(self):
        def meaning(command, option):
            lines = self.ok(command, "--help").split("\nExamples:\n")[0]
            terms = re.split(r"\n(?=  -|      --)", "\n" + lines)[1:]
            return next(" ".join(t.split()) for t in terms if f"--{option}" in t.split("  ")[0] + t.split("\n")[0])

        formats = re.findall(r"^  (\w+) .*\n", self.ok("--help").split("the extension of -o):\n")[1].split("'fsd")[0], re.M)
        self.assertEqual(sorted(formats), ["accelerate", "dcp", "fsdp_dtensor", "h5", "pt", "safetensors", "torch_dist"])
        for command in ("consolidate", "reshard", "convert", "average"):
            self.assertIn("format of DST, one of accelerate, dcp, fsdp_dtensor, h5, pt, safetensors or torch_dist", meaning(command, "to"))
            self.assertNotIn("npy", meaning(command, "to"))
        self.assertIn("one of raw, npy, and json for objects", meaning("extract", "to"))
        for command in ("extract", "schema"):
            self.assertIn("standard output", meaning(command, "output"))
            self.assertNotIn("checkpoint", meaning(command, "output"))
        for command, word in (("inspect", "--html"), ("check", "--junit"), ("verify", "--seal")):
            self.assertIn(word, meaning(command, "force"))
        self.assertNotIn("--local", self.ok("average", "--help"))
        self.assertIn("without an index", meaning("consolidate", "max-shard-size"))
        self.assertIn("Usage: fsdpckpt reshard SRC -o DST --dp N", self.ok("reshard", "--help"))

    def test_help_lists_extensions(self):
        text = self.ok("--help")
        for line in ("h5 HDF5: .h5 .hdf5", "pt PyTorch (torch.save): .pt .pth .bin .ckpt", "safetensors safetensors: .safetensors"):
            self.assertIn(line, [" ".join(each.split()) for each in text.splitlines()])

    def test_example_has_help(self):
        program = os.path.join(os.path.dirname(harness.BINARY), "train_mlp")
        p = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=harness.HANG)
        self.assertEqual((p.returncode, p.stderr), (0, ""))
        self.assertTrue(p.stdout.startswith("usage: train_mlp "))
        for option in re.findall(r"--[\w-]+", p.stdout.split("\n\n")[0]):
            self.assertIn(f"\n  {option} ", p.stdout)
        for wrong in ("--frob", "ckpt"):
            p = subprocess.run([program, wrong], capture_output=True, text=True, timeout=harness.HANG, cwd=self.dir)
            self.assertEqual((p.returncode, p.stdout), (2, ""))
            self.assertIn("usage: train_mlp ", p.stderr)

    def test_version(self):
        text = self.ok("--version")
        self.assertRegex(text, r"^fsdpckpt \d+\.\d+\.\d+\n")
        for part in ("HDF5", "zlib", "seccomp"):
            self.assertIn(f"\n{part}", text)
        self.assertEqual(text, self.ok("inspect", "--version"))

    def test_usage_errors(self):
        cases = [
            (("inpsect",), "did you mean 'inspect'?"),
            (("frobnicate",), "unknown command 'frobnicate'"),
            (("help", "frobnicate"), "unknown command 'frobnicate'"),
            (("--json",), "goes after a command"),
            (("-v",), "--verbose goes after a command"),
            (("--frob",), "unknown option '--frob'"),
            (("inspect",), "inspect needs SRC"),
            (("inspect", "a", "b"), "'b' is one argument too many; a tensor name goes after --tensor"),
            (("inspect", ""), "SRC is empty; is a shell variable unset?"),
            (("consolidate", "a"), "consolidate needs -o"),
            (("consolidate", "a", "-o"), "needs an argument"),
            (("consolidate", "a", "--forse"), "did you mean '--force'?"),
            (("consolidate", "a", "-o", "b", "--dp", "2"), "does not take --dp"),
            (("schema", "a", "-j", "2"), "schema does not take --jobs"),
            (("schema", "a", "--quantize", "*"), "schema does not take --quantize"),
            (("view", "a", "-o", "v.h5", "--dequantize", "f32"), "view does not take --dequantize"),
            (("extract", "a", "w", "--adapter", "lora"), "extract does not take --adapter"),
            (("consolidate", "a", "-o", "-"), "name a file or directory"),
            (("view", "a", "-o", "-"), "name a file or directory"),
            (("consolidate", "a", "-o", "b", "-j", "0"), "--jobs: '0'"),
            (("consolidate", "a", "-o", "b", "--memory=lots"), "--memory: 'lots'"),
            (("consolidate", "a", "-o", "b", "--dtype", "i64"), "floating-point"),
            (("consolidate", "a", "-o", "b", "--compress", "10"), "'10' is not a level from 0 to 9"),
            (("consolidate", "a", "-o", "b", "--compress", ""), "not a level"),
            (("consolidate", "a", "-o", "b", "--compress", "x"), "not a level"),
            (("consolidate", "a", "-o", "b", "--progress", "often"), "auto, always, never"),
            (("consolidate", "a", "-o", "b", "--comm", "smoke"), "'smoke' is not one of auto, none, mpi"),
            (("convert", "a"), "convert needs -o, --output DST (or --dry-run)"),
            (("view", "a"), "view needs -o, --output DST; use 'fsdpckpt view SRC -o DST'"),
            (("reshard", "a", "-o", "b"), "--dp"),
            (("reshard", "a", "-o", "b", "--dp", "2", "--tp-plan", "x"), "--tp N"),
            (("inspect", "a", "--tree", "--json"), "choose one"),
            (("inspect", "a", "--html", "x", "--json"), "choose one"),
        ]
        for args, text in cases:
            with self.subTest(args=args):
                self.fails(2, *args, contains=[text])
        self.assertEqual(self.listing(), [])

    def test_no_arguments_print_the_usage(self):
        p = self.run_tool()
        self.assertEqual((p.returncode, p.stdout, p.stderr), (2, "", self.ok("--help")))

    def test_help_may_stand_anywhere(self):
        text = self.ok("reshard", "--help")
        for args in (("help", "reshard"), ("reshard", "help"), ("--help", "reshard"), ("-q", "reshard", "-o", "--help")):
            self.assertEqual(self.ok(*args), text, args)
        brief = self.ok("reshard", "-h")
        for args in (("-h", "reshard"), ("reshard", "ckpt", "--frob", "-h"), ("reshard", "--dtype", "-h")):
            self.assertEqual(self.ok(*args), brief, args)
        self.assertEqual(self.ok("help", "help"), self.ok("--help"))
        self.assertEqual(self.ok("version"), self.ok("--version"))
        os.mkdir(self.path("help"))  # now "help" is also the name of a directory
        self.fails(3, "inspect", "help", contains=["help: not a checkpoint"])

    def test_options_before_the_command(self):
        source = harness.corpus("dcp-torch2.15.0-fsdp2")
        self.assertEqual(self.ok("--json", "inspect", source), self.ok("inspect", source, "--json"))
        self.ok("-qo", "inspect", "consolidate", source, "--to", "pt")
        self.ok("--to", "pt", "-o", "x.h5", "--dtype=f16", "-q", "consolidate", source, "--force")
        self.assertEqual(self.listing(), ["inspect", "x.h5"])

    def test_words_of_other_tools(self):
        """Commands and options of similar tools either work or get a suggestion."""
        source = harness.corpus("dcp-torch2.15.0-fsdp2")
        os.mkdir(self.path("ckpt"))
        for args, text in (
            (("merge", "a"), "did you mean 'consolidate'?"),
            (("dcp_to_torch_save", "a", "x.pt"), "did you mean 'consolidate --to pt'?"),
            (("to-safetensors", "a"), "did you mean 'consolidate --to safetensors'?"),
            (("merge_lora", "a"), "did you mean 'consolidate --adapter'?"),
            (("zero_to_fp32.py", "a", "x.pt"), "did you mean 'consolidate'?"),
            (("reshard", source, "-o", "x", "--num_shards", "4"), "did you mean '--dp'?"),
            (("reshard", source, "-o", "x", "--nproc_per_node", "4"), "did you mean '--dp'?"),
            (("convert", source, "-o", "x.pt", "--bf16"), "did you mean '--dtype'?"),
            (("consolidate", source, "-o", "x.pt", "--no-optimizer"), "did you mean '--model-only'?"),
            (("consolidate", source, "-o", "x.pt", "--weights-only"), "did you mean '--model-only'?"),
            (("export", source, "-o", "x", "--model", "Qwen"), "did you mean '--like'?"),
            (("unshard", "a"), "did you mean 'consolidate'?"),
            (("split", "a"), "did you mean 'reshard'?"),
            (("info", "a"), "did you mean 'inspect'?"),
            (("ls", "a"), "did you mean 'inspect'?"),
            (("validate", "a"), "did you mean 'check'?"),
            (("compare", "a", "b"), "did you mean 'diff'?"),
            (("ckpt",), "did you mean 'fsdpckpt inspect ckpt'?"),
            (("help", "reshrd"), "did you mean 'reshard'?"),
            (("inspect", source, "-json"), "did you mean '--json'?"),
            (("inspect", source, "-help"), "did you mean '--help'?"),
            (("consolidate", source, "--dst", "x"), "did you mean '--output'?"),
            (("consolidate", source, "--format", "pt"), "did you mean '--to'?"),
            (("consolidate", source, "-o", "x.h5", "--overwrite"), "did you mean '--force'?"),
            (("reshard", source, "-o", "x", "--world-size", "2"), "did you mean '--dp'?"),
            (("consolidate", source, "-o", "x.h5", "--dp", "2"), "which is for reshard, average"),
            (("consolidate", source, "-o", "x.h5", "--dtype", "bfloat"), "did you mean 'bf16'?"),
            (("consolidate", source, "-o", "x.h5", "--dtype", "fp8"), "did you mean 'f8_e4m3fn'?"),
            (("consolidate", source, "-o", "x.h5", "--dtype", "f8_e5m3"), "did you mean 'f8_e5m2'?"),
            (("verify", source, "-json"), "did you mean '--json'?"),
            (("consolidate", source, "-output", "x.h5"), "did you mean '--output'?"),
            ((source,), "did you mean 'fsdpckpt inspect "),
            (("consolidate", source, "-o", "x.h5", "--include", "norm.weight"), "'*norm.weight*' matches 'model.norm.weight'"),
            (("export", source, "x"), "the target goes after -o"),
            (("check", source, "model.json"), "a schema goes after --schema"),
            (("check", source, "--like", "base"), "use '--against'"),
            (("inspect", source, "-o", "page.html"), "use '--html FILE'"),
            (("extract", source, "--tensor", "w"), "the name is an argument"),
            (("inspect", source, "--grep", "norm"), "use --include '*TEXT*'"),
            (("recipes", "--grep", "norm"), "see 'fsdpckpt recipes --help'"),
            (("inspect", source, "--include", "ckpt", "ckpt"), "quote it"),
            (("check", source, "ckpt"), "another checkpoint after --against"),
            (("diff", source, "--like", "ckpt"), "'fsdpckpt diff A B'"),
            (("export", source, "-o", "x", "--weights-only"), "export always takes the model only"),
            (("consolidate", source, "-o", "x.h5", "--dtype", "bfloat"), "did you mean 'bf16'? choose one of "),
            (("reshard", source, "-o", "x", "--hsdp", "2"), "did you mean '--replicas'?"),
            (("reshard", source, "-o", "x", "--pp", "2"), "pipeline stages"),
            (("consolidate", source, "-o", "x.pt", "--model"), "did you mean '--model-only'?"),
            (("consolidate", "--input", source, "-o", "x.pt"), "the checkpoint is an argument"),
            (("reshard", source, "-o", "x", "--nproc", "2"), "did you mean '--dp'?"),
            (("inspect", source, "-V"), "did you mean '--version'?"),
            (("consolidate", source, "-o", "x.pt", "-y"), "did you mean '--force'?"),
            (("export", source, "-o", "x", "--like", "meta-llama/Llama-3.1-8B"), "a model of the hub is hf://meta-llama/Llama-3.1-8B"),
            (("inspect", source, "--include", "a.h5", "ckpt", "ckpt"), "quote it"),
            (("consolidate", source, "x.h5"), "the target goes after -o"),
            (("consolidate", source, "-o", "x.h5", "--memory", "2", "GB"), "--memory 2: is that 2 bytes? write 2B, 2MB or 2GB"),
            (("consolidate", source, "-o", "x", "--to", "st", "--max-shard-size", "5"),
             "--max-shard-size 5: is that 5 bytes? write 5B, 5MB or 5GB"),
            (("consolidate", source, "-o", "x", "--to", "st", "--max-shard-size=1"), "is that 1 byte? write 1B, 1MB or 1GB"),
            (("verify", source, "two words", "words"), "needs quotes"),
            (("consolidate", "-o", "x.h5"), "use 'fsdpckpt consolidate SRC -o DST'"),
            (("reshard", source, "--dp", "2"), "use 'fsdpckpt reshard SRC -o DST --dp N [--tp N]'"),
            (("reshard", source, "-o", "x", "--tp", "2", "--tp-plan", "lama"), "known is 'auto'"),
        ):
            with self.subTest(args=args):
                self.fails(2, *args, contains=[text])
        self.fails(3, "inspect", "ckp", contains=["ckp: no such file or directory; did you mean 'ckpt'?"])
        self.fails(3, "inspect", self.path("ckptt"), contains=[f"did you mean '{self.path('ckpt')}'?"])
        self.assertEqual(self.listing(), ["ckpt"])
        for word in ("half", "FP16", "torch.half", "Float16", "F16"):
            self.ok("consolidate", source, "-o", "x.h5", "--dtype", word, "--progress", "Never", "-q", "--force")
            types = {t["dtype"] for t in json.loads(self.ok("inspect", "x.h5", "--json"))["tensors"]}
            self.assertEqual(types, {"float16"})

    def test_formats_without_a_writer_are_refused(self):
        source = harness.corpus("dcp-torch2.15.0-fsdp2")
        self.fails(5, "consolidate", source, "-o", "x", "--to", "deepspeed", contains=["can only be read", "can be written: accelerate, dcp, h5"])
        self.assertEqual(self.listing(), [])

    def test_escape_sequences_do_not_reach_the_terminal(self):
        self.fails(3, "inspect", "no\x1b[31msuch\nthing")
        self.fails(2, "in\x1b]0;x\x07spect")

    def test_full_disk_on_stdout(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        for args in (("--help",), ("inspect", harness.corpus("dcp-torch2.15.0-fsdp2")),
                     ("inspect", harness.corpus("dcp-torch2.15.0-fsdp2"), "--json")):
            with open("/dev/full", "w") as full:
                self.fails(4, *args, stdout=full, contains=["standard output", "No space left"])

    def test_quiet_keeps_the_json(self):
        source, target = harness.corpus("dcp-torch2.15.0-2d-dp4tp2"), self.path("full.h5")
        self.ok("consolidate", source, "-o", target, "-q")
        for args in (("inspect", source), ("check", source), ("verify", target), ("diff", source, target),
                     ("units", source), ("consolidate", source, "-o", "other.h5", "--dry-run")):
            self.assertEqual(self.ok(*args, "-q"), "", args)
            self.assertEqual(self.ok(*args, "-q", "--json"), self.ok(*args, "--json"), args)
            json.loads(self.ok(*args, "-q", "--json"))
        # All differences are listed, not only the first.
        other = harness.corpus("dcp-torch2.15.0-train")
        p = self.run_tool("diff", source, other, "-q", "--json")
        self.assertEqual((p.returncode, p.stdout), (1, self.run_tool("diff", source, other, "--json").stdout))

    def test_a_missing_file_of_an_option_is_a_usage_error(self):
        source = harness.corpus("dcp-torch2.15.0-train")
        os.mkdir(self.path("no-weights"))
        with open(self.path("no-weights", "adapter_config.json"), "w") as f:
            f.write('{"peft_type": "LORA", "r": 16, "lora_alpha": 16}')
        for args, line in (
            (["check", source, "--against", "none"], "none: no such file; it should be a checkpoint or a schema"),
            (["check", source, "--against", "no-weights/adapter_config.json/x"], "x: no such file; it should be"),
            (["check", source, "--schema", "none"], "none: no such file; it should be a schema"),
            (["diff", source, source, "--schema", "none"], "none: no such file; it should be a schema or a checkpoint"),
            (["consolidate", source, "-o", "x.h5", "--schema", "none"], "none: no such file; it should be a schema or"),
            (["consolidate", source, "-o", "x.h5", "--adapter", "none"],
             "none/adapter_config.json: no such file; it should be the configuration of an adapter"),
            (["consolidate", source, "-o", "x.h5", "--adapter", "no-weights=0.5"],
             "no-weights/adapter_model.safetensors: no such file; it should be the weights of an adapter"),
            (["consolidate", source, "-o", "x.h5", "--recipe", "auto", "--config", "none"],
             "none: no such file; it should be a model's configuration"),
            (["consolidate", source, "-o", "x.h5", "--dequantize", "bf16", "--config", "no-weights"],
             "no-weights/config.json: no such file; it should be a model's configuration"),
            (["export", source, "-o", "x", "--config", "none"], "none: no such file; it should be a model's"),
            (["units", source, "--classes", "none"], "none: no such file; it should be a description of modules"),
            # These also take words, and say which.
            (["consolidate", source, "-o", "x.h5", "--recipe", "none"], "recipe 'none': neither a file nor a known recipe"),
            (["reshard", source, "-o", "x", "--dp", 2, "--tp", 2, "--tp-plan", "none"], "TP plan 'none': neither a file"),
            (["units", source, "--policy", "none"], "--policy 'none': neither a file nor a known policy"),
            (["export", source, "-o", "x", "--like", "none"], "none: has no config.json; name the directory of a model"),
        ):
            with self.subTest(args=args):
                self.fails(2, *args, contains=[line])

    def test_closed_pipe_is_quiet(self):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as out:
            p = self.run_tool("inspect", harness.corpus("dcp-torch2.15.0-fsdp2"), "--json", stdout=out)
        self.assertEqual((p.returncode, p.stderr), (0, ""))


if __name__ == "__main__":
    harness.main()
