"""--dtype and --dtype-for: which tensors they cast, and quantized weights that they must not touch."""

import json
import os

import harness
import safetensors_file

NORM = {"model.norm.weight": ("BF16", (8,)), "model.layers.0.input_layernorm.weight": ("BF16", (8,))}
# What quantizers write: name of the codes, of the scales, and the tensors.
QUANTIZED = {
    "deepseek": ("q.weight", "q.weight_scale_inv", ("F8_E4M3", (128, 128)), ("F32", (1, 1))),
    "compressed-tensors": ("q.weight", "q.weight_scale", ("F8_E4M3", (4, 4)), ("F32", (4, 1))),
    "per-tensor": ("q.weight", "q.weight_scale", ("F8_E4M3", (4, 4)), ("F32", ())),
    "int8": ("q.weight", "q.weight_scale", ("I8", (4, 4)), ("BF16", (4, 1))),
    "experts": ("experts.down_proj", "experts.down_proj_scale_inv", ("F8_E4M3", (2, 4, 4)), ("F32", (2, 1, 1))),
    "gpt-oss": ("experts.down_proj_blocks", "experts.down_proj_scales", ("U8", (2, 4, 1, 16)), ("U8", (2, 4, 1))),
    "mxfp4 with its type": ("e.w_blocks", "e.w_scales", ("U8", (2, 4, 1, 16)), ("F8_E8M0", (2, 4, 1))),
    "gptq": ("q.qweight", "q.scales", ("I32", (1, 4)), ("F16", (1, 4))),
    "bitsandbytes": ("q.weight", "q.weight.absmax", ("U8", (8, 1)), ("F32", (1,))),
    "bitsandbytes int8": ("q.weight", "q.SCB", ("I8", (8, 8)), ("F32", (8,))),
    "awq": ("q.qweight", "q.scales", ("I32", (4, 1)), ("F16", (1, 8))),
    "compressed-tensors int4": ("q.weight_packed", "q.weight_scale", ("I32", (4, 1)), ("BF16", (4, 1))),
    "nvfp4": ("q.weight_packed", "q.weight_scale", ("U8", (4, 8)), ("F8_E4M3", (4, 1))),
    # torchao 0.18: flatten_tensor_state_dict of models after quantize_ with Int8WeightOnlyConfig and others
    "torchao int8": ("q._weight_qdata", "q._weight_scale", ("I8", (8, 4)), ("F32", (8, 1))),
    "torchao float8": ("q._weight_qdata", "q._weight_scale", ("F8_E4M3", (8, 4)), ("F32", (8, 1))),
    "torchao intx": ("q._weight_qdata", "q._weight_scale", ("I8", (8, 64)), ("BF16", (8, 2))),
    # optimum-quanto 0.2: state_dict of models after freeze
    "quanto qint8": ("q.weight._data", "q.weight._scale", ("I8", (8, 4)), ("BF16", (8, 1))),
    "quanto qint4": ("q.weight._data._data", "q.weight._scale", ("U8", (4, 4)), ("BF16", (8, 1))),
    "quanto qfloat8": ("q.weight._data", "q.weight._scale", ("F8_E4M3", (8, 4)), ("BF16", (8, 1))),
    "hqq": ("q.W_q", "q.scale", ("U8", (4, 8)), ("F16", (8, 1))),
    "eetq": ("q.weight", "q.weight_scales", ("I8", (8, 8)), ("F16", (8,))),
    "aqlm": ("q.codes", "q.scales", ("I8", (8, 1, 1)), ("F16", (8, 1, 1, 1))),
    "mlx": ("q.weight", "q.scales", ("U32", (8, 1)), ("F16", (8, 1))),
    "8-bit Adam": ("state.q.state1", "state.q.absmax1", ("U8", (64,)), ("F32", (1,))),
}
# What belongs to such a pair besides.
COMPANIONS = {
    "torchao int8": ("q._weight_zero_point", ("F32", (8, 1))),
    "quanto qint4": ("q.weight._shift", ("BF16", (8, 1))),
    "hqq": ("q.zero", ("F16", (8, 1))),
    "mlx": ("q.biases", ("F16", (8, 1))),
    "bitsandbytes": ("q.weight.nested_absmax", ("F32", (1,))),
    "nvfp4": ("q.weight_global_scale", ("F32", (1,))),
    "8-bit Adam": ("state.q.qmap1", ("F32", (256,))),
}
# Tensors that are not quantized, though their names or dtypes remind of it.
PLAIN = {
    "swin": {"attn.relative_position_index": ("I32", (4, 4)), "attn.logit_scale": ("F32", (1, 1, 1))},
    "mask": {"attn.mask": ("U8", (4, 4)), "attn.scale": ("F32", (4,))},
    "actnorm": {"n.initialized": ("U8", ()), "n.scale": ("F32", (4,)), "n.loc": ("F32", (4,))},
    "observer": {"f.scale": ("F32", (1,)), "f.zero_point": ("I32", (1,)), "f.fake_quant_enabled": ("U8", (1,))},
    "positions": {"e.position_ids": ("I64", (1, 8)), "logit_scale": ("F32", ())},
    "modulation": {"b.scale_shift_table": ("F32", (6, 4)), "b.ids": ("I32", (4,))},
}


class Dtype(harness.Case):
    def dtypes(self, path):
        return {t["name"]: t["dtype"] for t in json.loads(self.ok("inspect", path, "--json"))["tensors"]}

    def test_codes_and_scales_are_not_parted(self):
        for what, (codes, scales, codes_are, scales_are) in QUANTIZED.items():
            with self.subTest(what):
                safetensors_file.write_zeros(self.path("q.safetensors"), {**NORM, codes: codes_are, scales: scales_are})
                for command in (("consolidate", "-o", "m.h5"), ("reshard", "-o", "out", "--dp", "2"),
                                ("convert", "-o", "m.pt")):
                    self.fails(5, command[0], "q.safetensors", *command[1:], "--dtype", "bf16", contains=[
                        f"q.safetensors: tensor {codes} holds quantized codes, and {scales} their scales",
                        "leave --dtype out, or keep both as they are with --dtype-for 'GLOB=keep'"])
                self.assertEqual(self.listing(), ["q.safetensors"])

    def test_codes_and_scales_are_not_averaged_apart(self):
        for what, (codes, scales, codes_are, scales_are) in QUANTIZED.items():
            with self.subTest(what):
                for name in ("a", "b"):
                    safetensors_file.write_zeros(self.path(name), {**NORM, codes: codes_are, scales: scales_are})
                for more in ((), ("--take-first",)):
                    self.fails(5, "average", "a", "b", "-o", "m.h5", *more,
                               contains=[f"{codes} holds quantized codes, and {scales} their scales"])

    def test_what_belongs_to_codes_stays(self):
        for what, (name, is_) in COMPANIONS.items():
            with self.subTest(what):
                codes, scales, codes_are, scales_are = QUANTIZED[what]
                safetensors_file.write_zeros(self.path("q.safetensors"), {codes: codes_are, scales: scales_are, name: is_})
                self.fails(5, "consolidate", "q.safetensors", "-o", "m.h5", "--dtype-for", f"{name}=f64",
                           contains=[f"tensor {codes} holds quantized codes"])
                if len(is_[1]) > 1:
                    self.fails(5, "consolidate", "q.safetensors", "-o", "m.h5", "--quantize", name,
                               contains=[f"tensor {codes} holds quantized codes"])

    def test_plain_tensors_are_cast(self):
        for what, tensors in PLAIN.items():
            with self.subTest(what):
                for name in ("a", "b"):
                    safetensors_file.write_zeros(self.path(name), {**NORM, **tensors})
                self.ok("consolidate", "a", "-o", "m.h5", "--dtype", "f64", "-f")
                self.ok("average", "a", "b", "-o", "m.h5", "-f")

    def test_the_hint_to_dequantize_is_for_known_layouts(self):
        for what, (codes, scales, codes_are, scales_are) in QUANTIZED.items():
            with self.subTest(what):
                safetensors_file.write_zeros(self.path("q.safetensors"), {**NORM, codes: codes_are, scales: scales_are})
                refused = self.run_tool("consolidate", "q.safetensors", "-o", "d.h5", "--dequantize", "f32", "--dry-run")
                for run in (("consolidate", "q.safetensors", "-o", "q.h5", "--dtype", "f64"),
                            ("average", "q.safetensors", "q.safetensors", "-o", "q.h5")):
                    self.assertEqual("--dequantize" in self.run_tool(*run).stderr, refused.returncode == 0 or
                                     "cannot be dequantized" not in refused.stderr, what)

    def test_a_configuration_says_what_names_do_not(self):
        tensors = {**NORM, "q.tiles": ("U8", (4, 4)), "q.ranges": ("F32", (4,)), "q.position_ids": ("I64", (1, 8))}
        configs = {"config.json": {"quantization_config": {"quant_method": "new"}}, "quanto_qmap.json": {},
                   "hf_quant_config.json": {}}
        os.mkdir(self.path("m"))
        os.mkdir(self.path("d"))
        safetensors_file.write_zeros(self.path("m/model.safetensors"), tensors)
        for source in ("m", "m/model.safetensors"):
            self.ok("consolidate", source, "-o", "m.h5", "--dtype", "f64", "-f")
            for name, config in configs.items():
                with self.subTest(source=source, config=name):
                    with open(self.path("m/" + name), "w") as f:
                        json.dump(config, f)
                    says = [f"tensor q.tiles holds quantized codes of type uint8, because m/{name} says that the "
                            "weights are quantized"]
                    self.fails(5, "consolidate", source, "-o", "n.h5", "--dtype", "f64", contains=says)
                    self.fails(5, "average", source, source, "-o", "n.h5", contains=says)
                    self.ok("consolidate", source, "-o", "m.h5", "--dtype", "f64", "--dtype-for", "q.*=keep", "-f")
                    os.unlink(self.path("m/" + name))
        # Weights that are numbers again: the configuration no longer holds.
        safetensors_file.write_zeros(self.path("d/model.safetensors"), {**NORM, "q.position_ids": ("I64", (1, 8))})
        with open(self.path("d/config.json"), "w") as f:
            json.dump(configs["config.json"], f)
        self.ok("consolidate", "d", "-o", "m.h5", "--dtype", "f64", "-f")

    def test_every_pair_counts(self):
        pairs = {f"l.{i}.weight{end}": kind for i in range(3) for end, kind in (("", ("F8_E4M3", (4, 4))),
                                                                                ("_scale_inv", ("F32", (1, 1))))}
        safetensors_file.write_zeros(self.path("q.safetensors"), pairs)
        self.fails(5, "consolidate", "q.safetensors", "-o", "m.h5", "--dtype", "f32", contains=["the first of 3 such"])

    def test_quantized_weights_convert_and_keep(self):
        safetensors_file.write_zeros(self.path("q.safetensors"), {**NORM, "q.weight": ("F8_E4M3", (4, 4)),
                                                       "q.weight_scale_inv": ("F32", (1, 1))})
        self.ok("consolidate", "q.safetensors", "-o", "same.safetensors")
        self.assertEqual(self.dtypes("same.safetensors"), self.dtypes("q.safetensors"))
        self.ok("consolidate", "q.safetensors", "-o", "m.safetensors", "--dtype", "f32", "--dtype-for", "q.*=keep")
        self.assertEqual(self.dtypes("m.safetensors"),
                         {**dict.fromkeys(NORM, "float32"), "q.weight": "float8_e4m3fn", "q.weight_scale_inv": "float32"})
        # The scales alone are cast to another type: refused, too.
        self.fails(5, "consolidate", "q.safetensors", "-o", "n.h5", "--dtype", "bf16", "--dtype-for", "q.weight=keep",
                   contains=["q.weight holds quantized codes"])
        # Codes without scales are ordinary numbers.
        self.ok("consolidate", "q.safetensors", "-o", "norms.h5", "--dtype", "f32", "--exclude", "q.*")
        safetensors_file.write_zeros(self.path("plain.safetensors"), {"q.weight": ("F8_E4M3", (4, 4))})
        self.ok("consolidate", "plain.safetensors", "-o", "plain.h5", "--dtype", "bf16")
        self.assertEqual(self.dtypes("plain.h5"), {"q.weight": "bfloat16"})

    def test_dtype_for(self):
        safetensors_file.write_zeros(self.path("m.safetensors"), {**NORM, "a.weight": ("BF16", (4, 4)), "n": ("I32", (2,))})
        self.ok("consolidate", "m.safetensors", "-o", "a.h5", "--dtype-for", "*norm.weight=f32")
        self.assertEqual(self.dtypes("a.h5"), {**dict.fromkeys(NORM, "float32"), "a.weight": "bfloat16", "n": "int32"})
        self.ok("consolidate", "m.safetensors", "-o", "b.h5", "--dtype", "f16", "--dtype-for", "*norm*=f64",
                "--dtype-for", "model.norm.*=keep")
        self.assertEqual(self.dtypes("b.h5"), {"model.norm.weight": "bfloat16", "a.weight": "float16", "n": "int32",
                                               "model.layers.0.input_layernorm.weight": "float64"})
        # The names are those of the source.
        self.ok("consolidate", "m.safetensors", "-o", "c.h5", "--strip-prefix", "model.", "--dtype-for",
                "model.norm.weight=f32")
        self.assertEqual(self.dtypes("c.h5")["norm.weight"], "float32")

    def test_dtype_for_is_checked(self):
        safetensors_file.write_zeros(self.path("m.safetensors"), NORM)
        for rule, why in (("bf16", "'bf16' is not GLOB=TYPE"), ("=bf16", "is not GLOB=TYPE"),
                          ("a=int8", "int8 is not a floating-point type"), ("a=b", "there is no dtype 'b'"),
                          ("nothing*=f32", "the glob 'nothing*' with a dtype matches none of the names")):
            self.fails(2, "consolidate", "m.safetensors", "-o", "m.h5", "--dtype-for", rule, contains=[why])


if __name__ == "__main__":
    harness.main()
