"""Makes verl/<case>/: a step folder of verl, and expected.safetensors with the values that a Hub folder of it must have.

verl itself needs ray and GPUs, so its FSDPCheckpointManager.save_checkpoint and the saving of LoRA in fsdp_workers.py (v0.8) are
repeated here line by line, with torch, transformers and PEFT on gloo and the CPU:

    actor/model_world_size_2_rank_0.pt, optim_…, extra_state_…, fsdp_config.json, huggingface/, and lora_adapter/ of LoRA

Cases: `fsdp2`; `fsdp2-lora`, whose expected values are those of PEFT's merge_and_unload; `fsdp1` and `fsdp1-lora` of 2 ranks and
`fsdp1-tied` of 4, whose optimizer has one flat shard for each unit; `fsdp1-orig*`, the same with use_orig_params, where each rank has
the elements of each parameter that are in its flat shard. optimizer.safetensors has its state as FSDP.optim_state_dict gathers it.

    pip install --no-deps peft; python tests/corpus/make_verl.py [CASE ...]
"""

import copy
import dataclasses
import functools
import json
import os
import pathlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

warnings.filterwarnings("ignore")
OUT = pathlib.Path(__file__).parent / "verl"
CASES = ("fsdp1", "fsdp1-lora", "fsdp1-tied", "fsdp1-orig", "fsdp1-orig-lora", "fsdp1-orig-tied", "fsdp2", "fsdp2-lora")
CONFIG = LlamaConfig(vocab_size=13, hidden_size=6, intermediate_size=9, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
                     head_dim=2, max_position_embeddings=16, tie_word_embeddings=False, dtype="float32", architectures=["LlamaForCausalLM"],
                     bos_token_id=0, eos_token_id=1)


def world(case):
    return 4 if case.endswith("tied") else 2


def is_fsdp1(case):
    return case.startswith("fsdp1")


def build(case):
    """The model as it is wrapped, and its configuration."""
    torch.manual_seed(3)
    config = copy.deepcopy(CONFIG)
    config.tie_word_embeddings = case.endswith("tied")
    model = LlamaForCausalLM(config)
    if case.endswith("lora"):
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=6, target_modules=["q_proj", "down_proj"]))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(p)
    return model


def shard(case, model):
    mesh = dist.init_device_mesh("cpu", (world(case),), mesh_dim_names=("fsdp",))
    if is_fsdp1(case):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
        if case.endswith("lora"):  # as get_fsdp_wrap_policy of verl/utils/fsdp_utils.py does it
            from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy

            leaf = lambda module: not list(module.named_children()) and getattr(module, "weight", None) is not None
            of_lora = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: leaf(module) and module.weight.requires_grad)
            policy = functools.partial(_or_policy, policies=[of_lora, policy])
        return FSDP(model, auto_wrap_policy=policy, device_id=torch.device("cpu"), device_mesh=mesh, use_orig_params="orig" in case)
    from torch.distributed.fsdp import fully_shard

    for module in [m for m in model.modules() if isinstance(m, LlamaDecoderLayer)]:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def save_checkpoint(case, model, optimizer, scheduler, path, rank):
    """As verl/utils/checkpoint/fsdp_checkpoint_manager.py does it."""
    name = lambda part: path / f"{part}_world_size_{world(case)}_rank_{rank}.pt"
    if is_fsdp1(case):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType

        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False),
                                  ShardedOptimStateDictConfig(offload_to_cpu=False)):
            torch.save(model.state_dict(), name("model"))
            torch.save(optimizer.state_dict(), name("optim"))
    else:
        torch.save(model.state_dict(), name("model"))
        torch.save(optimizer.state_dict(), name("optim"))
    torch.save({"lr_scheduler": scheduler.state_dict(), "rng": {"cpu": torch.get_rng_state()[:16].clone()}}, name("extra_state"))
    if rank == 0:
        inner = model._fsdp_wrapped_module if is_fsdp1(case) else model
        inner.config.save_pretrained(path / "huggingface")
        (path / "huggingface" / "tokenizer.json").write_text("{}")  # the tokenizer is not the model's
        with open(path / "fsdp_config.json", "w") as f:
            json.dump({"FSDP_version": 1 if is_fsdp1(case) else 2, "world_size": world(case)}, f, indent=4)


def save_adapter(case, model, path, rank):
    """As save_checkpoint of verl/workers/fsdp_workers.py and layered_summon_lora_params of FSDP2 do it."""
    from peft.utils.save_and_load import get_peft_model_state_dict

    if is_fsdp1(case):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

        with FSDP.summon_full_params(model, writeback=False):
            inner = model._fsdp_wrapped_module
            names = {n.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for n, p in inner.state_dict().items()}
            params = get_peft_model_state_dict(inner, state_dict=names)
    else:
        inner = model
        params = {n: p.full_tensor().detach().clone() for n, p in get_peft_model_state_dict(model).items()}
    if rank == 0:
        config = dataclasses.asdict(inner.peft_config["default"])
        config["task_type"] = config["task_type"].value if hasattr(config["task_type"], "value") else config["task_type"]
        config["peft_type"] = config["peft_type"].value
        config["target_modules"] = sorted(config["target_modules"])
        (path / "lora_adapter").mkdir()
        save_file(params, str(path / "lora_adapter" / "adapter_model.safetensors"))
        with open(path / "lora_adapter" / "adapter_config.json", "w", encoding="utf-8") as f:
            json.dump(config, f, ensure_ascii=False, indent=4)


def expected(case, model, optimizer, root, rank):
    """The values of the model, as torch gathers them."""
    if is_fsdp1(case):
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import StateDictType

        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            full = model.state_dict()
            local, whole = optimizer.state_dict(), {}
            for key in ("step", "exp_avg", "exp_avg_sq"):  # with use_orig_params on a CPU, torch 2.15 gathers all keys in one buffer
                one = {**local, "state": {n: {key: s[key]} for n, s in local["state"].items()}}
                state = FSDP.optim_state_dict(model, optimizer, one)["state"]
                whole.update({f"{n}.{key}": s[key].detach().clone().contiguous() for n, s in state.items() if key in s})
        if rank == 0:
            save_file(whole, str(root / "optimizer.safetensors"))
    else:
        full = {n: p.full_tensor().detach().clone() for n, p in model.state_dict().items()}
    if rank == 0:
        if case.endswith("lora"):
            whole = build(case)
            whole.load_state_dict(full)
            full = whole.merge_and_unload().state_dict()
        if case.endswith("tied"):
            del full["lm_head.weight"]  # a Hub folder has a tied weight once
        save_file({n: p.detach().clone().contiguous() for n, p in full.items()}, str(root / "expected.safetensors"))


def run(rank, case):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", rank=rank, world_size=world(case))
    root = OUT / case
    path = root / "actor"
    path.mkdir(parents=True, exist_ok=True)
    model = shard(case, build(case))
    optimizer = torch.optim.AdamW(model.parameters() if is_fsdp1(case) else [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    ids = torch.arange(8).reshape(2, 4)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    scheduler.step()
    dist.barrier()
    save_checkpoint(case, model, optimizer, scheduler, path, rank)
    if case.endswith("lora"):
        save_adapter(case, model, path, rank)
    expected(case, model, optimizer, root, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        mp.spawn(run, (name,), world(name))
