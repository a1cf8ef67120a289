#!/usr/bin/env python3
"""consolidate and reshard on every checkpoint of the corpus, all written by real PyTorch.

Consolidates each and compares every byte with the values that torch had before it saved. Then reshards it to each mesh, reads
index.h5 and the boxes of each shard with stock h5py, and consolidates it back. Where torch has saved the same model on a 2D
mesh, the boxes of our 2D layout must be the ones that torch recorded.

usage: convert.py FSDPCKPT CORPUS [GLOB]        exit 77 without h5py
"""
import fnmatch
import glob
import json
import os
import shutil
import sys
import tempfile

try:
    import h5py
    import compare
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import Failure, must_run

MESHES = [
    ["--dp", "3"],
    ["--dp", "8"],
    ["--dp", "16"],
    ["--tp", "2", "--dp", "4"],
    ["--tp", "4"],
    ["--replicas", "2", "--dp", "2", "--tp", "2"],
]
# The modules that tests/corpus/make_dcp.py parallelizes, named as in a Hugging Face plan.
TORCH_PLAN = {
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
}
TORCH_MESHES = {
    "fsdp2": ["--dp", "4"],
    "2d-dp2tp2": ["--dp", "2", "--tp", "2"],
    "2d-dp4tp2": ["--dp", "4", "--tp", "2"],
    "2d-uneven": ["--dp", "3", "--tp", "2"],
    "hsdp": ["--replicas", "2", "--dp", "2"],
    "hsdp-tp": ["--replicas", "2", "--dp", "2", "--tp", "2"],
}


def must_equal(target, expected, boxes=False):
    problems, checked = compare.compare(target, expected, boxes=boxes)
    if problems:
        raise Failure("; ".join(problems[:3]) + (" (and %d more)" % (len(problems) - 3) if len(problems) > 3 else ""))
    return checked


def plan_for(program, source, mesh, home):
    """The built-in plan if it cuts anything, else one that cuts every matrix, for small unusual checkpoints."""
    if "--tp" not in mesh:
        return []
    if must_run(program, "reshard", source, "-o", os.path.join(home, "never"), "--dry-run", "-q", *mesh,
           ok=(0, 2)).returncode == 0:
        return []
    return ["--tp-plan", os.path.join(home, "any.json")]


def boxes_of(directory):
    """{(fqn, offsets, sizes)} of the boxes in the shard files. Replicas are stored once."""
    found = set()
    for path in sorted(glob.glob(os.path.join(directory, "shard-*.h5"))):
        with h5py.File(path, "r") as f:
            for where, dataset in compare.walk(f):
                if "global_shape" in dataset.attrs and "owner" not in dataset.attrs and dataset.size != 0:
                    offsets = [int(x) for x in compare.as_list(dataset.attrs["offsets"])]
                    found.add((where, tuple(offsets), tuple(dataset.shape)))
    return found


def check_torch_boxes(program, full, case, expected, home):
    """Compares our layout for torch's mesh and plan with the chunks that torch wrote."""
    out = os.path.join(home, "boxes")
    mesh = TORCH_MESHES[case]
    plan = ["--tp-plan", os.path.join(home, "torch.json")] if "--tp" in mesh else []
    must_run(program, "reshard", full, "-o", out, "-q", *mesh, *plan)
    ours = boxes_of(out)
    theirs = set()
    for fqn, want in expected["tensors"].items():
        if fqn == "model.freqs":
            # A buffer: fully_shard does not cut buffers, but a checkpoint does not distinguish them from parameters.
            ours = {box for box in ours if box[0] != compare.h5_path(want["path"])}
            continue
        for chunk in want["chunks"]:
            if 0 not in chunk["sizes"]:
                theirs.add((compare.h5_path(want["path"]), tuple(chunk["offsets"]), tuple(chunk["sizes"])))
    shutil.rmtree(out)
    if ours != theirs:
        raise Failure("boxes differ from torch's: only ours %s, only torch's %s" %
                      (sorted(ours - theirs)[:3], sorted(theirs - ours)[:3]))


def check_case(program, source, home):
    expected_path = os.path.join(source, "expected.json")
    with open(expected_path, encoding="utf-8") as f:
        expected = json.load(f)
    full = os.path.join(home, "full.h5")
    must_run(program, "consolidate", source, "-o", full, "-q")
    checked = must_equal(full, expected_path)
    # HDF5 keeps the members of a group together and torch may not, so compare files that went through HDF5 once.
    again = os.path.join(home, "again.h5")
    must_run(program, "consolidate", full, "-o", again, "-q")
    for mesh in MESHES:
        out, back = os.path.join(home, "out"), os.path.join(home, "back.h5")
        try:
            plan = plan_for(program, source, mesh, home)
            made = must_run(program, "reshard", source, "-o", out, "-q", *mesh, *plan, ok=(0, 2))
            if "shards none of the" in made.stderr:
                continue  # only scalars and objects: nothing to cut
            if made.returncode != 0:
                raise Failure(made.stderr.strip())
            must_equal(out, expected_path, boxes=True)
            must_run(program, "consolidate", out, "-o", back, "-q")
            must_equal(back, expected_path)
            with open(again, "rb") as a, open(back, "rb") as b:
                if a.read() != b.read():
                    raise Failure("consolidated back, the file differs from the one consolidated from one file")
        except Failure as e:
            raise Failure("%s: %s" % (" ".join(mesh), e))
        shutil.rmtree(out)
        os.remove(back)
    if expected.get("case") in TORCH_MESHES:
        check_torch_boxes(program, full, expected["case"], expected, home)
    return checked


def main():
    program, corpus = sys.argv[1:3]
    pattern = sys.argv[3] if len(sys.argv) > 3 else "dcp-*"
    cases = sorted(c for c in os.listdir(corpus) if fnmatch.fnmatch(c, pattern))
    failed = 0
    for case in cases:
        home = tempfile.mkdtemp(prefix="fc-convert-")
        for name, plan in (("any", {"*": "colwise"}), ("torch", TORCH_PLAN)):
            with open(os.path.join(home, name + ".json"), "w") as f:
                json.dump(plan, f)
        try:
            print("%s: %d values, equal" % (case, check_case(program, os.path.join(corpus, case), home)))
        except Failure as e:
            failed += 1
            print("%s: FAILED: %s" % (case, e))
        finally:
            shutil.rmtree(home)
    print("%d checkpoints, %d failed" % (len(cases), failed))
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
