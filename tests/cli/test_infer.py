"""recipes --infer: the shipped recipes are found again, from what the converters of their packages made
(tests/corpus/make_recipes.py), and are as general."""

import json
import os
import re

import harness
import safetensors_file

RECIPES = os.path.join(harness.CORPUS, "..", "recipes")
FOLDERS = sorted(f for f in os.listdir(RECIPES) if os.path.exists(os.path.join(RECIPES, f, "from.safetensors")))
# What the other direction cannot make again: tensors that the converter drops, and a norm that has two names in A.
ONE_WAY = {"meta-llama", "megatron-dist-deepseek", "torchtitan-0.2-gpt-oss", "torchtitan-0.2-llama4", "torchtitan-0.2-qwen3-moe",
           "torchtitan-gpt-oss", "torchtitan-qwen3-moe"}
# Other sizes that the same tensors can have, and the shipped recipe, which was compared with the package.
OTHER_SIZES = [("torchtitan-llama3", "torchtitan-llama3", {"num_attention_heads": 8, "num_key_value_heads": 4}),
               ("megatron-llama", "megatron-llama", {"num_attention_heads": 28, "head_dim": 2}),
               ("litgpt-llama", "litgpt-llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 4}),
               ("litgpt-pythia", "litgpt-neox", {"num_attention_heads": 2}), ("meta-llama", "meta-llama", {"num_attention_heads": 2})]
MORE_LAYERS = [("transformers-mixtral", "transformers-mixtral"), ("transformers-qwen-moe", "transformers-qwen-moe"),
               ("megatron-qwen-moe", "megatron-qwen-moe"), ("olmo-core", "olmo-core"), ("nanogpt", "nanogpt")]


def side(folder, name):
    return os.path.join(RECIPES, folder, f"{name}.safetensors")


def larger(tensors):
    """Five layers, and twice as many experts: of a tensor that has all of them, or with numbers of their own."""
    out = {}
    for name, (dtype, shape, data) in tensors.items():
        if "experts" in name and len(shape) == 3:
            shape, data = [2 * shape[0], *shape[1:]], data + data
        names = [name]
        if re.search(r"weight\d$", name):
            names.append(name[:-1] + str(int(name[-1]) + 4))
        for n in names:
            if re.search(r"(layers|blocks|h)\.1\.", n):
                for layer in range(1, 5):
                    out[re.sub(r"(layers|blocks|h)\.1\.", rf"\g<1>.{layer}.", n)] = (dtype, shape, data)
            else:
                out[n] = (dtype, shape, data)
    return out


class Infer(harness.Case):
    maxDiff = 2000

    def find(self, folder, *more):
        self.ok("recipes", "--infer", side(folder, "from"), side(folder, "to"), "-o", "mine.json", "--force", "-q", *more)
        with open(self.path("mine.json"), encoding="utf-8") as f:
            return json.load(f)

    def convert(self, source, recipe, *more):
        self.ok("consolidate", source, "-o", "out.safetensors", "--force", "-q", "--recipe", recipe, *more)
        return safetensors_file.read(self.path("out.safetensors"))

    def test_all_that_are_shipped(self):
        for folder in FOLDERS:
            with self.subTest(folder):
                config = ("--config", os.path.join(RECIPES, folder))
                found = self.find(folder)
                for rule in found["rules"]:
                    for name in re.findall(r'"([^"]*)"', json.dumps([rule.get(k, "") for k in ("from", "to", "drop")])):
                        self.assertIsNone(re.search(r"\.\d+(\.|$)", name), name)  # a rule for all layers and experts
                self.assertEqual(self.convert(side(folder, "from"), "mine.json", *config), safetensors_file.read(side(folder, "to")))
                if folder not in ONE_WAY:
                    self.assertEqual(self.convert(side(folder, "to"), "mine.json", "--reverse", *config),
                                     safetensors_file.read(side(folder, "from")))

    def test_sizes_are_those_of_the_config(self):
        for folder, shipped, sizes in OTHER_SIZES:
            with self.subTest(folder), open(os.path.join(RECIPES, folder, "config.json"), encoding="utf-8") as f:
                config = {**json.load(f), **sizes}
                with open(self.path("config.json"), "w", encoding="utf-8") as g:
                    json.dump(config, g)
                self.find(folder)
                got = [self.convert(side(folder, "from"), r, "--config", "config.json") for r in ("mine.json", shipped)]
                self.assertEqual(*got)
                self.assertNotEqual(got[0], safetensors_file.read(side(folder, "to")))

    def test_more_layers_and_experts(self):
        for folder, shipped in MORE_LAYERS:
            with self.subTest(folder):
                config = ("--config", os.path.join(RECIPES, folder))
                self.find(folder)
                safetensors_file.write(self.path("larger.safetensors"), larger(safetensors_file.read(side(folder, "from"))))
                got = [self.convert("larger.safetensors", r, *config) for r in ("mine.json", shipped)]
                self.assertEqual(*got)
                self.assertGreater(len(got[0]), len(safetensors_file.read(side(folder, "to"))) * 3 // 2)

    def test_other_formats_and_layouts(self):
        want = self.ok("recipes", "--infer", side("megatron-qwen-moe", "from"), side("megatron-qwen-moe", "to"), "-q")
        self.ok("reshard", side("megatron-qwen-moe", "from"), "-o", "a", "--to", "dcp", "--dp", "3")
        self.ok("consolidate", side("megatron-qwen-moe", "to"), "-o", "b.h5", "--compress", "1")
        got = self.ok("recipes", "--infer", "a", "b.h5", "-q", "--config", os.path.join(RECIPES, "megatron-qwen-moe"))
        self.assertEqual(json.loads(got)["rules"], json.loads(want)["rules"])
        without = json.loads(self.ok("recipes", "--infer", "a", "b.h5", "-q"))  # numbers in place of names
        self.assertEqual(len(without["rules"]), len(json.loads(want)["rules"]))

    def test_stacked_layers_of_megatron(self):
        """torch_dist has all layers and experts in one tensor, and padding."""
        for folder in ("llama", "qwen3-moe", "mixtral"):
            with self.subTest(folder):
                here = os.path.join(RECIPES, "megatron-dist-" + folder)
                found = json.loads(self.ok("recipes", "--infer", os.path.join(here, "torch_dist"), os.path.join(here, "to.safetensors"),
                                           "--model-only", "-q"))
                self.assertTrue(any("unstack" in json.dumps(rule) for rule in found["rules"]))

    def test_tied_tensors(self):
        found = self.find("torchtitan-llama3-tied")
        self.assertIn({"drop": "lm_head.weight", "same_as": "tok_embeddings.weight"}, found["rules"])
        found = self.find("megatron-dist-deepseek")
        self.assertIn({"add": "model.layers.{0+num_hidden_layers}.shared_head.head.weight", "same_as": "lm_head.weight"}, found["rules"])

    def test_what_is_found_is_told(self):
        p = self.run_tool("recipes", "--infer", side("meta-llama", "from"), side("meta-llama", "to"), "-o", "m.json")
        self.assertEqual((p.returncode, p.stdout), (0, ""))
        self.assertIn("left out: rope.freqs\n", p.stderr)
        self.assertIn("proven: 13 rules make all 21 tensors", p.stderr)

    def test_guesses_are_marked(self):
        """Half a head is two elements here, so pairs and halves look alike. The shipped recipe has pairs, then halves."""
        rules = {rule["to"]: rule for rule in self.find("meta-llama")["rules"] if "operations" in rule}
        self.assertEqual(sorted(rules), ["model.layers.{n}.self_attn.k_proj.weight", "model.layers.{n}.self_attn.q_proj.weight"])
        for rule in rules.values():
            self.assertEqual(rule["note"], "a guess: two axes have the same size, so either order fits")

    def test_one_tensor_that_is_not_the_same(self):
        tensors = safetensors_file.read(side("torchtitan-llama3", "to"))
        name = "model.layers.1.self_attn.v_proj.weight"
        dtype, shape, data = tensors[name]
        changed = bytearray(data)
        changed[2 * (3 * shape[1] + 5)] ^= 1
        safetensors_file.write(self.path("b.safetensors"), {**tensors, name: (dtype, shape, bytes(changed))})
        p = self.run_tool("recipes", "--infer", side("torchtitan-llama3", "from"), "b.safetensors", "--config", os.path.join(RECIPES, "torchtitan-llama3"))
        self.assertEqual(p.returncode, 1)
        self.assertIn(f"not explained: {name} of b.safetensors; the nearest is layers.1.attention.qkv_linear.wv.weight, which differs "
                      "first at [3, 5]", p.stderr)
        self.assertIn("not proven: 12 rules make 20 tensors", p.stderr)
        self.assertEqual(len(json.loads(p.stdout)["rules"]), 12)

    def test_other_weights(self):
        tensors = safetensors_file.read(side("torchtitan-llama3", "from"))
        other = {n: (d, s, bytes(x ^ (0x55 if len(s) > 1 else 0) for x in b)) for n, (d, s, b) in tensors.items()}
        safetensors_file.write(self.path("b.safetensors"), other)
        self.fails(1, "recipes", "--infer", side("torchtitan-llama3", "from"), "b.safetensors", "-o", "m.json",
                   contains=["these are not the same weights: 1.6 % of the elements agree"])
        self.assertFalse(os.path.exists(self.path("m.json")))

    def test_wrong_use(self):
        a, b = side("nanogpt", "from"), side("nanogpt", "to")
        self.fails(2, "recipes", "--infer", a, contains=["--infer needs two checkpoints"])
        self.fails(2, "recipes", a, b, contains=["two checkpoints need --infer"])
        self.fails(2, "recipes", "nanogpt", "-o", "x.json", contains=["--output needs --infer"])
        with open(self.path("x.json"), "w", encoding="utf-8") as f:
            f.write("kept")
        p = self.run_tool("recipes", "--infer", a, b, "-o", "x.json")
        self.assertEqual(p.returncode, 2, p.stderr)
        with open(self.path("x.json"), encoding="utf-8") as f:
            self.assertEqual(f.read(), "kept")


if __name__ == "__main__":
    harness.main()
