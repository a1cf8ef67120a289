#!/usr/bin/env python3
"""--dequantize against the published formulas in PyTorch, bit for bit: code × scale in float32, rounded once.

Codes have scales per tensor, per channel and per block (also blocks at ragged edges, and of a size that only config.json
gives); three-dimensional experts; int8; pairs of four-bit floats; MXFP4. They are read from one file and from shards, and
written to one file and to shards. `average` refuses codes, and averages what they stand for. --quantize is compared with the
formula of Transformers, which DeepSeek's padding at ragged edges extends.

usage: dequantize.py FSDPCKPT        exit 77 without torch
"""
import json
import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run, run_main
from torch_values import must_equal

E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0.0, -.5, -1, -1.5, -2, -3, -4, -6])


def codes(dtype, *shape):
    """All finite values of a type."""
    raw = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    return torch.where(raw.float().isfinite(), raw.float(), 1.0).to(dtype)


def scales(*shape, dtype=torch.float32):
    return (torch.rand(shape) * 0.01 + 1e-4).to(dtype)


def spread(scale, shape, blocks):
    """One scale per element."""
    for d, block in enumerate(blocks):
        scale = scale.repeat_interleave(block, d).narrow(d, 0, shape[d])
    return scale.expand(shape)


def unpacked(pairs):
    """The four-bit floats of bytes, the one in the low bits first."""
    both = pairs.view(torch.uint8)
    return E2M1[torch.stack([both & 15, both >> 4], -1).long()].flatten(-2)


def mxfp4(blocks, exponents):
    """As Transformers: blocks of 32 along the last dimension, which is then exchanged with the one before."""
    values = unpacked(blocks) * torch.ldexp(torch.tensor(1.0), exponents.int() - 127)[..., None]
    return values.flatten(-2).transpose(-1, -2).contiguous()


def model():
    """(tensors, the weights that they stand for)"""
    torch.manual_seed(1)
    f8, other = torch.float8_e4m3fn, torch.float8_e5m2
    stored = {"embed.weight": torch.randn(64, 96).bfloat16(), "norm.weight": torch.randn(96)}
    want = dict(stored)

    def pair(name, code, end, scale, values):
        stored[name + end[0]] = code
        stored[name + end[1]] = scale
        want[name + (end[0] if "blocks" not in end[0] else "")] = values

    inverse, plain = (".weight", ".weight_scale_inv"), (".weight", ".weight_scale")
    for name, shape in {"even": (256, 384), "ragged": (300, 577), "small": (5, 100), "long": (1, 70001)}.items():
        code, scale = codes(f8, *shape), scales(-(-shape[0] // 128), -(-shape[1] // 128))
        pair(name, code, inverse, scale, code.float() * spread(scale, shape, (128, 128)))
    code, scale = codes(f8, 3, 200, 130), scales(3, 2, 2)
    pair("experts.up", code, ("", "_scale_inv"), scale, code.float() * spread(scale, code.shape, (1, 128, 128)))
    code, scale = codes(f8, 256, 130), codes(torch.float8_e8m0fnu, 2, 2)
    scale = torch.randint(110, 130, (2, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    pair("e8m0", code, inverse, scale, code.float() * spread(scale.float(), code.shape, (128, 128)))
    for name, scale in {"tensor": scales(), "tensor1": scales(1), "channel": scales(300, 1, dtype=torch.bfloat16),
                        "channel1": scales(300), "group": scales(300, 4)}.items():
        code = codes(other if name == "channel" else f8, 300, 64)
        full = scale.float().reshape(-1, scale.shape[1] if scale.ndim == 2 else 1)
        pair(name, code, plain, scale, code.float() * spread(full, code.shape, (300 // len(full), 64 // full.shape[1])))
        stored[name + ".input_scale"] = scales()  # of activations: left out
    code, scale = torch.randint(-128, 128, (70, 90), dtype=torch.int8), scales(70, 1)
    pair("int8", code, plain, scale, code.float() * scale)
    code, scale = torch.randint(-128, 128, (96, 64), dtype=torch.int8), scales(96, 4)
    pair("pairs", code, inverse, scale, unpacked(code) * spread(scale, (96, 128), (1, 32)))
    code = torch.randint(0, 256, (3, 500, 16, 16), dtype=torch.uint8)
    scale = torch.randint(100, 140, (3, 500, 16), dtype=torch.uint8)
    pair("mlp.experts.down_proj", code, ("_blocks", "_scales"), scale, mxfp4(code, scale))
    return stored, want


def rounded(want, dtype):
    return {name: t if name in ("embed.weight", "norm.weight") else t.to(dtype) for name, t in want.items()}


def sources(tool, path, stored):
    """The same checkpoint in several formats and layouts."""
    save_file(stored, path("one.safetensors"))
    torch.save(stored, path("one.pt"))
    must_run(tool, "reshard", path("one.safetensors"), "-o", path("dcp"), "--to", "dcp", "--dp", 3, "-q")
    must_run(tool, "reshard", path("one.safetensors"), "-o", path("h5"), "--dp", 4, "--compress", 1, "-q")
    return [path(name) for name in ("one.safetensors", "one.pt", "dcp", "h5")]


def check_all(tool, path, stored, want):
    for source in sources(tool, path, stored):
        for dtype, short in ((torch.bfloat16, "bf16"), (torch.float32, "f32"), (torch.float16, "f16")):
            must_run(tool, "consolidate", source, "-o", path("out.safetensors"), "--dequantize", short, "-q", "-f")
            must_equal(rounded(want, dtype), order(want, load_file(path("out.safetensors"))), source + " " + short)
    for to in ("dcp", "h5", "safetensors"):
        must_run(tool, "reshard", path("dcp"), "-o", path("shards"), "--to", to, "--dp", 5, "--dequantize", "bf16", "-q",
                 "-f", "--memory", "2M")
        must_run(tool, "consolidate", path("shards"), "-o", path("out.safetensors"), "-q", "-f")
        must_equal(rounded(want, torch.bfloat16), order(want, load_file(path("out.safetensors"))), "shards " + to)
    # The other options are about the new tensors.
    must_run(tool, "convert", path("one.pt"), "-o", path("some.pt"), "--dequantize", "bf16", "--dtype", "f32", "--include",
             "experts.*", "--include", "mlp*", "--rename", "s/^/m./", "-q")
    some = {"m." + n: t.bfloat16().float() for n, t in want.items() if "experts" in n}
    must_equal(some, torch.load(path("some.pt"), weights_only=True), "selected")


def order(want, got):
    must(sorted(want) == sorted(got), sorted(want), sorted(got))
    return {name: got[name] for name in want}


def check_config(tool, path):
    """Blocks of 96 do not divide 200 rows."""
    code, scale = codes(torch.float8_e4m3fn, 200, 64), scales(3, 1)
    os.mkdir(path("m"))
    save_file({"a.weight": code, "a.weight_scale_inv": scale}, path("m/a.safetensors"))
    argv = tool, "consolidate", path("m/a.safetensors"), "-o", path("a.safetensors"), "--dequantize", "f32", "-q"
    r = must_run(*argv, ok=(5,))
    must("does not fit its scales [3, 1]" in r.stderr or "does not fit its scales" in r.stderr, r.stderr)
    with open(path("m/config.json"), "w") as f:
        json.dump({"quantization_config": {"weight_block_size": [96, 96]}}, f)
    must_run(*argv)
    want = {"a.weight": code.float() * spread(scale, (200, 64), (96, 64))}
    must_equal(want, load_file(path("a.safetensors")), "config.json")


def check_refusals(tool, path):
    save_file({"a.weight": torch.ones(3)}, path("none.safetensors"))
    packed = torch.zeros(4, 4, dtype=torch.int32)
    for name, tensors, status, words in (
            ("none", {"a.weight": torch.ones(3)}, 2, "has no quantized weights"),
            ("gptq", {"a.qweight": packed, "a.scales": torch.ones(1, 4)}, 5, "they are no int32 matrix"),
            ("awq", {"a.weight": torch.zeros(2, 8, dtype=torch.uint8), "a.weight_scale": torch.ones(4, 1)}, 5,
             "are four-bit integers of ModelOpt's AWQ"),
            ("second", {"a.weight": codes(torch.float8_e4m3fn, 4, 4), "a.weight_scale": torch.ones(4, 1),
                        "a.weight_scale_2": torch.ones(())}, 5, "a.weight_scale_2 besides its scales"),
            ("shape", {"a.weight": codes(torch.float8_e4m3fn, 10, 10), "a.weight_scale": torch.ones(3, 1)}, 5,
             "does not fit its scales"),
            ("mxfp4", {"a_blocks": torch.zeros(4, 4, 2, 15, dtype=torch.uint8),
                       "a_scales": torch.zeros(4, 4, 2, dtype=torch.uint8)}, 5, "as GPT-OSS stores them")):
        save_file(tensors, path(name + ".safetensors"))
        r = must_run(tool, "consolidate", path(name + ".safetensors"), "-o", path("no.h5"), "--dequantize", "bf16",
                     ok=(status,))
        must(words in r.stderr and r.stderr.count("\n") == 1 and not os.path.exists(path("no.h5")), name, r.stderr)


def check_damage(tool, path, stored):
    """A flipped bit in the codes or the scales is found, though both are read in blocks."""
    for victim in ("ragged.weight", "ragged.weight_scale_inv", "mlp.experts.down_proj_blocks",
                   "mlp.experts.down_proj_scales"):
        torch.save({victim: stored[victim].clone()}, path("find.pt"))
        needle = stored[victim].flatten().view(torch.uint8).numpy().tobytes()[-16:]
        with open(path("one.pt"), "rb") as f:
            data = bytearray(f.read())
        at = data.find(needle)
        must(at > 0, victim)
        data[at] ^= 1
        with open(path("bad.pt"), "wb") as f:
            f.write(data)
        r = must_run(tool, "consolidate", path("bad.pt"), "-o", path("bad.h5"), "--dequantize", "bf16", "-q", ok=(3,))
        must(victim in r.stderr and not os.path.exists(path("bad.h5")), victim, r.stderr)


def quantized(weight):
    """Codes and scales of blocks of 128 x 128: the largest magnitude becomes 448, in the steps of Transformers."""
    codes, scale = torch.zeros(weight.shape), torch.ones(*weight.shape[:-2], *(-(-n // 128) for n in weight.shape[-2:]))
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            block = ..., slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            largest = weight[block].float().abs().amax((-2, -1))
            factor = torch.where(largest > 0, largest.reciprocal() * 448, 1.0)
            codes[block] = (weight[block].float() * factor[..., None, None]).clamp(-448, 448)
            scale[..., i, j] = 1.0 / factor
    return codes.to(torch.float8_e4m3fn), scale


def check_quantize(tool, path):
    torch.manual_seed(6)
    weights = {"l.a.weight": torch.randn(256, 384).bfloat16(), "l.b.weight": torch.randn(300, 9001) * 1e-3,
               "l.c.weight": torch.randn(3, 130, 70).half(), "l.zero.weight": torch.zeros(5, 5),
               "l.norm.weight": torch.randn(384), "head.weight": torch.randn(10, 20)}
    save_file(weights, path("w.safetensors"))
    want = dict(weights)
    for name in ("l.a", "l.b", "l.c", "l.zero"):
        want[name + ".weight"], want[name + ".weight_scale_inv"] = quantized(weights[name + ".weight"])
    for to in ("consolidate", "reshard"):
        out = path("q.safetensors") if to == "consolidate" else path("q")
        must_run(tool, to, path("w.safetensors"), "-o", out, "-q", "--quantize", "l.*", *(("--dp", 3) if to == "reshard" else ()))
        must_run(tool, "consolidate", out, "-o", path("again.safetensors"), "-q", "-f")
        must_equal(dict(sorted(want.items())), dict(sorted(load_file(path("again.safetensors")).items())), to)
    must_run(tool, "consolidate", path("q"), "-o", path("back.safetensors"), "-q", "--dequantize", "f32")
    back = load_file(path("back.safetensors"))
    for name, w in weights.items():
        must(bool(((back[name].float() - w.float()).abs() <= w.float().abs() / 15 + w.float().abs().max() / 2e5).all()), name)
    save_file({"l.weight": torch.tensor([[1.0, float("nan")]])}, path("nan.safetensors"))
    r = must_run(tool, "consolidate", path("nan.safetensors"), "-o", path("no.h5"), "--quantize", "*", ok=(5,))
    must("l.weight: has infinite values or NaN" in r.stderr and not os.path.exists(path("no.h5")), r.stderr)
    r = must_run(tool, "consolidate", path("w.safetensors"), "-o", path("no.h5"), "--quantize", "*norm*", ok=(2,))
    must("no floating-point matrix has a name like '*norm*'" in r.stderr, r.stderr)


def check_average(tool, path, want):
    r = must_run(tool, "average", path("one.pt"), path("dcp"), "-o", path("mean.pt"), ok=(5,))
    must("holds quantized codes" in r.stderr and "--dequantize" in r.stderr, r.stderr)
    must_run(tool, "average", path("one.pt"), path("dcp"), "-o", path("mean.pt"), "--dequantize", "f32", "-q")
    got = torch.load(path("mean.pt"), weights_only=True)
    must_equal(rounded(want, torch.float32), order(want, got), "average")


def main():
    tool = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-dequantize-") as home:
        path = lambda name: os.path.join(home, name)
        stored, want = model()
        check_all(tool, path, stored, want)
        check_config(tool, path)
        check_refusals(tool, path)
        check_damage(tool, path, stored)
        check_average(tool, path, want)
        check_quantize(tool, path)
    print("%d dequantized weights have the bits of the formulas" % (len(want) - 2))
    return 0


if __name__ == "__main__":
    run_main(main)
