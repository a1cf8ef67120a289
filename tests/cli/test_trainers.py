"""Folders of trainers, from their root to a folder for the Hugging Face hub, or to one line with the reason and the path that works.
tests/corpus/README.md says which package wrote each, and which were rebuilt from its source."""
import json
import os
import shutil
import struct

import harness
import safetensors_file

CORPUS = os.path.join(harness.CORPUS, "..")


class Trainers(harness.Case):
    def folder(self, *parts, to="run"):
        shutil.rmtree(self.path(to), ignore_errors=True)
        shutil.copytree(os.path.join(CORPUS, *parts), self.path(to))
        return to

    def assert_near(self, got, want):
        """The same names and shapes, and values of float32 that are equal up to the rounding of one product."""
        self.assertEqual({n: t[:2] for n, t in got.items()}, {n: t[:2] for n, t in want.items()})
        for name, (_, _, data) in want.items():
            numbers = lambda raw: struct.unpack("<%df" % (len(raw) // 4), raw)
            for a, b in zip(numbers(got[name][2]), numbers(data)):
                self.assertLess(abs(a - b), 1e-6, name)


class Verl(Trainers):
    def exported(self, out="hub"):
        return safetensors_file.read(self.path(out, "model.safetensors"))

    def test_one_command(self):
        for case in ("fsdp1", "fsdp2"):
            with self.subTest(case):
                run = self.folder("verl", case)
                out = self.ok("export", f"{run}/actor/", "-o", "hub", "-f")
                self.assertEqual(self.exported(), safetensors_file.read(self.path(run, "expected.safetensors")))
                self.assertIn(f"copied:   config.json, tokenizer.json, from {run}/actor/huggingface\n", out)
                self.assertIn("checked:  tie_word_embeddings, vocab_size, num_hidden_layers of config.json", out)
                for name in ("config.json", "tokenizer.json"):
                    with open(self.path(run, "actor", "huggingface", name)) as a, open(self.path("hub", name)) as b:
                        self.assertEqual(a.read(), b.read())

    def test_the_configuration_is_compared(self):
        run = self.folder("verl", "fsdp2")
        config = self.path(run, "actor", "huggingface", "config.json")
        with open(config, encoding="utf-8") as f:
            changed = {**json.load(f), "num_hidden_layers": 3}
        with open(config, "w", encoding="utf-8") as f:
            json.dump(changed, f)
        self.fails(2, "export", f"{run}/actor", "-o", "hub",
                   contains=[f"does not fit {run}/actor/huggingface", "has 2 layers, and config.json says 3"])
        self.assertNotIn("hub", self.listing())

    def test_options(self):
        run = self.folder("verl", "fsdp2")
        self.ok("export", f"{run}/actor", "-o", "hub", "--dtype", "bf16")
        self.assertEqual({t[0] for t in self.exported().values()}, {"BF16"})
        shutil.copytree(self.path(run, "actor", "huggingface"), self.path("other"))
        report = json.loads(self.ok("export", f"{run}/actor", "-o", "hub2", "--like", "other", "--json"))
        self.assertEqual(report["model"]["side_files"], ["config.json", "tokenizer.json"])

    def test_lora(self):
        run = self.folder("verl", "fsdp2-lora")
        p = self.run_tool("export", f"{run}/actor", "-o", "hub")
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertIn("and not lora_adapter (safetensors)", p.stderr)
        self.assert_near(self.exported(), safetensors_file.read(self.path(run, "expected.safetensors")))
        self.assertIn(f"into 4 weights; its configuration is {run}/actor/lora_adapter/adapter_config.json\n", p.stdout)
        # Without its configuration, alpha is unknown.
        shutil.rmtree(self.path(run, "actor", "lora_adapter"))
        self.fails(2, "export", f"{run}/actor", "-o", "none", contains=["belongs to a LoRA adapter", "--adapter-config FILE"])
        # A configuration that was left there is no error for a model without an adapter, unless it is named.
        plain = self.folder("verl", "fsdp2", to="plain")
        shutil.copytree(os.path.join(CORPUS, "verl", "fsdp2-lora", "actor", "lora_adapter"), self.path(plain, "actor", "lora_adapter"))
        self.assertEqual(self.run_tool("export", f"{plain}/actor", "-o", "plain-hub").returncode, 0)
        self.fails(2, "export", f"{plain}/actor", "-o", "none", "--adapter-config", f"{plain}/actor/lora_adapter",
                   contains=["has no LoRA adapter inside"])

    def test_the_optimizer_of_flat_parameters(self):
        run = self.folder("verl", "fsdp1")
        self.fails(5, "consolidate", f"{run}/actor", "-o", "all.pt",
                   contains=["optimizer state under a number", "FSDP1's flat parameters", "FSDP.optim_state_dict"])
        self.ok("consolidate", f"{run}/actor", "-o", "model.safetensors", "--include", "model.*", "--strip-prefix", "model.")
        self.assertEqual(safetensors_file.read(self.path("model.safetensors")),
                         safetensors_file.read(self.path(run, "expected.safetensors")))


if __name__ == "__main__":
    harness.main()
