#!/usr/bin/env python3
"""One line of error lists all unreadable values of a file of h5py or PyTorch, with options that leave out all of them and nothing else.

usage: unreadable.py FSDPCKPT       exit 77 without torch or h5py
"""
import os
import pathlib
import shlex
import sys
import tempfile

try:
    import h5py
    import numpy as np
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish, must_run


def hdf5(path, unreadable):
    with h5py.File(path, "w") as f:
        f["w"] = np.ones((4, 4), "f4")
        f["meta/ids"] = np.arange(3)
        f["metadata"] = np.arange(2)
        for name in unreadable:
            f[name.replace(".", "/")] = h5py.SoftLink("/nowhere")


def torch_save(path, unreadable):
    state = {"w": torch.ones(4, 4), "meta": {"ids": torch.arange(3)}, "metadata": torch.arange(2)}
    for name in unreadable:
        at, keys = state, name.split(".")
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = torch.empty(3, device="meta")
    torch.save(state, path)


CASES = {  # unreadable names, the globs that leave them out
    "two": (["a", "b"], ["a", "b"]),
    "beside": (["meta.x", "meta.y", "gone"], ["meta.x", "meta.y", "gone"]),
    "group": ([f"junk.t{i}" for i in range(40)], ["junk.*"]),
    "groups": (["junk.deep.a", "junk.deep.b", "other.x", "metad"], ["junk.*", "other.*", "metad"]),
}


def main():
    program = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as home:
        for make, extension in ((hdf5, "h5"), (torch_save, "pt")):
            for case, (names, globs) in CASES.items():
                source, target = pathlib.Path(home, f"{case}.{extension}"), pathlib.Path(home, f"{case}.{extension}.safetensors")
                make(source, names)
                said = must_run(program, "consolidate", source, "-o", target, ok=(3, 5)).stderr
                check(said.count("\n") == 1 and not target.exists(), f"{source}: {said}")
                words = shlex.split(said.rsplit("; leave all of them out with ", 1)[-1])
                options = words[1::2]
                check(sorted(options) == sorted(globs) and set(words[::2]) == {"--exclude"}, f"{source}: {words}")
                check(len(names) < 8 or "more" in said, said)
                must_run(program, "consolidate", source, "-o", target, *words)
                listed = must_run(program, "inspect", target, "--all").stdout
                check(all(name in listed for name in ("w ", "meta.ids", "metadata")), f"{source}: {listed}")
            # More names than a line has room for: still one line.
            source = pathlib.Path(home, f"many.{extension}")
            make(source, [f"{'x' * 60}{i}" for i in range(60)])
            said = must_run(program, "consolidate", source, "-o", pathlib.Path(home, "never.h5"), ok=(3, 5)).stderr
            check("and 54 more; leave all of them out with --exclude GLOB" in said and said.count("\n") == 1, said)
    return finish("unreadable")


if __name__ == "__main__":
    sys.exit(main())
