"""DTensors with data under FSDP over TP against torch on gloo: chunk_dtensor, all_gather_dtensor, chunk_tensor and
pre_load_state_dict, on 2D and HSDP meshes.

usage: dtensor_data.py PATH_OF_DTENSOR_TOOL

Exit status 77 without torch.
"""

import json
import logging
import subprocess
import sys
import warnings

try:
    import torch
    import torch.distributed.fsdp  # noqa: F401  (its submodules import each other in this order only)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import fsdp
    from torch.distributed.tensor.placement_types import _StridedShard

    import gloo
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

warnings.filterwarnings("ignore")
SHAPES = [(8, 6), (16, 4), (10, 6), (3, 5), (7,), (4, 3, 2), (1, 2), (2, 2)]
PLACEMENTS = {"Shard(0)": Shard(0), "Shard(1)": Shard(1), "Replicate()": Replicate()}


def even(shape, placement, ranks):
    """Only such cuts can be compared: DTensor.from_local infers the shape from the local tensor."""
    return not placement.startswith("Shard") or shape[int(placement[6])] % ranks == 0


def all_cases():
    made = []
    for mesh in ((2, 2), (4, 2), (2, 2, 2)):
        for shape in SHAPES:
            made.append({"mesh": mesh, "shape": shape, "tp": None})
            for tp in PLACEMENTS:
                if tp != "Shard(1)" or len(shape) > 1:
                    if even(shape, tp, mesh[-1]):
                        made.append({"mesh": mesh, "shape": shape, "tp": tp})
        for shape in ((16, 4), (8, 6), (32,)):
            factor = mesh[-1]
            rest = ["Replicate()"] * (len(mesh) - 2)
            made.append({"mesh": mesh, "shape": shape,
                         "placements": f"[{', '.join([*rest, f'_StridedShard(0, {factor})', 'Shard(0)'])}]"})
    return made


def text_of(placements):
    names = []
    for p in placements:
        names.append("Replicate()" if p.is_replicate() else f"Shard({p.dim})")
    return f"[{', '.join(names)}]"


def flat(tensor):
    return tensor.reshape(-1).tolist()


def run_case(case, rank, mesh):
    whole = torch.arange(torch.Size(case["shape"]).numel(), dtype=torch.int32).reshape(case["shape"])
    if "placements" in case:
        placements = [Replicate()] * (mesh.ndim - 2) + [_StridedShard(0, split_factor=mesh.size(mesh.ndim - 1)), Shard(0)]
        tensor = distribute_tensor(whole, mesh, placements)
        return {"gathered": flat(fsdp._all_gather_dtensor(tensor, mesh))}
    tensor = whole
    if case["tp"]:
        tensor = distribute_tensor(whole, mesh["tp"], [PLACEMENTS[case["tp"]]])
    chunked = fsdp._chunk_dtensor(tensor, rank, mesh["dp"])
    result = {
        "placements": text_of(chunked.placements),
        "chunked": flat(chunked.to_local()),
        "gathered": flat(fsdp._all_gather_dtensor(chunked, chunked.device_mesh)),
    }
    dp = mesh["dp"]
    # For a DTensor, _chunk_tensor takes ranks of the TP group for global ranks and fails in all groups but the first, so this
    # calls only its inner half.
    chunk = fsdp._create_chunk_sharded_tensor if case["tp"] else fsdp._chunk_tensor
    local = tensor.to_local() if case["tp"] else tensor
    made = chunk(local, dp.get_local_rank(), dp.size(), 1, dp.get_group())
    _, shards = fsdp._pre_load_state_dict(made)
    result["loaded"] = len(shards)
    result["chunk_tensor"] = flat(shards[0].tensor) if shards else None
    return result


def run_all(rank, world, cases):
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    meshes, results = {}, []
    for case in cases:
        sizes = case["mesh"]
        if torch.Size(sizes).numel() != world:
            results.append(None)
            continue
        if sizes not in meshes:
            names = ("replicate", "dp", "tp")[-len(sizes):]
            meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        mesh = meshes[sizes]
        results.append(run_case(case, rank, mesh))
    return results


def main():
    cases = all_cases()
    wanted = {world: gloo.run(world, run_all, cases) for world in (4, 8)}
    answer = subprocess.run([sys.argv[1]], input=json.dumps(cases), capture_output=True, text=True, check=True)
    failures = 0
    for i, (case, got) in enumerate(zip(cases, json.loads(answer.stdout))):
        world = torch.Size(case["mesh"]).numel()
        found = [got["error"]] if got["code"] else []
        for rank in range(world if not found else 0):
            theirs = wanted[world][rank][i]
            mine = got["ranks"][rank]
            found += [f"rank {rank} {key}: {mine.get(key)} is not torch's {theirs[key]}"
                      for key in theirs if mine.get(key) != theirs[key]]
        if found:
            print(f"{case}: {found[0]}")
            failures += 1
    print(f"{len(cases)} cases, {failures} differences")
    return 1 if failures or len(cases) < 60 else 0


if __name__ == "__main__":
    sys.exit(main())
