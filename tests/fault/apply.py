#!/usr/bin/env python3
"""Interrupts `apply`, which changes a model in place, at every system call, and runs it again.

fail: each call fails in turn, or an allocation at each place. The command ends with one line. kill: it is killed at each call, and so is the
next run, at a call by chance. power: after each call the power fails, and the disk has some of what was not synced. In each case the
model has the old bytes, or a journal with which the next run completes the new ones. After the next run it has exactly those, and
nothing is left behind.

usage: apply.py FSDPCKPT LIBRARY fail|mem|kill|power
"""
import os
import random
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[1:1] = [HERE, os.path.join(HERE, "..", "cli")]
import power  # noqa: E402
import weight_sync  # noqa: E402

SIZES = {"a": 5000, "b": 70000, "c": 4, "d": 33}
FILES = (("a", "c"), ("b", "d"))
EIO = "5"


def changed(tensors, seed):
    rng, made = random.Random(seed), {}
    for name, data in tensors.items():
        data = bytearray(data)
        for _ in range(len(data) // 50 + 1):
            data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        made[name] = bytes(data)
    return made


def save(folder, tensors, files):
    os.makedirs(folder)
    for k, names in enumerate(files):
        weight_sync.write_file(os.path.join(folder, f"model-{k + 1:05d}-of-{len(files):05d}.safetensors"), {"format": "pt"},
                               {name: ("U8", [len(tensors[name])], tensors[name]) for name in names})
    return power.tree(folder)


class Apply:
    def __init__(self, program, library, home, full):
        """Two versions over the base: deltas, or a full version in one file and a delta."""
        self.program, self.home = program, home
        self.updates, self.model = os.path.join(home, "updates"), os.path.join(home, "model")
        rng = random.Random(1)
        base = {name: rng.randbytes(size) for name, size in SIZES.items()}
        first = changed(base, 2)
        self.last = changed(first, 3)
        self.old = save(os.path.join(home, "old"), base, FILES)
        if full:
            tensors = {name: ("U8", [len(data)], data) for name, data in first.items()}
            os.makedirs(os.path.join(self.updates, "weight_v000001"))
            weight_sync.write_file(os.path.join(self.updates, "weight_v000001", "model.safetensors"), None, tensors)
        else:
            weight_sync.write_version(os.path.join(self.updates, "weight_v000001"), base, first, 1, encoding="overwrite")
        weight_sync.write_version(os.path.join(self.updates, "weight_v000002"), first, self.last, 2, files=2)
        self.log = os.path.join(home, "log")
        folders = [os.path.dirname(library), os.environ.get("LD_LIBRARY_PATH")]  # LD_PRELOAD cannot hold blanks
        self.preload = dict(os.environ, LD_PRELOAD=os.path.basename(library), LD_LIBRARY_PATH=":".join(filter(None, folders)))

    def run(self, env=None):
        return subprocess.run([self.program, "apply", self.updates, self.model, "-q", "-j1"], env=env, capture_output=True, text=True,
                              timeout=600)

    def faulty(self, n, **more):
        """Runs it with a fault at the n-th call. @return the result, and the name of the call."""
        with open(self.log, "wb") as f:
            f.write(bytes(64))
        p = self.run(dict(self.preload, FAULT_AT=str(n), FAULT_LOG=self.log, **more))
        with open(self.log, "rb") as f:
            return p, f.read().rstrip(b"\0").decode()

    def start(self):
        shutil.rmtree(self.model, True)
        power.write_tree(self.old, self.model)

    def is_old(self):
        return {name: data for name, data in power.tree(self.model).items() if not name.startswith(".weight_sync")} == self.old

    def finish(self, where):
        """The next run ends with the new version, and leaves nothing else behind."""
        p = self.run()
        assert (p.returncode, p.stdout, p.stderr) == (0, "", ""), f"{where}: {p}"
        assert weight_sync.read_model(self.model) == self.last, f"{where}: wrong bytes"
        names = sorted(name for name in power.tree(self.model) if name.startswith(".weight_sync"))
        assert names == [".weight_sync", ".weight_sync/lock", ".weight_sync/state.json"], f"{where}: {names}"
        with open(os.path.join(self.model, ".weight_sync/state.json"), "rb") as f:
            assert f.read() == b'{"version": "000002"}', where

    def interrupt(self, kill, **more):
        """@return how many calls there are, and how often the model was left with a journal."""
        chance, journals = random.Random(1), 0
        for n in range(1, 100000):
            self.start()
            p, call = self.faulty(n, **more)
            if not call:
                assert p.returncode == 0, p
                self.finish("without a fault")
                return n - 1, journals
            where = f"call {n} ({call})"
            if not kill:
                assert p.returncode in (0, 3, 4) and p.stderr.count("\n") == (p.returncode != 0), f"{where}: {p}"
            has_journal = os.path.exists(os.path.join(self.model, ".weight_sync/journal"))
            assert has_journal or self.is_old() or weight_sync.read_model(self.model) == self.last, where
            journals += has_journal
            if kill:
                self.faulty(chance.randrange(1, 200), **more)
            self.finish(where)

    def cut_power(self):
        """@return how many calls there are, and how many different disks there were after them."""
        self.start()
        replay, chance, checked = power.Replay(self.model), random.Random(1), set()
        p = self.run(dict(self.preload, TRACE_LOG=self.log))
        assert p.returncode == 0, p
        log = list(power.records(self.log))
        for n, (line, data) in enumerate(log):
            replay.call(line, data)
            for disk in replay.disks(chance):
                key = hash(tuple(sorted(disk.items())))
                if key not in checked:
                    checked.add(key)
                    shutil.rmtree(self.model)
                    power.write_tree(disk, self.model)
                    self.finish(f"after call {n + 1} ({line})")
        for disk in replay.disks(chance):
            left = {name for name in disk if name.startswith(".weight_sync")}
            assert ".weight_sync/journal" not in left and disk[".weight_sync/state.json"] == b'{"version": "000002"}', left
        return len(log), len(checked)


def main():
    program, library, way = sys.argv[1:]
    home = os.path.realpath(tempfile.mkdtemp(prefix="fc-apply-"))
    try:
        for full in (False, True):
            case = Apply(program, library, os.path.join(home, str(full)), full)
            if way == "power":
                calls, disks = case.cut_power()
                assert disks > calls / 2, (calls, disks)
                print(f"{calls} calls, {disks} disks after a power failure")
            else:
                faults = {"fail": {"FAULT_FAMILY": "sys", "FAULT_ERRNO": EIO}, "kill": {"FAULT_FAMILY": "sys", "FAULT_KILL": "1"},
                          "mem": {"FAULT_FAMILY": "mem", "FAULT_FIRST": "1"}}
                calls, journals = case.interrupt(way == "kill", **faults[way])
                print(f"{calls} calls in turn, {journals} of them left a journal")
                assert calls > 30 and journals > 3 or way == "mem" and calls > 10, (calls, journals)
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(main())
