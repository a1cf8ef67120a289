#!/usr/bin/env python3
"""--adapter against the formula of LoRA in float64: base + weight × alpha / rank × B × A, in float32 and rounded once.

The adapters are written as PEFT writes them: patterns of ranks and alphas, rank-stabilized scales, Conv1D and embeddings (which
are transposed), convolutions, ranks above one slice, modules that are saved as a whole, fused experts, several adapters with weights. Bases are
of several types, formats and layouts.

usage: adapters.py FSDPCKPT        exit 77 without torch
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

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "rank_pattern": {}, "alpha_pattern": {}, "use_rslora": False,
          "fan_in_fan_out": False, "use_dora": False, "init_lora_weights": True, "lora_bias": False}
# name: (shape of the weight, rank)
LINEAR = {"model.layers.0.q_proj": ((300, 130), 8), "model.layers.1.q_proj": ((513, 9001), 8),
          "model.layers.0.down_proj": ((70, 1030), 100), "model.layers.1.down_proj": ((7, 16), 1),
          "model.layers.0.conv": ((20, 6, 3, 3), 8), "lm_head": ((130, 64), 8)}
PATTERNS = {"rank_pattern": {r"layers\.0.down_proj": 100, r".*\.[1-9]\d*?\.down_(?:proj|none)": 1},
            "alpha_pattern": {"model.layers.1.q_proj": 3, "no.such": 5}}
ALPHA = {"model.layers.1.q_proj": 3}


def write_adapter(folder, tensors, **config):
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({**CONFIG, **config}, f)
    save_file({"base_model.model." + name: t.contiguous() for name, t in tensors.items()},
              os.path.join(folder, "adapter_model.safetensors"))


def factors(shape, rank, dtype):
    """A and B of a linear layer or a convolution."""
    a, b = torch.randn(rank, *shape[1:]), torch.randn(shape[0], rank, *(1 for _ in shape[2:]))
    return (0.2 * a).to(dtype), (0.2 * b).to(dtype)


def adapter(seed, dtype):
    """(tensors, {weight: (A, B, rank)})"""
    torch.manual_seed(seed)
    tensors, pairs = {}, {}
    for name, (shape, rank) in LINEAR.items():
        a, b = factors(shape, rank, dtype)
        tensors[name + ".lora_A.weight"], tensors[name + ".lora_B.weight"] = a, b
        pairs[name + ".weight"] = a, b, rank
    return tensors, pairs


def product(a, b, shape):
    """B × A in float64, and the sum of magnitudes, which bounds the rounding errors."""
    a, b = a.double().reshape(len(a), -1), b.double().reshape(len(b), -1)
    return (b @ a).reshape(shape), (b.abs() @ a.abs()).reshape(shape)


def must_be_near(exact, size, terms, got, what):
    """Half a unit in the last place, as rounding once gives, and the errors of sums in float32."""
    eps = torch.finfo(got.dtype).eps
    exponent = torch.frexp(got.double().abs() + 1e-300)[1].double()
    smallest = torch.tensor(torch.finfo(got.dtype).smallest_normal * eps / 2).double()
    half = torch.maximum(2.0 ** (exponent - 1) * eps / 2, smallest)
    error = (got.double() - exact).abs()
    allowed = half * 1.001 + size * (terms + 4) * 2.0 ** -24
    must(bool((error <= allowed).all()), what, "off by", (error / allowed).max().item(), "of what is allowed")


def check_linear(tool, path, dtype, factor_dtype, to):
    torch.manual_seed(0)
    base = {name + ".weight": torch.randn(shape).to(dtype) for name, (shape, _) in LINEAR.items()}
    base["model.norm.weight"] = torch.randn(40)
    save_file(base, path("base.safetensors"))
    must_run(tool, "reshard", path("base.safetensors"), "-o", path("base"), "--to", to, "--dp", 3, "-q", "-f")
    first, one = adapter(1, factor_dtype)
    second, two = adapter(2, factor_dtype)
    write_adapter(path("first"), first, **PATTERNS)
    write_adapter(path("second"), second, **PATTERNS, use_rslora=True)
    argv = "--adapter", path("first"), "--adapter", path("second") + "=-0.25", "-q", "-f"
    must_run(tool, "consolidate", path("base.safetensors"), "-o", path("m.safetensors"), *argv)
    got = load_file(path("m.safetensors"))
    must(sorted(got) == sorted(base), sorted(got))
    must_equal(base.pop("model.norm.weight"), got["model.norm.weight"], "norm")
    for name, w in base.items():
        shape, rank = LINEAR[name[:-7]]
        alpha = ALPHA.get(name[:-7], 16)
        x, size_x = product(*one[name][:2], shape)
        y, size_y = product(*two[name][:2], shape)
        sx, sy = alpha / rank, -0.25 * alpha / rank ** 0.5
        must_be_near(w.double() + sx * x + sy * y, w.double().abs() + sx * size_x + abs(sy) * size_y, rank, got[name], name)
    # The layout of the base and of the target, and the memory, do not change a bit.
    must_run(tool, "reshard", path("base"), "-o", path("out"), "--to", to, "--dp", 5, "--memory", "8M", "-j", 3, *argv)
    must_run(tool, "consolidate", path("out"), "-o", path("again.safetensors"), "-q", "-f")
    must_equal({n: got[n] for n in sorted(got)}, dict(sorted(load_file(path("again.safetensors")).items())), "layouts")


def check_transposed(tool, path):
    """Conv1D of GPT-2 and embeddings store (in, out). For a square one, fan_in_fan_out decides."""
    torch.manual_seed(3)
    base = {"h.0.c_fc.weight": torch.randn(48, 192), "h.0.c_proj.weight": torch.randn(64, 64), "wte.weight": torch.randn(500, 48)}
    tensors, want, sizes = {}, {}, {}
    for name, w in base.items():
        a, b = 0.1 * torch.randn(8, w.shape[0]), 0.1 * torch.randn(w.shape[1], 8)
        ends = (".lora_embedding_A", ".lora_embedding_B") if name == "wte.weight" else (".lora_A.weight", ".lora_B.weight")
        for end, t in zip(ends, (a, b)):
            tensors["transformer." + name[:-7] + end] = t
        x, size = product(a, b, (w.shape[1], w.shape[0]))
        want[name], sizes[name] = w.double() + 2 * x.T, w.double().abs() + 2 * size.T
    write_adapter(path("conv1d"), tensors, fan_in_fan_out=True)
    torch.save({"transformer." + n: t for n, t in base.items()}, path("gpt2.pt"))
    must_run(tool, "consolidate", path("gpt2.pt"), "-o", path("gpt2.safetensors"), "--adapter", path("conv1d"), "-q",
             "--strip-prefix", "transformer.")
    got = load_file(path("gpt2.safetensors"))
    for name in base:
        must_be_near(want[name], sizes[name], 8, got[name], name)


def experts_product(a, b, experts, transposed):
    """PEFT's ParamWrapper.get_delta_weight without the scale, and the sum of magnitudes."""
    def all_experts(x, y):
        x, y = x.double().reshape(experts, -1, x.shape[1]), y.double().reshape(len(y), -1, experts)
        return torch.einsum("o r e, e r i -> e i o" if transposed else "o r e, e r i -> e o i", y, x)
    return all_experts(a, b), all_experts(a.abs(), b.abs())


def check_experts(tool, path, dtype, transposed, to):
    """target_parameters: fused experts. Both parameters of a module have the same names in the adapter, but for its nesting.
    Blocks end within an expert, and shards cut experts, rows and columns. The second matrix may be square."""
    torch.manual_seed(6)
    count, hidden, inner, rank = 5, 130, 4100 if not transposed else 130, 8
    at = "model.layers.0.mlp.experts."
    base, want, sizes, tensors = {}, {}, {}, {}
    for name, nest, inside, outside in (("gate_up_proj", "base_layer.", hidden, 2 * inner), ("down_proj", "", inner, hidden)):
        w = torch.randn(count, inside, outside).to(dtype) if transposed else torch.randn(count, outside, inside).to(dtype)
        a, b = 0.2 * torch.randn(rank * count, inside), 0.2 * torch.randn(outside, rank * count)
        tensors[at + nest + "lora_A.weight"], tensors[at + nest + "lora_B.weight"] = a, b
        x, size = experts_product(a, b, count, transposed)
        base[at + name], want[at + name], sizes[at + name] = w, w.double() + 2 * x, w.double().abs() + 2 * size
    save_file(base, path("experts.safetensors"))
    must_run(tool, "reshard", path("experts.safetensors"), "-o", path("experts-" + to), "--to", to, "--dp", 3, "-q", "-f")
    write_adapter(path("fused"), tensors, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    for source, memory in (("experts.safetensors", "1G"), ("experts-" + to, "8M")):
        must_run(tool, "consolidate", path(source), "-o", path("m.safetensors"), "--adapter", path("fused"), "-q", "-f",
                 "--memory", memory)
        got = load_file(path("m.safetensors"))
        for name in base:
            must_be_near(want[name], sizes[name], rank, got[name], name)


def check_ambiguous_experts(tool, path):
    torch.manual_seed(7)
    def refused(names, words, status=5):
        save_file({"e." + n: torch.randn(3, *shape) for n, shape in names.items()}, path("square.safetensors"))
        write_adapter(path("square"), {"e.lora_A.weight": torch.randn(24, 16), "e.lora_B.weight": torch.randn(16, 24)},
                      target_parameters=["e.down_proj", "e.up_proj"])
        r = must_run(tool, "consolidate", path("square.safetensors"), "-o", path("no.h5"), "--adapter", path("square"),
                     ok=(status,))
        must(words in r.stderr and r.stderr.count("\n") == 1 and not os.path.exists(path("no.h5")), r.stderr)
    refused({"down_proj": (16, 16)}, "nothing tells whether they are (in, out)")
    refused({"down_proj": (16, 16), "up_proj": (16, 16)}, "fits e.down_proj and e.up_proj")
    refused({"down_proj": (16, 15)}, "has no e.weight", 2)


def check_saved_modules(tool, path):
    """What an adapter stores as a whole replaces the base's; the base may have a prefix, and fp8 with scales."""
    torch.manual_seed(4)
    base = {"model.q.weight": torch.randn(64, 32).bfloat16(), "model.q.bias": torch.randn(64).bfloat16(),
            "model.head.weight": torch.randn(10, 32).bfloat16()}
    a, b = factors((64, 32), 8, torch.float32)
    saved = {"head.weight": torch.randn(12, 32), "q.base_layer.bias": torch.randn(64), "score.weight": torch.randn(3, 32)}
    write_adapter(path("saved"), {"q.lora_A.weight": a, "q.lora_B.weight": b, **saved}, modules_to_save=["head", "score"])
    torch.save(base, path("prefixed.pt"))
    must_run(tool, "consolidate", path("prefixed.pt"), "-o", path("saved.pt"), "--adapter", path("saved"), "-q")
    got = torch.load(path("saved.pt"), weights_only=True)
    must_equal({"model.q.weight": got["model.q.weight"], "model.q.bias": saved["q.base_layer.bias"].bfloat16(),
                "model.head.weight": saved["head.weight"].bfloat16(), "model.score.weight": saved["score.weight"]}, got)
    x, size = product(a, b, (64, 32))
    must_be_near(base["model.q.weight"].double() + 2 * x, base["model.q.weight"].double().abs() + 2 * size, 8,
                 got["model.q.weight"], "prefix")
    codes = base["model.q.weight"].float().to(torch.float8_e4m3fn)
    save_file({"q.weight": codes, "q.weight_scale": torch.tensor(0.5)}, path("fp8.safetensors"))
    write_adapter(path("plain"), {"q.lora_A.weight": a, "q.lora_B.weight": b})
    argv = tool, "consolidate", path("fp8.safetensors"), "-o", path("fp8.pt"), "--adapter", path("plain"), "-q"
    r = must_run(*argv, ok=(5,))
    must("--dequantize" in r.stderr, r.stderr)
    must_run(*argv, "--dequantize", "f32")
    w = codes.double() / 2
    must_be_near(w + 2 * x, w.abs() + 2 * size, 8, torch.load(path("fp8.pt"), weights_only=True)["q.weight"], "fp8")


def check_refusals(tool, path):
    torch.manual_seed(5)
    w = torch.randn(64, 32)
    torch.save({"q.weight": w, "t.weight": w, "n": torch.ones(64, 32, dtype=torch.int32)}, path("b.pt"))
    a, b = factors((64, 32), 8, torch.float32)
    good = {"q.lora_A.weight": a, "q.lora_B.weight": b}
    save_file({"q.weight": w, "n.weight": torch.ones(64, 32, dtype=torch.int32)}, path("b.safetensors"))
    cases = [("dora", good, {"use_dora": True}, 5, "DoRA"), ("type", good, {"peft_type": "LOHA"}, 5, "type LOHA"),
             ("pissa", good, {"init_lora_weights": "pissa_niter_4"}, 5, "changes the base weights"),
             ("bias", good, {"lora_bias": True}, 5, "lora_bias"), ("rank", good, {"r": 4}, 2, "the rank of q is 4"),
             ("experts", good, {"target_parameters": [5]}, 2, "target_parameters has a member that is not a string"),
             ("pattern", good, {"rank_pattern": {"(?=q)q": 4}}, 5, "no equal POSIX expression"),
             ("missing", {"x.lora_A.weight": a, "x.lora_B.weight": b}, {}, 2, "has no x.weight"),
             ("half", {"q.lora_A.weight": a}, {}, 2, "but not lora_B"),
             ("shape", {"q.lora_A.weight": a[:, :31], "q.lora_B.weight": b}, {}, 2, "do not fit q.weight"),
             ("int", {"n.lora_A.weight": a, "n.lora_B.weight": b}, {}, 5, "of type int32"),
             ("vector", {**good, "q.lora_magnitude_vector": a[0].clone()}, {}, 5, "only lora_A and lora_B")]
    for name, tensors, config, status, words in cases:
        write_adapter(path(name), tensors, **config)
        r = must_run(tool, "consolidate", path("b.safetensors"), "-o", path("no.h5"), "--adapter", path(name), ok=(status,))
        must(words in r.stderr and r.stderr.count("\n") == 1 and not os.path.exists(path("no.h5")), name, r.stderr)
    write_adapter(path("good"), good)
    r = must_run(tool, "consolidate", path("b.pt"), "-o", path("no.h5"), "--adapter", path("good"), ok=(2,))
    must("q.weight and t.weight are tied" in r.stderr, r.stderr)
    r = must_run(tool, "consolidate", path("b.safetensors"), "-o", path("good"), "-f", "--adapter", path("good"), ok=(2,))
    must(os.path.exists(path("good/adapter_config.json")), "the adapter was replaced")


def check_damage(tool, path):
    """A flipped bit in a factor, which blocks read in parts, is found."""
    os.mkdir(path("damaged"))
    tensors = load_file(path("first/adapter_model.safetensors"))
    torch.save(tensors, path("damaged/adapter_model.bin"))
    with open(path("first/adapter_config.json")) as f, open(path("damaged/adapter_config.json"), "w") as g:
        g.write(f.read())
    with open(path("damaged/adapter_model.bin"), "r+b") as f:
        data = f.read()
        at = data.find(tensors["base_model.model.model.layers.1.q_proj.lora_A.weight"].flatten().view(torch.uint8)
                       .numpy().tobytes()[:32])
        must(at > 0, "lora_A is in the file")
        f.seek(at)
        f.write(bytes([data[at] ^ 1]))
    r = must_run(tool, "consolidate", path("base.safetensors"), "-o", path("bad.h5"), "--adapter", path("damaged"), ok=(3,))
    must("lora_A" in r.stderr and not os.path.exists(path("bad.h5")), r.stderr)


def main():
    tool = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-adapters-") as home:
        path = lambda name: os.path.join(home, name)
        for dtype, factor, to in ((torch.bfloat16, torch.bfloat16, "dcp"), (torch.float32, torch.float32, "h5"),
                                  (torch.float16, torch.float32, "safetensors")):
            check_linear(tool, path, dtype, factor, to)
        check_damage(tool, path)
        check_transposed(tool, path)
        check_saved_modules(tool, path)
        check_experts(tool, path, torch.bfloat16, False, "dcp")
        check_experts(tool, path, torch.float32, True, "h5")
        check_ambiguous_experts(tool, path)
        check_refusals(tool, path)
    print("merged adapters are the formula in float64, rounded once")
    return 0


if __name__ == "__main__":
    run_main(main)
