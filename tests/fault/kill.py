#!/usr/bin/env python3
"""Kills a conversion that replaces its target at every system call in turn, until a run ends before it is killed.

After each kill, the name of the target leads to the complete old or the complete new one. The next run replaces it, reports
in whole lines what it found, and leaves nothing else in the directory.
usage: kill.py FSDPCKPT SHIM OLD NEW exchange|two-steps COMMAND [OPTION...]
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile


def run(argv, env=None):
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)


def main():
    program, shim, old, new, way, *command = sys.argv[1:]
    home = tempfile.mkdtemp(prefix="fc-kill-")
    target = os.path.join(home, "target" if command[0] == "reshard" or "--to" in command else "target.h5")
    log = os.path.join(tempfile.gettempdir(), f"fc-kill-{os.getpid()}.log")
    options = ["-o", target, "-q", "-j1", *command[1:]]
    folders = [os.path.dirname(shim), os.environ.get("LD_LIBRARY_PATH")]  # LD_PRELOAD cannot hold blanks
    base = dict(os.environ, LD_PRELOAD=os.path.basename(shim), LD_LIBRARY_PATH=":".join(filter(None, folders)),
                **({"FAULT_NO_EXCHANGE": "1"} if way == "two-steps" else {}))

    def names(path):
        result = run([program, "inspect", path, "--json"])
        if result.returncode != 0:
            raise AssertionError(f"{path} cannot be opened: {result.stderr}")
        return sorted(tensor["name"] for tensor in json.loads(result.stdout)["tensors"]), result.stderr

    try:
        made = run([program, command[0], old, *options], base)
        assert made.returncode == 0, made.stderr
        old_names, new_names, finished, removed, clean = names(old)[0], names(new)[0], 0, 0, 0
        assert old_names != new_names
        for n in range(1, 100000):
            made = run([program, command[0], old, *options, "--force"], base)
            assert made.returncode == 0 and os.listdir(home) == [os.path.basename(target)], (made, os.listdir(home))
            with open(log, "wb") as f:
                f.write(bytes(64))
            env = dict(base, FAULT_FAMILY="sys", FAULT_KILL="1", FAULT_AT=str(n), FAULT_LOG=log)
            killed = run([program, command[0], new, *options, "--force"], env)
            with open(log, "rb") as f:
                call = f.read().rstrip(b"\0").decode()
            if not call:
                assert killed.returncode == 0, killed.stderr
                print(f"killed {n - 1} times; {finished} replacements finished and {removed} leftovers removed later")
                return 0 if removed > 0 and (finished > 0) == (way == "two-steps") else 1
            where = f"killed at call {n} ({call}): "
            found, told = names(target)
            assert found in (old_names, new_names), where + "the target is neither the old nor the new one"
            finished += "put in place" in told
            again = run([program, command[0], new, *options, "--force"], base)
            assert again.returncode == 0, where + again.stderr
            assert os.listdir(home) == [os.path.basename(target)], where + f"left behind: {os.listdir(home)}"
            lines = again.stderr.splitlines()
            assert len(lines) <= 1 and all("an earlier run died" in line for line in lines), where + again.stderr
            removed += len(lines)
            clean += not lines
            assert names(target)[0] == new_names, where + "the next run did not replace the target"
    finally:
        if os.path.exists(log):
            os.remove(log)
        shutil.rmtree(home)
    return 1


if __name__ == "__main__":
    sys.exit(main())
