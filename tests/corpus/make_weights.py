#!/usr/bin/env python3
"""Makes tests/corpus/weights: a tiny model, the same with fp8 and MXFP4 codes, and a LoRA adapter for it.

make_weights.py DIR
"""
import json
import os
import sys

import torch
from safetensors.torch import save_file


def main():
    folder = sys.argv[1]
    torch.manual_seed(0)
    os.makedirs(os.path.join(folder, "lora"), exist_ok=True)
    shapes = {"q_proj": (60, 80), "down_proj": (80, 60)}
    base = {"model.layers.0.%s.weight" % k: torch.randn(s).to(torch.bfloat16) for k, s in shapes.items()}
    save_file(base, os.path.join(folder, "base.safetensors"))
    scaled = {k: v.to(torch.float8_e4m3fn) for k, v in base.items()}
    scaled.update({k + "_scale_inv": torch.rand(1, 1) for k in base})
    scaled["experts_blocks"] = torch.randint(0, 256, (2, 4, 3, 16), dtype=torch.uint8)
    scaled["experts_scales"] = torch.randint(100, 140, (2, 4, 3), dtype=torch.uint8)
    save_file(scaled, os.path.join(folder, "scaled.safetensors"))
    lora = {}
    for module, (rows, columns) in shapes.items():
        name = "base_model.model.model.layers.0.%s.lora_" % module
        lora[name + "A.weight"], lora[name + "B.weight"] = torch.randn(3, columns), torch.randn(rows, 3)
    save_file(lora, os.path.join(folder, "lora", "adapter_model.safetensors"))
    with open(os.path.join(folder, "lora", "adapter_config.json"), "w", encoding="utf-8") as f:
        json.dump({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": list(shapes)}, f)
        f.write("\n")


if __name__ == "__main__":
    main()
