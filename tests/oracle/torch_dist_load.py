#!/usr/bin/env python3
"""torch_dist that we write, loaded by real megatron-core (gloo, CPU) into real GPTModels on meshes with tensor, pipeline and
expert parallelism. The models of the corpus are of mbridge (tests/corpus/make_megatron_models.py), and what they must hold
after the load is what megatron-core loads of its own checkpoint of the same model.

usage: torch_dist_load.py FSDPCKPT CORPUS       exit 77 without megatron-core
"""
import hashlib
import os
import socket
import sys
import tempfile
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "corpus"))
try:
    import megatron.core  # noqa: F401
    import torch
    import torch.multiprocessing as mp
    import make_megatron_models as models
    import make_megatron_ranks as ranks
    from checks import check, finish, run
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

# Layers of Transformer Engine have a norm of their own before experts; Megatron's layers, which need no GPU, say that it
# is the fused one.
ENGINE_KEYS = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}


def loaded(case, folder, engine):
    """What one rank has after the load: name to digest."""
    from megatron.core import dist_checkpointing
    config, model = models.build(case)
    for layer in model.decoder.layers if engine else []:
        layer.submodules_config.sharded_state_dict_keys_map = ENGINE_KEYS
    for p in model.parameters():
        p.data.fill_(7)
    metadata = dist_checkpointing.load_content_metadata(folder)
    state = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, folder)
    model.load_state_dict(state["model"])
    return {name: digest(p) for name, p in [*model.named_parameters(), *model.named_buffers()]}


def digest(t):
    return hashlib.sha256(t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def can_resume():
    """Whether this megatron-core stores the distributed optimizer by parameter, as 0.15 and later do."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    return "fully_reshardable" in getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())


def keep_step():
    """Apex's and Transformer Engine's AdamW have the step in the group. torch's, which needs no GPU, has it in the state, too;
    megatron-core sets it there before it loads the other states, and then looks for it among these."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    load = DistributedOptimizer._set_main_param_and_optimizer_states
    if getattr(load, "keeps_step", False):
        return

    def with_step(self, model_param, tensors):
        group, order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group]["params"][order]
        return load(self, model_param, {"step": self.optimizer.state[main]["step"], **tensors})

    with_step.keeps_step = True
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


def loaded_optimizer(case, folder):
    """What the distributed optimizer of one rank has after the load of the model and the optimizer."""
    from megatron.core import dist_checkpointing
    config, model = models.build(case)
    optimizer = ranks.make_chained({**case, "distributed": True}, config, [model])
    metadata = {**(dist_checkpointing.load_content_metadata(folder) or {"chained_optim_avoid_prefix": True}),
                "distrib_optim_sharding_type": "fully_reshardable",
                "distrib_optim_fully_reshardable_mem_efficient": False}
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=True, metadata=metadata)
    state = dist_checkpointing.load(state, folder)
    model.load_state_dict(state["model"])
    keep_step()
    optimizer.load_state_dict(state["optimizer"])
    got = {name: digest(p) for name, p in model.named_parameters()}
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for g, group in enumerate(one.optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                place = "optimizer %d, group %d, parameter %d" % (number, g, i)
                got[place] = digest(p)
                got.update({place + ", " + k: digest(v) if isinstance(v, torch.Tensor) else v
                            for k, v in one.optimizer.state[p].items()})
            got["optimizer %d, group %d" % (number, g)] = str({k: v for k, v in group.items() if k != "params"})
    return got


def on_rank(rank, port, case, own, ours, failures):
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks.ranks_of(case)), LOCAL_RANK=str(rank),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        ranks.pretend_gpu()
        from megatron.core import parallel_state as ps
        ps.initialize_model_parallel(case["tp"], case["pp"], expert_model_parallel_size=case["ep"],
                                     expert_tensor_parallel_size=case["tp"])
        resumed = can_resume() and case.get("distributed")
        wants = {False: loaded(case, own, False), True: loaded_optimizer(case, own) if resumed else {}}
        for folder, engine, resumes in ours:
            got, want = loaded_optimizer(case, folder) if resumes else loaded(case, folder, engine), wants[resumes]
            if got != want or not want:
                failures.put("rank %d: %s: %s" % (rank, folder, sorted(n for n in want if got.get(n) != want[n])))
    except Exception:  # noqa: BLE001
        failures.put("rank %d: %s" % (rank, traceback.format_exc()))


def check_load(name, mesh, own, ours):
    case = {"tp": 1, "pp": 1, "vp": None, "ep": 1, **models.CASES[name], "dp": 1, **mesh}
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    failures = mp.get_context("spawn").SimpleQueue()
    mp.spawn(on_rank, args=(port, case, own, ours, failures), nprocs=ranks.ranks_of(case))
    while not failures.empty():
        check(False, "%s on %s: %s" % (name, mesh, failures.get()))


def main():
    program, corpus = sys.argv[1:3]
    with tempfile.TemporaryDirectory() as home:
        for name, recipe, engine, mesh in (("llama", "megatron-llama", False, dict(tp=2, pp=2)),
                                           ("qwen3-moe", "megatron-qwen-moe", True, dict(tp=1, pp=1, ep=2, dp=2))):
            case = os.path.join(corpus, "recipes", "megatron-dist-" + name)
            own = os.path.join(case, "torch_dist")
            full, sharded, again, hub, resumed = (os.path.join(home, name + end)
                                                  for end in ("-full", "-sharded", "-again", "-hub", "-resumed"))
            how = ["--to", "torch_dist", "--recipe", recipe, "--reverse", "--config", case, "-q"]
            run(program, "convert", os.path.join(case, "to.safetensors"), "-o", full, *how)
            run(program, "reshard", os.path.join(case, "to.safetensors"), "-o", sharded, "--dp", "3", *how)
            run(program, "reshard", own, "-o", again, "--dp", "2", "--to", "torch_dist", "-q")
            ours = [(full, engine, False), (sharded, engine, False), (again, False, False)]
            if models.CASES[name].get("distributed") and can_resume():
                run(program, "consolidate", own, "-o", hub, "--to", "dcp", "--recipe", recipe, "--config", case, "-q")
                run(program, "reshard", hub, "-o", resumed, "--dp", "2", *how)
                ours += [(again, False, True), (resumed, False, True)]
            check_load(name, mesh, own, ours)
    return finish("torch_dist_load, megatron-core " + megatron.core.__version__)


if __name__ == "__main__":
    sys.exit(main())
