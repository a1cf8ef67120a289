#!/usr/bin/env python3
"""Every message of check and diff. Real torch and h5py make each defect (check_defects.py has those of check), and the printed
lines must be those of docs/CHECK_MESSAGES.md.

usage: check_messages.py FSDPCKPT CORPUS DOCUMENT [--write]        exit 77 without torch

--write updates the document. Read it before you commit it, as somebody at three in the morning would.
"""
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml

from check_defects import CHECKS, PROGRAM, consolidated, model, save, tool

try:
    import h5py
    import numpy as np
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

DOCUMENT = os.path.abspath(sys.argv[3])


# ---- diff ----

def two(a, b):
    save(a, "a")
    save(b, "b")


def changed(name="layers.1.mlp.up_proj.weight", where=((3, 5),), by=0.25):
    state = model()
    state[name] = state[name].clone()
    for at in where:
        state[name][at] += by
    return state


def values(*numbers, dtype=torch.float32):
    return {"w": torch.tensor(numbers, dtype=torch.float64).to(dtype)}


def nan_with_other_bits():
    a = values(1, 2, float("nan"))
    b = {"w": a["w"].clone()}
    b["w"].view(torch.int32)[2] ^= 1
    two(a, b)


def packed():
    a = torch.arange(8, dtype=torch.uint8)
    b = a.clone()
    b[3] = 200
    two({"w": a.view(torch.float4_e2m1fn_x2)}, {"w": b.view(torch.float4_e2m1fn_x2)})


def wrong_digest():
    for name in ("a.h5", "b.h5"):
        consolidated({"w": torch.arange(4.0), "v": torch.ones(2)}, name)
    with h5py.File("b.h5", "r+") as f:
        f["w"].attrs["crc64"] = np.uint64(1)


DIFFS = [
    ("One element of a weight", "diff a b", lambda: two(model(), changed())),
    ("Several elements", "diff a b", lambda: two(model(), changed(where=((0, 0), (3, 5), (47, 15)), by=1e-6))),
    ("What h5diff calls equal: 448 and 416 in fp8", "diff a b",
     lambda: two(values(1, 448, dtype=torch.float8_e4m3fn), values(1, 416, dtype=torch.float8_e4m3fn))),
    ("Only the sign of a zero", "diff a b", lambda: two(values(0, 1), values(-0.0, 1))),
    ("A value became NaN", "diff a b", lambda: two(values(1, 2, 3), values(1, float("nan"), 3))),
    ("NaN with other bits", "diff a b", nan_with_other_bits),
    ("NaN on both sides, compared as numbers", "diff a b --rtol 1e-6",
     lambda: two(values(1, float("nan")), values(1, float("nan")))),
    ("Beyond the tolerance, relative to B's zero", "diff a b --atol 1e-6", lambda: two(values(1e-3, 1), values(0, 1))),
    ("Within the tolerance", "diff a b --rtol 1e-2 --verbose", lambda: two(values(1, 2), values(1.01, 2, dtype=torch.bfloat16))),
    ("Integers beyond float64", "diff a b",
     lambda: two({"w": torch.tensor([2**62 + 1])}, {"w": torch.tensor([2**62])})),
    ("Complex numbers", "diff a b", lambda: two({"w": torch.tensor([1 + 2j])}, {"w": torch.tensor([1 - 2j])})),
    ("A mask", "diff a b", lambda: two({"w": torch.tensor([True, False])}, {"w": torch.tensor([True, True])})),
    ("Two numbers per byte", "diff a b", packed),
    ("A recorded digest is wrong", "diff a.h5 b.h5 --data", wrong_digest),
    ("Another shape", "diff a b", lambda: two(values(1, 2, 3), values(1, 2))),
    ("Another dtype", "diff a b", lambda: two(values(1, 2), values(1, 2, dtype=torch.bfloat16))),
    ("A tensor and a number", "diff a b", lambda: two({"step": torch.tensor(3)}, {"step": 3})),
    ("Another learning rate", "diff a b", lambda: two({"lr": 1e-3}, {"lr": 1e-4})),
    ("Names on one side only", "diff a b", lambda: two({**values(1), "x": torch.zeros(2)}, {**values(1), "y": torch.zeros(2, 2)})),
]


def lines_of(command):
    p = subprocess.run([PROGRAM, *command.split()], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C.UTF-8"})
    if p.returncode not in (0, 1, 3) or (p.returncode == 3) != (p.stderr.count("\n") == 1):
        raise SystemExit("%s: exit %d: %s" % (command, p.returncode, p.stderr))
    return (p.stdout + p.stderr).splitlines()


def kinds_of(command):
    """(kinds that were found, from the JSON; all kinds, from the JUnit report)."""
    p = subprocess.run([PROGRAM, *command.split(), "--json", "--junit", "report.xml"], capture_output=True, text=True)
    findings = json.loads(p.stdout)["findings"]
    found = {f["kind"] for f in findings}
    mend(command, findings)
    return found, {case.get("name") for case in xml.parse("report.xml").iter("testcase")}


def mend(command, findings):
    """A conversion with all suggested options must give a checkpoint without these findings."""
    _, source, *options = command.split()
    suggested = [f for f in findings if "option" in f]
    if not suggested:
        return
    conversion = shlex.split(" ".join(f["option"] for f in suggested))
    tool("consolidate", source, "-o", "mended.h5", "-q", *conversion)
    p = subprocess.run([PROGRAM, "check", "mended.h5", *options, "--json"], capture_output=True, text=True)
    left = {f["kind"] for f in json.loads(p.stdout)["findings"]} & {f["kind"] for f in suggested}
    if left:
        raise SystemExit("%s: still %s after %s" % (command, left, conversion))


def case(title, command, make, seen, known):
    home = tempfile.mkdtemp(prefix="fc-messages-")
    before = os.getcwd()
    os.chdir(home)
    try:
        make()
        lines = lines_of(command)
        if command.startswith("check"):
            found, looked_for = kinds_of(command)
            seen |= found
            known |= looked_for
            lines.pop()  # the summary
        if not lines:
            raise SystemExit("%s: %s says nothing" % (title, command))
    finally:
        os.chdir(before)
        shutil.rmtree(home)
    return ["**%s** (`%s`)" % (title, command), "", *("    " + line for line in lines), ""]


HEAD = """# What check and diff say

For those who got a message and ask what causes it. Each message of `fsdpckpt check` and `fsdpckpt diff`, with a defect that causes it.
`tests/oracle/check_messages.py` makes each defect with PyTorch, writes this page, and compares every line with the output.
"""


def comparable(text):
    """The lines without the length of the complete file, which changes with our HDF5 headers."""
    return re.sub(r"(stored_eof = |its header says )\d+", r"\1N", text).splitlines()


def main():
    seen, known = set(), set()
    text = HEAD.splitlines() + [""]
    count = 0
    for title, command, make in CHECKS:
        if command is None:
            text += ["## check: " + title[2:].lower(), ""]
        else:
            text += case(title, command, make, seen, known)
            count += 1
    text += ["## diff", ""]
    for title, command, make in DIFFS:
        text += case(title, command, make, set(), set())
        count += 1
    text = "\n".join(text)
    if "--write" in sys.argv:
        with open(DOCUMENT, "w", encoding="utf-8") as f:
            f.write(text)
    with open(DOCUMENT, encoding="utf-8") as f:
        document = f.read()
    problems = list(difflib.unified_diff(comparable(document), comparable(text), "the document", "the output",
                                         lineterm="", n=1))
    silent = known - seen
    if silent:
        problems.append("no defect has the kind %s" % ", ".join(sorted(silent)))
    print("\n".join(problems))
    print("%d defects, %d kinds of findings, %d problems" % (count, len(known), len(problems)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
