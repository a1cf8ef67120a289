"""--recipe: shipped recipes against what the converters of their packages made (tests/corpus/make_recipes.py), from and to
every layout."""

import glob
import hashlib
import json
import os
import re
import shutil

import harness
import safetensors_file

RECIPES = os.path.join(harness.CORPUS, "..", "recipes")
# Folder of the corpus, recipe, and what the converter drops, so that it does not come back. None: the names are older than
# those that --reverse makes.
CASES = [("torchtitan-llama3", "torchtitan-llama3", []), ("torchtitan-llama3-tied", "torchtitan-llama3", []),
         ("torchtitan-qwen3", "torchtitan-qwen3", []),
         ("torchtitan-qwen3-moe", "torchtitan-qwen3", ["layers.0.moe.expert_bias_E", "layers.1.moe.expert_bias_E"]),
         ("litgpt-llama", "litgpt-llama", []), ("litgpt-qwen2", "litgpt-llama", []), ("litgpt-qwen3", "litgpt-llama", []),
         ("litgpt-gemma2", "litgpt-gemma", []), ("litgpt-gemma3", "litgpt-gemma", []), ("litgpt-phi3", "litgpt-phi", []),
         ("litgpt-pythia", "litgpt-neox", []), ("nanogpt", "nanogpt", []),
         ("meta-llama", "meta-llama", ["rope.freqs"]), ("nanotron-llama", "nanotron-llama", []), ("nanotron-qwen2", "nanotron-llama", []),
         ("torchtitan-deepseek-v3", "torchtitan-deepseek-v3", []), ("torchtitan-deepseek-v3-lite", "torchtitan-deepseek-v3", []),
         ("torchtitan-gpt-oss", "torchtitan-gpt-oss", ["layers.0.moe.expert_bias_E", "layers.1.moe.expert_bias_E"]),
         ("transformers-deepseek-v3", "transformers-deepseek-v3", []),
         ("transformers-mixtral", "transformers-mixtral", []), ("transformers-qwen-moe", "transformers-qwen-moe", []),
         ("megatron-llama", "megatron-llama", []), ("megatron-qwen2", "megatron-llama", []),
         ("megatron-qwen3", "megatron-llama", []), ("megatron-qwen-moe", "megatron-qwen-moe", []),
         ("torchtitan-0.2-llama3", "torchtitan-llama3", None), ("torchtitan-0.2-qwen3-moe", "torchtitan-qwen3", None),
         ("torchtitan-0.2-deepseek-v3", "torchtitan-deepseek-v3", None), ("torchtitan-0.2-gpt-oss", "torchtitan-gpt-oss", None),
         ("torchtitan-0.2-llama4", "torchtitan-llama4", ["layers.1.moe.expert_bias"]),
         ("olmo-core", "olmo-core", []), ("olmo-core-flex", "olmo-core", []), ("olmo-core-llama", "olmo-core-llama", []),
         ("olmo-core-qwen3", "olmo-core-llama", []), ("olmo", "olmo", []), ("olmo2", "olmo", [])]
# The same for the cases of make_families.py.
FAMILIES = {"torchtitan-qwen3-5": ("torchtitan-qwen3-5", []),
            "torchtitan-qwen3-5-moe": ("torchtitan-qwen3-5", ["layers.0.moe.expert_bias_E", "layers.1.moe.expert_bias_E"]),
            "megatron-kimi-k2": ("megatron-deepseek-v3", []), "megatron-glm4-5-air": ("megatron-deepseek-v3", []),
            "megatron-gemma2": ("megatron-llama", []), "megatron-gemma3": ("megatron-llama", []),
            "megatron-nemotron": ("megatron-llama", []), "megatron-gpt-oss": ("megatron-gpt-oss", []),
            "megatron-qwen2-5-vl": ("megatron-qwen2-5-vl", []), "megatron-qwen3-vl": ("megatron-qwen3-vl", []),
            "megatron-qwen3-vl-moe": ("megatron-qwen3-vl", []),
            "torchtitan-kimi-k2": ("torchtitan-deepseek-v3", []), "torchtitan-kimi-k2-5": ("torchtitan-kimi-k2-5", []),
            "transformers-glm4-moe": ("transformers-deepseek-v3", []), "transformers-minimax-m2": ("transformers-mixtral", []),
            "transformers-qwen3-next": ("transformers-qwen-moe", [])}
# Models that mbridge loaded into GPTModels on several ranks, by make_megatron_models.py.
DISTRIBUTED = [("llama", "megatron-llama"), ("qwen3-moe", "megatron-qwen-moe"), ("qwen2-moe", "megatron-qwen-moe"),
               ("mixtral", "megatron-mixtral"), ("mixtral-single", "megatron-mixtral"), ("deepseek", "megatron-deepseek-v3"),
               ("glm4-5", "megatron-deepseek-v3")]
# Megatron's names of the same tensors without Transformer Engine, and of experts that are not grouped.
LOCAL = [("self_attention.linear_qkv.layer_norm_", "input_layernorm.{}"), ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.{}"),
         ("experts.linear_fc1.weight", "experts.local_experts.{}.linear_fc1.weight"),
         ("experts.linear_fc2.weight", "experts.local_experts.{}.linear_fc2.weight")]


def local_name(name):
    for engine, local in LOCAL:
        at = name.find(engine)
        if at >= 0:
            number = name[at + len(engine):]
            return name[:at] + local.format(number)
    return name


def stacked(tensors, pattern, name, number):
    """Joins the tensors that match along a new first dimension, in the order of the group `number`."""
    made, groups = {}, {}
    for old, tensor in tensors.items():
        found = re.fullmatch(pattern, old)
        if found:
            groups.setdefault(found.expand(name), []).append((int(found[number]), tensor))
        else:
            made[old] = tensor
    for new, parts in groups.items():
        parts = [t for _, t in sorted(parts, key=lambda p: p[0])]
        made[new] = (parts[0][0], [len(parts), *parts[0][1]], b"".join(t[2] for t in parts))
    return made


def halved(tensors, name):
    """Gives the halves of each expert's linear_fc1 names of their own."""
    made = {}
    for old, (dtype, shape, data) in tensors.items():
        found = re.fullmatch(r"(.*\.mlp\.experts\.)linear_fc1\.weight(\d+)", old)
        for i, half in enumerate("wv" if found else ()):
            part = data[i * len(data) // 2:(i + 1) * len(data) // 2]
            made[found.expand(name) + "_" + half] = (dtype, [shape[0] // 2, *shape[1:]], part)
        if not found:
            made[old] = (dtype, shape, data)
    return made


def takers(case, name, side):
    """The shipped recipes with a pattern that matches the name of a tensor, of any model."""
    found = []
    for recipe in (line.split()[0] for line in case.ok("recipes").splitlines()):
        for rule in json.loads(case.ok("recipes", recipe))["rules"]:
            if "model_type" in rule.get("when", ""):
                continue  # for another model
            patterns = rule.get(side, rule.get("drop") if side == "from" else None) or []
            for p in [patterns] if isinstance(patterns, str) else patterns:
                if re.fullmatch(re.sub(r"\\{[^{}]*\\}", r"\\d+", re.escape(p)), name):
                    found.append(recipe)
    return set(found)


def decided(case, source, recipe, side):
    """The tensor that export names as the reason for a recipe, or None. Only that recipe has a pattern for it."""
    reverse = ("--recipe", "auto", "--reverse") if side == "to" else ()
    report = json.loads(case.ok("export", source, "-o", "reason", "--dry-run", "--json", "-q", *reverse))["model"]
    case.assertEqual((report["recipe"], report["recipe_reason"]["by"]), (recipe, "names"))
    name = report["recipe_reason"]["tensor"]
    if name is not None:
        case.assertIn(name, safetensors_file.read(source))
        case.assertEqual(takers(case, name, side), {recipe})
    return name


class Shipped(harness.Case):
    def check(self, source, target, *options):
        self.ok("consolidate", source, "-o", self.path("out.safetensors"), "--force", "-q", *options)
        got = safetensors_file.read(self.path("out.safetensors"))
        self.assertEqual(sorted(got), sorted(target))
        for name in target:
            self.assertEqual(got[name], target[name], name)

    def test_as_the_converter_did(self):
        for folder, recipe, lost in CASES + [(folder, *case) for folder, case in FAMILIES.items()]:
            here = os.path.join(RECIPES, folder)
            both = {side: safetensors_file.read(os.path.join(here, f"{side}.safetensors")) for side in ("from", "to")}
            back = {name: t for name, t in both["from"].items() if name not in (lost or ())}
            for source, target, options in (("from", both["to"], ()), ("to", back, ("--reverse",)))[:1 if lost is None else 2]:
                with self.subTest(folder, source=source):
                    path = os.path.join(here, f"{source}.safetensors")
                    self.check(path, target, "--recipe", recipe, *options)
                    given = ("--recipe", recipe, "--config", here, *options)
                    for to in ("dcp",) if folder in FAMILIES else ("h5", "dcp", "pt"):  # uneven shards cut heads, experts and halves
                        self.ok("reshard", path, "-o", self.path(to), "--to", to, "--dp", "3", "--tp", "2", "--force")
                        self.check(to, target, *given)

    def test_distributed_models_of_megatron(self):
        """torch_dist with stacked layers and experts, and one file per rank; padding of the vocabulary comes back as zeros."""
        for folder, recipe in DISTRIBUTED:
            here = os.path.join(RECIPES, "megatron-dist-" + folder)
            given = ("-q", "--recipe", recipe, "--config", here)
            both = {side: safetensors_file.read(os.path.join(here, f"{side}.safetensors")) for side in ("from", "to")}
            with self.subTest(folder):
                self.check(os.path.join(here, "torch_dist"), both["to"], "--exclude", "*optimizer*", *given)
                self.check(os.path.join(here, "to.safetensors"), both["from"], "--reverse", *given)
                self.check(os.path.join(here, "from.safetensors"), both["to"], *given)
                if os.path.exists(os.path.join(here, "ranks")):
                    self.check(os.path.join(here, "ranks"), both["to"], "--include", "model.*", "--strip-prefix", "model.",
                               *given)

    def test_torch_dist_of_families(self):
        for folder in ("megatron-gpt-oss", "megatron-nemotron"):
            here = os.path.join(RECIPES, folder)
            self.check(os.path.join(here, "torch_dist"), safetensors_file.read(os.path.join(here, "to.safetensors")), "--model-only",
                       "--recipe", FAMILIES[folder][0], "--config", here)

    def test_folder_of_nemo(self):
        """NeMo 2 has Megatron's torch_dist in the folder `weights`, with `module.` before all names."""
        here = os.path.join(RECIPES, "megatron-dist-nemo")
        want = safetensors_file.read(os.path.join(here, "to.safetensors"))
        for source in (here, os.path.join(here, "weights")):
            out = self.ok("export", source, "-o", "out", "--force", "--config", here)
            self.assertIn("names:    megatron-llama, ", out)
            self.assertEqual(safetensors_file.read(self.path("out", "model.safetensors")), want)
        listed = json.loads(self.ok("inspect", here, "--json"))
        self.assertEqual(listed["format"], "megatron")
        self.assertEqual({o["name"]: o["value"] for o in listed["objects"]}["global_step"], 10)
        os.makedirs(self.path("run/weights"))  # a folder of this name alone says nothing
        self.fails(3, "inspect", "run", contains=["run: not a checkpoint"])
        shutil.copytree(os.path.join(here, "weights"), self.path("cut/weights"))
        os.truncate(self.path("cut/weights/common.pt"), 100)
        self.fails(3, "inspect", "cut", contains=["cut/weights/common.pt"])

    def test_checkpoint_of_megatron_fsdp(self):
        """fsdp_dtensor is DCP with wrappers before the names, fp32 masters as weights, and gate and up apart."""
        for folder, recipe in DISTRIBUTED[:2]:
            here = os.path.join(RECIPES, "megatron-dist-" + folder)
            hub = safetensors_file.read(os.path.join(here, "to.safetensors"))
            for case in sorted(glob.glob(os.path.join(here, "fsdp_dtensor-*", ""))):
                with self.subTest(case):
                    self.ok("export", case, "-o", "out", "--force", "--recipe", recipe, "--config", here, "--dtype", "bf16")
                    self.assertEqual(safetensors_file.read(self.path("out", "model.safetensors")), hub)
                    self.ok("consolidate", case, "-o", "m.safetensors", "--force", "-q", "--model-only", "--recipe", recipe,
                            "--config", here, "--dtype", "bf16")
                    self.assertEqual(safetensors_file.read(self.path("m.safetensors")), hub)
                    with open(case.rstrip("/") + ".json", encoding="utf-8") as f:
                        want = {name: tuple(t[1:]) for name, t in json.load(f).items()}
                    self.ok("reshard", case, "-o", "again", "--to", "dcp", "--dp", "3", "--force", "-q")
                    for source in (case, "again"):
                        self.ok("consolidate", source, "-o", "all.safetensors", "--force", "-q")
                        got = {name: (t[1], hashlib.sha256(t[2]).hexdigest())
                               for name, t in safetensors_file.read(self.path("all.safetensors")).items()}
                        self.assertEqual(got, want)
                    for given in ((), ("--model-only",)):
                        self.fails(5, "reshard", case, "-o", "td", "--to", "torch_dist", "--dp", "2", *given,
                                   contains=["_w is half of what torch_dist has as one tensor"])

    def test_halves_of_experts(self):
        """Megatron-FSDP's names of gate and up, for grouped experts and others."""
        for folder, recipe in (("mixtral", "megatron-mixtral"), ("qwen2-moe", "megatron-qwen-moe"),
                               ("deepseek", "megatron-deepseek-v3")):
            here = os.path.join(RECIPES, "megatron-dist-" + folder)
            source = safetensors_file.read(os.path.join(here, "from.safetensors"))
            target = safetensors_file.read(os.path.join(here, "to.safetensors"))
            for name in (r"\1linear_fc1.weight\2", r"\1local_experts.\2.linear_fc1.weight"):
                with self.subTest(folder, name=name):
                    safetensors_file.write(self.path("v.safetensors"), halved(source, name))
                    self.check("v.safetensors", target, "--recipe", recipe, "--config", here)

    def test_model_of_the_config_decides(self):
        """Mixtral and Qwen-MoE have the same names in Megatron."""
        for folder, model, recipe in (("mixtral", "mixtral", "megatron-mixtral"), ("qwen2-moe", "qwen2_moe", "megatron-qwen-moe")):
            here = os.path.join(RECIPES, "megatron-dist-" + folder)
            with open(os.path.join(here, "config.json"), encoding="utf-8") as f:
                config = {**json.load(f), "model_type": model}
            with open(self.path("config.json"), "w", encoding="utf-8") as f:
                json.dump(config, f)
            run = ("consolidate", os.path.join(here, "from.safetensors"), "-o", "m.safetensors", "--force", "--recipe", "auto")
            p = self.run_tool(*run, "--config", "config.json")
            self.assertEqual((p.returncode, p.stderr.count(f"the recipe is {recipe}")), (0, 1), p.stderr)
            self.assertEqual(safetensors_file.read(self.path("m.safetensors")),
                             safetensors_file.read(os.path.join(here, "to.safetensors")))

    def test_distributed_optimizer_of_megatron(self):
        """Each sharding type is read as torch's DCP reader reads it."""
        for folder in ("llama", "mixtral-single"):
            here = os.path.join(RECIPES, "megatron-dist-" + folder)
            with open(os.path.join(here, "optimizer.json"), encoding="utf-8") as f:
                want = {name: tuple(t) for name, t in json.load(f).items()}
            self.ok("consolidate", os.path.join(here, "torch_dist"), "-o", "o.safetensors", "--include", "*optimizer*", "-q", "--force")
            got = {name: (t[1], hashlib.sha256(t[2]).hexdigest())
                   for name, t in safetensors_file.read(self.path("o.safetensors")).items()}
            self.assertEqual(got, want)

    def test_other_names_of_megatron(self):
        for folder, recipe in (("megatron-llama", "megatron-llama"), ("megatron-qwen2", "megatron-llama"),
                               ("megatron-qwen3", "megatron-llama"), ("megatron-qwen-moe", "megatron-qwen-moe"),
                               ("megatron-gemma3", "megatron-llama"), ("megatron-nemotron", "megatron-llama"),
                               ("megatron-qwen2-5-vl", "megatron-qwen2-5-vl"), ("megatron-qwen3-vl", "megatron-qwen3-vl"),
                               ("megatron-qwen3-vl-moe", "megatron-qwen3-vl")):
            here = os.path.join(RECIPES, folder)
            source = safetensors_file.read(os.path.join(here, "from.safetensors"))
            target = safetensors_file.read(os.path.join(here, "to.safetensors"))
            variants = [{local_name(name): t for name, t in source.items()},
                        stacked(source, r"(.*experts)\.(linear_fc.\.weight)(\d+)", r"\1.experts.\2", 3)]
            if recipe != "megatron-qwen-moe":  # torch_dist stores all layers in one tensor
                variants.append(stacked(variants[1], r"(.*decoder\.layers)\.(\d+)\.(.*)", r"\1.\3", 2))
            for i, tensors in enumerate(variants):
                with self.subTest(folder, variant=i):
                    safetensors_file.write(self.path("v.safetensors"), tensors)
                    self.check("v.safetensors", target, "--recipe", recipe, "--config", here)

    def test_gpt2_of_the_hub(self):
        """Its files have no prefix, and a mask that no model of today has."""
        here = os.path.join(RECIPES, "nanogpt")
        hub = {name.removeprefix("transformer."): t for name, t in safetensors_file.read(os.path.join(here, "to.safetensors")).items()}
        hub["h.0.attn.bias"] = ("F32", [1, 1, 2, 2], bytes(16))
        safetensors_file.write(self.path("hub.safetensors"), hub)
        self.check("hub.safetensors", safetensors_file.read(os.path.join(here, "from.safetensors")), "--recipe", "nanogpt",
                   "--reverse", "--exclude", "*.attn.bias")

    def test_rope_of_nanotron(self):
        """model_config.json of nanotron has rope_interleaved; its version 0.4 had no such member, and always interleaved pairs."""
        here = os.path.join(RECIPES, "nanotron-llama")
        source, want = os.path.join(here, "from.safetensors"), safetensors_file.read(os.path.join(here, "to.safetensors"))
        with open(os.path.join(here, "config.json"), encoding="utf-8") as f:
            config = json.load(f)
        for more, good in (({"rope_interleaved": False}, True), ({"rope_interleaved": True}, False), ({}, False)):
            with self.subTest(str(more)):
                with open(self.path("model_config.json"), "w", encoding="utf-8") as f:
                    json.dump({**config, "is_llama_config": True, **more}, f)
                given = ("--recipe", "nanotron-llama", "--config", "model_config.json")
                if good:
                    self.check(source, want, *given)
                else:
                    self.fails(2, "consolidate", source, "-o", "none.safetensors", *given,
                               contains=["attn.qkv_proj.weight', which is only for models with 'rope_in_halves'"])

    def test_checkpoint_of_nanotron(self):
        """nanotron's own files of two tensor-parallel ranks and two stages, whose parameters are not those of a whole layer."""
        here = os.path.join(harness.CORPUS, "..", "nanotron")
        whole = safetensors_file.read(os.path.join(here, "expected.safetensors"))
        with open(self.path("config.json"), "w", encoding="utf-8") as f:
            json.dump({"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8}, f)
        given = ("--recipe", "nanotron-llama", "--config", "config.json")
        self.ok("export", os.path.join(here, "tp2pp2"), "-o", "hub", *given)
        got = safetensors_file.read(self.path("hub", "model.safetensors"))
        for i in range(2):
            for name, parts in (("attn.qkv", ("self_attn.q", "self_attn.k", "self_attn.v")), ("mlp.gate_up", ("mlp.gate", "mlp.up"))):
                want = whole[f"model.decoder.{i}.pp_block.{name}_proj.weight"][2]
                self.assertEqual(b"".join(got[f"model.layers.{i}.{part}_proj.weight"][2] for part in parts), want)
        self.assertEqual(got["lm_head.weight"], whole["model.lm_head.pp_block.weight"])
        self.check("hub", whole, *given, "--reverse")

    def test_new_tensors_are_sharded(self):
        here = os.path.join(RECIPES, "torchtitan-llama3")
        self.ok("reshard", os.path.join(here, "from.safetensors"), "-o", "ranks", "--dp", "5")
        self.ok("reshard", "ranks", "-o", "hf", "--to", "safetensors", "--dp", "3", "--recipe", "torchtitan-llama3",
                "--config", here)
        self.check("hf", safetensors_file.read(os.path.join(here, "to.safetensors")))
        layout = json.loads(self.ok("inspect", "hf", "--json", "--tensor", "model.layers.0.self_attn.q_proj.weight"))
        self.assertEqual(len(layout["chunks"]), 3)

    def test_convert_of_a_full_checkpoint(self):
        here = os.path.join(RECIPES, "nanogpt")
        self.ok("convert", os.path.join(here, "from.safetensors"), "-o", "m.h5", "--recipe", "nanogpt")
        self.check("m.h5", safetensors_file.read(os.path.join(here, "to.safetensors")))

    def test_selection_and_dtypes(self):
        here = os.path.join(RECIPES, "torchtitan-llama3")
        self.ok("consolidate", os.path.join(here, "from.safetensors"), "-o", "p.safetensors", "--rename", "s/^/model./")
        self.ok("consolidate", "p.safetensors", "-o", "m.h5", "--strip-prefix", "model.", "--include", "model.layers.1.*",
                "--recipe", "torchtitan-llama3", "--config", os.path.join(here, "config.json"), "--dtype-for",
                "model.layers.1.*norm.weight=f32")
        got = {t["name"]: t["dtype"] for t in json.loads(self.ok("inspect", "m.h5", "--json"))["tensors"]}
        self.assertEqual(len(got), 9)
        self.assertEqual(got["model.layers.1.input_layernorm.weight"], "float32")
        self.assertEqual(got["model.layers.1.self_attn.q_proj.weight"], "bfloat16")

    def test_damaged_data_is_found(self):
        here = os.path.join(RECIPES, "torchtitan-llama3")
        for to in ("h5", "dcp", "safetensors"):
            with self.subTest(to):
                self.ok("reshard", os.path.join(here, "from.safetensors"), "-o", to, "--to", to, "--dp", "2")
                with self.flipped_chunk(to, "layers.1.attention.qkv_linear.wq.weight", 1):
                    self.fails(3, "consolidate", to, "-o", f"{to}.pt", "--recipe", "torchtitan-llama3", "--config", here)
                self.ok("consolidate", to, "-o", f"{to}.pt", "--recipe", "torchtitan-llama3", "--config", here)


class Reading(harness.Case):
    """Commands that read show the result of the recipe, without writing it."""

    def setUp(self):
        super().setUp()
        self.here = os.path.join(RECIPES, "torchtitan-llama3")
        self.to = os.path.join(self.here, "to.safetensors")
        self.want = safetensors_file.read(self.to)
        source = os.path.join(self.here, "from.safetensors")
        self.ok("consolidate", source, "-o", "more.safetensors", "--rename", "s/^/model./")
        self.ok("reshard", "more.safetensors", "-o", "ranks", "--dp", "3")
        self.given = ("--strip-prefix", "model.", "--recipe", "torchtitan-llama3", "--config", self.here)

    def test_names_and_shapes(self):
        for command, key in (("inspect", "tensors"), ("schema", "tensors")):
            document = json.loads(self.ok(command, "ranks", *self.given, *(("--json",) if command == "inspect" else ())))
            self.assertEqual({t["name"]: t["shape"] for t in document[key]}, {n: t[1] for n, t in self.want.items()}, command)
        one = json.loads(self.ok("inspect", "ranks", *self.given, "--json", "--tensor", "model.layers.0.self_attn.k_proj.weight"))
        self.assertGreater(len(one["chunks"]), 1)

    def test_data(self):
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.norm.weight", "lm_head.weight"):
            self.ok("extract", "ranks", name, "-o", "bytes", "-f", *self.given)
            with open(self.path("bytes"), "rb") as f:
                self.assertEqual(f.read(), self.want[name][2], name)
        self.assertIn("equal: 21 the same", self.ok("diff", "ranks", self.to, *self.given, "--data"))
        self.ok("average", "ranks", "more.safetensors", "-o", "mean.safetensors", *self.given)
        self.assertEqual(safetensors_file.read(self.path("mean.safetensors")), self.want)
        self.ok("view", "ranks", "-o", "view.h5", *self.given)
        self.ok("diff", "view.h5", self.to, "--follow-external", "-q")
        other = os.path.join(RECIPES, "torchtitan-llama3-tied", "to.safetensors")
        p = self.run_tool("diff", "ranks", other, *self.given)
        self.assertEqual((p.returncode, p.stderr), (1, ""))  # no message of a size that another one replaces

    def test_check(self):
        self.ok("check", "ranks", "--against", self.to, *self.given)
        self.assertEqual(self.run_tool("check", "ranks", "--against", self.to).returncode, 1)
        back = ("--recipe", "torchtitan-llama3", "--reverse", "--config", self.here)
        self.ok("check", self.to, "--against", os.path.join(self.here, "from.safetensors"), *back)
        self.ok("diff", self.to, os.path.join(self.here, "from.safetensors"), *back)
        self.fails(2, "inspect", "ranks", "--recipe", "torchtitan-llama3", contains=["no rule of the recipe"])
        self.fails(2, "check", "ranks", "--config", self.here, contains=["--config needs"])
        self.fails(2, "inspect", "ranks", "--strip-prefix", "model.", contains=["only together with --recipe"])
        self.fails(2, "diff", "ranks", self.to, "--reverse", contains=["--reverse needs --recipe"])


class Commands(harness.Case):
    def test_list_and_print(self):
        names = [line.split()[0] for line in self.ok("recipes").splitlines()]
        self.assertLessEqual({recipe for _, recipe, _ in CASES}, set(names))
        for name in names:
            self.assertEqual(json.loads(self.ok("recipes", name))["fsdpckpt"], "recipe")
        self.fails(2, "recipes", "none", contains=["there is no shipped recipe 'none'"])

    def test_auto(self):
        for side, options, recipe in (("nanogpt/from", (), "nanogpt"), ("meta-llama/from", (), "meta-llama"),
                                      ("torchtitan-qwen3-5/to", ("--reverse",), "torchtitan-qwen3-5"),
                                      ("megatron-qwen3/from", (), "megatron-llama"),
                                      ("transformers-qwen-moe/from", (), "transformers-qwen-moe")):
            name = decided(self, os.path.join(RECIPES, side + ".safetensors"), recipe, "to" if options else "from")
            why = "the only one with a rule for " + ("'%s'" % name if name else "every tensor")
            source = os.path.join(RECIPES, side + ".safetensors")
            run = ("consolidate", source, "-o", "m.h5", "--force", "--recipe", "auto", *options)
            p = self.run_tool(*run)
            self.assertEqual((p.returncode, p.stderr.splitlines()[0]), (0, f"fsdpckpt: {source}: the recipe is {recipe}, {why}"))
            self.assertEqual(self.run_tool(*run, "-q").stderr, "")
        for side, options, why in (
                ("nanogpt/to", (), "no shipped recipe fits"),  # its names do not tell which side it is
                ("nanogpt/to", ("--reverse",), "no shipped recipe fits"), ("nanogpt/from", ("--reverse",), "no shipped recipe")):
            self.fails(2, "consolidate", os.path.join(RECIPES, side + ".safetensors"), "-o", "n.h5", "--recipe", "auto",
                       *options, contains=[why])

    def test_auto_takes_the_recipe_for_the_model(self):
        """The names of these fit several recipes; config.json tells which model it is."""
        for folder, options, model in (("torchtitan-llama3/from", (), "llama"), ("transformers-mixtral/from", (), "mixtral"),
                                       ("torchtitan-llama3-tied/from", (), "llama")):
            recipe = dict((c[0], c[1]) for c in CASES)[folder.split("/")[0]]
            here = os.path.join(RECIPES, folder)
            for config in (model, None):  # without model_type the class in architectures tells it
                with open(os.path.join(os.path.dirname(here), "config.json"), encoding="utf-8") as f:
                    numbers = json.load(f)
                numbers.pop("model_type" if config is None else "architectures")
                with open(self.path("config.json"), "w", encoding="utf-8") as f:
                    json.dump(numbers, f)
                p = self.run_tool("consolidate", here + ".safetensors", "-o", "m.h5", "--force", "--recipe", "auto", "--config",
                                  "config.json", *options)
                self.assertEqual(p.returncode, 0, p.stderr)
                key, value = ("architectures", numbers["architectures"][0]) if config is None else ("model_type", model)
                self.assertIn(f"the recipe is {recipe}, because {key} of config.json is '{value}'", p.stderr)
        alone = self.path("alone")
        os.mkdir(alone)
        for folder, options, contains in (
                ("torchtitan-llama3/from", (), ["'torchtitan-llama3', 'torchtitan-qwen3'; choose one with --recipe, or name the"]),
                ("torchtitan-qwen3-moe/to", ("--reverse",), ["several recipes fit the names of all its tensors: "])):
            shutil.copy(os.path.join(RECIPES, folder + ".safetensors"), os.path.join(alone, "m.safetensors"))
            run = ("consolidate", "alone/m.safetensors", "-o", "n.h5", "--recipe", "auto", *options)
            self.fails(2, *run, contains=contains)
        with open(self.path("config.json"), "w", encoding="utf-8") as f:  # several programs train this model
            json.dump({"text_config": {"model_type": "qwen3_moe"}}, f)
        self.fails(2, *run, "--config", "config.json", contains=["and the model 'qwen3_moe': ", "choose one with --recipe"])


if __name__ == "__main__":
    harness.main()
