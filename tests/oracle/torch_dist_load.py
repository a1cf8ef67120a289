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
    return {name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, p in [*model.named_parameters(), *model.named_buffers()]}


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
        want = loaded(case, own, False)
        for folder, engine in ours:
            got = loaded(case, folder, engine)
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
            full, sharded, again = (os.path.join(home, name + end) for end in ("-full", "-sharded", "-again"))
            how = ["--to", "torch_dist", "--recipe", recipe, "--reverse", "--config", case, "-q"]
            run(program, "convert", os.path.join(case, "to.safetensors"), "-o", full, *how)
            run(program, "reshard", os.path.join(case, "to.safetensors"), "-o", sharded, "--dp", "3", *how)
            run(program, "reshard", own, "-o", again, "--dp", "2", "--to", "torch_dist", "-q")
            check_load(name, mesh, own, [(full, engine), (sharded, engine), (again, False)])
    return finish("torch_dist_load, megatron-core " + megatron.core.__version__)


if __name__ == "__main__":
    sys.exit(main())
