#!/usr/bin/env python3
"""--resume with other options than the run before: every command that converts, with every option that it takes. A conversion that
was killed before its last rename is resumed with one option more, and one that was begun with the option without it. Either the
command refuses, or the target is that of a run without --resume.

usage: resume_options.py FSDPCKPT SHIM
"""
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[1:1] = [HERE, os.path.join(HERE, "..", "cli")]
import power  # noqa: E402
import safetensors_file  # noqa: E402

# What each option gets. None: it makes no sense here. FREE ones change no byte, so a conversion goes on with them.
FREE = {"jobs": ["2"], "memory": ["8M"], "progress": ["never"], "color": ["never"], "comm": ["none"], "trust-objects": [], "json": [],
        "quiet": [], "verbose": [], "force": []}
BOUND = {"to": ["h5"], "dtype": ["bf16"], "dtype-for": ["m.w.weight=bf16"], "max-shard-size": ["1MB"], "model-only": [], "include": ["m.*"],
         "exclude": ["m.b"], "strip-prefix": ["m"], "rename": ["s/^m/n/"], "dequantize": ["bf16"], "quantize": ["m.w.weight"],
         "adapter": ["adapter"], "delta": ["updates"], "recipe": ["drop.json"], "reverse": [], "config": ["config.json"], "up-to": ["1"],
         "dp": ["3"], "tp": ["2"], "replicas": ["2"], "tp-plan": ["plan.json"], "policy": ["always"], "classes": ["classes.json"],
         "ignore": ["m"], "rank": ["0"], "like": ["hub"], "adapter-config": ["adapter/adapter_config.json"], "schema": ["schema.json"],
         "weights": ["1,0"], "take-first": [], "compress": ["1"], "local": [], "follow-external": [], "hdf5-plugins": ["."], "dry-run": None,
         "output": None, "resume": None, "help": None, "version": None}
# The command, its sources, and the name of the target.
CASES = [(["consolidate", "a.safetensors"], "t.safetensors"), (["reshard", "a.safetensors", "--dp", "2"], "t"),
         (["convert", "a.safetensors"], "t.h5"), (["export", "hub"], "t"), (["average", "a.safetensors", "b.safetensors"], "t.h5"),
         (["convert", "codes.safetensors"], "t.h5")]
# Those that a case here can be converted with. A run that adds one must be refused because of it.
NOTICED = {"to", "dtype", "dtype-for", "max-shard-size", "include", "exclude", "strip-prefix", "rename", "dequantize", "quantize", "adapter",
           "delta", "recipe", "dp", "weights", "take-first", "follow-external", "hdf5-plugins"}


def write(path, content):
    with open(path, "w") as f:
        json.dump(content, f)


def prepare(program, home):
    at = lambda name: os.path.join(home, name)
    must = lambda *argv: subprocess.run([program, *argv, "-q"], cwd=home, check=True, capture_output=True)
    rng = random.Random(1)

    def floats(count):
        return struct.pack(f"<{count}f", *(rng.uniform(-1, 1) for _ in range(count)))
    for name in ("a", "b", "next", "codes"):
        codes = {"m.q.weight": ("F8_E4M3", [128, 128], bytes(rng.randrange(64) for _ in range(128 * 128))), "m.q.weight_scale_inv": ("F32", [1, 1], floats(1))}
        safetensors_file.write(at(name + ".safetensors"), {"m.w.weight": ("F32", [1024, 128], floats(1024 * 128)), "m.b": ("F32", [8], floats(8)),
                                                           **(codes if name == "codes" else {})})
    os.mkdir(at("hub"))
    shutil.copy(at("a.safetensors"), at("hub/model.safetensors"))
    write(at("hub/config.json"), {"model_type": "llama"})
    os.mkdir(at("updates"))
    must("delta", "hub", "next.safetensors", "-o", "updates/weight_v000001")
    os.mkdir(at("adapter"))
    write(at("adapter/adapter_config.json"), {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["w"]})
    safetensors_file.write(at("adapter/adapter_model.safetensors"), {
        "base_model.model.m.w.lora_A.weight": ("F32", [1, 128], floats(128)), "base_model.model.m.w.lora_B.weight": ("F32", [1024, 1], floats(1024))})
    write(at("config.json"), {"heads": 2})
    write(at("drop.json"), {"fsdpckpt": "recipe", "schema": 1, "rules": [{"drop": "m.b"}], "others": "keep"})
    write(at("plan.json"), {"m.w": "colwise"})
    write(at("classes.json"), {})
    must("schema", "a.safetensors", "-o", "schema.json")


class Case:
    def __init__(self, program, shim, home, number, case):
        self.program, self.home, (self.command, self.name) = program, home, case
        self.disk, self.log = os.path.join(home, f"disk{number}"), os.path.join(home, f"log{number}")
        self.env = dict(os.environ, LD_PRELOAD=os.path.basename(shim), FAULT_LOG=self.log, FAULT_FAMILY="sys", FAULT_KILL="1",
                        LD_LIBRARY_PATH=":".join(filter(None, [os.path.dirname(shim), os.environ.get("LD_LIBRARY_PATH")])))
        self.wholes = {}

    def run(self, options, env=None, begins=True):
        if begins:
            shutil.rmtree(self.disk, True)
            os.mkdir(self.disk)
        argv = [self.program, *self.command, "-o", os.path.join(self.disk, self.name), *options]
        return subprocess.run(argv, cwd=self.home, env=env, capture_output=True, text=True)

    def whole(self, options):
        """The target of a run with these options, and not --resume; None if it fails."""
        key = tuple(options)
        if key not in self.wholes:
            self.wholes[key] = power.tree(self.disk) if self.run(options).returncode == 0 else None
        return self.wholes[key]

    def kill(self, n, options):
        """@return whether there is an n-th call."""
        with open(self.log, "wb") as f:
            f.write(bytes(64))
        self.run([*options, "-j1", "--resume"], {**self.env, "FAULT_AT": str(n)})
        with open(self.log, "rb") as f:
            return f.read(1) != b"\0"

    def begin(self, options):
        """Kills a conversion just before its target is in place. @return a number for begin_again."""
        low, high = 1, 1 << 12
        while low < high:
            middle = (low + high) // 2
            self.kill(middle, options)
            low, high = (low, middle) if os.path.exists(os.path.join(self.disk, self.name)) else (middle + 1, high)
        return low - 1

    def resume(self, begun, number, options):
        """@return whether the run with these options is refused because of that."""
        expected = self.whole(options)
        self.kill(number, begun)
        assert not os.path.exists(os.path.join(self.disk, self.name))
        p = self.run([*options, "--resume"], begins=False)
        what = f"{' '.join(self.command)}, begun with {begun}, resumed with {options}: exit {p.returncode}: {p.stderr}"
        if p.returncode == 0:
            assert "goes on with" in p.stderr and power.tree(self.disk) == expected, what
            return False
        assert p.returncode in (2, 3, 5), what
        return "the unfinished conversion was begun with" in p.stderr

    def options(self):
        text = subprocess.run([self.program, self.command[0], "--help"], capture_output=True, text=True, check=True).stdout
        return re.findall(r"^  (?:-\w, |    )--([a-z0-9-]+)", text, re.MULTILINE)

    def attempt(self):
        """@return the options that were noticed, and those that were allowed to differ."""
        noticed, allowed, number = set(), set(), self.begin([])
        for option in self.options():
            known = {**FREE, **BOUND}
            assert option in known, f"--{option}: this test does not know the option: say whether it changes bytes"
            if known[option] is None:
                continue
            options = ["--" + option, *known[option]]
            if self.resume([], number, options):
                noticed.add(option)
            elif option in FREE:
                allowed.add(option)
            if option in ("exclude", "dtype", "weights") and self.whole(options):
                assert self.resume(options, self.begin(options), []), option
        return noticed, allowed


def main():
    program, shim = sys.argv[1:]
    with tempfile.TemporaryDirectory() as home, ThreadPoolExecutor(2) as pool:
        prepare(program, home)
        done = list(pool.map(lambda it: Case(program, shim, home, *it).attempt(), enumerate(CASES)))
    noticed, allowed = set().union(*(n for n, _ in done)), set().union(*(a for _, a in done))
    print("noticed: " + " ".join(sorted(noticed)))
    assert noticed >= NOTICED, f"not noticed: {NOTICED - noticed}"
    assert not noticed & set(FREE) and allowed == set(FREE), f"not allowed to differ: {set(FREE) - allowed}"


if __name__ == "__main__":
    sys.exit(main())
