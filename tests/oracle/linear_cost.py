"""What the tests of linear cost share: runs the command on an input of n and of 4 n, and compares processor time and memory.

Import it before anything large.
"""
import atexit
import os
import subprocess
import sys
import tempfile

# Runs commands one after another. A child's peak memory begins at that of the process that made it, so this one starts
# before anything large is imported.
RUNNER = """
import os, subprocess, sys
for line in sys.stdin:
    folder, *args = line.rstrip("\\n").split("\\t")
    with open(os.devnull, "wb") as null:
        p = subprocess.Popen(args, cwd=folder, stdout=null, stderr=subprocess.PIPE)
        errors = p.stderr.read()
        _, status, usage = os.wait4(p.pid, 0)
    print(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime, usage.ru_maxrss, errors[-500:], flush=True)
"""
runner = subprocess.Popen([sys.executable, "-S", "-c", RUNNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
atexit.register(runner.kill)

TOOL = os.path.abspath(sys.argv[1])
SMALL, TIMES, MOST_GROWTH = 1500, 4, 8
failures = []


def cost(folder, *args):
    """Processor seconds and peak KiB of a run."""
    print(folder, TOOL, *args, sep="\t", file=runner.stdin, flush=True)
    status, seconds, peak, errors = runner.stdout.readline().split(" ", 3)
    answers = (0, 3, 5) + ((1,) if args[0] in ("check", "verify") else ()) + ((2,) if "--rename" in args else ())
    if int(status) not in answers or errors.count("\\n") > 1:
        failures.append(f"{args}: exit {status}: {errors}")
    return float(seconds), int(peak)


def grows(name, make, runs):
    """Fails if a run on 4 times the input costs more than 8 times as much."""
    costs = []
    for n in (SMALL, SMALL * TIMES):
        with tempfile.TemporaryDirectory() as d:
            make(os.path.join(d, name), n)
            costs.append([cost(d, run[0], name, *run[1:]) for run in runs])
    empty = [max(c) for c in zip(*(cost("/", "--version") for _ in range(3)))]
    for run, small, large in zip(runs, *costs):
        label = f"{make.__name__}: {' '.join(run)}"
        print(f"{label}: {small[0]:.2f} → {large[0]:.2f} s, {small[1] >> 10} → {large[1] >> 10} MiB", flush=True)
        for i, what in enumerate(("processor time", "peak memory")):
            if large[i] > MOST_GROWTH * (small[i] + empty[i]):
                failures.append(f"{label}: {TIMES} × the input needs {large[i] / small[i]:.1f} × the {what}")


def finish():
    for failure in failures:
        print("FAILED:", failure)
    return 1 if failures else 0
