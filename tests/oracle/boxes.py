"""fc_local_box against torch: the local boxes of every rank for thousands of shapes, meshes and placements.

usage: boxes.py PATH_OF_BOX_TOOL

The expected boxes come from torch's _compute_local_shape_and_global_offset, which DCP uses to record them. It returns a size
and a first offset even where a _StridedShard leaves rows that are not contiguous; torch's index lists show these cases. There
fc_local_box must refuse, except for the placements that FSDP makes on top of TP: then all ranks with that FSDP coordinate
must have what FSDP holds in memory, torch.chunk of torch.chunk.
Exit status 77 without torch.
"""

import itertools
import math
import random
import subprocess
import sys

try:
    import torch
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset, _get_shard_size_and_offsets
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)


def is_cut(p):
    return isinstance(p, (Shard, _StridedShard))


def split_factor(p):
    return p.split_factor if isinstance(p, _StridedShard) else 1


def contiguous(shape, mesh, placements, coordinate):
    """Returns True if torch's index lists are intervals in every dimension."""
    local, indices = list(shape), {}
    for m, p in enumerate(placements):
        if is_cut(p):
            local[p.dim], indices[p.dim] = _get_shard_size_and_offsets(
                local[p.dim], mesh[m], coordinate[m], p, indices.get(p.dim), shape[p.dim], False
            )
    return all(int(i[-1]) - int(i[0]) + 1 == i.numel() for i in indices.values())


def fsdp_position(placements, mesh, dim):
    """The mesh dimension whose _StridedShard shows that later ones cut `dim` first, or None."""
    cuts = [m for m, p in enumerate(placements) if is_cut(p) and p.dim == dim]
    strided = [m for m in cuts if split_factor(placements[m]) > 1]
    if len(strided) != 1:
        return None
    later = math.prod(mesh[m] for m in cuts if m > strided[0])
    return strided[0] if later == split_factor(placements[strided[0]]) else None


def held_by_fsdp(size, placements, mesh, coordinate, dim, at):
    rows = torch.arange(size)

    def chunk_of(t, count, index):
        chunks = torch.chunk(t, count) if t.numel() else ()
        return chunks[index] if index < len(chunks) else t[:0]

    flat = 0
    for m, p in enumerate(placements):
        if is_cut(p) and p.dim == dim and m != at:
            if m < at:
                rows = chunk_of(rows, mesh[m], coordinate[m])
            else:
                flat = flat * mesh[m] + coordinate[m]
    rows = chunk_of(chunk_of(rows, placements[at].split_factor, flat), mesh[at], coordinate[at])
    return (int(rows[0]), rows.numel()) if rows.numel() else (size, 0)


def expected(shape, mesh, placements):
    """The box of every rank, or None where there is none."""
    coordinates = list(itertools.product(*[range(n) for n in mesh]))
    boxes = {}
    for c in coordinates:
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(c), placements)
        boxes[c] = (list(offsets), list(sizes))
    for dim in range(len(shape)):
        only = [p if is_cut(p) and p.dim == dim else Replicate() for p in placements]
        bad = {c for c in coordinates if not contiguous(shape, mesh, only, c)}
        at = fsdp_position(placements, mesh, dim)
        later = [m for m, p in enumerate(only) if is_cut(p) and at is not None and m > at]
        groups = {tuple(x for m, x in enumerate(c) if m not in later) for c in bad}
        for c in coordinates:
            if at is None:
                if c in bad:
                    boxes[c] = None
            elif tuple(x for m, x in enumerate(c) if m not in later) in groups and boxes[c] is not None:
                offset, size = held_by_fsdp(shape[dim], placements, mesh, c, dim, at)
                boxes[c][0][dim], boxes[c][1][dim] = offset, size
    return [boxes[c] for c in coordinates]


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


def main(tool):
    cases = [*fixed_cases(), *random_cases(2500)]
    lines = [
        f"{','.join(map(str, s)) or '-'} {','.join(map(str, m))} {text_of(p)}" for s, m, p in cases
    ]
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
            if g != (tuple(w) if w else None):
                failures += 1
                if failures <= 10:
                    print(f"{line}: rank {rank}: fsdpckpt {g}, torch {w}")
        if None not in got:
            held = sum(math.prod(sizes) for _, sizes in {(tuple(o), tuple(s)) for o, s in got})
            if held != math.prod(shape):
                failures += 1
                print(f"{line}: the distinct boxes hold {held} elements of {math.prod(shape)}")
    print(f"{len(cases)} layouts, {ranks} boxes ({refused} refused because they are not boxes), {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
