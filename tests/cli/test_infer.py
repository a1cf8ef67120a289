"""recipes --infer: the shipped recipes are found again, from what the converters of their packages made
(tests/corpus/make_recipes.py), and are as general. From names alone, recipes are proposed that do the same."""

import json
import os
import re

import harness
import safetensors_file

RECIPES = os.path.join(harness.CORPUS, "..", "recipes")
FOLDERS = sorted(f for f in os.listdir(RECIPES) if os.path.exists(os.path.join(RECIPES, f, "from.safetensors")))
# What the other direction cannot make again: tensors that the converter drops, and a norm that has two names in A.
ONE_WAY = {"meta-llama", "megatron-dist-deepseek", "megatron-dist-glm4-5", "megatron-glm4-5-air",
           "megatron-kimi-k2", "torchtitan-0.2-gpt-oss", "torchtitan-0.2-llama4", "torchtitan-0.2-qwen3-moe",
           "torchtitan-gpt-oss", "torchtitan-qwen3-moe", "torchtitan-qwen3-5-moe"}
# Other sizes that the same tensors can have, and the shipped recipe, which was compared with the package.
OTHER_SIZES = [("torchtitan-llama3", "torchtitan-llama3", {"num_attention_heads": 8, "num_key_value_heads": 4}),
               ("megatron-llama", "megatron-llama", {"num_attention_heads": 28, "head_dim": 2}),
               ("litgpt-llama", "litgpt-llama", {"num_attention_heads": 6, "num_key_value_heads": 1, "head_dim": 4}),
               ("litgpt-pythia", "litgpt-neox", {"num_attention_heads": 2}), ("meta-llama", "meta-llama", {"num_attention_heads": 2})]
# Of other packages (tests/corpus/make_pairs.py): the number of rules, which is that of all names without the layers.
PAIRS = {"lens-gpt2": 17, "timm-flax-vit": 20, "whisper": 51}
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
                        if not name.startswith("mm_projector.proj."):  # a Sequential, which has no layers
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

    def test_pairs_of_other_packages(self):
        for name, count in PAIRS.items():
            here = os.path.join(RECIPES, "..", "pairs", name)
            for a, b in (("a", "b"), ("b", "a")):
                with self.subTest(name, a=a):
                    a, b = (os.path.join(here, side + ".safetensors") for side in (a, b))
                    p = self.run_tool("recipes", "--infer", a, b, "-o", "mine.json", "--force")
                    self.assertEqual(p.returncode, 0, p.stderr)
                    self.assertIn(f"proven: {count} rules make all", p.stderr)
                    self.assertEqual(self.convert(a, "mine.json", "--config", here), safetensors_file.read(b))

    def test_operations_are_derived(self):
        here = os.path.join(RECIPES, "..", "pairs")
        rules = json.loads(self.ok("recipes", "--infer", os.path.join(here, "lens-gpt2", "a.safetensors"),
                                   os.path.join(here, "lens-gpt2", "b.safetensors"), "-q"))["rules"]
        self.assertIn({"from": "transformer.h.{n}.attn.c_attn.weight",
                       "to": ["blocks.{n}.attn.W_Q", "blocks.{n}.attn.W_K", "blocks.{n}.attn.W_V"],
                       "operations": [{"chunk": 1}, {"rearrange": "a (heads c) -> heads a c"}]}, rules)
        rules = json.loads(self.ok("recipes", "--infer", os.path.join(here, "timm-flax-vit", "a.safetensors"),
                                   os.path.join(here, "timm-flax-vit", "b.safetensors"), "-q"))["rules"]
        self.assertIn({"from": "embedding.kernel", "to": "patch_embed.proj.weight", "operations": {"rearrange": "a b c d -> d c a b"}}, rules)
        self.assertIn("Transformer.encoderblock_{n}.LayerNorm_0.scale", [rule["from"] for rule in rules])

    def test_zeros_from_nowhere(self):
        tensors = safetensors_file.read(side("torchtitan-llama3", "to"))
        safetensors_file.write(self.path("b.safetensors"), {**tensors, "lm_head.bias": ("F32", [4], b"\0" * 16)})
        p = self.run_tool("recipes", "--infer", side("torchtitan-llama3", "from"), "b.safetensors")
        self.assertEqual(p.returncode, 1, p.stderr)
        self.assertIn("not explained: lm_head.bias of b.safetensors; all of it is zero\n", p.stderr)

    def test_halves_that_change_places(self):
        """The language has no operation for it, but the values are the same: that is not said to be another model."""
        tensors = safetensors_file.read(side("torchtitan-llama3", "to"))
        big = {n: (d, s, b[len(b) // 2:] + b[:len(b) // 2]) for n, (d, s, b) in tensors.items()}
        safetensors_file.write(self.path("b.safetensors"), big)
        p = self.run_tool("recipes", "--infer", side("torchtitan-llama3", "from"), "b.safetensors")
        self.assertEqual(p.returncode, 1)
        self.assertNotIn("not the same weights", p.stderr)
        self.assertIn("not explained: lm_head.weight of b.safetensors", p.stderr)

    def test_a_finetuned_model_is_another_one(self):
        tensors = safetensors_file.read(side("torchtitan-llama3", "to"))
        for share, code in ((1.0, "these are not the same weights: 0.0 %"), (0.1, "not proven: ")):
            changed = {}
            for k, (name, (dtype, shape, data)) in enumerate(sorted(tensors.items())):
                data = bytearray(data)
                data[0] ^= k < share * len(tensors)
                changed[name] = (dtype, shape, bytes(data))
            safetensors_file.write(self.path("b.safetensors"), changed)
            p = self.run_tool("recipes", "--infer", side("torchtitan-llama3", "from"), "b.safetensors")
            self.assertEqual(p.returncode, 1, p.stderr)
            self.assertIn(code, p.stderr)

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

    def propose(self, source, folder, rc=0):
        p = self.run_tool("recipes", "--infer", source, "--config", os.path.join(RECIPES, folder), "-o", "mine.json", "--force")
        self.assertEqual(p.returncode, rc, p.stderr)
        self.assertIn("not proven: ", p.stderr)
        with open(self.path("mine.json"), encoding="utf-8") as f:
            recipe = json.load(f)
        self.assertTrue(recipe["description"].startswith("not proven"), recipe["description"])
        return recipe, p.stderr

    def test_from_names_alone(self):
        """The proposal does what the shipped recipe does, which was compared with the package."""
        ambiguous = []
        for folder in FOLDERS:
            with self.subTest(folder):
                recipe, said = self.propose(side(folder, "from"), folder)
                if ", or of megatron-" in said:  # the config.json does not name the model
                    ambiguous.append(folder)
                else:
                    self.assertEqual(self.convert(side(folder, "from"), "mine.json", "--config", os.path.join(RECIPES, folder)),
                                     safetensors_file.read(side(folder, "to")))
                self.assertFalse(any("note" in rule for rule in recipe["rules"]), recipe)
        self.assertEqual(sorted(ambiguous), ["megatron-dist-mixtral", "megatron-dist-mixtral-single", "megatron-dist-qwen3-moe"])

    def test_a_name_that_nobody_knows(self):
        for folder in ("torchtitan-llama3", "megatron-qwen-moe", "olmo-core"):
            with self.subTest(folder):
                tensors = safetensors_file.read(side(folder, "from"))
                tensors["layers.1.mystery.weight"] = ("F32", [2], b"\0" * 8)
                safetensors_file.write(self.path("a.safetensors"), tensors)
                err = self.propose("a.safetensors", folder, rc=1)[1]
                self.assertIn("no rule: layers.1.mystery.weight\n", err)
                self.assertIn(f"take {len(tensors) - 1} of {len(tensors)} tensors", err)
                self.fails(2, "consolidate", "a.safetensors", "-o", "no.safetensors", "--recipe", "mine.json", "--config",
                           os.path.join(RECIPES, folder), contains=["takes 'layers.1.mystery.weight'"])

    def test_shapes_that_do_not_fit(self):
        tensors = safetensors_file.read(side("litgpt-llama", "from"))
        name = "transformer.h.1.attn.qkv.weight"
        dtype, shape, data = tensors[name]
        row = len(data) // shape[0]
        tensors[name] = (dtype, [shape[0] - 1, *shape[1:]], data[:-row])
        safetensors_file.write(self.path("a.safetensors"), tensors)
        self.assertIn("no rule: transformer.h.0.attn.qkv.weight; the nearest does not fit: ", self.propose("a.safetensors", "litgpt-llama", rc=1)[1])
        self.fails(2, "recipes", "--infer", "a.safetensors", contains=["needs 'num_attention_heads' of the model's config.json"])

    def test_names_that_are_nearly_known(self):
        want = safetensors_file.read(side("torchtitan-llama3", "to"))
        for front, layers in (("module.", "module.layers"), ("", "decoder.blocks")):
            with self.subTest(layers):
                tensors = {front + n if not n.startswith("layers.") else layers + n[len("layers"):]: t
                           for n, t in safetensors_file.read(side("torchtitan-llama3", "from")).items()}
                safetensors_file.write(self.path("a.safetensors"), tensors)
                rules = self.propose("a.safetensors", "torchtitan-llama3")[0]["rules"]
                notes = [rule.get("note") for rule in rules if "layers" in rule["from"] or "blocks" in rule["from"]]
                self.assertEqual(set(notes), {"a guess: the name is nearly one of torchtitan-llama3"})
                config = os.path.join(RECIPES, "torchtitan-llama3")
                self.assertEqual(self.convert("a.safetensors", "mine.json", "--config", config), want)

    def test_names_of_several_recipes(self):
        """A dense layer in a mixture of experts, and biases, which two recipes of Megatron have; another one knows none of the names."""
        tensors = safetensors_file.read(side("megatron-qwen-moe", "from"))
        tensors["decoder.layers.0.mlp.linear_fc1.weight_w"] = ("F32", [2], b"\0" * 8)
        safetensors_file.write(self.path("a.safetensors"), tensors)
        rules, err = self.propose("a.safetensors", "megatron-qwen-moe")
        self.assertEqual(rules["rules"][-1], {
            "from": "decoder.layers.{n}.mlp.linear_fc1.weight_w", "to": "model.layers.{n}.mlp.gate_proj.weight",
            "note": "a guess: the name is one of megatron-deepseek-v3"})
        self.assertIn("a guess: decoder.layers.{n}.mlp.linear_fc1.weight_w", err)

    def test_equal_tensors_before_those_with_the_same_elements(self):
        """The names would say another pair, which has the same elements in another order."""
        rows = [bytes([i, i + 1]) * 8 for i in range(0, 16, 2)]
        one, other = (("BF16", [8, 8], b"".join(r)) for r in (rows, rows[::2] + rows[1::2]))
        safetensors_file.write(self.path("a.safetensors"), {"q": one, "k": other})
        safetensors_file.write(self.path("b.safetensors"), {"q": other, "k": one})
        self.ok("recipes", "--infer", "a.safetensors", "b.safetensors", "-o", "mine.json", "-q")
        with open(self.path("mine.json"), encoding="utf-8") as f:
            self.assertEqual(json.load(f)["rules"], [{"from": "q", "to": "k"}, {"from": "k", "to": "q"}])

    def test_damage(self):
        """A digest that is recorded does not replace reading the tensor."""
        for name in ("a", "b"):
            safetensors_file.write(self.path(f"{name}.safetensors"), {name: ("BF16", [8, 8], bytes(range(128)))})
            self.ok("verify", "--seal", f"{name}.safetensors", "-q")
        self.ok("recipes", "--infer", "a.safetensors", "b.safetensors", "-q")
        for name in ("a", "b"):
            path = self.path(f"{name}.safetensors")
            with self.flipped(path, os.path.getsize(path) - 3):
                self.fails(3, "recipes", "--infer", "a.safetensors", "b.safetensors", contains=[f"tensor {name}: damaged"])

    def test_names_of_the_hub(self):
        self.fails(2, "recipes", "--infer", side("torchtitan-llama3", "to"), contains=["the names are those of the model hub already", "'torchtitan-llama3'"])
        safetensors_file.write(self.path("a.safetensors"), {"x.y": ("F32", [2], b"\0" * 8)})
        self.fails(2, "recipes", "--infer", "a.safetensors", contains=["no shipped recipe has one of its names"])

    def test_wrong_use(self):
        a, b = side("nanogpt", "from"), side("nanogpt", "to")
        self.fails(2, "recipes", "--infer", contains=["--infer needs two checkpoints"])
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
