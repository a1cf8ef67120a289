"""--dequantize of models that quantizers saved (tests/corpus/make_quantized.py): the weights are those that the same package
computes, bit for bit, from every layout. And what is missing or does not fit is one line."""

import json
import os
import shutil

import harness
import safetensors_file

QUANTIZED = os.path.join(harness.CORPUS, "..", "quantized")
# Types of this program for those of safetensors.
SHORT = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


def cases():
    return sorted(os.listdir(QUANTIZED))


class Quantized(harness.Case):
    def source(self, case):
        return os.path.join(QUANTIZED, case, "model.safetensors")

    def weights(self, case):
        """The weights, and the type that the package gives to those that were quantized."""
        stored = safetensors_file.read(self.source(case))
        want = safetensors_file.read(os.path.join(QUANTIZED, case, "weights.safetensors"))
        computed = {kind for name, (kind, _, data) in want.items() if name not in stored or stored[name][2] != data}
        self.assertEqual(len(computed), 1, case)
        return want, SHORT[computed.pop()]

    def equal(self, path, want):
        got = safetensors_file.read(path)
        self.assertEqual(sorted(got), sorted(want))
        for name in want:
            self.assertEqual(got[name][:2], want[name][:2], name)
            self.assertTrue(got[name][2] == want[name][2], name)

    def test_the_weights_are_the_package_s(self):
        self.assertGreater(len(cases()), 0)
        for case in cases():
            with self.subTest(case):
                want, kind = self.weights(case)
                self.ok("consolidate", self.source(case), "-o", "w.safetensors", "--dequantize", kind, "-f")
                self.equal(self.path("w.safetensors"), want)

    def test_every_layout(self):
        for case in cases():
            with self.subTest(case):
                want, kind = self.weights(case)
                config = os.path.join(QUANTIZED, case, "config.json")
                self.ok("reshard", self.source(case), "-o", "dcp", "--to", "dcp", "--dp", "3", "-f")
                self.ok("reshard", "dcp", "-o", "h5", "--dp", "2", "--dequantize", kind, "--config", config, "-f")
                self.ok("consolidate", "h5", "-o", "w.safetensors", "-f")
                self.equal(self.path("w.safetensors"), want)

    def without(self, case, part, says):
        tensors = safetensors_file.read(self.source(case))
        name = sorted(n for n in tensors if n.endswith(part))[0]
        del tensors[name]
        os.makedirs(self.path("m"), exist_ok=True)
        safetensors_file.write(self.path("m/model.safetensors"), tensors)
        shutil.copy(os.path.join(QUANTIZED, case, "config.json"), self.path("m/config.json"))
        self.fails(5, "consolidate", "m/model.safetensors", "-o", "w.safetensors", "--dequantize", "bf16", contains=[says])
        self.assertEqual(self.listing(), ["m"])

    def test_missing_parts(self):
        for case, part, says in (("ct-int4-groups", ".weight_shape", "there is no l.k.weight_shape next to it"),
                                 ("ct-int4-groups", ".weight_packed", "is a part of a quantized weight, but codes with scales"),
                                 ("ct-int4-groups", ".weight_scale", "is a part of a quantized weight, but its scales"),
                                 ("ct-int1", ".weight_zero_point", "it is not symmetric, and there is no a.weight_zero_point"),
                                 ("bnb-nf4", ".quant_map", "there is no a.weight.quant_map of 16 float32"),
                                 ("bnb-nf4", "__nf4", "there is no a.weight.quant_state.bitsandbytes__nf4 next to it"),
                                 ("bnb-nf4", "a.weight.absmax", "is a part of a quantized weight, but codes with scales"),
                                 ("bnb-nf4-nested", ".nested_absmax", "there are no a.weight.nested_absmax of 1 and nested"),
                                 ("bnb-int8", ".weight", "is a part of a quantized weight, but codes with scales"),
                                 ("gptq-int4", ".qzeros", "there is no .qzeros of type int32 next to it"),
                                 ("awq", ".scales", "is a part of a quantized weight, but"),
                                 ("gptq-int4", ".qweight", "is a part of a quantized weight, but"),
                                 ("modelopt-nvfp4", "down_proj.weight_scale_2", "there is no model.layers.0.mlp.down_proj.weight_scale_2 next to it"),
                                 ("ct-nvfp4", ".weight_global_scale", "there is no a.weight_global_scale next to it")):
            with self.subTest(case + part):
                self.without(case, part, says)

    def changed(self, case, part, edit, status=5):
        tensors = safetensors_file.read(self.source(case))
        name = sorted(n for n in tensors if n.endswith(part))[0]
        tensors[name] = edit(*tensors[name])
        safetensors_file.write(self.path("m.safetensors"), tensors)
        return self.fails(status, "consolidate", "m.safetensors", "-o", "w.safetensors", "--dequantize", "bf16")

    def test_parts_that_do_not_fit(self):
        number = lambda value: value.to_bytes(8, "little", signed=True)
        for case, part, edit, says in (
                ("ct-int4-groups", ".weight_shape", lambda k, s, d: (k, s, d[:8] + number(1 << 40)), "no size from 1 to 8 bits"),
                ("ct-int4-groups", ".weight_shape", lambda k, s, d: (k, s, number(-1) + d[8:]), "-1 elements along dimension 0"),
                ("ct-int4-groups", ".weight_shape", lambda k, s, d: (k, s, number(1 << 62) + d[8:]), "elements along dimension 0"),
                ("ct-int4-groups", ".weight_scale", lambda k, s, d: (k, [len(d) // 2, 1], d), "does not fit its scales"),
                ("ct-nvfp4", ".weight_scale", lambda k, s, d: (k, [len(d), 1], d), "does not fit a.weight_scale"),
                ("modelopt-nvfp4", "down_proj.weight_scale", lambda k, s, d: (k, [s[0] * 2, s[1] // 2], d), "does not fit"),
                ("modelopt-nvfp4", "down_proj.weight_scale", lambda k, s, d: (k, [s[0] // 2, s[1] * 2], d), "does not fit"),
                ("modelopt-nvfp4", "down_proj.weight_scale_2", lambda k, s, d: (k, [2], d * 2), "does not fit"),
                ("modelopt-mxfp4", "down_proj.weight_scale", lambda k, s, d: ("F32", s, d * 4), "four-bit integers of ModelOpt's AWQ"),
                ("bnb-nf4", "a.weight", lambda k, s, d: (k, [len(d) // 2, 2], d), "should have one column and 180 rows"),
                ("bnb-nf4", "a.weight.absmax", lambda k, s, d: (k, [1], d[:4]), "a.weight.absmax should have 6 elements"),
                ("bnb-nf4", "a.weight.quant_state.bitsandbytes__nf4", lambda k, s, d: (k, s, b"{" * len(d)), "is no JSON"),
                ("bnb-nf4", "a.weight.quant_state.bitsandbytes__nf4", lambda k, s, d: (k, s, d.replace(b"[9, 40]", b"[-9, 4]")),
                 "the shape in its quant_state is"),
                ("bnb-int8", ".weight_format", lambda k, s, d: (k, s, b"\1"), "it is not in row-major order (l.weight_format)"),
                ("gptq-int4", ".qweight", lambda k, s, d: (k, s, d), "whether GPTQ's zero points are one less is said by"),
                ("gptq-int4", ".scales", lambda k, s, d: (k, [s[0] * 2, s[1] // 2], d), "with 6 rows"),
                ("gptq-int4", ".qweight", lambda k, s, d: (k, [s[0] * 2, s[1] // 2], d), "not those of AWQ's GEMM"),
                ("gptq-int4", ".g_idx", lambda k, s, d: (k, [s[0] - 1], d[4:]), "l.g_idx should have 96 elements"),
                ("ct-int1", ".weight_zero_point", lambda k, s, d: (k, [s[1], s[0]], d), "does not fit a.weight_zero_point")):
            with self.subTest(case + part):
                error = self.changed(case, part, edit)
                self.assertIn(says, error if isinstance(error, str) else error.stderr)

    def test_classes_that_were_pickled(self):
        pickled = [(case, name) for case in cases() for name in ("model.pt", "dcp") if os.path.exists(os.path.join(QUANTIZED, case, name))]
        self.assertEqual(len(pickled), 7)
        for case, name in pickled:
            with self.subTest(case + name):
                want, kind = self.weights(case)
                source = os.path.join(QUANTIZED, case, name)
                self.ok("consolidate", source, "-o", "w.safetensors", "--dequantize", kind, "-f")
                self.equal(self.path("w.safetensors"), want)
                self.ok("verify", source)
                error = self.fails(5, "consolidate", source, "-o", "no.pt", contains=["which only that class can rebuild"])
                self.assertIn("; compute the weights with --dequantize\n", error)
                listed = {t["name"]: t for t in json.loads(self.ok("inspect", source, "--json"))["tensors"]}
                stored = safetensors_file.read(self.source(case))
                self.assertEqual({name: t["shape"] for name, t in listed.items()}, {name: t[1] for name, t in stored.items()})

    def test_what_torchao_says_is_removed(self):
        """Other members of __metadata__ stay, and a class that is not known is refused."""
        tensors, said = safetensors_file.read(self.source("torchao-int8")), {"title": "a model"}
        with open(self.source("torchao-int8"), "rb") as f:
            said.update(json.loads(f.read(int.from_bytes(f.read(8), "little")))["__metadata__"])
        safetensors_file.write(self.path("m.safetensors"), tensors, said)
        argv = "m.safetensors", "-o", "w.safetensors", "--dequantize", "bf16", "-f", "-q"
        self.ok("consolidate", *argv)
        self.equal(self.path("w.safetensors"), self.weights("torchao-int8")[0])
        with open(self.path("w.safetensors"), "rb") as f:
            kept = json.loads(f.read(int.from_bytes(f.read(8), "little")))["__metadata__"]
        self.assertEqual({key: text for key, text in kept.items() if "fsdpckpt" not in key}, {"format": "pt", "title": "a model"})
        said["a.weight"] = said["a.weight"].replace("Int8Tensor", "NVFP4Tensor")
        safetensors_file.write(self.path("m.safetensors"), tensors, said)
        self.fails(5, "consolidate", *argv, contains=["a._weight_qdata holds quantized codes: they are torchao's NVFP4Tensor, which"])

    def test_layouts_that_are_not_known(self):
        for tensors, says in (
                ({"a.weight_packed": ("U8", [4, 48], bytes(192)), "a.weight_scale": ("U8", [4, 2], bytes(8))},
                 "a.weight_packed holds quantized codes: they are six-bit floats (MXFP6), which cannot be dequantized"),
                ({"a.weight": ("U8", [4, 24], bytes(96)), "a.weight_scale": ("F8_E8M0", [4, 1], bytes(4))}, "they are six-bit floats"),
                ({"a._weight_qdata": ("I8", [4, 8], bytes(32)), "a._weight_scale": ("BF16", [1, 4], bytes(8)),
                  "a._weight_zero_point": ("BF16", [1, 4], bytes(8))}, "the zero points a._weight_zero_point are of type bfloat16"),
                ({"a._weight_qdata": ("F8_E4M3", [4, 32], bytes(128)), "a._weight_scale": ("F8_E8M0", [4, 1], bytes(4))},
                 "they are torchao's MXTensor or NVFP4Tensor, which"),
                ({"a._weight_qdata": ("U8", [4, 16], bytes(64)), "a._weight_scale": ("F8_E4M3", [4, 2], bytes(8))},
                 "holds codes of type uint8 as torchao stores them, which cannot be dequantized"),
                ({"a._weight_qdata": ("I8", [4, 8], bytes(32)), "a._weight_scale": ("F32", [4, 1], bytes(16)),
                  "a._weight_act_pre_scale": ("F32", [8], bytes(32))}, "a._weight_act_pre_scale multiplies the inputs"),
                ({"a.weight._data._data": ("U8", [4, 8], bytes(32)), "a.weight._scale": ("BF16", [8, 1], bytes(16)),
                  "a.weight._shift": ("BF16", [8, 1], bytes(16))},
                 "holds codes of type uint8 as quanto (without the shape of the weight) stores them, which cannot")):
            safetensors_file.write(self.path("m.safetensors"), tensors)
            self.fails(5, "consolidate", "m.safetensors", "-o", "w.safetensors", "--dequantize", "bf16", contains=[says])

    def test_weights_that_are_not_what_their_module_multiplies_with(self):
        tensors = safetensors_file.read(self.source("modelopt-int8"))
        tensors["model.layers.0.mlp.down_proj.pre_quant_scale"] = "BF16", [32], bytes(64)
        safetensors_file.write(self.path("m.safetensors"), tensors)
        self.fails(5, "consolidate", "m.safetensors", "-o", "w.safetensors", "--dequantize", "bf16",
                   contains=["down_proj.pre_quant_scale multiplies the inputs of the module, and"])

    def test_gptq_is_what_the_configuration_says(self):
        for config, says in (({"quant_method": "awq"}, "but the model's config.json says 'awq'"),
                             ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not known"),
                             ({"bits": 3}, "but the model's config.json says 'other bits'"), ({"bits": 4}, None)):
            with self.subTest(config):
                with open(self.path("quantize_config.json"), "w") as f:
                    json.dump(config, f)
                argv = ("consolidate", self.source("gptq-int4"), "-o", "w.safetensors", "--dequantize", "f16", "--config",
                        "quantize_config.json")
                if says:
                    if "quant_method" in config:
                        with open(self.path("quantize_config.json"), "w") as f:
                            json.dump({"quantization_config": config}, f)
                    self.fails(5, *argv, contains=[says])
                else:
                    self.ok(*argv)
                    self.equal(self.path("w.safetensors"), self.weights("gptq-int4")[0])

    def test_a_group_that_is_not_there(self):
        tensors = safetensors_file.read(self.source("gptq-int4"))
        kind, shape, data = tensors["l.g_idx"]
        tensors["l.g_idx"] = kind, shape, data[:40] + (3).to_bytes(4, "little") + data[44:]
        os.mkdir(self.path("m"))
        safetensors_file.write(self.path("m/model.safetensors"), tensors)
        shutil.copy(os.path.join(QUANTIZED, "gptq-int4", "config.json"), self.path("m/config.json"))
        self.fails(3, "consolidate", "m/model.safetensors", "-o", "w.safetensors", "--dequantize", "f16",
                   contains=["l.g_idx says that column 10 is of group 3, but there are 3"])

    def test_the_configuration_decides_where_several_sizes_fit(self):
        """One word holds 8 columns of 1 to 4 bits."""
        tensors = {"a.weight_packed": ("I32", [2, 1], bytes(range(8))), "a.weight_scale": ("F32", [2, 1], bytes(8)),
                   "a.weight_shape": ("I64", [2], (2).to_bytes(8, "little") + (8).to_bytes(8, "little"))}
        os.mkdir(self.path("m"))
        safetensors_file.write(self.path("m/model.safetensors"), tensors)
        argv = "consolidate", "m/model.safetensors", "-o", "w.safetensors", "--dequantize", "bf16", "-f"
        self.fails(5, *argv, contains=["are integers of several sizes: the model's config.json says which"])
        for bits, fails in ((4, False), (5, True)):
            groups = {"g": {"weights": {"num_bits": bits, "type": "int"}}}
            with open(self.path("m/config.json"), "w") as f:
                json.dump({"text_config": {"quantization_config": {"config_groups": groups}}}, f)
            if fails:
                self.fails(5, *argv, contains=["no size that quantization_config"])
            else:
                self.ok(*argv)


if __name__ == "__main__":
    harness.main()
