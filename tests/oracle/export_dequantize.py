#!/usr/bin/env python3
"""Random models of transformers that were quantized, exported with --dequantize like themselves: transformers loads the result as a
model that is not quantized, with the weights and the logits that it has when transformers dequantizes the same files.

fp8 needs only transformers; compressed-tensors and bitsandbytes are tested where they are installed.

usage: export_dequantize.py FSDPCKPT        exit 77 without torch and transformers
"""
import importlib.util
import json
import logging
import os
import sys
import tempfile
import warnings

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers.integrations.finegrained_fp8 import Fp8Quantize
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run, run_main
from torch_values import must_equal

SIZES = {"vocab_size": 160, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 4, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "rms_norm_eps": 1e-05,
         "tie_word_embeddings": False}
IDS = torch.arange(32).reshape(2, 16) % 160


def plain(family, home):
    torch.manual_seed(3)
    model = getattr(transformers, family + "ForCausalLM")(getattr(transformers, family + "Config")(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(home)
    return model.eval()


def fp8(home):
    """Blocks of 128 x 128, as transformers quantizes and DeepSeek saves them."""
    plain("Qwen3", home)
    config = transformers.FineGrainedFP8Config()
    path, edited = os.path.join(home, "model.safetensors"), {}
    for name, t in load_file(path).items():
        linear = name.endswith("_proj.weight")
        edited.update({k: v[0] if isinstance(v, list) else v for k, v in
                       Fp8Quantize(quantizer(config)).convert({name: [t]}).items()} if linear else {name: t})
    save_file(edited, path, {"format": "pt"})
    must(any(t.dtype == torch.float8_e4m3fn for t in edited.values()), "no codes")
    said(home, dict(config.to_dict(), modules_to_not_convert=["lm_head"]))
    return load(home, dtype=torch.bfloat16, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))


def quantizer(config):
    return type("Quantizer", (), {"quantization_config": config})()


def compressed(home):
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    model = plain("Llama", home)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    scheme = QuantizationConfig(config_groups={"a": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"],
                                quantization_status="frozen")
    apply_quantization_config(model, scheme)
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            largest = module.weight.detach().float().unflatten(1, (-1, 32)).abs().amax(2)
            module.weight_scale.data.copy_((largest / 7.5).to(module.weight_scale.dtype))
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, os.path.join(home, "model.safetensors"), {"format": "pt"})
    compressor.update_config(home)
    must("quantization_config" in config_of(home), "no quantization_config")
    return load(home, quantization_config=transformers.CompressedTensorsConfig(run_compressed=False))


def four_bits(home):
    plain("Llama", home + "-plain")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                             bnb_4bit_compute_dtype=torch.bfloat16)
    model = load(home + "-plain", quantization_config=config, device_map={"": "cpu"})
    model.save_pretrained(home)
    return model.dequantize(dtype=torch.bfloat16).eval()


def config_of(home):
    with open(os.path.join(home, "config.json"), encoding="utf-8") as f:
        return json.load(f)


def said(home, quantization):
    config = config_of(home)
    config["quantization_config"] = quantization
    with open(os.path.join(home, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=2)


def load(home, **how):
    return transformers.AutoModelForCausalLM.from_pretrained(home, **how).eval()


def check(tool, name, make, home):
    source, out = os.path.join(home, name), os.path.join(home, name + "-out")
    want = make(source)
    for other in ("hf_quant_config.json", "tokenizer.json"):
        with open(os.path.join(source, other), "w", encoding="utf-8") as f:
            f.write("{}")
    r = must_run(tool, "export", source, "-o", out, "--like", source, "--dequantize", "bf16")
    must("without what config.json said of quantization" in r.stdout, r.stdout)
    must("quantization_config" in config_of(source) and "quantization_config" not in config_of(out), "config.json")
    must(sorted(os.listdir(out)) == sorted(set(os.listdir(source)) - {"hf_quant_config.json"}), os.listdir(out))
    got = load(out)
    must(getattr(got, "hf_quantizer", None) is None and got.dtype == torch.bfloat16, name, "is quantized, or", got.dtype)
    weights = dict(want.state_dict())
    must_equal(weights, dict(got.state_dict()), name)
    with torch.no_grad():
        must(torch.equal(got(IDS).logits, want(IDS).logits), name, "logits")
    # Another type becomes that of the model.
    must_run(tool, "export", source, "-o", out, "-f", "--like", os.path.join(source, "config.json"), "--dequantize", "f32", "-q")
    wide = load(out, dtype="auto")
    must(wide.dtype == torch.float32 and wide.config.dtype == torch.float32, wide.dtype)
    print(name, len(weights), "weights")


def main():
    tool = sys.argv[1]
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-export-dequantize-") as home:
        check(tool, "fp8", fp8, home)
        for package, make in (("compressed_tensors", compressed), ("bitsandbytes", four_bits)):
            if importlib.util.find_spec(package):
                check(tool, package, make, home)

    return 0


if __name__ == "__main__":
    run_main(main)
