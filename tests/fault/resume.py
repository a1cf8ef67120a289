#!/usr/bin/env python3
"""Interrupts conversions with --resume, and lets the next run go on.

kill: the command is killed at every STEP-th system call, and so is a second run at a call by chance. The next one makes the same
bytes as a run without a fault and without --resume, and leaves nothing else. fail: each call fails instead; the command ends with
its one error line, and perhaps one that says what is kept. moved: after kills at 40 and 90 % of the bytes, the next run reads and
writes what is left, and at most 5 % more of what a whole one does, or MOST_LOST. replace, two_steps: the command replaces an older
target, and is killed at each of the STEP calls before and after that, and so is a second run at others; the target is always the old
one or the new one. two_steps is without an exchange of names, so that the target can be missing until the next run. power: after each
call the power fails, and the disk has some of what was not synced.

usage: resume.py FSDPCKPT SHIM TRACE kill|fail|moved|replace|two_steps|power STEP CASE
"""
import json
import math
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[1:1] = [HERE, os.path.join(HERE, "..", "cli")]
import power  # noqa: E402
import safetensors_file  # noqa: E402

ROWS = {"quantize": 160, "recipe": 160, "delta": 160}  # of the tensors of a small source; the others have 40
NAMES = {"st": "st.safetensors", "dcp": "dcp", "pt": "x.pt", "packed": "p.h5", "codes": "codes.safetensors", "flat": "flat.pt"}
EIO = "5"
# For `moved`: rows and columns of the one large tensor of a source, and the part of the bytes that may be moved twice: two records and a
# tile. A transposed tensor is read in bands of at most 16 MiB; what was read of a band that is not written is read again.
LARGE = {"recipe": (4000, 8000)}
MOST_LOST = {"recipe": 0.05 + (16 << 20) / 128e6}
# The source, the command, and the name of the target.
CASES = {
    "hdf5": ("st", ["consolidate"], "t.h5"),
    "shards": ("st", ["reshard", "--dp", "2"], "t"),
    "safetensors": ("dcp", ["consolidate"], "t.safetensors"),
    "split": ("st", ["consolidate", "--to", "safetensors", "--max-shard-size", "100kB"], "t/"),
    "ranks": ("dcp", ["reshard", "--to", "safetensors", "--dp", "3"], "t"),
    "dcp": ("pt", ["reshard", "--to", "dcp", "--dp", "2"], "t"),
    "pt": ("dcp", ["consolidate"], "t.pt"),
    "pt_ranks": ("dcp", ["reshard", "--to", "pt", "--dp", "2"], "t"),
    "accelerate": ("st", ["reshard", "--to", "accelerate", "--dp", "2", "--rename=s/^/model./"], "t"),
    "cast": ("pt", ["consolidate", "--dtype", "f32"], "t.h5"),
    "average": ("pt", ["average", "--to", "pt", "OTHER"], "t.pt"),
    "recipe": ("pt", ["consolidate", "--recipe", "RECIPE"], "t.h5"),
    "quantize": ("st", ["consolidate", "--quantize=l*.weight"], "t.safetensors"),
    "export": ("pt", ["export"], "t"),
    "delta": ("pt", ["consolidate", "--delta", "DELTA"], "t.safetensors"),
    "dequantize": ("codes", ["consolidate", "--dequantize", "bf16"], "t.safetensors"),
    "adapter": ("pt", ["consolidate", "--adapter", "ADAPTER"], "t.pt"),
    "flat": ("flat", ["consolidate", "--schema", "SCHEMA"], "t.safetensors"),
    "compressed_source": ("packed", ["consolidate"], "t.safetensors"),
}


def crc64(data, before):
    """The CRC-64 of XZ, which ends a record of the journal. @param before that of the record before it, or 0"""
    crc = before ^ (1 << 64) - 1
    for byte in data:
        crc = CRC64[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ (1 << 64) - 1


def crc64_table():
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0xc96c5795d7870f42 if crc & 1 else 0)
        yield crc


CRC64 = list(crc64_table())


def renumber(journal, inodes):
    """Gives the files in the records of a journal other inodes; 0: missing."""
    with open(journal, "rb") as f:
        data = bytearray(f.read())
    at, was, now = 0, 0, 0
    while at + 24 <= len(data):
        kind, length = struct.unpack_from("<QQ", data, at)
        end = at + 16 + length
        was = crc64(data[at:end], was)
        if end + 8 > len(data) or struct.unpack_from("<Q", data, end)[0] != was:
            break
        if kind == 2:
            old, = struct.unpack_from("<Q", data, at + 24)
            struct.pack_into("<Q", data, at + 24, inodes.get(old, 0))
        now = crc64(data[at:end], now)
        struct.pack_into("<Q", data, end, now)
        at = end + 8
    with open(journal, "wb") as f:
        f.write(data)


def small(rows, columns, seed, count=4):
    rng, tensors = random.Random(seed), {}
    for i in range(count):
        data = bytearray(rng.randbytes(2 * rows * columns))
        data[1::2] = b"\x3f" * (rows * columns)
        tensors[f"l{i}.weight"] = "BF16", [rows, columns], bytes(data)
    return {**tensors, **{f"l{i}.b": ("F32", [7], struct.pack("<7f", *range(7))) for i in range(count)}}


def trained(tensors):
    """The same with a change of every 50th element, as after a training step."""
    made = {}
    for name, (dtype, shape, data) in tensors.items():
        data = bytearray(data)
        data[::100] = bytes(byte ^ 1 for byte in data[::100])
        made[name] = dtype, shape, bytes(data)
    return made


def floats(*shape):
    rng = random.Random(3)
    return "F32", [*shape], struct.pack(f"<{math.prod(shape)}f", *(rng.random() for _ in range(math.prod(shape))))


def make_codes(rows, columns, count):
    scales = floats((rows + 127) // 128, (columns + 127) // 128)
    return {name: value for i in range(count) for name, value in (
        (f"l{i}.weight", ("F8_E4M3", [rows, columns], bytes([56]) * (rows * columns))), (f"l{i}.weight_scale_inv", scales))}


def make_adapter(folder, rows, columns, count):
    os.mkdir(folder)
    with open(os.path.join(folder, "adapter_config.json"), "w") as f:
        json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [f"l{i}" for i in range(count)]}, f)
    safetensors_file.write(os.path.join(folder, "adapter_model.safetensors"), {
        name: value for i in range(count) for name, value in ((f"base_model.model.l{i}.lora_A.weight", floats(2, columns)),
                                                              (f"base_model.model.l{i}.lora_B.weight", floats(rows, 2)))})


class Resume:
    def __init__(self, program, shim, trace, home, case, rows=None, columns=1000, count=4):
        self.program, self.home = program, home
        self.log, self.trace_log = os.path.join(home, "log"), os.path.join(home, "trace")
        folders = sorted({os.path.dirname(shim), os.path.dirname(trace)})  # LD_PRELOAD cannot hold blanks
        self.paths = ":".join([*folders, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        self.shim, self.trace = os.path.basename(shim), os.path.basename(trace)
        self.sources, kind = os.path.join(home, "sources"), CASES[case][0]
        os.mkdir(self.sources)
        rows = rows or ROWS.get(case, 40)
        model = small(rows, columns, 1, count)
        flat = {name: value for name, value in model.items() if value[0] == "BF16"}
        safetensors_file.write(self.of("st.safetensors"), model)
        for made, options in (("dcp", ["--to", "dcp"]), ("pt", ["--to", "pt"]), ("packed", ["--to", "h5", "--compress", "1"])):
            if made == kind:
                self.must([self.program, "consolidate", self.of("st.safetensors"), "-o", self.of(NAMES[kind]), "-q", *options])
        if case == "average":
            safetensors_file.write(self.of("other.safetensors"), small(rows, columns, 2, count))
        if case == "delta":
            safetensors_file.write(self.of("other.safetensors"), trained(model))
            self.must([program, "delta", self.of("st.safetensors"), self.of("other.safetensors"), "-o", self.of("delta"), "-q", "--number=1"])
        if case == "dequantize":
            safetensors_file.write(self.of(NAMES[kind]), make_codes(rows, columns, count))
        if case == "adapter":
            make_adapter(self.of("adapter"), rows, columns, count)
        if case == "flat":
            data = b"".join(value[2] for value in flat.values())
            for name, tensors in (("flat", {"_flat_param": ("BF16", [len(data) // 2], data)}), ("schema", flat)):
                safetensors_file.write(self.of(name + ".safetensors"), tensors)
                self.must([self.program, "consolidate", self.of(name + ".safetensors"), "-o", self.of(name + ".pt"), "-q"])
        with open(self.of("recipe.json"), "w") as f:
            f.write('{"fsdpckpt": "recipe", "schema": 1, "others": "keep", "rules": [{"from": "l{n}.weight", "to": "l{n}.turned", "operations": {"transpose": [0, 1]}}]}')
        self.source = self.of(NAMES[kind])
        words = {"OTHER": self.of("other.safetensors"), "RECIPE": self.of("recipe.json"), "DELTA": self.of("delta"), "ADAPTER": self.of("adapter"),
                 "SCHEMA": self.of("schema.pt")}
        self.command, self.name = [words.get(word, word) for word in CASES[case][1]], CASES[case][2]
        self.disk = os.path.join(home, "disk")
        os.mkdir(self.disk)
        self.must(self.argv(resume=False))
        self.whole = power.tree(self.disk)
        assert self.whole

    def of(self, name):
        return os.path.join(self.sources, name)

    def argv(self, resume=True):
        return [self.program, self.command[0], self.source, "-o", os.path.join(self.disk, self.name), "-q", "-j1", *self.command[1:],
                *(["--resume"] if resume else [])]

    @staticmethod
    def must(argv, env=None):
        p = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        assert (p.returncode, p.stdout) == (0, ""), p
        return p.stderr

    def start(self):
        shutil.rmtree(self.disk)
        os.mkdir(self.disk)

    def preload(self, *libraries, **more):
        return dict(os.environ, LD_PRELOAD=":".join(libraries), LD_LIBRARY_PATH=self.paths, **more)

    def faulty(self, n, *options, **more):
        """Runs it with a fault at the n-th call. @return the result, and the name of the call."""
        with open(self.log, "wb") as f:
            f.write(bytes(64))
        env = self.preload(self.shim, FAULT_AT=str(n), FAULT_LOG=self.log, FAULT_FAMILY="sys", **more)
        p = subprocess.run([*self.argv(), *options], env=env, capture_output=True, text=True, timeout=600)
        with open(self.log, "rb") as f:
            return p, f.read().rstrip(b"\0").decode()

    def finish(self, where):
        """The next run ends with the same bytes, and leaves nothing else. @return whether it went on."""
        done = power.tree(self.disk) == self.whole
        again = subprocess.run(self.argv(), capture_output=True, text=True, timeout=600)
        assert again.returncode == (2 if done else 0), f"{where}: {again}"
        told = again.stderr.splitlines()
        assert done or all("goes on with" in line or "an earlier run died" in line for line in told) and len(told) <= 1, f"{where}: {told}"
        found = power.tree(self.disk)
        assert found == self.whole, f"{where}: {sorted(found)} for {sorted(self.whole)}"
        return any("goes on with" in line for line in told)

    def interrupt(self, kill, step):
        """@return how many calls there are, and how often the next run went on with something."""
        chance, resumed = random.Random(step), 0
        for n in range(1 + chance.randrange(step), 1 << 30, step):
            self.start()
            p, call = self.faulty(n, **({"FAULT_KILL": "1"} if kill else {"FAULT_ERRNO": EIO}))
            where = f"call {n} ({call})"
            if not call:
                assert p.returncode == 0 and power.tree(self.disk) == self.whole, f"{where}: {p}"
                return n, resumed
            if kill:
                self.faulty(chance.randrange(1, 300), FAULT_KILL="1")
            elif p.returncode == 0:
                assert power.tree(self.disk) == self.whole, where
            else:
                lines = [line for line in p.stderr.splitlines() if "is kept in" not in line]
                assert p.returncode in (3, 4, 5) and len(lines) == 1, f"{where}: {p}"
                kept = os.path.exists(os.path.join(self.disk, f".{self.name.rstrip('/')}.fsdpckpt-resume", "journal"))
                assert kept == ("is kept in" in p.stderr), f"{where}: {p}"
            resumed += self.go_on(where)

    def go_on(self, where):
        if os.path.exists(os.path.join(self.disk, self.name.rstrip("/"))):
            self.clear(where)
            return False
        return self.finish(where)

    def clear(self, where):
        """The target is complete. The next run that replaces it removes what is left."""
        target = power.target_of(power.tree(self.disk), self.name.rstrip("/"))
        assert target == self.whole, where
        self.must([*self.argv(), "--force"])
        assert power.tree(self.disk) == self.whole, where

    def replace(self, near, **more):
        """@return the first call at which the target is the new one, and after how many kills it was the old one, and the new one."""
        chance, name, counts = random.Random(near), self.name.rstrip("/"), {"old": 0, "new": 0}
        kept, journal = os.path.join(self.home, "old"), os.path.join(self.disk, f".{name}.fsdpckpt-resume", "journal")
        self.start()
        self.must([*self.argv(resume=False), "--include", "l0.*"])
        old = power.tree(self.disk)
        os.rename(self.disk, kept)

        def kill(n, begins=True):
            """@return whether the target is the new one."""
            if begins:
                shutil.rmtree(self.disk, True)
                shutil.copytree(kept, self.disk)
            _, call = self.faulty(n, "--force", FAULT_KILL="1", **more)
            target = power.target_of(power.tree(self.disk), name)
            assert target in (old, self.whole) or (more and not target), f"call {n} ({call}): {sorted(target)}"
            counts["new" if target == self.whole else "old"] += 1
            return target == self.whole

        low, high = 1, 1 << 14
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if kill(middle) else (middle + 1, high)
        for n in range(low - near, low + near):
            unclean = kill(n) and os.path.exists(journal)
            for second in range(1, low, 40) if unclean else [chance.randrange(1, low)]:
                kill(n)
                kill(second, False)
                self.must([*self.argv(), "--force"], self.preload(self.shim, **more) if more else None)
                assert power.tree(self.disk) == self.whole, f"call {n}: {sorted(power.tree(self.disk))}"
        return low, counts["old"], counts["new"]

    def write(self, state):
        """Makes the files of a replayed disk. Those with two names have them, and the journal gets the numbers of the new inodes."""
        made, todo = {}, [("", state.top)]
        self.start()
        while todo:
            path, inode = todo.pop()
            for name, below in state.inodes[inode].items():
                content, full = state.inodes[below], os.path.join(self.disk, path + name)
                if isinstance(content, dict):
                    made[below] = full
                    os.mkdir(full)
                    todo.append((path + name + "/", below))
                elif below in made:
                    os.link(made[below], full)
                else:
                    made[below] = full
                    with open(full, "wb") as f:
                        f.write(content)
        inodes = {inode: os.stat(path).st_ino for inode, path in made.items()}
        for journal in [path for path in made.values() if path.endswith("-resume/journal")]:
            renumber(journal, inodes)
        for complete in [path for path in made.values() if path.endswith("-resume/complete")]:
            for number in os.listdir(complete):
                os.rename(os.path.join(complete, number), os.path.join(complete, str(inodes.get(int(number), 0))))

    def cut_power(self, step):
        """@return how many calls there are, how many different disks there were after every STEP-th, and how many runs went on."""
        self.start()
        replay, chance, checked, resumed = power.Replay(self.disk), random.Random(1), set(), 0
        self.must(self.argv(), self.preload(self.trace, TRACE_LOG=self.trace_log))
        assert power.tree(self.disk) == self.whole
        log = list(power.records(self.trace_log))
        for n, (line, data) in enumerate(log):
            replay.call(line, data)
            for state in replay.states(chance) if n % step == 0 or n + 1 == len(log) else ():
                key = hash(tuple(sorted(state.listing().items())))
                if key not in checked:
                    checked.add(key)
                    self.write(state)
                    resumed += self.go_on(f"after call {n + 1} ({line})")
        assert replay.now.listing() == self.whole, "the log lacks calls"
        return len(log), len(checked), resumed

    def measured(self, argv, env=None):
        """@return the bytes that a run reads and writes."""
        p = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)
        with open(f"/proc/{p.pid}/io") as f:
            counted = dict(line.split(": ") for line in f)
        out = p.communicate()[0]
        assert p.returncode in (0, -9), out
        return int(counted["rchar"]) + int(counted["wchar"])

    def move(self, part):
        """Kills a run when it has moved a part of what a whole one does. @return this, and what the killed run and the next one move."""
        self.start()
        whole = self.measured(self.argv())
        self.start()
        killed = self.measured(self.argv(), self.preload(self.shim, FAULT_MOVED=str(int(part * whole)), FAULT_FAMILY="sys", FAULT_KILL="1"))
        assert killed >= part * whole and power.tree(self.disk) != self.whole, (killed, whole)
        rest = self.measured(self.argv())
        assert power.tree(self.disk) == self.whole
        return whole, killed, rest


def main():
    program, shim, trace, way, step, case = sys.argv[1:]
    home = os.path.realpath(tempfile.mkdtemp(prefix="fc-resume-"))
    try:
        if way == "moved":
            run = Resume(program, shim, trace, home, case, *LARGE.get(case, (16000, 1000)), count=1)
            for part in (0.4, 0.9):
                whole, killed, rest = run.move(part)
                print(f"after a kill at {killed} of {whole} bytes: {rest}, so {(killed + rest - whole) / whole:.1%} are lost")
                assert killed + rest <= (1 + MOST_LOST.get(case, 0.05)) * whole
        elif way in ("replace", "two_steps"):
            more = {"FAULT_NO_EXCHANGE": "1"} if way == "two_steps" else {}
            calls, old, new = Resume(program, shim, trace, home, case).replace(int(step), **more)
            print(f"new from call {calls} on; {old} old and {new} new targets")
            assert old > 0 and new > 0
        elif way == "power":
            calls, disks, resumed = Resume(program, shim, trace, home, case).cut_power(int(step))
            print(f"{calls} calls, {disks} disks after a power failure, {resumed} times the next run went on")
            assert disks > calls / int(step) and resumed > 0
        else:
            calls, resumed = Resume(program, shim, trace, home, case).interrupt(way == "kill", int(step))
            print(f"{calls} calls, {resumed} times the next run went on")
            assert resumed > 0
    finally:
        shutil.rmtree(home)


if __name__ == "__main__":
    sys.exit(main())
