"""Makes nanotron/tp2pp2/: a checkpoint that nanotron's own save_weights and save_meta wrote, on gloo and the CPU, with two tensor-parallel
ranks and two stages, and expected.safetensors with the whole tensors.

The modules are plain; nanotron's create_sharded_parameter_from_config marks their parameters as those of its Llama are marked: qkv_proj
has three contiguous chunks along its rows, o_proj is sharded along its columns, norms are whole.

    pip install --no-deps nanotron==0.4 dacite; python tests/corpus/make_nanotron.py
"""

import logging
import os
import pathlib
import shutil
import sys
import types

import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp

OUT = pathlib.Path(__file__).parent / "nanotron"
TP, PP = 2, 2
QKV, GATE_UP = (8, 4, 4), (6, 6)


def whole():
    """The tensors of the model."""
    torch.manual_seed(4)
    r = lambda *shape: torch.randn(shape).to(torch.bfloat16)
    tensors = {"model.token_position_embeddings.pp_block.token_embedding.weight": r(12, 6)}
    for i in range(2):
        at = f"model.decoder.{i}.pp_block."
        tensors.update({at + "input_layernorm.weight": r(6), at + "attn.qkv_proj.weight": r(sum(QKV), 6), at + "attn.o_proj.weight": r(6, 8),
                        at + "mlp.gate_up_proj.weight": r(sum(GATE_UP), 6), at + "mlp.down_proj.weight": r(6, 6)})
    tensors["model.final_layer_norm.pp_block.weight"] = r(6)
    tensors["model.lm_head.pp_block.weight"] = r(12, 6)
    return tensors


def stage_of(name):
    return 1 if any(part in name for part in ("decoder.1.", "final_layer_norm", "lm_head")) else 0


def run(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29537", RANK=str(rank), WORLD_SIZE=str(TP * PP), LOCAL_RANK=str(rank))
    torch_dist.init_process_group("gloo", rank=rank, world_size=TP * PP)
    import nanotron

    # nanotron 0.4 imports its models and its trainer from everywhere, with packages that need a GPU. Saving needs neither.
    def stub(name, **members):
        module = types.ModuleType("nanotron." + name)
        module.__dict__.update(members)
        sys.modules[module.__name__] = module
        setattr(nanotron, name, module)

    stub("logging", get_logger=logging.getLogger, log_rank=lambda *args, **more: None, ERROR=logging.ERROR)
    stub("models", NanotronModel=torch.nn.Module)
    stub("serialize", __path__=[os.path.join(nanotron.__path__[0], "serialize")])
    from nanotron.parallel import ParallelContext
    from nanotron.parallel.parameters import NanotronParameter
    from nanotron.parallel.sharded_parameters import SplitConfig, create_sharded_parameter_from_config
    from nanotron.serialize.metadata import save_meta
    from nanotron.serialize.weights import save_weights

    ParallelContext.set_device = lambda self: None
    context = ParallelContext(tensor_parallel_size=TP, pipeline_parallel_size=PP, data_parallel_size=1)
    tp = torch_dist.get_rank(context.tp_pg)
    model = torch.nn.Module()
    for name, tensor in whole().items():
        if stage_of(name) != torch_dist.get_rank(context.pp_pg):
            continue
        chunks = {"qkv_proj": QKV, "gate_up_proj": GATE_UP}.get(name.split(".")[-2])
        dim = 1 if "o_proj" in name or "down_proj" in name else 0
        if tensor.ndim == 1:
            parameter = NanotronParameter(tensor)
        else:
            parts = torch.split(tensor, list(chunks or [tensor.shape[dim]]), dim)
            local = torch.cat([part.chunk(TP, dim)[tp] for part in parts], dim).contiguous()
            parameter = create_sharded_parameter_from_config(torch.nn.Parameter(local), context.tp_pg, SplitConfig(dim, chunks))
        module = model
        for part in name.split(".")[:-1]:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(name.split(".")[-1], parameter)
    save_weights(model, context, OUT / "tp2pp2")
    save_meta(context, OUT / "tp2pp2", {"last_train_step": 1})
    torch_dist.barrier()


if __name__ == "__main__":
    from safetensors.torch import save_file

    shutil.rmtree(OUT, ignore_errors=True)
    mp.spawn(run, (), TP * PP)
    save_file(whole(), str(OUT / "expected.safetensors"))
