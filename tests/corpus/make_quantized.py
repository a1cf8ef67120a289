"""Makes tests/corpus/quantized: small quantized models as their packages save them, and the weights that the same package computes of
them.

usage: make_quantized.py OUT [CASE...]

Each folder has model.safetensors and config.json, and weights.safetensors: what the package's own decompression gives. Those of torchao
have model.pt or dcp, too, with its classes.
Packages: compressed-tensors 0.20.0 (pip install --no-deps compressed-tensors loguru). ct-columns, which must be named, needs 0.12.2.
bitsandbytes 0.50.2 (on a CPU). auto-gptq 0.7.1 and autoawq 0.2.9 need a GPU: pip download --no-deps, unpack both into one folder, and name
it in $QUANTIZED_PACKAGES. modelopt-* need nvidia-modelopt 0.47.0 with pulp, omegaconf, scipy and requests (on a CPU).
torchao-* need torchao 0.18.0, quanto-* optimum-quanto 0.2.7.
"""
import json
import os
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

VERSIONS = []


# ---- compressed-tensors ----

def model(linears, dtype, seed=0):
    """A model of linear layers: {name: (rows, columns)}."""
    torch.manual_seed(seed)
    root = torch.nn.Module()
    for name, (rows, columns) in linears.items():
        at = root
        *folders, last = name.split(".")
        for folder in folders:
            if not hasattr(at, folder):
                at.add_module(folder, torch.nn.Module())
            at = getattr(at, folder)
        at.add_module(last, torch.nn.Linear(columns, rows, bias=last == "gate").to(dtype))
    root.norm = torch.nn.LayerNorm(8).to(dtype)
    return root


def set_scales(root, spread):
    """Random scales, of sizes that differ by factors of 4^spread, and zero points."""
    for module in root.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        scale, zero = module.weight_scale, getattr(module, "weight_zero_point", None)
        exponents = torch.randint(-spread, spread + 1, scale.shape)
        if scheme.weights.scale_dtype == torch.uint8 or scheme.weights.type == "float" and scheme.weights.group_size == 32:
            values = torch.pow(2.0, exponents)
        else:
            values = (torch.rand(scale.shape) + 0.5) * torch.pow(4.0, exponents) * 0.01
        if hasattr(module, "weight_global_scale"):
            values = values.clamp(2 ** -6, 448)
            module.weight_global_scale.data = torch.tensor([37.3])
        scale.data = values.to(scale.dtype)
        if zero is not None and not scheme.weights.symmetric:
            half = 1 << (scheme.weights.num_bits - 1)
            zero.data = torch.randint(-half, half, zero.shape).to(zero.dtype)
        # Codes of every size: the weight is a multiple of its scale.
        factor = values if not hasattr(module, "weight_global_scale") else values / 37.3
        while factor.ndim < 2:
            factor = factor.unsqueeze(-1)
        rows, columns = module.weight.shape
        full = factor.repeat_interleave(-(-rows // factor.shape[0]), 0)[:rows]
        full = full.repeat_interleave(-(-columns // full.shape[1]), 1)[:, :columns]
        reach = 1 << (scheme.weights.num_bits - 1)
        module.weight.data = ((torch.rand(rows, columns) * 2 - 1) * reach * full).to(module.weight.dtype)


def compressed(groups, linears, dtype=torch.bfloat16, ignore=(), spread=2, seed=0):
    """(stored tensors, weights, quantization_config)"""
    import tempfile
    import compressed_tensors
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    root = model(linears, dtype, seed)
    apply_quantization_config(root, QuantizationConfig(config_groups=groups, ignore=list(ignore)))
    set_scales(root, spread)
    compressor = ModelCompressor.from_pretrained_model(root)
    compressor.compress_model(root)
    stored = {name: t.detach().clone().contiguous() for name, t in root.state_dict().items()}
    with tempfile.TemporaryDirectory() as home:
        compressor.update_config(home)
        with open(os.path.join(home, "config.json")) as f:
            config = json.load(f)
    compressor.decompress_model(root)
    got = root.state_dict()
    want = {name: t.detach().clone().contiguous() for name, t in got.items()
            if not name.split(".")[-1].startswith(("weight_", "input_", "output_"))}
    VERSIONS.append("compressed-tensors " + compressed_tensors.__version__)
    return stored, want, config


def weights(bits, strategy, kind="int", **more):
    args = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True}
    args.update(more)
    return args


def group(targets, args, inputs=None):
    return {"targets": targets, "weights": args, "input_activations": inputs}


def asymmetric(bits, strategy, **more):
    return weights(bits, strategy, symmetric=False, **more)


def compressed_cases():
    eight = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    eight_floats = dict(eight, type="float")
    mixed = {"attn": group(["re:.*attn.*"], asymmetric(4, "group", group_size=16)), "mlp": group(["re:.*up$"], weights(8, "channel")),
             "down": group(["re:.*down$"], asymmetric(3, "channel"))}
    layers = {"attn.q": (12, 32), "attn.k": (9, 48), "mlp.up": (9, 37), "mlp.down": (11, 45), "head": (4, 8), "mlp.gate": (4, 8)}
    yield "ct-int4-groups", lambda **k: compressed({"a": group(["Linear"], weights(4, "group", group_size=32))},
                                                   {"l.q": (5, 64), "l.k": (3, 96), "head": (4, 8)}, ignore=["head"], **k)
    yield "ct-mixed", lambda **k: compressed(mixed, layers, ignore=["head", "re:.*gate"], **k)
    for dtype in (torch.float16, torch.float32):
        yield "ct-int8-tensor-" + str(dtype)[6:], lambda d=dtype, **k: compressed(
            {"a": group(["re:.*down"], weights(8, "tensor")), "b": group(["re:.*up"], asymmetric(8, "group", group_size=8))},
            {"down": (5, 13), "up": (6, 24)}, dtype=d, **k)
    for bits in (1, 6):
        yield "ct-int%d" % bits, lambda b=bits, **k: compressed({"a": group(["Linear"], asymmetric(b, "channel"))}, {"a": (34, 45)}, **k)
    yield "ct-w8a8-int", lambda **k: compressed({"a": group(["re:a.*"], weights(8, "channel"), eight),
                                                 "b": group(["re:b.*"], asymmetric(8, "channel"), eight)},
                                                {"a1": (9, 20), "b1": (8, 12)}, **k)
    yield "ct-w8a8-float", lambda **k: compressed({"a": group(["re:a.*"], weights(8, "channel", "float"), eight_floats),
                                                   "b": group(["re:b.*"], weights(8, "tensor", "float"), eight_floats),
                                                   "c": group(["re:c.*"], weights(8, "block", "float", block_structure=[16, 16]),
                                                              eight_floats)}, {"a1": (9, 20), "b1": (8, 12), "c1": (40, 50)}, **k)
    yield "ct-w8-naive", lambda **k: compressed({"a": group(["Linear"], weights(8, "group", "float", group_size=100))}, {"a": (5, 200)}, **k)
    yield "ct-nvfp4", lambda **k: compressed({"a": group(["Linear"], weights(4, "tensor_group", "float", group_size=16))},
                                             {"a": (5, 32), "b": (3, 64), "head": (4, 16)}, ignore=["head"], **k)
    yield "ct-mxfp4", lambda **k: compressed({"a": group(["Linear"], weights(4, "group", "float", group_size=32))},
                                             {"a": (5, 32), "b": (3, 64)}, **k)
    yield "ct-mxfp8", lambda **k: compressed({"a": group(["Linear"], weights(8, "group", "float", group_size=32, scale_dtype="torch.uint8"))},
                                             {"a": (5, 32), "b": (3, 64)}, **k)


def columns_case():
    """Which group each column has (actorder), as versions before 0.18 wrote it: pip install --no-deps compressed-tensors==0.12.2."""
    import compressed_tensors
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs

    torch.manual_seed(1)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=16, actorder="group")
    stored, want = {}, {}
    for name, columns in (("a", torch.randperm(48) // 16), ("b", torch.full((48,), -1))):
        scale = ((torch.rand(6, 3) + 0.5) * 0.01).bfloat16()
        packed = PackedQuantizationCompressor().compress_weight(
            weight=torch.randn(6, 48).bfloat16() * 0.05, scale=scale, zero_point=None, g_idx=columns.int(), quantization_args=args)
        packed = {"weight_" + key.replace("weight_", ""): t.contiguous() for key, t in packed.items()}
        packed.update(weight_scale=scale, weight_g_idx=columns.int())
        want[name + ".weight"] = PackedQuantizationCompressor().decompress_weight(packed, quantization_args=args).contiguous()
        stored.update({"%s.%s" % (name, key): t for key, t in packed.items()})
    VERSIONS.append("compressed-tensors " + compressed_tensors.__version__)
    groups = {"g": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}
    return stored, want, {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}}


# ---- bitsandbytes ----

def four_bits(shapes, dtype, kind, nested, storage=torch.uint8, size=64, seed=2):
    import bitsandbytes
    torch.manual_seed(seed)
    root = torch.nn.Module()
    for name, (rows, columns) in shapes.items():
        layer = bitsandbytes.nn.Linear4bit(columns, rows, bias=name == "a", quant_type=kind, compress_statistics=nested, quant_storage=storage)
        layer.weight.blocksize = size
        layer.weight.data = torch.randn(rows, columns) * torch.exp(torch.randn(rows, 1) * 3)
        root.add_module(name, layer.to(dtype))
    root.norm = torch.nn.LayerNorm(8).to(dtype)
    root = root.to("cpu")  # which quantizes
    want = {name: t.detach() for name, t in root.state_dict().items() if name.endswith("bias") or name.startswith("norm")}
    for name in shapes:
        weight = getattr(root, name).weight
        want[name + ".weight"] = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    stored = {name: t.detach() for name, t in root.state_dict().items()}
    assert any(name.endswith(".absmax") for name in stored)
    config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind,
                                      "bnb_4bit_use_double_quant": nested}}
    VERSIONS.append("bitsandbytes " + bitsandbytes.__version__)
    return stored, want, config


def eight_bits(dtype, seed=3):
    import bitsandbytes
    torch.manual_seed(seed)
    layer = bitsandbytes.nn.Linear8bitLt(23, 11, has_fp16_weights=False).to(dtype)
    layer.weight.data, layer.weight.SCB, _ = bitsandbytes.functional.int8_vectorwise_quant(
        (torch.randn(11, 23) * torch.exp(torch.randn(11, 1) * 3)).half())
    stored = {"l." + name: t.detach() for name, t in layer.state_dict().items()}
    assert "l.SCB" in stored
    want = {"l.bias": stored["l.bias"], "l.weight": bitsandbytes.functional.int8_vectorwise_dequant(stored["l.weight"], stored["l.SCB"])}
    VERSIONS.append("bitsandbytes " + bitsandbytes.__version__)
    return stored, want, {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}


def bitsandbytes_cases():
    shapes = {"a": (9, 40), "b": (3, 7)}
    yield "bnb-nf4", lambda: four_bits(shapes, torch.bfloat16, "nf4", False)
    yield "bnb-nf4-nested", lambda: four_bits(dict(shapes, c=(64, 34)), torch.float16, "nf4", True)
    # Rows of whole blocks: of others the package makes the code 8, which is 0 in quant_map, -0 on a CPU.
    yield "bnb-fp4-nested", lambda: four_bits({"a": (5, 64), "b": (3, 7)}, torch.float32, "fp4", True)
    yield "bnb-nf4-stored-as-bf16", lambda: four_bits({"a": (9, 40)}, torch.bfloat16, "nf4", True, torch.bfloat16)
    yield "bnb-int8", lambda: eight_bits(torch.float32)


# ---- GPTQ and AWQ: the modules of the packages, without what needs a GPU ----

def module_of(*path):
    """A file of a package that cannot be imported as a whole: unpack its wheel or sdist into $QUANTIZED_PACKAGES."""
    import glob
    import importlib.util
    spec = importlib.util.spec_from_file_location("module", glob.glob(os.path.join(os.environ["QUANTIZED_PACKAGES"], *path))[0])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def words(*shape):
    return torch.randint(-2 ** 31, 2 ** 31, shape, dtype=torch.int64).to(torch.int32)


def gptq_layer(bits, columns, rows, size, order, dtype):
    """(stored, weight): random codes. Zero points are never the largest code, after which implementations differ."""
    layer = module_of("auto_gptq", "nn_modules", "qlinear", "qlinear_cuda.py").QuantLinear(bits, size, columns, rows, False,
                                                                                       weight_dtype=dtype)
    layer.qweight.copy_(words(*layer.qweight.shape))
    even = {2: 0x55555555, 3: 0, 4: 0x11111111, 8: 0x01010101}[bits]
    layer.qzeros.copy_(words(*layer.qzeros.shape) & ~even)
    layer.scales.copy_((torch.rand(layer.scales.shape) + 0.5) * torch.pow(4.0, torch.randint(-3, 3, layer.scales.shape)) * 0.01)
    if order:
        layer.g_idx.copy_(layer.g_idx[torch.randperm(columns)])
    stored = {name: t.clone() for name, t in layer.state_dict().items()}
    return stored, layer(torch.eye(columns, dtype=dtype)).t(), even


def gptq(bits, order, dtype=torch.float16, second=False, columns=96, rows=32, seed=4):
    torch.manual_seed(seed)
    stored, want, even = gptq_layer(bits, columns, rows, 32, order, dtype)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "desc_act": order, "sym": False, "checkpoint_format": "gptq"}
    if second:  # what GPTQModel's convert_gptq_v1_to_v2_format makes of it
        config["checkpoint_format"] = "gptq_v2"
        stored["qzeros"] += even
    norm = {"norm.weight": torch.ones(8, dtype=dtype)}
    VERSIONS.append("auto-gptq 0.7.1, qlinear_cuda.py")
    return {**{"l." + name: t for name, t in stored.items()}, **norm}, {"l.weight": want, **norm}, {"quantization_config": config}


def awq(columns=64, rows=24, size=32, seed=5):
    torch.manual_seed(seed)
    stored = {"qweight": words(columns, rows // 8), "qzeros": words(columns // size, rows // 8),
              "scales": ((torch.rand(columns // size, rows) + 0.5) * 0.01).half()}
    want = module_of("autoawq*", "awq", "utils", "packing_utils.py").dequantize_gemm(
        stored["qweight"], stored["qzeros"], stored["scales"], 4, size).t()
    norm = {"norm.weight": torch.ones(8).half()}
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}
    VERSIONS.append("autoawq 0.2.9, packing_utils.py")
    return {**{"l." + name: t for name, t in stored.items()}, **norm}, {"l.weight": want, **norm}, {"quantization_config": config}


def unpacked_cases():
    for bits in (2, 3, 4, 8):
        yield "gptq-int%d" % bits, lambda b=bits: gptq(b, b != 2)
    yield "gptq-v2", lambda: gptq(4, False, torch.bfloat16, True)
    yield "awq", awq


# ---- ModelOpt ----

def modelopt(config, dtype):
    """A tiny Llama as export_hf_checkpoint writes it. The weights are those of the package's own tensors in `dtype`."""
    import tempfile
    import modelopt as package
    import modelopt.torch.quantization as mtq
    import transformers
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, INT8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
    from safetensors.torch import load_file
    torch.manual_seed(6)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])).to(torch.bfloat16).eval()
    model = mtq.quantize(model, getattr(mtq, config), lambda m: m(torch.arange(8)[None]))
    with tempfile.TemporaryDirectory() as home:
        export_hf_checkpoint(model, export_dir=home)
        stored = {name: t for name, t in load_file(os.path.join(home, "model.safetensors")).items()
                  if any(part in name for part in ("k_proj", "down_proj", "norm", "embed"))}  # the rest has the same layout
        with open(os.path.join(home, "config.json")) as f:
            quantization = json.load(f)["quantization_config"]
    want = {}
    for name, t in stored.items():
        scale, second = stored.get(name + "_scale"), stored.get(name + "_scale_2")
        if scale is None:
            want.update({} if "_scale" in name else {name: t})
            continue
        if t.dtype == torch.uint8:
            kind, size = (MXFP4QTensor, 32) if second is None else (NVFP4QTensor, t.shape[1] * 2 // scale.shape[1])
            made = kind((t.shape[0], t.shape[1] * 2), torch.bfloat16, t)
            want[name] = made.dequantize(dtype, scale=scale, double_scale=second, block_sizes={-1: size})
        elif scale.dtype == torch.uint8:
            want[name] = MXFP8QTensor(t.shape, torch.bfloat16, t).dequantize(dtype, scale=scale)
        else:
            kind = INT8QTensor if t.dtype == torch.int8 else FP8QTensor
            want[name] = kind(t.shape, torch.bfloat16, t).dequantize(dtype, scale=scale[:, None] if scale.ndim else scale)
        assert want[name].dtype == dtype and want[name].count_nonzero() > t.numel() / 2
    VERSIONS.append("nvidia-modelopt " + package.__version__)
    return stored, want, {"quantization_config": quantization}


def modelopt_cases():
    # FP8 in bfloat16 is rounded twice by the package, NVFP4 is not.
    for name, config, dtype in (("nvfp4", "NVFP4_DEFAULT_CFG", torch.bfloat16), ("w4a16-nvfp4", "W4A16_NVFP4_CFG", torch.float32),
                                ("w4a8-nvfp4", "W4A8_NVFP4_FP8_CFG", torch.bfloat16), ("mxfp4", "MXFP4_DEFAULT_CFG", torch.bfloat16),
                                ("mxfp8", "MXFP8_DEFAULT_CFG", torch.bfloat16), ("fp8", "FP8_DEFAULT_CFG", torch.float32),
                                ("fp8-channel", "FP8_PER_CHANNEL_PER_TOKEN_CFG", torch.float32),
                                ("int8", "INT8_WEIGHT_ONLY_CFG", torch.float32)):
        yield "modelopt-" + name, lambda c=config, d=dtype: modelopt(c, d)


# ---- torchao ----

def spread_linears(dtype, shapes):
    root = torch.nn.Module()
    for name, (rows, columns) in shapes.items():
        layer = torch.nn.Linear(columns, rows, bias=name == "a").to(dtype)
        layer.weight.data *= torch.exp(torch.randn(rows, 1) * 3).to(dtype)
        root.add_module(name, layer)
    root.norm = torch.nn.LayerNorm(8).to(dtype)
    return root


def torchao(config, dtype, large, seed=7):
    """As transformers saves it: torchao takes its tensors apart, and describes them in __metadata__."""
    import torchao as package
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    torch.manual_seed(seed)
    # The codes of DCP must be shorter than the archive of a plain tensor, by which the class is found.
    root = spread_linears(dtype, {"a": (48 if large else 9, 64), "b": (3, 32)})
    package.quantization.quantize_(root, config)
    values = {name: t.detach() for name, t in root.state_dict().items()}
    stored, described = flatten_tensor_state_dict(values)
    want = {name: t.dequantize() if hasattr(t, "dequantize") and type(t) is not torch.Tensor else t for name, t in values.items()}
    assert type(values["a.weight"]) is not torch.Tensor and want["a.weight"].dtype == dtype
    VERSIONS.append("torchao " + package.__version__)
    return stored, want, {"quantization_config": {"quant_method": "torchao"}}, dict(described, format="pt"), values


def torchao_cases():
    def configs(name, **args):
        from torchao import quantization
        return getattr(quantization, name)(**args)

    def groups(size):
        from torchao.quantization import PerGroup
        return PerGroup(size)
    for name, make, dtype in (
            ("int8", lambda: configs("Int8WeightOnlyConfig"), torch.bfloat16),
            ("w8a8", lambda: configs("Int8DynamicActivationInt8WeightConfig"), torch.float16),
            ("float8", lambda: configs("Float8WeightOnlyConfig"), torch.bfloat16),
            ("intx4", lambda: configs("IntxWeightOnlyConfig", weight_dtype=torch.int4, granularity=groups(16)), torch.bfloat16),
            ("intx6", lambda: configs("Int8DynamicActivationIntxWeightConfig", weight_dtype=torch.int6, weight_granularity=groups(32),
                                      weight_mapping_type=asymmetric_type()), torch.float32)):
        yield "torchao-" + name, lambda m=make, d=dtype, n=name: torchao(m(), d, n in ("int8", "float8"))


def asymmetric_type():
    from torchao.quantization import MappingType
    return MappingType.ASYMMETRIC


# ---- quanto ----

def quanto(kind, dtype, seed=8):
    from importlib.metadata import version
    import optimum.quanto as package
    torch.manual_seed(seed)
    root = spread_linears(dtype, {"a": (9, 40), "b": (3, 7)})
    package.quantize(root, weights=getattr(package, kind))
    package.freeze(root)
    stored = {name: t.detach() for name, t in root.state_dict().items()}
    want = {name: t for name, t in stored.items() if name.endswith("bias") or name.startswith("norm")}
    want.update({name + ".weight": getattr(root, name).weight.dequantize().detach() for name in "ab"})
    assert "a.weight._scale" in stored and want["a.weight"].dtype == dtype
    VERSIONS.append("optimum-quanto " + version("optimum-quanto"))
    return stored, want, {"quantization_config": {"quant_method": "quanto", "weights": kind}}


def quanto_cases():
    for kind, dtype in (("qint8", torch.bfloat16), ("qfloat8", torch.float16), ("qfloat8_e5m2", torch.float32)):
        yield "quanto-" + kind, lambda k=kind, d=dtype: quanto(k, d)


def cases():
    yield "ct-columns", columns_case
    yield from compressed_cases()
    yield from bitsandbytes_cases()
    yield from modelopt_cases()
    yield from torchao_cases()
    yield from quanto_cases()
    if "QUANTIZED_PACKAGES" in os.environ:
        yield from unpacked_cases()


def main():
    out, only = sys.argv[1], sys.argv[2:]
    for name, make in cases():
        if not any(name.startswith(o) for o in only) if only else name == "ct-columns":
            continue
        stored, want, config, *more = make()
        folder = os.path.join(out, name)
        os.makedirs(folder, exist_ok=True)
        stored, want = ({name: t.clone().contiguous() for name, t in tensors.items()} for tensors in (stored, want))
        save_file(stored, os.path.join(folder, "model.safetensors"), *more[:1])
        for values in more[1:]:
            torch.save(values, os.path.join(folder, "model.pt"))
            if name in ("torchao-int8", "torchao-float8"):  # dcp.save fails with intx, which lacks aten.is_pinned in torchao 0.18.0
                dcp.save(values, checkpoint_id=os.path.join(folder, "dcp"))
        save_file(want, os.path.join(folder, "weights.safetensors"), {"by": VERSIONS[-1]})
        with open(os.path.join(folder, "config.json"), "w") as f:
            json.dump(config, f, indent=1, sort_keys=True)
            f.write("\n")
        print(name, sum(os.path.getsize(os.path.join(folder, n)) for n in os.listdir(folder)), VERSIONS[-1])


if __name__ == "__main__":
    main()
