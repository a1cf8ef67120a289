#!/usr/bin/env python3
"""Pairs of checkpoints for recipes --infer: small random weights before and after the converter of another package.

usage: make_pairs.py CORPUS LENS TRANSFORMERS

Needs a Python with torch, safetensors and transformers 5.23.0, and `pip install --no-deps timm==1.0.31 openai-whisper==20250625
einops torchvision Pillow requests importlib_metadata zipp tiktoken regex more-itertools`. LENS and TRANSFORMERS are folders
with transformer-lens 2.16.1 and transformers 4.36.2 (`pip install --no-deps --target FOLDER PACKAGE`), of which only functions run.
"""
import ast
import json
import os
import sys
import tempfile
import types
import typing

import torch
from safetensors.torch import save_file

CORPUS, LENS, TRANSFORMERS = sys.argv[1:]
random = torch.Generator().manual_seed(5)


def values(*shape):
    return torch.randn(shape, generator=random)


def trained(model):
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(values(*value.shape))
    return model


def functions(path, names, known):
    """Only some functions and constants of a script, without its imports."""
    tree = ast.parse(open(path, encoding="utf-8").read())
    tree.body = [n for n in tree.body if getattr(n, "name", "") in names or getattr(getattr(n, "targets", [None])[0], "id", "") in names]
    for node in tree.body:
        for arg in node.args.args if isinstance(node, ast.FunctionDef) else []:
            arg.annotation = None
    found = {"torch": torch, **known}
    exec(compile(tree, path, "exec"), found)
    return found


def put(name, a, b, config):
    folder = os.path.join(CORPUS, "pairs", name)
    os.makedirs(folder, exist_ok=True)
    for side, tensors in (("a", a), ("b", b)):
        save_file({k: v.detach().clone().contiguous() for k, v in tensors.items()}, os.path.join(folder, side + ".safetensors"))
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)


def lens_gpt2():
    """Conv1D, and one matrix per head."""
    import einops
    import transformers
    sizes = {"vocab_size": 10, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 5}
    model = trained(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))
    model.tie_weights()
    path = os.path.join(LENS, "transformer_lens/pretrained/weight_conversions/gpt2.py")
    convert = functions(path, {"convert_gpt2_weights"}, {"einops": einops, "cast": typing.cast})["convert_gpt2_weights"]
    put("lens-gpt2", model.state_dict(), convert(model, types.SimpleNamespace(n_layers=2, n_heads=3, d_head=4)), sizes)


def timm_flax():
    """Flax's kernels, with names as in encoderblock_0, in the npz of Google's ViT; the names have dots here."""
    import numpy
    import timm
    width, heads = 12, 3
    head = width // heads
    a = {"embedding/kernel": values(2, 2, 3, width), "embedding/bias": values(width), "cls": values(1, 1, width),
         "Transformer/posembed_input/pos_embedding": values(1, 5, width), "Transformer/encoder_norm/scale": values(width),
         "Transformer/encoder_norm/bias": values(width), "head/kernel": values(width, 7), "head/bias": values(7)}
    for i in range(2):
        block = f"Transformer/encoderblock_{i}/"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            a.update({f"{block}{norm}/scale": values(width), f"{block}{norm}/bias": values(width)})
        attention = block + "MultiHeadDotProductAttention_1/"
        for name in ("query", "key", "value"):
            a.update({f"{attention}{name}/kernel": values(width, heads, head), f"{attention}{name}/bias": values(heads, head)})
        a.update({attention + "out/kernel": values(heads, head, width), attention + "out/bias": values(width)})
        for k, (rows, columns) in enumerate(((width, 20), (20, width))):
            a.update({f"{block}MlpBlock_3/Dense_{k}/kernel": values(rows, columns), f"{block}MlpBlock_3/Dense_{k}/bias": values(columns)})
    model = timm.models.vision_transformer.VisionTransformer(img_size=4, patch_size=2, embed_dim=width, depth=2, num_heads=heads,
                                                             mlp_ratio=20 / width, num_classes=7)
    with tempfile.TemporaryDirectory() as tmp:
        numpy.savez(os.path.join(tmp, "x.npz"), **{k: v.numpy() for k, v in a.items()})
        model.load_pretrained(os.path.join(tmp, "x.npz"))
    put("timm-flax-vit", {k.replace("/", "."): v for k, v in a.items()}, model.state_dict(), {"num_attention_heads": heads, "hidden_size": width})


def whisper():
    """Modules with numbers: mlp.0 and mlp.2 become fc1 and fc2. The head is tied."""
    sys.modules["numba"] = types.SimpleNamespace(jit=lambda *a, **k: lambda f: f)
    import transformers
    import whisper.model as openai
    sizes = openai.ModelDimensions(n_mels=4, n_audio_ctx=6, n_audio_state=8, n_audio_head=2, n_audio_layer=2, n_vocab=10, n_text_ctx=5,
                                   n_text_state=8, n_text_head=2, n_text_layer=2)
    model = trained(openai.Whisper(sizes))
    path = os.path.join(TRANSFORMERS, "transformers/models/whisper/convert_openai_to_hf.py")
    renamed = dict(model.state_dict())
    functions(path, {"WHISPER_MAPPING", "rename_keys"}, {"print": lambda *a: None})["rename_keys"](renamed)
    config = {"vocab_size": 10, "num_mel_bins": 4, "d_model": 8, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
              "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_source_positions": 6, "max_target_positions": 5}
    hub = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2,
                                                                                  decoder_start_token_id=3, **config))
    assert not hub.model.load_state_dict(renamed, strict=False).missing_keys
    hub.proj_out.weight = hub.model.decoder.embed_tokens.weight
    put("whisper", model.state_dict(), hub.state_dict(), config)


with torch.no_grad():
    lens_gpt2()
    timm_flax()
    whisper()
