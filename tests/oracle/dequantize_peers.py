#!/usr/bin/env python3
"""--dequantize and --quantize against the code of the packages whose checkpoints they read, bit for bit: Transformers (blocks of fp8,
MXFP4 of GPT-OSS) and compressed-tensors (fp8 and int8 per tensor, channel and group; packed integers and four-bit floats with
scales of every size). tests/cli/test_quantized.py compares whole models.

usage: dequantize_peers.py FSDPCKPT        exit 77 without these packages
"""
import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from safetensors.torch import load_file, save_file
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run, run_main
from torch_values import must_equal


def of_transformers(stored, want):
    op = Fp8Dequantize(None)
    for name, shape, blocks in (("a", (256, 384), (2, 3)), ("b", (64, 320), (1, 5)), ("e", (3, 256, 128), (3, 2, 1))):
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        scales = torch.rand(blocks).bfloat16() * 0.01
        stored[name + ".weight"], stored[name + ".weight_scale_inv"] = codes, scales
        want[name + ".weight"] = op._dequantize_one(codes, scales)
    codes, scales = torch.randint(-128, 128, (96, 64), dtype=torch.int8), torch.rand(96, 4).bfloat16()
    stored["pairs.weight"], stored["pairs.weight_scale_inv"] = codes, scales
    want["pairs.weight"] = op._dequantize_one(codes, scales)
    for name, shape in (("mlp.experts.gate_up_proj", (4, 640, 9, 16)), ("mlp.experts.down_proj", (4, 288, 20, 16))):
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8)
        scales = torch.randint(80, 160, shape[:-1], dtype=torch.uint8)
        stored[name + "_blocks"], stored[name + "_scales"] = blocks, scales
        want[name] = convert_moe_packed_tensors(blocks, scales)


def of_compressed_tensors(stored, want):
    weight = torch.randn(160, 96)
    for i, (strategy, kind, bits, shape) in enumerate((("tensor", "float", 8, (1,)), ("channel", "float", 8, (160, 1)),
                                                       ("group", "float", 8, (160, 3)), ("channel", "int", 8, (160, 1)))):
        args = QuantizationArgs(num_bits=bits, type=kind, strategy=strategy, group_size=32 if strategy == "group" else None)
        limit = 448 if kind == "float" else 127
        amax = weight.reshape(shape[0], -1, 96 // (shape[-1] if len(shape) == 2 else 1)).abs().amax((1, 2) if len(shape) == 1
                                                                                                else 2)
        scales = (amax.reshape(shape) / limit).bfloat16()
        codes = quantize(weight, scales, None, args, dtype=torch.float8_e4m3fn if kind == "float" else torch.int8)
        name = "c%d" % i
        stored[name + ".weight"], stored[name + ".weight_scale"] = codes, scales
        want[name + ".weight"] = dequantize(codes, scales, None, args, dtype=torch.bfloat16)


def packed(stored, want, name, form, tensors, **args):
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    want[name + ".weight"] = BaseCompressor.get_value_from_registry(form).decompress(dict(tensors), scheme)["weight"]
    stored.update({"%s.%s" % (name, key): t.clone().contiguous() for key, t in tensors.items()})


def all_bits(dtype, *shape):
    """Finite numbers of every size."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    limits = torch.iinfo(integers)
    numbers = torch.randint(limits.min, limits.max, shape, dtype=integers).view(dtype)
    return torch.where(numbers.float().isfinite(), numbers.float(), 1.0).to(dtype)


def integers(bits, *shape):
    return torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), shape, dtype=torch.int8)


def of_packed_integers(stored, want, dtype):
    for bits in range(1, 9):
        for front in ((70,), (3, 70)):
            codes, zeros = integers(bits, *front, 96), integers(bits, *front, 3)
            tensors = {"weight_packed": pack_to_int32(codes, bits), "weight_shape": torch.tensor(codes.shape),
                       "weight_zero_point": pack_to_int32(zeros, bits, packed_dim=0), "weight_scale": all_bits(dtype, *front, 3)}
            packed(stored, want, "i%d.%d" % (bits, len(front)), "pack-quantized", tensors, num_bits=bits, type="int", strategy="group",
                   group_size=32, symmetric=False)


def of_packed_floats(stored, want):
    codes, exponents = torch.randint(0, 256, (255, 16), dtype=torch.uint8), torch.arange(255, dtype=torch.uint8).reshape(255, 1)
    packed(stored, want, "mxfp4", "mxfp4-pack-quantized", {"weight_packed": codes, "weight_scale": exponents}, num_bits=4, type="float",
           strategy="group", group_size=32)
    for i, divisor in enumerate((torch.tensor([1e-30]), torch.tensor(3.7), torch.tensor([1e30]), torch.tensor([0.37]))):
        packed(stored, want, "nvfp4%d" % i, "nvfp4-pack-quantized",
               {"weight_packed": codes, "weight_scale": all_bits(torch.float8_e4m3fn, 255, 2), "weight_global_scale": divisor},
               num_bits=4, type="float", strategy="tensor_group", group_size=16)


def check_packed(tool, path):
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        stored, want = {}, {}
        of_packed_integers(stored, want, dtype)
        if dtype == torch.bfloat16:
            of_packed_floats(stored, want)
        save_file(stored, path("p.safetensors"))
        must_run(tool, "consolidate", path("p.safetensors"), "-o", path("p.out.safetensors"), "--dequantize", short, "-q", "-f")
        got = load_file(path("p.out.safetensors"))
        must(sorted(got) == sorted(want), sorted(got), sorted(want))
        must_equal(want, {name: got[name] for name in want}, short)


def check_bitsandbytes(tool, path):
    """Weights that are computed in several blocks; those of 7 columns begin within a byte of codes."""
    try:
        import bitsandbytes.functional as peer
    except ImportError:
        return print("without bitsandbytes")
    for dtype, short in ((torch.bfloat16, "bf16"), (torch.float16, "f16"), (torch.float32, "f32")):
        stored, want = {}, {}
        for name, shape, kind, nested in (("a", (100003, 7), "nf4", True), ("b", (3, 1, 300001), "nf4", False), ("c", (700, 640), "fp4", True)):
            codes, state = peer.quantize_4bit(torch.randn(shape, dtype=dtype) * torch.exp(torch.randn(1) * 3).to(dtype), quant_type=kind,
                                              compress_statistics=nested)
            if kind == "fp4":  # the sign of its zero depends on the processor
                codes = torch.where(codes >> 4 == 8, codes & 15, codes)
                codes = torch.where(codes & 15 == 8, codes & 240, codes)
            stored[name] = codes
            stored.update({"%s.%s" % (name, key): t for key, t in state.as_dict(packed=True).items()})
            want[name] = peer.dequantize_4bit(codes, state)
        save_file(stored, path("b.safetensors"))
        must_run(tool, "consolidate", path("b.safetensors"), "-o", path("b.out.safetensors"), "--dequantize", short, "-q", "-f")
        got = load_file(path("b.out.safetensors"))
        must(sorted(got) == sorted(want), sorted(got), sorted(want))
        must_equal(want, {name: got[name] for name in want}, short)


class Quantizer:
    """What Fp8Quantize reads of a quantizer."""

    class quantization_config:
        weight_block_size, scale_fmt = (128, 128), None


def check_quantize(tool, path):
    torch.manual_seed(3)
    weights = {"a.weight": torch.randn(256, 512).bfloat16(), "b.weight": torch.randn(2, 128, 384).bfloat16() * 1e-4,
               "norm.weight": torch.randn(64)}
    save_file(weights, path("w.safetensors"))
    must_run(tool, "consolidate", path("w.safetensors"), "-o", path("fp8.safetensors"), "--quantize", "?.weight", "-q")
    must_equal(dict(sorted(Fp8Quantize(Quantizer).convert(weights).items())),
               dict(sorted(load_file(path("fp8.safetensors")).items())), "quantize")


def main():
    tool = sys.argv[1]
    torch.manual_seed(2)
    stored, want = {}, {}
    of_transformers(stored, want)
    of_compressed_tensors(stored, want)
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-dequantize-") as home:
        source, out = os.path.join(home, "q.safetensors"), os.path.join(home, "w.safetensors")
        save_file(stored, source)
        must_run(tool, "consolidate", source, "-o", out, "--dequantize", "bf16", "-q")
        got = load_file(out)
        must(sorted(got) == sorted(want), sorted(got), sorted(want))
        must_equal(want, {name: got[name] for name in want})
        check_bitsandbytes(tool, lambda name: os.path.join(home, name))
        check_packed(tool, lambda name: os.path.join(home, name))
        check_quantize(tool, lambda name: os.path.join(home, name))
    print("%d weights are those of Transformers and compressed-tensors" % len(want))
    return 0


if __name__ == "__main__":
    run_main(main)
