"""DCP checkpoints of FSDP2 over TP whose rows do not divide, as PyTorch's own planner saves them: with wrong boxes.

usage: misplaced.py PATH_OF_FSDPCKPT [--all]

The values must come out right; rows that PyTorch did not store must be an error that names them. Exit status 77 without torch,
or with one whose boxes are right.
"""

import json
import subprocess
import sys
import tempfile
import warnings

try:
    import safetensors.torch
    import torch
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor.parallel  # noqa: F401  once, not in each rank
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    import gloo
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

warnings.filterwarnings("ignore")
NAMES = ("replicate", "dp", "tp")
# A mesh and the rows of the tensors of one checkpoint. PyTorch saves them, because its wrong boxes do not overlap.
CASES = [((4, 2), (9, 17, 8, 6)), ((3, 3), (11, 9, 12))]
CASES += [((3, 3), (11,)), ((2, 3, 2), (7, 8))] if "--all" in sys.argv else []


def weight(rows):
    return torch.arange(rows * 3.0).reshape(rows, 3) + 1


def save(rank, _world, sizes, rows, path):
    names = NAMES[3 - len(sizes):]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = torch.nn.Module()
    for n in rows:
        value = distribute_tensor(weight(n), mesh["tp"], [Shard(0)])
        model.register_parameter(f"rows{n}", torch.nn.Parameter(value))
    fully_shard(model, mesh=mesh[names[:-1]])
    state = model.state_dict()
    dcp.save(state, checkpoint_id=path)
    return {name: value.to_local().shape[0] for name, value in state.items()}


def run(*args):
    return subprocess.run([TOOL, *args], capture_output=True, text=True)


def check_tensor(path, target, n):
    """Returns whether all rows are there."""
    made = run("consolidate", path, "-o", target, "--include", f"rows{n}", "--force", "-q")
    if made.returncode == 0:
        value = safetensors.torch.load_file(target)[f"rows{n}"]
        assert torch.equal(value, weight(n)), f"{path}: {n} rows: {value[:, 0]}"
        return True
    assert made.returncode == 3, made
    assert f"tensor rows{n}: elements [{n - 1}:{n}, 0:3] are in no chunk" in made.stderr, made.stderr
    return False


def main():
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    if _compute_local_shape_and_global_offset((7,), (3, 2), [2, 0], strided)[0] == (0,):
        print("skipped: this PyTorch computes the boxes that its ranks hold")
        return 77
    whole = lost = 0
    for number, (sizes, rows) in enumerate(CASES):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/dcp"
            gloo.run(torch.Size(sizes).numel(), save, sizes, rows, path)
            found = [check_tensor(path, f"{folder}/one.safetensors", n) for n in rows]
            whole += sum(found)
            lost += len(found) - sum(found)
            said = json.loads(run("inspect", path, "--json").stdout)["note"]
            assert f"{sizes[-2]} × tp {sizes[-1]}" in said, said
            assert ("PyTorch stored only some rows of" in said) == (not all(found)), said
            assert all(found) or sizes == (3, 3), f"{sizes} {rows}: {found}: only there do two ranks have the same empty box"
            if all(found):
                made = run("convert", path, "-o", f"{folder}/again", "--to", "h5", "-q")
                assert made.returncode == 0, made
    print(f"{len(CASES)} checkpoints: {whole} tensors whole, {lost} of which PyTorch did not store a row")
    assert whole and lost
    return 0


if __name__ == "__main__":
    TOOL = sys.argv[1]
    sys.exit(main())
