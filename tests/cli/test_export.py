"""export: the model of a training checkpoint as a directory for transformers and vLLM. Names, dtypes, bytes, files and the index
against the reference; and every way in which the two do not fit."""

import array
import json
import os
import shutil
import struct

import harness
import safetensors_file

RECIPES = os.path.join(harness.CORPUS, "..", "recipes")


def floats(*shape, start=0.0):
    """A tensor of float32 whose elements count from `start`."""
    size = 1
    for n in shape:
        size *= n
    return "F32", list(shape), array.array("f", [start + i for i in range(size)]).tobytes()


def as_bf16(tensor):
    """The same as bfloat16, for values that it holds exactly."""
    _, shape, data = tensor
    return "BF16", shape, b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))


class Export(harness.Case):
    def model(self):
        """A tiny model under the names of the hub. Elements are whole numbers below 256, which bfloat16 holds."""
        return {"model.embed_tokens.weight": floats(12, 4), "model.layers.0.mlp.up_proj.weight": floats(6, 4, start=50),
                "model.layers.0.mlp.down_proj.weight": floats(4, 6, start=80), "model.norm.weight": floats(4, start=120),
                "lm_head.weight": floats(12, 4, start=130)}

    def reference(self, files, name="ref", **config):
        """A directory as the hub has it: `files` are dicts of tensors, one for each file."""
        root = self.path(name)
        os.makedirs(os.path.join(root, "additional_chat_templates"))
        names = ["model.safetensors"] if len(files) == 1 else \
            ["model-%05d-of-%05d.safetensors" % (i + 1, len(files)) for i in range(len(files))]
        for file, tensors in zip(names, files):
            safetensors_file.write(os.path.join(root, file), tensors)
        side = {"config.json": json.dumps({"vocab_size": 12, **config}), "tokenizer.json": "{}", "README.md": "# A model\n",
                "additional_chat_templates/rag.jinja": "{{ messages }}", "pytorch_model.bin": "weights", ".gitattributes": "x"}
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(len(t[2]) for f in files for t in f.values())},
                     "weight_map": {t: n for n, f in zip(names, files) for t in f}}
            side["model.safetensors.index.json"] = json.dumps(index)
        for file, text in side.items():
            with open(os.path.join(root, file), "w", encoding="utf-8") as f:
                f.write(text)
        return root

    def source(self, tensors, name="in.safetensors"):
        safetensors_file.write(self.path(name), tensors)
        return name

    def exported(self, out="out"):
        """{name: tensor} of all files, after comparing them with the index."""
        files = sorted(n for n in os.listdir(self.path(out)) if n.endswith(".safetensors"))
        parts = {n: safetensors_file.read(self.path(out, n)) for n in files}
        every = {name: t for part in parts.values() for name, t in part.items()}
        self.assertEqual(len(every), sum(map(len, parts.values())))
        if files == ["model.safetensors"]:
            self.assertFalse(os.path.exists(self.path(out, "model.safetensors.index.json")))
            return every
        with open(self.path(out, "model.safetensors.index.json"), encoding="utf-8") as f:
            index = json.load(f)
        self.assertEqual(files, ["model-%05d-of-%05d.safetensors" % (i + 1, len(files)) for i in range(len(files))])
        self.assertEqual(index["weight_map"], {name: n for n, part in parts.items() for name in part})
        self.assertEqual(index["metadata"]["total_size"], sum(len(t[2]) for t in every.values()))
        return every

    def metadata(self, path):
        with open(self.path(path), "rb") as f:
            size, = struct.unpack("<Q", f.read(8))
            return json.loads(f.read(size))["__metadata__"]

    def training(self):
        """A nested DCP checkpoint of a training run: model, optimizer, step."""
        return harness.corpus("dcp-torch2.15.0-train")


class WithoutReference(Export):
    def test_the_model_alone(self):
        out = self.ok("export", self.training(), "-o", "out")
        got = self.exported()
        listed = json.loads(self.ok("inspect", self.training(), "--json"))["tensors"]
        self.assertEqual(sorted(got), sorted(t["name"][6:] for t in listed if t["name"].startswith("model.")))
        self.assertIn("model:    model;", out)
        self.assertRegex(out, r"model;.*other values left out: (?=.*\boptim\b)")
        self.assertIn("missing:  config.json and the tokenizer", out)
        self.assertEqual(self.metadata("out/model.safetensors")["format"], "pt")
        self.ok("consolidate", self.training(), "-o", "m.safetensors", "--include", "model.*", "--strip-prefix", "model.")
        self.assertEqual(got, safetensors_file.read(self.path("m.safetensors")))

    def test_wrappers_and_prefixes(self):
        model = self.model()
        inner = {n.replace("mlp.", "_checkpoint_wrapped_module.mlp._orig_mod."): t for n, t in model.items()}
        for prefix in ("", "module.", "_orig_mod.module.", "module.model.", "_forward_module.llm.model."):
            with self.subTest(prefix):
                self.source({prefix + n: t for n, t in inner.items()})
                report = json.loads(self.ok("export", "in.safetensors", "-o", "out", "-f", "--json"))["model"]
                self.assertEqual(self.exported(), model)
                self.assertIn("_checkpoint_wrapped_module.", report["wrappers"])
                self.assertEqual(report["prefix"], {"module.model.": "model.", "_forward_module.llm.model.": "llm.model."}
                                 .get(prefix, ""))

    def test_flat_optimizer_is_left_out(self):
        model = self.model()
        self.source({**model, "optimizer.state.lm_head.weight.exp_avg": floats(12, 4),
                     "optim.state.model.norm.weight.step": floats()})
        self.ok("export", "in.safetensors", "-o", "out")
        self.assertEqual(self.exported(), model)

    def left_out(self, names):
        """The line about the model of a checkpoint with nested values. `names`: {name: (path, tensor)}."""
        self.source({name: t for name, (_, t) in names.items()})
        with open(self.path("in.safetensors"), "rb") as f:
            size, = struct.unpack("<Q", f.read(8))
            header, data = json.loads(f.read(size)), f.read()
        header["__metadata__"] = {"fsdpckpt.paths": json.dumps({name: path for name, (path, _) in names.items()})}
        text = json.dumps(header).encode()
        with open(self.path("in.safetensors"), "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text + data)
        return self.ok("export", "in.safetensors", "-o", "out", "-f").splitlines()[1]

    def test_what_is_left_out_is_named_as_deep_as_needed(self):
        branches = {"model": self.model(), "optim": {"state.w.exp_avg": floats(2), "state.v.exp_avg": floats(2)}, "note": {"t": floats(1)}}
        names = {f"app.{b}.{n}": (["app", b, n], t) for b, group in branches.items() for n, t in group.items()}
        line = self.left_out({**names, "epoch.now": (["epoch", "now"], floats())})
        self.assertRegex(line, r"^model:    app\.model; 4 other values left out: ")
        self.assertEqual(sorted(line.split(": ")[-1].split(", ")), ["app.note", "app.optim", "epoch"])

    def test_a_long_list_of_what_is_left_out_says_that_it_goes_on(self):
        model = {f"model.{n}": (["model", n], t) for n, t in self.model().items()}
        line = self.left_out({**model, **{f"optim_{i:030}.x": ([f"optim_{i:030}", "x"], floats(1)) for i in range(9)}})
        self.assertRegex(line, r"; 9 other values left out: optim_0+, (optim_\w+, ){4,}\.\.\.$")

    def test_a_base_model_keeps_its_names(self):
        model = {n: t for n, t in self.model().items() if n.startswith("model.")}
        self.source(model)
        self.ok("export", "in.safetensors", "-o", "out")
        self.assertEqual(self.exported(), model)

    def test_recipe_and_files(self):
        here = os.path.join(RECIPES, "torchtitan-qwen3")
        self.source({"module.model." + n: t for n, t in safetensors_file.read(os.path.join(here, "from.safetensors")).items()})
        self.ok("reshard", "in.safetensors", "-o", "ranks", "--to", "dcp", "--dp", "3")
        args = ("export", "ranks", "-o", "out", "--max-shard-size", "2KB", "--recipe", "torchtitan-qwen3", "--config", here)
        report = json.loads(self.ok(*args, "--json"))
        want = safetensors_file.read(os.path.join(here, "to.safetensors"))
        self.assertEqual(self.exported(), want)
        self.assertEqual((report["model"]["recipe"], report["model"]["prefix"]), ("torchtitan-qwen3", "model."))
        self.assertGreater(report["files"], 3)
        self.ok("export", "ranks", "-o", "bf", "--dtype", "bf16", "--recipe", "torchtitan-qwen3", "--config", here)
        self.assertEqual({t[0] for t in self.exported("bf").values()}, {"BF16"})

    def test_auto(self):
        here = os.path.join(RECIPES, "nanogpt")
        for recipe in ((), ("--recipe", "auto")):
            out = self.ok("export", os.path.join(here, "from.safetensors"), "-o", "out", "-f", *recipe)
            self.assertRegex(out, "names:    nanogpt, the only one with a rule for 'transformer[^ ]*'\n")
            self.assertEqual(self.exported(), safetensors_file.read(os.path.join(here, "to.safetensors")))
        self.source(self.model())
        self.assertIn("names:    no recipe\n", self.ok("export", "in.safetensors", "-o", "plain"))
        self.fails(2, "export", "in.safetensors", "-o", "none", "--recipe", "auto", contains=["no shipped recipe fits"])
        titan = os.path.join(RECIPES, "torchtitan-llama3")
        self.source(safetensors_file.read(os.path.join(titan, "from.safetensors")))
        self.fails(2, "export", "in.safetensors", "-o", "none", contains=["several recipes fit", "choose one with --recipe, or"])
        out = self.ok("export", "in.safetensors", "-o", "hub", "--config", titan)
        self.assertIn("names:    torchtitan-llama3, because model_type of config.json is 'llama'\n", out)
        with open(self.path("config.json"), "w", encoding="utf-8") as f:
            json.dump({"text_config": {"model_type": "llama"}, "num_attention_heads": 4, "num_key_value_heads": 2}, f)
        for options, reason in ((("--config", titan), {"by": "config", "key": "model_type", "value": "llama"}),
                                (("--config", "config.json"),
                                 {"by": "config", "key": "text_config.model_type", "value": "llama"}),
                                (("--config", titan, "--recipe", "torchtitan-llama3"), {"by": "option"}),
                                (("--recipe", "none"), None)):
            report = json.loads(self.ok("export", "in.safetensors", "-o", "d", "--dry-run", "--json", *options))["model"]
            self.assertEqual(report["recipe_reason"], reason)
            self.assertEqual(report["recipe"], reason and "torchtitan-llama3")
        self.assertEqual(self.exported("hub"), safetensors_file.read(os.path.join(titan, "to.safetensors")))
        self.ok("export", os.path.join(here, "from.safetensors"), "-o", "same", "--recipe", "none")
        self.assertEqual(self.exported("same"), safetensors_file.read(os.path.join(here, "from.safetensors")))

    def test_no_model_or_several(self):
        train = self.training()
        self.fails(2, "export", train, "-o", "out", "--include", "optim.*", contains=["it has no model, only: optim"])
        self.assertFalse(os.path.exists(self.path("out")))


class LikeReference(Export):
    def check(self, tensors, files, *options, expect=None, **config):
        """Exports `tensors` like a reference with `files`, whose tensors are expected unless others are named."""
        self.source(tensors)
        ref = self.reference(files, **config)
        report = json.loads(self.ok("export", "in.safetensors", "-o", "out", "--like", ref, "--json", *options))
        self.assertEqual(self.exported(), expect if expect is not None else {n: t for f in files for n, t in f.items()})
        for name in ("config.json", "tokenizer.json", "README.md", "additional_chat_templates/rag.jinja"):
            with open(os.path.join(ref, name), "rb") as a, open(self.path("out", name), "rb") as b:
                self.assertEqual(a.read(), b.read(), name)
        weights = len(files) if len(files) == 1 else len(files) + 1
        if not options:
            self.assertEqual(len(os.listdir(self.path("out"))), weights + 4)
        shutil.rmtree(ref)
        return report["model"]

    def refused(self, tensors, files, *contains, status=2, **config):
        self.source(tensors)
        ref = self.reference(files, "other", **config)
        self.fails(status, "export", "in.safetensors", "-o", "none", "--like", ref, contains=contains)
        self.assertEqual([n for n in self.listing() if n.startswith(("none", "."))], [])
        shutil.rmtree(ref)

    def test_dtypes_and_files(self):
        bf16 = {n: as_bf16(t) for n, t in self.model().items()}
        names = sorted(bf16)
        bf16["model.norm.weight"] = self.model()["model.norm.weight"]  # mixed dtypes
        files = [{n: bf16[n] for n in names[:1]}, {n: bf16[n] for n in (names[1], names[3])},
                 {n: bf16[n] for n in (names[2], names[4])}]
        report = self.check({"model." + n: t for n, t in self.model().items()}, files)
        self.assertEqual((report["prefix"], report["cast"]), ("model.", 4))
        for number, file in enumerate(files):  # the same tensors in the same files
            got = safetensors_file.read(self.path("out", "model-%05d-of-00003.safetensors" % (number + 1)))
            self.assertEqual(sorted(got), sorted(file))

    def test_another_size_of_files(self):
        self.check(self.model(), [self.model()], "--max-shard-size", "300B")
        self.assertGreater(len([n for n in os.listdir(self.path("out")) if n.endswith(".safetensors")]), 2)

    def test_tied_weights_are_written_once(self):
        model = self.model()
        model["lm_head.weight"] = model["model.embed_tokens.weight"]
        stored = {n: t for n, t in model.items() if n != "lm_head.weight"}
        report = self.check(model, [stored], tie_word_embeddings=True)
        self.assertEqual(report["tied"], [{"name": "lm_head.weight", "same_as": "model.embed_tokens.weight"}])
        self.check(stored, [stored], "-f", tie_word_embeddings=True)
        # The reference stores both.
        report = self.check(stored, [model], "-f", tie_word_embeddings=True)
        self.assertEqual(report["copied"], [{"name": "lm_head.weight", "same_as": "model.embed_tokens.weight"}])
        # They are not tied in this training run.
        self.refused(self.model(), [stored], "lm_head.weight", "unexpected", tie_word_embeddings=True)
        self.refused(stored, [self.model()], "lm_head.weight", "missing")

    def test_vocabulary(self):
        padded = self.model()
        for name, start in (("model.embed_tokens.weight", 0), ("lm_head.weight", 130)):
            padded[name] = floats(16, 4, start=start)
        report = self.check(padded, [self.model()])
        self.assertEqual([(t["name"], t["from"], t["to"]) for t in report["trimmed"]],
                         [("model.embed_tokens.weight", 16, 12), ("lm_head.weight", 16, 12)])
        tied = {**padded, "lm_head.weight": padded["model.embed_tokens.weight"]}
        stored = {n: t for n, t in self.model().items() if n != "lm_head.weight"}
        self.check(tied, [stored], "-f", text_config={"vocab_size": 12})
        # Other dimensions and other sizes are not trimmed.
        self.source(padded)
        ref = self.reference([self.model()], "other", vocab_size=13)
        p = self.run_tool("export", "in.safetensors", "-o", "none", "--like", ref)
        self.assertEqual(p.returncode, 2)
        self.assertIn("2 differences", p.stderr)
        shutil.rmtree(ref)
        small = {**self.model(), "lm_head.weight": floats(10, 4)}
        self.refused(small, [self.model()], "lm_head.weight")

    def test_differences(self):
        model = self.model()
        self.refused({**model, "model.layers.0.extra.weight": floats(3)}, [model], "model.layers.0.extra.weight")
        self.refused({n: t for n, t in model.items() if "norm" not in n}, [model], "model.norm.weight", "missing")
        self.refused({**model, "model.norm.weight": floats(5)}, [model], "model.norm.weight")
        codes = {**model, "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [6, 4], bytes(24))}
        self.refused(model, [codes], "model.layers.0.mlp.up_proj.weight is float32, and float8_e4m3fn in the reference")
        self.refused({**model, "model.norm.weight": ("I32", [4], bytes(16))}, [model], "model.norm.weight is int32")

    def test_recipe(self):
        here = os.path.join(RECIPES, "torchtitan-llama3")
        want = safetensors_file.read(os.path.join(here, "to.safetensors"))
        ref = self.reference([want])
        shutil.copy(os.path.join(here, "config.json"), os.path.join(ref, "config.json"))
        self.ok("reshard", os.path.join(here, "from.safetensors"), "-o", "ranks", "--dp", "3", "--tp", "2")
        self.ok("export", "ranks", "-o", "out", "--like", ref, "--recipe", "torchtitan-llama3")
        self.assertEqual(self.exported(), want)
        self.ok("export", "out", "-o", "again", "--like", ref)  # names that fit need no recipe
        self.assertEqual(self.exported("again"), want)

    def test_layouts_of_the_same_names(self):
        """nanoGPT and transformers call most tensors alike, but only one of them transposes matrices."""
        sides = {n: safetensors_file.read(os.path.join(RECIPES, "nanogpt", n + ".safetensors")) for n in ("from", "to")}
        ref = self.reference([sides["to"]])
        for side, recipe in (("from", "nanogpt"), ("to", None)):
            self.source(sides[side])
            report = json.loads(self.ok("export", "in.safetensors", "-o", "out", "-f", "--like", ref, "--json"))
            self.assertEqual(report["model"]["recipe"], recipe)
            self.assertEqual(self.exported(), sides["to"])


class LikeConfiguration(Export):
    """--like names a directory without weights."""

    def bare(self, **config):
        ref = self.path("bare")
        shutil.rmtree(ref, ignore_errors=True)
        os.makedirs(ref)
        for name, text in (("config.json", json.dumps(config)), ("tokenizer.json", "{}"), ("training_args.bin", "x")):
            with open(os.path.join(ref, name), "w", encoding="utf-8") as f:
                f.write(text)
        return ref

    def check(self, tensors, *options, expect=None, **config):
        self.source({"model." + n: t for n, t in tensors.items()})
        args = ("export", "in.safetensors", "-o", "out", "-f", "--like", self.bare(**config), *options)
        report = json.loads(self.ok(*args, "--json"))["model"]
        self.assertEqual(self.exported(), tensors if expect is None else expect)
        self.assertEqual(report["side_files"], ["config.json", "tokenizer.json"])
        self.assertIn(", ".join(report["checked"]) or "nothing", self.ok(*args))
        return report

    def refused(self, tensors, *contains, **config):
        self.source(tensors)
        self.fails(2, "export", "in.safetensors", "-o", "none", "--like", self.bare(**config), contains=contains)
        self.assertNotIn("none", self.listing())

    def test_names_dtypes_and_files_are_those_of_the_source(self):
        report = self.check(self.model(), vocab_size=12, num_hidden_layers=1, tie_word_embeddings=False,
                            architectures=["LlamaForCausalLM"])
        self.assertEqual(report["checked"], ["tie_word_embeddings", "vocab_size", "num_hidden_layers"])
        self.assertEqual(self.check(self.model())["checked"], [])
        self.check(self.model(), "--dtype", "bf16", "--max-shard-size", "100B",
                   expect={n: as_bf16(t) for n, t in self.model().items()})
        self.assertTrue(os.path.exists(self.path("out", "model.safetensors.index.json")))

    def test_recipe(self):
        here = os.path.join(RECIPES, "torchtitan-llama3")
        ref = self.bare()
        shutil.copy(os.path.join(here, "config.json"), ref)
        self.ok("export", os.path.join(here, "from.safetensors"), "-o", "out", "--like", ref)
        self.assertEqual(self.exported(), safetensors_file.read(os.path.join(here, "to.safetensors")))

    def test_vocabulary(self):
        padded = {**self.model(), "model.embed_tokens.weight": floats(16, 4), "lm_head.weight": floats(16, 4, start=130)}
        report = self.check(padded, expect=self.model(), vocab_size=12)
        self.assertEqual([(t["name"], t["from"], t["to"]) for t in report["trimmed"]],
                         [("model.embed_tokens.weight", 16, 12), ("lm_head.weight", 16, 12)])
        self.refused(self.model(), "12 rows, and vocab_size of config.json is 13", vocab_size=13)
        # The embedding alone has more rows in Llama 3.2 Vision.
        self.assertEqual(self.check({**padded, "lm_head.weight": floats(12, 4)}, text_config={"vocab_size": 12})["trimmed"], [])

    def test_tied_weights(self):
        causal = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 12}
        model = {**self.model(), "lm_head.weight": self.model()["model.embed_tokens.weight"]}
        stored = {n: t for n, t in model.items() if n != "lm_head.weight"}
        report = self.check(model, expect=stored, tie_word_embeddings=True, **causal)
        self.assertEqual(report["tied"], [{"name": "lm_head.weight", "same_as": "model.embed_tokens.weight"}])
        self.check(stored, tie_word_embeddings=True, **causal)
        padded = {**model, "model.embed_tokens.weight": floats(16, 4), "lm_head.weight": floats(16, 4)}
        self.check(padded, expect=stored, tie_word_embeddings=True, **causal)
        self.check(model, **causal)  # the class decides, which is not known
        self.refused(self.model(), "lm_head.weight is not equal to model.embed_tokens.weight", tie_word_embeddings=True, **causal)
        self.refused(stored, "lm_head.weight, is missing", tie_word_embeddings=False, **causal)
        self.check(stored, tie_word_embeddings=False, architectures=["Qwen2Model"])

    def test_layers(self):
        layers = lambda *numbers: {"model.layers.%d.mlp.up_proj.weight" % n: floats(6, 4) for n in numbers}
        self.check(layers(0, 1, 2), num_hidden_layers=3)
        self.check(layers(0, 1, 2), num_hidden_layers=2, num_nextn_predict_layers=1)
        self.refused(layers(0, 1, 2), "model.layers has 3 layers, and config.json says 2", num_hidden_layers=2)
        self.refused(layers(0, 1, 2), "model.layers has 3 layers, and config.json says 4", num_hidden_layers=4)
        self.refused(layers(0, 2), "model.layers.1 is missing", num_hidden_layers=3)

    def test_quantized(self):
        config = {"quantization_config": {"quant_method": "fp8"}}
        self.refused(self.model(), "config.json has a quantization_config, but no weight is quantized", **config)
        self.check({**self.model(), "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [6, 4], bytes(24))}, **config)


class Dequantized(Export):
    """What config.json says of quantization does not hold for weights that were dequantized."""
    CODES = {"model.norm.weight": floats(4), "model.layers.0.mlp.up_proj.weight": ("F8_E4M3", [6, 4], bytes(24)),
             "model.layers.0.mlp.up_proj.weight_scale_inv": ("F32", [1, 1], b"\0\0\x80?")}
    WANT = {"model.norm.weight": floats(4), "model.layers.0.mlp.up_proj.weight": ("F32", [6, 4], bytes(96))}
    # Before and after. All other bytes stay.
    TEXTS = ((b'{"quantization_config": {"a": ["}", {}]}}', b'{}'),
             (b'{\n  "quantization_config": {"a": 1},\n  "eps": 1e-05\n}\n', b'{\n  \n  "eps": 1e-05\n}\n'),
             (b'{"eps": 1e-05, "compression_config": {"dtype": "x"} }', b'{"eps": 1e-05 }'),
             (b'{"quantization_config": {}, "compression_config": null, "a": 1}', b'{  "a": 1}'),
             (b'{"a": "\\"{", "quantization_config": 1, "torch_dtype": "bfloat16", "b": [true]}',
              b'{"a": "\\"{", "torch_dtype": "float32", "b": [true]}'),
             (b'{"text_config": {"dtype": "float16", "quantization_config": {}}, "vision_config": {"dtype": "float16"}, "dtype": null}',
              b'{"text_config": {"dtype": "float32"}, "vision_config": {"dtype": "float16"}, "dtype": null}'))

    def written(self, folder, text=None):
        path = self.path(folder, "config.json")
        if text is not None:
            os.makedirs(self.path(folder), exist_ok=True)
            with open(path, "wb") as f:
                f.write(text)
        with open(path, "rb") as f:
            return f.read()

    def test_the_configuration_of_the_reference(self):
        self.source(self.CODES)
        for before, after in self.TEXTS:
            self.written("bare", before)
            for name in ("hf_quant_config.json", "tokenizer.json"):
                with open(self.path("bare", name), "w", encoding="utf-8") as f:
                    f.write("{}")
            out = self.ok("export", "in.safetensors", "-o", "out", "-f", "--like", "bare", "--dequantize", "f32")
            self.assertEqual(self.written("out"), after)
            self.assertEqual("without what config.json said of quantization" in out, b"_config" in before.split(b"vision")[0])
            self.assertEqual(sorted(os.listdir(self.path("out"))), ["config.json", "model.safetensors", "tokenizer.json"])
            self.assertEqual(self.exported(), self.WANT)

    def test_the_configuration_that_force_keeps(self):
        self.source(self.CODES)
        for command in (("export",), ("consolidate", "--to", "safetensors")):
            self.ok(*command, "in.safetensors", "-o", "kept/", "-f", "--dequantize", "f32")
            self.written("kept", self.TEXTS[4][0])
            self.ok(*command, "in.safetensors", "-o", "kept/", "-f", "--dequantize", "f32")
            self.assertEqual(self.written("kept"), self.TEXTS[4][1])
            self.written("kept", self.TEXTS[4][0])
            self.ok(*command, "in.safetensors", "-o", "kept/", "-f")
            self.assertEqual(self.written("kept"), self.TEXTS[4][0])

    def test_a_reference_with_weights(self):
        self.source(self.CODES)
        ref = self.reference([self.CODES])
        self.written(ref, self.TEXTS[4][0])
        self.ok("export", "in.safetensors", "-o", "out", "--like", ref, "--dequantize", "f32")
        self.assertEqual((self.exported(), self.written("out")), (self.WANT, self.TEXTS[4][1]))
        ref = self.reference([{**self.WANT, "model.norm.weight": as_bf16(floats(4))}], "plain")  # decides on dtypes
        self.written(ref, b'{"torch_dtype": "bfloat16"}')
        self.ok("export", "in.safetensors", "-o", "out", "-f", "--like", ref, "--dequantize", "f32")
        self.assertEqual(self.written("out"), b'{"torch_dtype": "bfloat16"}')

    def test_no_json(self):
        self.source(self.CODES)
        self.ok("export", "in.safetensors", "-o", "kept", "--dequantize", "f32")
        for text in (b'{"a": 1, "a": 2}', b"[]", b"{"):
            self.written("kept", text)
            self.fails(2, "export", "in.safetensors", "-o", "kept", "-f", "--dequantize", "f32",
                       contains=["is no JSON object, so what it says of quantization cannot be removed"])


class Targets(Export):
    def test_dry_run_and_force(self):
        self.source(self.model())
        ref = self.reference([self.model()])
        before = self.listing()
        self.ok("export", "in.safetensors", "-o", "out", "--like", ref, "--dry-run")
        self.ok("export", "in.safetensors", "--like", ref, "--dry-run")
        self.assertEqual(self.listing(), before)
        self.fails(2, "export", "in.safetensors", "--like", ref, contains=["-o"])
        self.ok("export", "in.safetensors", "-o", "out", "--like", ref)
        self.fails(2, "export", "in.safetensors", "-o", "out", "--like", ref, contains=["exists; --force replaces it"])
        self.ok("export", "in.safetensors", "-o", "out", "--like", ref, "-f")
        with open(self.path("out", "notes.txt"), "w", encoding="utf-8") as f:
            f.write("mine")
        files = sorted(os.listdir(self.path("out")))
        for reference in (["--like", ref], []):  # what is not weights stays
            self.assertIn("notes.txt", self.ok("export", "in.safetensors", "-o", "out", *reference, "-f"))
            self.assertEqual(sorted(os.listdir(self.path("out"))), files)
        with open(self.path("out", "pytorch_model.bin"), "w", encoding="utf-8") as f:
            f.write("mine")
        self.fails(2, "export", "in.safetensors", "-o", "out", "--like", ref, "-f", contains=["which this program does not write"])
        os.remove(self.path("out", "pytorch_model.bin"))
        self.assertEqual(self.exported(), self.model())
        self.fails(2, "export", "in.safetensors", "-o", ref, "--like", ref, "-f")
        self.assertEqual(sorted(os.listdir(ref))[-1], "tokenizer.json")

    def test_wrong_references(self):
        self.source(self.model())
        ref = self.reference([self.model()])
        self.fails(2, "export", "in.safetensors", "-o", "out", "--like", ref, "--dtype", "bf16", contains=["omit --dtype"])
        os.remove(os.path.join(ref, "model.safetensors"))
        self.fails(3, "export", "in.safetensors", "-o", "out", "--like", ref, contains=["--like compares with the weights"])
        os.remove(os.path.join(ref, "config.json"))
        self.fails(2, "export", "in.safetensors", "-o", "out", "--like", ref, contains=["has no config.json"])
        os.symlink("nowhere", os.path.join(ref, "vocab.json"))
        self.assertNotIn("out", self.listing())

    def test_links_of_the_hub_cache(self):
        self.source(self.model())
        os.makedirs(self.path("models--a--b", "snapshots", "1f"))
        os.makedirs(self.path("models--a--b", "refs"))
        ref = self.reference([self.model()], os.path.join("models--a--b", "blobs"))
        shutil.rmtree(os.path.join(ref, "additional_chat_templates"))
        snapshot = os.path.join("models--a--b", "snapshots", "1f")
        for name in os.listdir(ref):
            os.symlink(os.path.join("..", "..", "blobs", name), self.path(snapshot, name))
        self.ok("export", "in.safetensors", "-o", "out", "--like", snapshot)
        self.assertFalse(os.path.islink(self.path("out", "config.json")))
        self.assertEqual(self.exported(), self.model())
        self.fails(2, "export", "in.safetensors", "-o", "root", "--like", "models--a--b", contains=["without refs/main"])
        with open(self.path("models--a--b", "refs", "main"), "w", encoding="utf-8") as f:
            f.write("1f")
        self.ok("export", "in.safetensors", "-o", "root", "--like", "models--a--b")
        self.assertEqual(self.exported("root"), self.model())
        os.makedirs(self.path("private"))
        os.makedirs(self.path("models--a--b", "blobs", "inner"))
        for path in ("private/key", "models--a--b/blobs/inner/key", "models--a--b/key"):
            with open(self.path(path), "w", encoding="utf-8") as f:
                f.write("secret")
        for link, to in (("tokenizer_config.json", "../../../private/key"), ("chat_templates", "../../../private"),
                         ("vocab.txt", "../../blobs/../../private/key"), ("vocab.json", "../../blobs/inner/key"),
                         ("added_tokens.json", "../../key"), ("x.json", "../../refs/main"), ("y", "../../blobs")):
            os.symlink(to, self.path(snapshot, link))
            self.fails(3, "export", "in.safetensors", "-o", "leak", "--like", snapshot,
                       contains=[link, "a symbolic link that leads out of the checkpoint", "--follow-external allows it"])
            os.remove(self.path(snapshot, link))
        os.symlink("../../../private/key", self.path(snapshot, "merges.txt"))
        self.ok("export", "in.safetensors", "-o", "leak", "--like", snapshot, "--follow-external")
        os.remove(self.path(snapshot, "merges.txt"))
        os.rename(self.path("models--a--b"), self.path("plain"))  # not a cache
        self.fails(3, "export", "in.safetensors", "-o", "leak2", "--like", "plain/snapshots/1f",
                   contains=["leads out of the checkpoint"])

    def test_damage_is_found(self):
        self.ok("reshard", self.source(self.model()), "-o", "ranks", "--dp", "2")
        ref = self.reference([self.model()])
        with self.flipped_chunk("ranks", "lm_head.weight", 1):
            self.fails(3, "export", "ranks", "-o", "out", "--like", ref)
        self.assertNotIn("out", self.listing())


if __name__ == "__main__":
    harness.main()
