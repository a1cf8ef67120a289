#!/usr/bin/env python3
"""Fails every system call, or an allocation at every place in the code, in turn, until a run has no more calls to fail.

Each failed run must exit with status 4 (a failed call of the system also with 3), print one line on stderr, leave the old target unchanged and leave nothing else
behind. Or it must succeed completely, if the call does not matter, such as a read-ahead hint. A command without a target must
then print the same as without a fault.

usage: run.py FSDPCKPT SHIM SOURCE sys|mem|dir|stat[@RANK[/STEP]] ERRNO COMMAND [OPTION...]

With @RANK the command runs on two ranks of MPI, and the calls that the program makes on this rank fail, with STEP only every STEP-th
call. All ranks must end.
"""
import os
import shutil
import subprocess
import sys
import tempfile

NO_TARGET = ("inspect", "check", "diff", "verify", "schema", "units", "recipes")
HAS_JOBS = ("inspect", "consolidate", "reshard", "convert", "export", "average", "diff", "verify", "delta", "fold")
HANG = 600  # seconds; only a hang takes this long, even on a busy machine
LAUNCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "mpi", "launch.sh")
# Sets the variables before "--" on one rank, and runs the rest.
ON_RANK = ["sh", "-c", 'rank=$1; shift; while [ "$1" != -- ]; do [ "$OMPI_COMM_WORLD_RANK" != "$rank" ] || export "$1"; shift; done; '
           'shift; exec "$@"', "sh"]


def snapshot(path):
    """{path: content} of every file under a directory."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            full = os.path.join(folder, name)
            with open(full, "rb") as f:
                found[os.path.relpath(full, path)] = f.read()
    return found


def run(argv, rank, faults=None):
    """Runs the command with the variables `faults`, which on several ranks only one gets. Other lines than its own are mpirun's."""
    faults = faults or {}
    if not rank:
        return subprocess.run(argv, env={**os.environ, **faults}, capture_output=True, text=True, timeout=HANG)
    variables = [f"{k}={v}" for k, v in faults.items()]
    result = subprocess.run([LAUNCH, "2", *ON_RANK, rank, *variables, "--", *argv], capture_output=True, text=True, timeout=HANG)
    result.stderr = "".join(line for line in result.stderr.splitlines(keepends=True) if line.startswith("fsdpckpt: "))
    return result


def main():
    program, shim, source, family, number, *command = sys.argv[1:]
    family, _, rank = family.partition("@")
    rank, _, step = rank.partition("/")
    home = tempfile.mkdtemp(prefix="fc-fault-")
    target = os.path.join(home, "target" if command[0] in ("reshard", "export") or "--to" in command else "target.h5")
    log = os.path.join(tempfile.gettempdir(), f"fc-fault-{os.getpid()}.log")
    jobs = ["-j1"] if command[0] in HAS_JOBS else []
    if command[0] in NO_TARGET:
        argv, force = [program, command[0], source, *jobs, *command[1:]], []
        os.mkdir(target)  # must stay as it is
    else:
        argv, force = [program, command[0], source, "-o", target, "-q", *jobs, *command[1:]], ["--force"]
    folders = [os.path.dirname(shim), os.environ.get("LD_LIBRARY_PATH")]  # LD_PRELOAD cannot hold blanks
    try:
        made = run(argv, rank)
        if rank and made.returncode == 77:
            print("there is no mpirun")
            return 77
        if made.returncode not in (0, 1):
            print(f"the command fails without a fault: {made.stderr}")
            return 1
        good = snapshot(home)
        failed = 0
        for n in range(1, 100000, int(step or 1)):
            faults = dict(LD_PRELOAD=os.path.basename(shim), LD_LIBRARY_PATH=":".join(filter(None, folders)),
                          FAULT_FAMILY=family, FAULT_AT=str(n), FAULT_ERRNO=number, FAULT_LOG=log,
                          **({"FAULT_OURS": "1"} if rank else {"FAULT_FIRST": "1"} if family == "mem" else {}))
            with open(log, "wb") as f:
                f.write(bytes(64))
            result = run([*argv, *force], rank, faults)
            with open(log, "rb") as f:
                call = f.read().rstrip(b"\0").decode()
            where = f"{family} fault {n} ({call}): "
            if snapshot(home) != good or sorted(os.listdir(home)) != [os.path.basename(target)]:
                print(where + "the target changed or something was left behind: " + str(os.listdir(home)))
                return 1
            if not call:
                if result.returncode != made.returncode:
                    print(where + f"failed without a fault: {result.stderr}")
                    return 1
                print(f"{n - 1} calls failed in turn, {failed} of them ended the command; the target was never harmed")
                return 0 if failed > 0 else 1
            if result.returncode == made.returncode and result.stdout == made.stdout:
                continue
            if result.returncode != 0 or command[0] in NO_TARGET:
                failed += 1
                if command[0] == "verify" and result.returncode == 1 and "Input/output error" in result.stdout:
                    continue  # unreadable data is a defect, and verify goes on to find others
                if result.returncode not in ((4,) if family == "mem" else (3, 4)) or result.stderr.count("\n") != 1:
                    print(where + f"exit {result.returncode}, stderr: {result.stderr!r}")
                    return 1
    finally:
        if os.path.exists(log):
            os.remove(log)
        shutil.rmtree(home)
    return 1


if __name__ == "__main__":
    sys.exit(main())
