"""fc_local_box against torch: the local boxes of every rank for thousands of shapes, meshes and placements.

usage: boxes.py PATH_OF_BOX_TOOL

There are two sources of the expected boxes. The first is FSDP2 itself: fully_shard over parameters that TP sharded, and over
those that EP and TP sharded, on 14 meshes and with 22 numbers of rows. Each rank is made in turn in a process group of torch that does not communicate, and
its box is read from the values of its local tensor.
The second is torch's index lists for any placements, which show where a _StridedShard leaves rows that are not contiguous.
There fc_local_box must refuse. The _StridedShard of FSDP divides last, as FSDP does.
Exit status 77 without torch.
"""

import itertools
import math
import random
import subprocess
import sys
import warnings

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset, _get_shard_size_and_offsets
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.testing._internal.distributed.fake_pg import FakeStore
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

warnings.filterwarnings("ignore")


def is_cut(p):
    return isinstance(p, (Shard, _StridedShard))


def split_factor(p):
    return p.split_factor if isinstance(p, _StridedShard) else 1


def fsdp_last(placements, mesh):
    """Mesh dimensions and placements in the order in which the ranks divide: FSDP's _StridedShard is a Shard that comes last."""
    first, last = [], []
    for m, p in enumerate(placements):
        later = [n for n in range(m + 1, len(mesh)) if is_cut(placements[n]) and placements[n].dim == getattr(p, "dim", None)]
        if split_factor(p) > 1 and split_factor(p) == math.prod(mesh[n] for n in later):
            last.append((m, Shard(p.dim)))
        else:
            first.append((m, p))
    return first + last[::-1]


def box_of(shape, mesh, placements, coordinate):
    """The box from torch's index lists, or None if they are not intervals."""
    local, indices = list(shape), {}
    for m, p in fsdp_last(placements, mesh):
        if is_cut(p):
            local[p.dim], indices[p.dim] = _get_shard_size_and_offsets(
                local[p.dim], mesh[m], coordinate[m], p, indices.get(p.dim), shape[p.dim], False
            )
    if any(int(i[-1]) - int(i[0]) + 1 != i.numel() for i in indices.values()):
        return None
    return [int(indices[d][0]) if d in indices else 0 for d in range(len(shape))], local


def expected(shape, mesh, placements):
    """The box of every rank, or None where there is none."""
    return [box_of(shape, mesh, placements, c) for c in itertools.product(*[range(n) for n in mesh])]


def text_of(placements):
    def one(p):
        if isinstance(p, _StridedShard):
            return f"_StridedShard({p.dim}, {p.split_factor})"
        return f"Shard({p.dim})" if isinstance(p, Shard) else "Replicate()"

    return "[" + ", ".join(one(p) for p in placements) + "]"


def fixed_cases():
    """The usual layouts, with sizes that divide evenly, that do not, and that are smaller than the mesh."""
    S, R = Shard, Replicate()
    for rows, columns in itertools.product([0, 1, 2, 3, 5, 7, 8, 9, 18, 28, 64, 97], [1, 4, 7]):
        for n in (1, 2, 3, 8):
            yield (rows, columns), (n,), [S(0)]
            yield (rows, columns), (n,), [S(1)]
        for dp, tp in [(4, 2), (2, 4), (3, 3), (4, 3), (1, 2), (2, 1)]:
            fsdp = _StridedShard(0, split_factor=tp) if tp > 1 else S(0)
            for pair in ([fsdp, S(0)], [S(0), S(1)], [S(0), R], [R, S(0)], [S(0), S(0)]):
                yield (rows, columns), (dp, tp), pair
                yield (rows, columns), (2, dp, tp), [R, *pair]
    yield (50257, 768), (4, 2), [_StridedShard(0, split_factor=2), S(0)]
    yield (50257, 768), (2, 2, 4), [_StridedShard(0, split_factor=8), S(0), S(0)]
    yield (), (4, 2), [R, R]


def random_cases(count):
    rng = random.Random(3)
    for _ in range(count):
        mesh = tuple(rng.choice([1, 2, 2, 3, 4, 5]) for _ in range(rng.randint(1, 3)))
        shape = tuple(rng.choice([0, 1, 2, 3, 5, 6, 7, 11, 13, 16, 23, 40]) for _ in range(rng.randint(1, 3)))
        placements = []
        for m in range(len(mesh)):
            dim = rng.randrange(len(shape))
            kind = rng.random()
            if kind < 0.2:
                placements.append(Replicate())
            elif kind < 0.65:
                placements.append(Shard(dim))
            else:
                sf = rng.choice([1, 2, 3, 4, math.prod(mesh[m + 1 :]), mesh[-1]])
                placements.append(_StridedShard(dim, split_factor=sf))
        yield shape, mesh, placements


def parse(word):
    if word.startswith("!"):
        assert word == "!5", f"fc_local_box failed with {word}"
        return None
    return tuple([int(n) for n in part.split(",") if n] for part in word.split(":"))


ROWS = {"d": [*range(1, 21), 25, 50257], "c": [1, 7, 16]}
# the sizes of FSDP's mesh (with HSDP, its replicas first), and of the mesh that sharded the parameters before
FSDP_MESHES = [((dp,), (tp,)) for dp in (2, 3, 4) for tp in (2, 3, 4)]
FSDP_MESHES += [((1,), (2,)), ((2,), (1,)), ((2, 3), (2,)), ((2,), (2, 2)), ((3,), (2, 2))]
NAMES = ("replicate", "dp", "ep", "tp")


def shard_model(rank, dp, tp):
    """The parameters of one rank after TP and fully_shard, by number of rows: {"d": Shard(0), "c": Shard(1)}."""
    names = NAMES[2 - len(dp):2] + NAMES[4 - len(tp):]
    mesh = init_device_mesh("cpu", dp + tp, mesh_dim_names=names)
    model = torch.nn.Module()
    for name, last in (("d", Shard(0)), ("c", Shard(1))):
        for n in ROWS[name]:
            whole = torch.arange(n, dtype=torch.float32)[:, None].expand(n, 2 if name == "d" else 12).contiguous()
            placements = [Shard(0)] * (len(tp) - 1) + [last]
            value = distribute_tensor(whole, mesh[names[len(dp):]], placements, src_data_rank=None)
            model.register_parameter(f"{name}{n}", torch.nn.Parameter(value))
    fully_shard(model, mesh=mesh[names[:len(dp)]])
    return dict(model.named_parameters())


def fsdp_cases():
    """(shape, mesh, placements) and the first row and the number of rows of every rank, as fully_shard leaves them."""
    held, layouts = {}, {}
    for dp, tp in FSDP_MESHES:
        world = math.prod(dp + tp)
        for rank in range(world):
            dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
            for name, p in shard_model(rank, dp, tp).items():
                local = p.to_local()[:, :1]
                key = (dp, tp, name)
                layouts[key] = tuple(p.shape), dp + tp, list(p.placements)
                assert local.shape[0] == 0 or bool((local[:, 0].diff() == 1).all()), "FSDP holds a box"
                held.setdefault(key, []).append((int(local[0, 0]) if local.numel() else p.shape[0], local.shape[0]))
            dist.destroy_process_group()
    return [(layouts[key], rows) for key, rows in held.items()]


def check_recorded(tool, cases, lines):
    """fc_recorded_box against the function that it is named after. @return the number of layouts that differ."""
    out = subprocess.run([tool, "recorded"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True).stdout
    failures = 0
    for (shape, mesh, placements), line, result in zip(cases, lines, out.splitlines(), strict=True):
        coordinates = itertools.product(*[range(n) for n in mesh])
        want = [_compute_local_shape_and_global_offset(shape, mesh, list(c), placements)[::-1] for c in coordinates]
        if [parse(w) for w in result.split(" ")] != [(list(offsets), list(sizes)) for offsets, sizes in want]:
            failures += 1
            if failures <= 10:
                print(f"{line}: fsdpckpt {result}, torch records {want}")
    print(f"{len(cases)} layouts as torch records them, {failures} differ")
    return failures


def line_of(shape, mesh, placements):
    return f"{','.join(map(str, shape)) or '-'} {','.join(map(str, mesh))} {text_of(placements)}"


def check_fsdp(tool):
    """@return the number of layouts of fully_shard whose boxes differ."""
    cases = fsdp_cases()
    lines = [line_of(*layout) for layout, _ in cases]
    out = subprocess.run([tool], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True).stdout
    failures = 0
    for (_, held), line, result in zip(cases, lines, out.splitlines(), strict=True):
        got = [parse(w) for w in result.split(" ")]
        if [box and (box[0][0], box[1][0]) for box in got] != held:
            failures += 1
            if failures <= 10:
                print(f"{line}: fsdpckpt {got}, the ranks hold the rows {held}")
    print(f"{len(cases)} layouts of fully_shard, {failures} differ")
    return failures


def main(tool):
    cases = [*fixed_cases(), *random_cases(2500)]
    lines = [line_of(*case) for case in cases]
    out = subprocess.run([tool], input="\n".join(lines) + "\n", capture_output=True, text=True, check=True).stdout
    results = out.splitlines()
    assert len(results) == len(cases), f"{len(results)} lines for {len(cases)} cases"
    failures = ranks = refused = 0
    for (shape, mesh, placements), line, result in zip(cases, lines, results):
        want = expected(shape, mesh, placements)
        got = [parse(w) for w in result.split(" ")]
        ranks += len(want)
        refused += sum(w is None for w in want)
        for rank, (w, g) in enumerate(itertools.zip_longest(want, got)):
            if g != w:
                failures += 1
                if failures <= 10:
                    print(f"{line}: rank {rank}: fsdpckpt {g}, torch {w}")
        if None not in got:
            held = sum(math.prod(sizes) for _, sizes in {(tuple(o), tuple(s)) for o, s in got})
            if held != math.prod(shape):
                failures += 1
                print(f"{line}: the distinct boxes hold {held} elements of {math.prod(shape)}")
    print(f"{len(cases)} layouts, {ranks} boxes ({refused} refused because they are not boxes), {failures} differ")
    return 1 if failures + check_recorded(tool, cases, lines) + check_fsdp(tool) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
