"""Cases about sharding: FSDP1, ShardedTensor, FSDP2, TP, 2D, HSDP, uneven and empty shards.

A case is called on every rank. It returns the state dict to save, or (state dict, extra). `extra` may hold `truth` (the full
tensors), `mesh`, `note`, and options for the planner and the writer.
"""
from dcp_torch import (
    Llama, Mini, Skip, V, case, cpu_as_current_device, dist, fsdp1_or_skip, fsdp1_sharded, fsdp1_wrap,
    fully_shard_fn, make_mesh, need, need_dtensor, need_orig_params, original, parallelize, torch, tp_plan,
    train_step)


@case("fsdp1", 2, "FSDP1, SHARDED_STATE_DICT: ShardedTensor, rows cut in ceil(n/k)")
def _(rank, world):
    return fsdp1_or_skip(lambda: fsdp1_sharded(fsdp1_wrap(Llama()))), {"truth": original(0)}


@case("fsdp1-origparams", 2, "FSDP1 with use_orig_params=True")
def _(rank, world):
    return fsdp1_or_skip(lambda: fsdp1_sharded(need_orig_params() or fsdp1_wrap(Llama(seed=1), use_orig_params=True))), {"truth": original(1)}


@case("fsdp1-optim", 2, "FSDP1 model and AdamW state after one step")
def _(rank, world):
    def build():
        model = fsdp1_wrap(Mini(seed=2), **({"use_orig_params": True} if V >= (2, 2) else {}))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        train_step(model, optimizer)
        return fsdp1_sharded(model, optimizer)

    return fsdp1_or_skip(build)


@case("fsdp1-dtensor", 2, "FSDP1 given a device mesh: DTensor instead of ShardedTensor")
def _(rank, world):
    need(V >= (2, 2), "FSDP1 takes a device_mesh since 2.2")
    mesh = make_mesh((2,), ("dp",))
    return fsdp1_or_skip(lambda: fsdp1_sharded(fsdp1_wrap(Llama(seed=3), device_mesh=mesh, use_orig_params=True))), {"truth": original(3)}


@case("fsdp1-hsdp", 4, "FSDP1 HYBRID_SHARD, replicate 2 x dp 2")
def _(rank, world):
    need(V >= (2, 0), "no HYBRID_SHARD")
    from torch.distributed.fsdp import ShardingStrategy

    def build():
        kwargs = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
        if V >= (2, 2):
            kwargs["device_mesh"] = make_mesh((2, 2), ("replicate", "dp"))
        else:
            shards = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            kwargs["process_group"] = (shards[rank // 2], replicas[rank % 2])
        return fsdp1_sharded(fsdp1_wrap(Llama(seed=8), **kwargs))

    return fsdp1_or_skip(build), {"truth": original(8), "mesh": {"replicate": 2, "dp": 2}}


@case("fsdp1-tp", 4, "2D by FSDP1 over TP (dp 2 x tp 2)")
def _(rank, world):
    need(V >= (2, 1), "no FSDP1 over TP that saves on the CPU")

    def build():
        if V >= (2, 2):
            mesh = make_mesh((2, 2), ("dp", "tp"))
            model = parallelize(Llama(dim=8, hidden=16, seed=4), mesh["tp"])
            return fsdp1_sharded(fsdp1_wrap(model, device_mesh=mesh["dp"], use_orig_params=True))
        # In 2.1, FSDP's shards of TP's DTensors are ShardedTensors of DTensors, which the planner unpacks.
        from torch.distributed._tensor import DeviceMesh
        from torch.distributed.tensor.parallel import parallelize_module
        from torch.distributed.tensor.parallel.fsdp import enable_2d_with_fsdp

        need(enable_2d_with_fsdp(), "2D needs a working FSDP extension")
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        model = parallelize_module(Llama(dim=8, hidden=16, seed=4), mesh, tp_plan(), tp_mesh_dim=1)
        return fsdp1_sharded(fsdp1_wrap(model, process_group=mesh.get_dim_groups()[0], use_orig_params=True))

    return fsdp1_or_skip(build), {"truth": original(4, dim=8, hidden=16)}


# ---------------------------------------------------------------- ShardedTensor by hand

def chunk_sharded(full, rank, world):
    """Calls the function that FSDP1's state dict hook calls for each parameter (fsdp/_shard_utils.py)."""
    from torch.distributed.fsdp import _shard_utils as u

    pg = dist.distributed_c10d._get_default_group()
    fn = getattr(u, "_create_chunk_sharded_tensor", None)
    need(fn is not None, "no _create_chunk_sharded_tensor")
    with cpu_as_current_device():
        try:
            return fn(full, rank, world, world, pg, torch.device("cpu"))
        except TypeError:
            return fn(full, rank, world, world, pg)


@case("sharded-tensor", 3, "ShardedTensor: 5 rows on 3 ranks, and 2 rows on 3 ranks")
def _(rank, world):
    torch.manual_seed(5)
    full = {"w": torch.randn(5, 4), "two": torch.randn(2, 3), "bias": torch.randn(7), "i": torch.arange(6).reshape(6, 1)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    return {"model": sd}, {"truth": {"model." + k: v for k, v in full.items()}}


@case("sharded-tensor-2d", 4, "EnumerableShardingSpec: a 2 x 2 grid of uneven blocks, and column cuts")
def _(rank, world):
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ShardMetadata

    torch.manual_seed(6)
    full = {"grid": torch.randn(5, 7), "cols": torch.randn(3, 9)}
    boxes = {
        "grid": [(0, 0, 3, 4), (0, 4, 3, 3), (3, 0, 2, 4), (3, 4, 2, 3)],
        "cols": [(0, 0, 3, 3), (0, 3, 3, 3), (0, 6, 3, 2), (0, 8, 3, 1)],
    }
    sd = {}
    for k, t in full.items():
        r, c, h, w = boxes[k][rank]
        md = ShardMetadata([r, c], [h, w], "rank:%d/cpu" % rank)
        local = t[r:r + h, c:c + w].contiguous()
        sd[k] = sharded_tensor.init_from_local_shards([sharded_tensor.Shard(local, md)], list(t.size()))
    return sd, {"truth": full}


# ---------------------------------------------------------------- DTensor

def shard(full, mesh, placements):
    """A DTensor over `full`, cut by torch. from_local with the global shape needs no collective, so it works for every dtype,
        also with uneven and empty shards."""
    dt = need_dtensor()
    local = full
    coord = [(mesh.mesh == dist.get_rank()).nonzero()[0].tolist()][0]
    for dim, p in enumerate(placements):
        if type(p).__name__ == "Shard":
            parts, at = list(local.chunk(mesh.mesh.size(dim), p.dim)), coord[dim]
            if at < len(parts):
                local = parts[at]
            else:
                local = local.narrow(p.dim, 0, 0)
    if V >= (2, 2):
        return dt.DTensor.from_local(local, mesh, placements, run_check=False, shape=full.size(), stride=full.stride())
    try:
        return dt.distribute_tensor(full, mesh, placements)
    except Exception as e:
        raise Skip("DTensor of %s: %s" % (full.dtype, str(e).split("\n")[0][:100]))


@case("fsdp2", 4, "FSDP2 fully_shard, Shard(0), the vocabulary's 11 rows on 4 ranks")
def _(rank, world):
    fully_shard = fully_shard_fn()
    mesh = make_mesh((4,), ("dp",))
    model = Llama(seed=10)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model.state_dict()}, {"truth": original(10), "mesh": {"dp": 4}}


@case("tp", 2, "tensor parallel: colwise, rowwise; the rest is replicated plain tensors")
def _(rank, world):
    mesh = make_mesh((2,), ("tp",))
    model = parallelize(Llama(seed=11), mesh)
    return {"model": model.state_dict()}, {"truth": original(11), "mesh": {"tp": 2}}


@case("tp-embed", 4, "tensor parallel embedding: rowwise, 11 rows on 4 ranks, colwise output, sequence parallel norm")
def _(rank, world):
    need(V >= (2, 4), "no parallel styles for Embedding and LayerNorm")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    mesh = make_mesh((4,), ("tp",))
    model = parallelize_module(Llama(seed=12), mesh, {
        "tok_embeddings": RowwiseParallel(),
        "output": ColwiseParallel(),
        "norm": SequenceParallel(),
        "layers.0.feed_forward.w2": RowwiseParallel(),
    })
    return {"model": model.state_dict()}, {"truth": original(12), "mesh": {"tp": 4}}


def two_d(shape, names, hidden, seed, dim=8):
    fully_shard = fully_shard_fn()
    mesh = make_mesh(shape, names)
    model = parallelize(Llama(dim=dim, hidden=hidden, seed=seed), mesh["tp"])
    dp = mesh["dp"] if "replicate" not in names else mesh["replicate", "dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=dp)
    fully_shard(model, mesh=dp)
    return {"model": model.state_dict()}, {"truth": original(seed, dim=dim, hidden=hidden), "mesh": dict(zip(names, shape))}


@case("2d-dp2tp2", 4, "2D FSDP+TP, dp 2 x tp 2")
def _(rank, world):
    return two_d((2, 2), ("dp", "tp"), 24, 13)


@case("2d-dp4tp2", 8, "2D FSDP+TP, dp 4 x tp 2, a colwise weight of 64 rows (_StridedShard: 0,32,8,40,16,48,24,56)")
def _(rank, world):
    return two_d((4, 2), ("dp", "tp"), 64, 14)


@case("2d-uneven", 6, "2D FSDP+TP, dp 3 x tp 2, nothing divides: 10 colwise rows, 11 vocabulary rows")
def _(rank, world):
    return two_d((3, 2), ("dp", "tp"), 10, 15)


@case("hsdp", 4, "HSDP, replicate 2 x dp 2: each chunk held twice, stored once")
def _(rank, world):
    fully_shard = fully_shard_fn()
    mesh = make_mesh((2, 2), ("replicate", "dp"))
    model = Llama(seed=16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return {"model": model.state_dict()}, {"truth": original(16), "mesh": {"replicate": 2, "dp": 2}}


@case("hsdp-tp", 8, "HSDP + TP, replicate 2 x dp 2 x tp 2")
def _(rank, world):
    need(V >= (2, 6), "no FSDP2 on a 3-D mesh slice")
    return two_d((2, 2, 2), ("replicate", "dp", "tp"), 16, 17)


@case("uneven", 3, "5 rows on 3 ranks (2, 2, 1), by rows and by columns, and a 3-D cut in the middle")
def _(rank, world):
    dt = need_dtensor()
    from_place = dt.Shard
    mesh = make_mesh((3,), ("dp",))
    torch.manual_seed(18)
    full = {"rows": torch.randn(5, 4), "cols": torch.randn(4, 5), "mid": torch.randn(2, 5, 3), "vec": torch.randn(5)}
    dims = {"rows": 0, "cols": 1, "mid": 1, "vec": 0}
    sd = {k: shard(v, mesh, [from_place(dims[k])]) for k, v in full.items()}
    return sd, {"truth": full, "mesh": {"dp": 3}}


@case("empty", 4, "2 rows on 4 ranks (1, 1, 0, 0), and a tensor that is empty everywhere")
def _(rank, world):
    dt = need_dtensor()
    mesh = make_mesh((4,), ("dp",))
    torch.manual_seed(19)
    full = {"rows": torch.randn(2, 3), "cols": torch.randn(3, 1), "one": torch.randn(1), "none": torch.zeros(0, 4)}
    dims = {"rows": 0, "cols": 1, "one": 0, "none": 0}
    sd = {k: shard(v, mesh, [dt.Shard(dims[k])]) for k, v in full.items()}
    return sd, {"truth": full, "mesh": {"dp": 4}}


@case("replicated", 4, "Replicate on one or both dims of a 2 x 2 mesh, and plain tensors held by every rank")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2, 2), ("dp", "tp"))
    torch.manual_seed(20)
    full = {"rr": torch.randn(3, 4), "sr": torch.randn(5, 4), "rs": torch.randn(4, 6), "plain": torch.randn(9)}
    R, S = dt.Replicate(), dt.Shard
    sd = {
        "rr": shard(full["rr"], mesh, [R, R]),
        "sr": shard(full["sr"], mesh, [S(0), R]),
        "rs": shard(full["rs"], mesh, [R, S(1)]),
        "plain": full["plain"],
    }
    return {"m": sd}, {"truth": {"m." + k: v for k, v in full.items()}, "mesh": {"dp": 2, "tp": 2}}


@case("shard-shard", 4, "[Shard(0), Shard(1)] and [Shard(0), Shard(0)] (dp-major) on a 2 x 2 mesh, uneven")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2, 2), ("a", "b"))
    torch.manual_seed(21)
    full = {"s0s1": torch.randn(5, 7), "s1s0": torch.randn(3, 6), "s0s0": torch.randn(7, 2)}
    S = dt.Shard
    plan = {"s0s1": [S(0), S(1)], "s1s0": [S(1), S(0)], "s0s0": [S(0), S(0)]}
    sd = {k: shard(v, mesh, plan[k]) for k, v in full.items()}
    return sd, {"truth": full, "mesh": {"a": 2, "b": 2}}
