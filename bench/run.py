#!/usr/bin/env python3
"""Measures fsdpckpt and its peers alternately, and prints one table of ratios.

Every round runs every command once, so that all of them run under the same conditions. The table gives the best and the
median of the rounds, the least processor time, and ratios of the medians. Before each command, earlier output is synced, and the input is read
(warm) or dropped from the cache (cold). The time includes the work of a command to make its output durable. A peer that
is not installed or fails is left out, and the table says so. A new job is one entry in JOBS, a new peer one in COMMANDS, a
new input one in SOURCES.
"""
import argparse
import fnmatch
import importlib.util
import os
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple

HERE = os.path.dirname(os.path.abspath(__file__))
MAKE_LLAMA = os.path.join(HERE, "make_llama.py")
MAKE_WEIGHTS = os.path.join(HERE, "make_weights.py")
MAKE_BIG = os.path.join(HERE, "..", "tests", "corpus", "make_big.py")
MARKERS = "<!-- bench/run%s: begin -->", "<!-- bench/run%s: end -->"
PEAK_MIB = 64
WRITTEN = 1.05  # × the output: more is a temporary copy

# {dir} is the new input, {size} the option, {ours} the command, {NAME} an input listed before.
SOURCES = {
    "fsdp": "{python} {make_big} data {dir} --size {size} --dp 8",
    "2d": "{python} {make_big} data {dir} --size {size} --tp 2 --dp 4",
    "h5": "{ours} reshard {fsdp} -o {dir} --dp 8 -q",
    "hf": "{ours} reshard {fsdp} -o {dir} --dp 8 --to safetensors -q",
    "hf-2d": "{ours} reshard {2d} -o {dir} --tp 2 --dp 4 --to safetensors -q",
    "pt": "{ours} consolidate {fsdp} -o {dir} --to pt -q",
    "model": "{ours} reshard {fsdp} -o {dir} --dp 8 --to dcp --include model.* -q",
    "zero3": "{python} {here}/make_zero3.py {dir} --size {size}",
    "small": "cp -r {corpus}/good/dcp-torch2.15.0-2d-dp4tp2 {dir}",
    "many": "{python} {here}/make_many.py {dir}",
    "many-full": "{ours} consolidate {many} -o {dir} --to h5 -q",
    "many-h5": "{ours} reshard {many-full} -o {dir} --dp 8 -q",
    "eight": "sh -c 'mkdir {dir} && for i in 1 2 3 4 5 6 7 8; do {python} {here}/make_many.py {dir}/$i.h5 12; done'",
    "many-dcp": "{ours} reshard {many} -o {dir} --dp 8 --to dcp -q",
    "dense": "sh -c '{python} {here}/make_schema.py dense --optimizer > {dir}'",
    "weights": "{python} {make_weights} {dir} --size {size}",
    "packed": "h5repack -l CHUNK=1024x1024 -f SHUF -f GZIP=1 {weights} {dir}",
    "packed-by-us": "{ours} consolidate {weights} -o {dir} --to h5 --compress 1 -q",
    "llama": "{python} {make_llama} {dir} --size {size}",
    "lora16": "{python} {make_llama} {dir} --model {llama} --rank 16",
    "lora64": "{python} {make_llama} {dir} --model {llama} --rank 64",
    "titan": "{ours} reshard {llama} -o {dir} --recipe torchtitan-llama3 --reverse --dp 8 --to dcp -q",
    "meta": "sh -c 'mkdir {dir} && cp {llama}/params.json {dir} && {ours} consolidate {llama} -o {dir}/consolidated.00.pth "
            "--recipe meta-llama --reverse -q'",
    "fp8": "{ours} consolidate {llama} -o {dir}/ --to safetensors --quantize model.layers.*_proj.weight -q",
}

# The program or Python module that an input needs, apart from torch and h5py.
SOURCE_NEEDS = {"zero3": "deepspeed", "packed": "h5repack"}

# source: the input; repeat: runs per round, for short commands; rounds: most rounds of a slow command, which then has none
# with a cold cache; synced: whether the output is on the disk at the end (None: no output); needs: a program or module that
# may be missing.
Command = namedtuple("Command", "title source line repeat rounds synced needs", defaults=(1, None, True, None))


def theirs(title, source, line, needs=None):
    return Command(title, source, line, rounds=2, synced=False, needs=needs)


def library(title, source, name, needs=None):
    return theirs(title, source, "{python} {here}/peers.py %s {src} {dst}" % name, needs)


def h5repack(options, source):
    return theirs("`h5repack %s`" % options, source, "h5repack %s {src} {dst}.h5" % options, "h5repack")


# The peers.
COMMANDS = {
    "cp": Command("`cp -r` and `sync -f`", "fsdp", "sh -c 'cp -r {src} {dst} && sync -f {dst}'"),
    "bare": Command("bare loop: read, write, sync", "fsdp", "bare_copy {cache} {src} {dst}", needs="bare_copy"),
    "bare-write": Command("bare loop: write, sync", "fsdp", "bare_copy write {src} {dst}", needs="bare_copy"),
    "cat": Command("`cat` of both", "h5", "sh -c 'cat {fsdp}/*.distcp {src}/*.h5 > /dev/null'", synced=None),
    "torch": library("torch `dcp_to_torch_save`", "fsdp", "dcp_to_torch"),
    "torch-2d": library("torch `dcp_to_torch_save`", "2d", "dcp_to_torch"),
    "cp-hf": Command("`cp -r` and `sync -f`", "hf", "sh -c 'cp -r {src} {dst} && sync -f {dst}'"),
    "torch-hf": library("torch `consolidate_safetensors_files`, 2 threads", "hf", "consolidate_hf"),
    "bare-hf": Command("bare loop: read, write, sync", "hf", "bare_copy {cache} {src} {dst}", needs="bare_copy"),
    "torch-hf-2d": library("torch `consolidate_safetensors_files`, 2 threads", "hf-2d", "consolidate_hf"),
    "torch-save-to-dcp": library("torch `torch_save_to_dcp`", "pt", "torch_to_dcp"),
    "accelerate": library("accelerate `merge_fsdp_weights`", "model", "merge_fsdp_weights", "accelerate"),
    "zero-to-fp32": library("DeepSpeed `zero_to_fp32`", "zero3", "zero_to_fp32", "deepspeed"),
    "ds-to-universal": library("DeepSpeed `ds_to_universal`, 4 and 2 workers", "zero3", "ds_to_universal", "deepspeed"),
    "titan-plain": Command("the same without a recipe", "titan", "{ours} consolidate {src} -o {dst}.safetensors -q"),
    "torchtitan": theirs("torchtitan's `convert_to_hf`", "titan", "{python} {here}/peers.py torchtitan_to_hf {src} {dst} {llama}",
                         "torchtitan"),
    "meta-plain": Command("the same without a recipe", "meta",
                          "{ours} consolidate {src}/consolidated.00.pth -o {dst}.safetensors -q"),
    "transformers-meta": library("Transformers' `convert_llama_weights_to_hf`", "meta", "transformers_from_meta",
                                 "transformers.models.llama.convert_llama_weights_to_hf"),
    "llama-plain": Command("the model without the adapter", "llama", "{ours} consolidate {src} -o {dst}.safetensors -q"),
    "peft": theirs("PEFT `merge_and_unload`, loaded and saved", "lora16",
                   "{python} {here}/peers.py peft_merge {src} {dst} {llama}", "peft"),
    "peft-64": theirs("PEFT `merge_and_unload`, loaded and saved", "lora64",
                      "{python} {here}/peers.py peft_merge {src} {dst} {llama}", "peft"),
    "products": Command("torch: the products alone, in memory", "lora64",
                        "{python} {here}/peers.py torch_products {src} {dst} {llama}", rounds=2, synced=None),
    "transposes": Command("torch: the transposes alone, in memory", "weights",
                          "{python} {here}/peers.py torch_transposes {src} {dst}", rounds=2, synced=None),
    "inflate": Command("ISA-L: inflating alone, in memory, 2 threads", "packed", "{python} {here}/peers.py isal_inflate {src} {dst}",
                       rounds=2, synced=None, needs="isal"),
    "torch-fp8": library("torch: code × scale, loaded and saved", "fp8", "torch_dequantize"),
    "cat-llama": Command("`cat`", "llama", "sh -c 'cat {src}/model.safetensors > /dev/null'", synced=None),
    "torch-stats": theirs("torch: the same numbers of each tensor", "llama", "{python} {here}/peers.py torch_stats {src} {dst}"),
    "plain": Command("without the recipe", "weights", "{ours} consolidate {src} -o {dst}.safetensors -q"),
    "h5repack-gzip": h5repack("-f SHUF -f GZIP=1", "weights"),
    "h5repack-chunks": h5repack("-l CHUNK=512x4096 -f SHUF -f GZIP=1", "packed"),
    "h5repack-none": h5repack("-l CONTI -f NONE", "packed"),
    "h5repack-none-ours": h5repack("-l CONTI -f NONE", "packed-by-us"),
}


# A goal is (peer or None, function of our result and the peer's). A result has .best and .median (seconds), .whole (seconds
# of the whole command, which includes the start of Python for some peers), .used (processor seconds), .peak (MiB), .size (bytes of the output) and
# .written (bytes written to files). The function returns (met, value, goal). Met is True, False, None if there is no goal,
# or the condition under which it is met.
def at_most(peer, ratio):
    return peer, lambda o, p: (o.median / p.median <= ratio, "%.2f × the time" % (o.median / p.median), "≤ %.2f ×" % ratio)


def faster(peer, times):
    def judge(o, p):
        ratio, whole = p.median / o.median, statistics.median(p.whole) / o.median
        text = "%.1f × faster" % ratio + (", %.1f × with Python's start" % whole if p.whole != p.seconds else "")
        return (ratio >= times or whole >= times and "with Python's start"), text, "≥ %g ×" % times

    return peer, judge


def compared_with(peer):
    return peer, lambda o, p: (None, "%.2f × the time" % (o.median / p.median), "")


def within(seconds):
    return None, lambda o, p: (o.median <= seconds, "%.1f ms" % (o.median * 1e3), "≤ %g ms" % (seconds * 1e3))


def same_size(peer, fraction):
    return peer, lambda o, p: (o.size <= p.size * (1 + fraction), "%+.1f %% bytes" % (100 * (o.size / p.size - 1)),
                               "≤ +%g %% bytes" % (100 * fraction))


# Our commands with their goals.
Job = namedtuple("Job", "command goals")
JOBS = {
    "consolidate-fsdp": Job(Command("consolidate 8 FSDP shards, DCP", "fsdp", "{ours} consolidate {src} -o {dst}.h5 -q"),
                            [at_most("cp", 0.35), faster("torch", 12), compared_with("bare"), compared_with("bare-write")]),
    "consolidate-h5": Job(Command("consolidate 8 FSDP shards, HDF5", "h5", "{ours} consolidate {src} -o {dst}.h5 -q"),
                          [at_most("cp", 0.35), faster("torch", 12), compared_with("bare")]),
    "consolidate-hf": Job(Command("consolidate 8 FSDP shards, safetensors (Hugging Face DCP)", "hf",
                                  "{ours} consolidate {src} -o {dst}.safetensors -q"),
                          [at_most("cp-hf", 0.35), faster("torch-hf", 8), compared_with("bare-hf")]),
    "consolidate-hf-2d": Job(Command("consolidate tp 2 × dp 4, safetensors (Hugging Face DCP)", "hf-2d",
                                     "{ours} consolidate {src} -o {dst}.safetensors -q"),
                             [at_most("cp-hf", 0.5), faster("torch-hf-2d", 8), compared_with("bare-hf")]),
    "consolidate-2d": Job(Command("consolidate tp 2 × dp 4, DCP", "2d", "{ours} consolidate {src} -o {dst}.h5 -q"),
                          [at_most("cp", 0.5), faster("torch-2d", 12), compared_with("bare")]),
    "reshard-2d": Job(Command("reshard 8 → tp 2 × dp 4", "fsdp", "{ours} reshard {src} -o {dst} --tp 2 --dp 4 -q"),
                      [at_most("cp", 0.5), compared_with("bare")]),
    "reshard-8": Job(Command("reshard tp 2 × dp 4 → 8", "2d", "{ours} reshard {src} -o {dst} --dp 8 -q"),
                     [at_most("cp", 0.5), compared_with("bare")]),
    "dcp-to-torch": Job(Command("8 FSDP shards, DCP → `torch.save`", "fsdp",
                                "{ours} consolidate {src} -o {dst}.pt --to pt -q"), [faster("torch", 8)]),
    "torch-to-dcp": Job(Command("`torch.save` → DCP", "pt", "{ours} convert {src} -o {dst} --to dcp -q"),
                        [faster("torch-save-to-dcp", 8)]),
    "merge-weights": Job(Command("8 FSDP shards, DCP → `model.safetensors`", "model",
                                 "{ours} consolidate {src} -o {dst}.safetensors --strip-prefix model. -q"),
                         [faster("accelerate", 8)]),
    "zero3-fp32": Job(Command("ZeRO-3 of 4 ranks → fp32 weights, `torch.save`", "zero3",
                              "{ours} consolidate {src} -o {dst}.pt --include model.* --strip-prefix model. -q"),
                      [faster("zero-to-fp32", 8)]),
    "zero3-full": Job(Command("ZeRO-3 of 4 ranks, optimizer and all → `torch.save`", "zero3",
                              "{ours} consolidate {src} -o {dst}.pt -q"), [faster("ds-to-universal", 8)]),
    "zero3-to-dcp": Job(Command("ZeRO-3 of 4 ranks, optimizer and all → DCP of 8", "zero3",
                                "{ours} reshard {src} -o {dst} --dp 8 --to dcp -q"), [faster("ds-to-universal", 8)]),
    "h5-to-dcp": Job(Command("convert 8 FSDP shards, HDF5 → DCP", "h5", "{ours} convert {src} -o {dst} --to dcp -q"),
                     [at_most("cp", 0.35)]),
    "inspect": Job(Command("`inspect` of a small checkpoint", "small", "{ours} inspect {src}", 20), [within(0.010)]),
    "inspect-h5": Job(Command("`inspect` of 1,000 tensors in 8 shards, HDF5", "many-h5", "{ours} inspect {src}", 20),
                      [within(0.010)]),
    "inspect-h5-full": Job(Command("the same, one HDF5 file", "many-full", "{ours} inspect {src}", 20), [within(0.010)]),
    "inspect-h5py": Job(Command("the same, one HDF5 file by h5py", "many", "{ours} inspect {src}", 20), [within(0.040)]),
    "average-h5py": Job(Command("`average --dry-run` of 8 HDF5 files by h5py", "eight",
                                "sh -c '{ours} average {src}/*.h5 -o {dst}.h5 --dry-run'", 20), [within(0.040)]),
    "check-h5": Job(Command("`check` of 1,000 tensors in 8 shards, HDF5", "many-h5", "{ours} check {src} -q", 20),
                    [within(0.010)]),
    "check-h5-full": Job(Command("the same, one HDF5 file", "many-full", "{ours} check {src} -q", 20), [within(0.010)]),
    "check-dcp": Job(Command("the same, DCP, against the HDF5 file", "many-dcp",
                             "{ours} check {src} --against {many} -q", 20), [within(0.050)]),
    "diff": Job(Command("`diff --data` of 8 DCP and 8 HDF5 shards", "h5", "{ours} diff {fsdp} {src} --data -q"),
                [at_most("cat", 1.2)]),
    "diff-digests": Job(Command("`diff` of 1,000 tensors by digests, HDF5", "many-h5",
                                "{ours} diff {many-full} {src} -q", 20), [within(0.100)]),
    "plan": Job(Command("plan of one rank of 16,384, 10¹² parameters and AdamW", "dense",
                        "{ours} reshard {src} --dp 2048 --tp 8 --dry-run --rank 12345 --json", 20), [within(0.050)]),
    "compress": Job(Command("`--compress 1` of Gaussian bf16 weights", "weights",
                            "{ours} consolidate {src} -o {dst}.h5 --compress 1 -q"),
                    [faster("h5repack-gzip", 10), same_size("h5repack-gzip", 0.02)]),
    "compress-chunks": Job(Command("`--compress 1` from other chunks, by h5repack", "packed",
                                   "{ours} consolidate {src} -o {dst}.h5 --compress 1 -q"),
                           [faster("h5repack-chunks", 10), same_size("h5repack-chunks", 0.02)]),
    "decompress": Job(Command("consolidate what h5repack compressed", "packed",
                              "{ours} consolidate {src} -o {dst}.h5 -q"),
                      [faster("h5repack-none", 8), compared_with("inflate")]),
    "reshard-packed": Job(Command("reshard what h5repack compressed to tp 2 × dp 4", "packed",
                                  "{ours} reshard {src} -o {dst} --tp 2 --dp 4 -q"), []),
    "recipe-rope": Job(Command("RoPE permutation by a recipe", "weights",
                               "{ours} consolidate {src} -o {dst}.safetensors --recipe {here}/recipes/rope.json -q"),
                       [at_most("plain", 1.3)]),
    "recipe-transpose": Job(Command("all large matrices transposed by a recipe", "weights",
                                    "{ours} consolidate {src} -o {dst}.safetensors --recipe {here}/recipes/transpose.json -q"),
                            [at_most("plain", 2), compared_with("transposes")]),
    "recipe-interleave": Job(Command("columns of all large matrices interleaved by a recipe", "weights",
                                     "{ours} consolidate {src} -o {dst}.safetensors --recipe {here}/recipes/interleave.json -q"),
                             [at_most("plain", 2)]),
    "recipe-rows": Job(Command("rows of all large matrices interleaved by a recipe", "weights",
                               "{ours} consolidate {src} -o {dst}.safetensors --recipe {here}/recipes/rows.json -q"),
                       [at_most("plain", 2)]),
    "export-titan": Job(Command("export of 8 FSDP shards of torchtitan, DCP", "titan",
                                "{ours} export {src} -o {dst} --recipe torchtitan-llama3 --config {llama} -q"),
                        [at_most("titan-plain", 1.3), faster("torchtitan", 8)]),
    "export-meta": Job(Command("export of Meta's `consolidated.00.pth`", "meta",
                               "{ours} export {src}/consolidated.00.pth -o {dst} --recipe meta-llama --config {llama} -q"),
                       [at_most("meta-plain", 1.3), faster("transformers-meta", 8)]),
    "lora-16": Job(Command("a LoRA adapter of rank 16 merged", "lora16",
                           "{ours} consolidate {llama} -o {dst}.safetensors --adapter {src} -q"),
                   [at_most("llama-plain", 1.3), faster("peft", 8)]),
    "lora-64": Job(Command("a LoRA adapter of rank 64 merged", "lora64",
                           "{ours} consolidate {llama} -o {dst}.safetensors --adapter {src} -q"),
                   [at_most("llama-plain", 1.3), faster("peft-64", 8), compared_with("products")]),
    "dequantize": Job(Command("block-scaled fp8 → bf16", "fp8", "{ours} consolidate {src} -o {dst}.safetensors --dequantize bf16 -q"),
                      [at_most("llama-plain", 1.3), faster("torch-fp8", 8)]),
    "stats": Job(Command("`inspect --stats`", "llama", "{ours} inspect {src} --stats --json"),
                 [compared_with("cat-llama"), faster("torch-stats", 8)]),
    "decompress-ours": Job(Command("consolidate what `--compress 1` compressed", "packed-by-us",
                                   "{ours} consolidate {src} -o {dst}.h5 -q"), [faster("h5repack-none-ours", 8)]),
}


class Result:
    def __init__(self):
        self.seconds, self.whole, self.processor = [], [], []
        self.peak, self.size, self.written, self.failed = 0, 0, 0, False

    used = property(lambda self: min(self.processor))
    best = property(lambda self: min(self.seconds))
    median = property(lambda self: statistics.median(self.seconds))


def size_of(path):
    if os.path.isdir(path):
        return sum(size_of(os.path.join(path, name)) for name in os.listdir(path))
    return os.path.getsize(path)


def remove_outputs(scratch):
    for name in os.listdir(scratch):
        path = os.path.join(scratch, name)
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def read_all(path):
    if os.path.isdir(path):
        for name in os.listdir(path):
            read_all(os.path.join(path, name))
        return
    with open(path, "rb", buffering=0) as f:
        while f.read(1 << 20):
            pass


def is_installed(name):
    if name and "." in name:  # finding it would import the package here, whose memory each command would begin with
        return subprocess.run([sys.executable, "-c", "import " + name], stderr=subprocess.DEVNULL).returncode == 0
    return name is None or shutil.which(name) is not None or importlib.util.find_spec(name) is not None


def drop_caches():
    try:
        with open("/proc/sys/vm/drop_caches", "w") as f:
            f.write("3\n")
        return True
    except OSError:
        return False


class Bench:
    def __init__(self, args, work):
        self.args, self.scratch = args, os.path.join(work, "out")
        os.mkdir(self.scratch)
        self.words = {"python": sys.executable, "here": HERE, "make_big": MAKE_BIG, "make_weights": MAKE_WEIGHTS, "make_llama": MAKE_LLAMA,
                      "size": args.size, "corpus": os.path.join(HERE, "..", "tests", "corpus"),
                      "ours": os.path.abspath(args.fsdpckpt)}
        self.work = work

    def make_sources(self, wanted):
        given = dict(pair.split("=", 1) for pair in self.args.source)
        for name, line in reversed(SOURCES.items()):  # also the inputs from which these are made
            wanted |= {n for n in SOURCES if name in wanted and name not in given and "{%s}" % n in line}
        for name, line in SOURCES.items():
            if name not in wanted:
                continue
            path = os.path.abspath(given[name]) if name in given else os.path.join(self.work, name)
            if name not in given:
                print("making %s" % name, file=sys.stderr)
                subprocess.run(shlex.split(line.format(dir=path, **self.words)), check=True, stdout=subprocess.DEVNULL)
            self.words[name] = path

    def run(self, command, cold, result):
        """Makes one timed run in an empty directory."""
        remove_outputs(self.scratch)
        os.sync()
        src = self.words[command.source]
        if cold:
            drop_caches()
        else:
            for name in SOURCES:
                if name == command.source or "{%s}" % name in command.line:
                    read_all(self.words[name])
        line = shlex.split(command.line.format(src=src, dst=os.path.join(self.scratch, "dst"),
                                               cache="cold" if cold else "warm", **self.words))
        started = time.perf_counter()
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        output = process.stdout.read()
        reported = re.search(r"^seconds: ([0-9.]+)$", output, re.M)
        used = re.search(r"^processor: ([0-9.]+)$", output, re.M)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            print("bench/run: failed: " + shlex.join(line), file=sys.stderr)
            result.failed = True
            return
        result.whole.append(seconds)
        result.seconds.append(float(reported.group(1)) if reported else seconds)
        result.processor.append(float(used.group(1)) if used else usage.ru_utime + usage.ru_stime)
        result.peak = max(result.peak, usage.ru_maxrss / 1024)
        result.size = size_of(self.scratch)
        result.written = usage.ru_oublock * 512
        remove_outputs(self.scratch)

    def measure(self, commands, rounds, cold):
        results = {name: Result() for name in commands}
        for i in range(rounds):
            for name, command in commands.items():
                if results[name].failed or command.rounds is not None and (cold or i >= command.rounds):
                    continue
                for _ in range(command.repeat):
                    if not results[name].failed:
                        self.run(command, cold, results[name])
                if results[name].failed and name not in COMMANDS:
                    raise SystemExit(1)
                if results[name].failed:  # a peer; the table reports it
                    continue
                print("%s %d/%d: %s %.3f s" % ("cold" if cold else "warm", i + 1, rounds, name, results[name].seconds[-1]),
                      file=sys.stderr)
        return results


def goal_lines(name, job, results):
    """Yields (peer, its seconds, processor seconds and memory, synced, ratio, goal, reached) for each goal of a job."""
    o = results[name]
    for peer, judge in job.goals:
        p = results.get(peer)
        if peer and peer not in results:
            yield COMMANDS[peer].title, "", "", "", "", "%s is not installed" % COMMANDS[peer].needs, "", None
        elif peer and p.failed:
            yield COMMANDS[peer].title, "", "", "", "", "it failed", "", None
        elif not peer or p.seconds:
            met, ratio, goal = judge(o, p)
            yield (COMMANDS[peer].title if peer else "–", "%.3f" % p.median if peer else "",
                   "%.2f" % p.used if peer else "", "%.0f" % p.peak if peer else "",
                   {True: "yes", False: "no", None: ""}[COMMANDS[peer].synced if peer else None], ratio, goal, met)
    yield "memory", "", "", "", "", "%.0f MiB" % o.peak, "≤ %d MiB" % PEAK_MIB, o.peak <= PEAK_MIB
    if o.size > 1 << 20:
        yield ("bytes written", "", "", "", "", "%.2f × its output" % (o.written / o.size), "≤ %.2f ×" % WRITTEN,
               o.written / o.size <= WRITTEN)


def table(jobs, results):
    lines = ["| job | runs | best, s | median, s | processor, s | peak, MiB | against | its median, s | its processor, s | "
             "its peak, MiB | synced | ratio | to reach | |", "|" + "---|" * 14]
    for name, job in jobs.items():
        o = results[name]
        first = "| %s | %d | %.3f | %.3f | %.2f | %.0f |" % (job.command.title, len(o.seconds), o.best, o.median, o.used, o.peak)
        for *cells, met in goal_lines(name, job, results):
            said = {True: "reached", False: "**not yet**", None: ""}.get(met, "**not yet**; reached %s" % met)
            lines.append("%s %s | %s |" % (first, " | ".join(cells), said))
            first = "| | | | | | |"
    return "\n".join(lines)


def first_match(path, pattern, otherwise="unknown"):
    try:
        with open(path) as f:
            found = re.search(pattern, f.read(), re.M)
        return found.group(1).strip() if found else otherwise
    except OSError:
        return otherwise


def machine(work):
    kind = subprocess.run(["stat", "-f", "-c", "%T", work], capture_output=True, text=True).stdout.strip()
    # statfs cannot distinguish ext2, ext3 and ext4; the table of mounts can.
    mounts = sorted((line.split() for line in open("/proc/mounts")), key=lambda m: len(m[1]))
    kind = next((m[2] for m in reversed(mounts) if work.startswith(m[1])), kind)
    memory = int(first_match("/proc/meminfo", r"^MemTotal: *(\d+)", "0")) / (1 << 20)
    return "%s, %d processors, %.0f GiB of memory, Linux %s, %s; %s of Python %s" % (
        first_match("/proc/cpuinfo", r"^model name\s*: (.*)$", platform.machine()), len(os.sched_getaffinity(0)), memory,
        platform.release(), kind, torch_version(), platform.python_version())


def torch_version():
    line = "import torch; print('torch', torch.__version__)"
    got = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)
    return got.stdout.strip() or "no torch"


def write_docs(path, text, begin, end):
    old = open(path).read() if os.path.exists(path) else "# Benchmarks\n\n%s\n%s\n" % (begin, end)
    head, rest = old.split(begin)
    with open(path, "w") as f:
        f.write(head + begin + "\n" + text + "\n" + end + rest.split(end)[1])


def can_make(source, given):
    return source in given or is_installed(SOURCE_NEEDS.get(source))


def list_jobs(jobs):
    for name, job in jobs.items():
        print("%-18s %s" % (name, job.command.title))
        for peer in dict.fromkeys(peer for peer, _ in job.goals if peer):
            missing = "" if is_installed(COMMANDS[peer].needs) else " (%s is not installed)" % COMMANDS[peer].needs
            print("%-18s   against %s%s" % ("", COMMANDS[peer].title, missing))


def measure_training(args):  # has a table of its own
    line = [sys.executable, os.path.join(HERE, "torch_save.py"), "--rounds", str(args.rounds)]
    line += [word for option in ("dir", "docs") if getattr(args, option) for word in ("--" + option, getattr(args, option))]
    environment = {**os.environ, "PYTHONPATH": os.path.join(os.path.dirname(os.path.abspath(args.fsdpckpt)), "..", "python")}
    return subprocess.run(line, env=environment).returncode


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("fsdpckpt", nargs="?", default="build/release/cli/fsdpckpt")
    ap.add_argument("--dir", default=None, help="where the temporary files go: on the disk to measure")
    ap.add_argument("--size", default="2G", help="of a checkpoint (default: 2G)")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--cold-rounds", type=int, default=3, help="0: no cold cache")
    ap.add_argument("--only", "--jobs", action="append", default=[], metavar="GLOB", help="jobs to run; training-loop, alone: bench/torch_save.py")
    ap.add_argument("--list", action="store_true", help="print the jobs and their peers, and stop")
    ap.add_argument("--source", action="append", default=[], metavar="NAME=DIR", help="use this input instead of making it")
    ap.add_argument("--docs", metavar="FILE", help="put the table into this file, between its markers")
    ap.add_argument("--part", metavar="NAME", help="of the file: the markers have this name, so that a run of a few jobs keeps the others")
    args = ap.parse_args()
    # Of the same build as the command.
    os.environ["PATH"] += ":" + os.path.join(os.path.dirname(os.path.abspath(args.fsdpckpt)), "..", "bench")
    jobs = {n: j for n, j in JOBS.items() if not args.only or any(fnmatch.fnmatch(n, g) for g in args.only)}
    if args.only == ["training-loop"]:
        return measure_training(args)
    if args.list:
        list_jobs(jobs)
        return 0
    given = {pair.split("=", 1)[0] for pair in args.source}
    for name in [n for n, j in jobs.items() if not can_make(j.command.source, given)]:
        print("bench/run: %s is left out: %s is not installed" % (name, SOURCE_NEEDS[jobs.pop(name).command.source]),
              file=sys.stderr)
    if not jobs:
        ap.error("no job is left: see --list")
    peers = [n for n in COMMANDS if any(n == peer for j in jobs.values() for peer, _ in j.goals)]
    commands = {n: COMMANDS[n] for n in peers if is_installed(COMMANDS[n].needs)}
    commands.update((n, j.command) for n, j in jobs.items())
    with tempfile.TemporaryDirectory(prefix="fsdpckpt-bench-", dir=args.dir) as work:
        bench = Bench(args, work)
        bench.make_sources({c.source for c in commands.values()})
        text = "%s. %sB per checkpoint, %s. " % (machine(os.path.realpath(work)), args.size,
                                               time.strftime("%Y-%m-%d", time.gmtime()))
        text += "Our times are those of outputs on the disk; `synced` says which of the others' are.\n"
        text += "\nWarm cache, %d rounds:\n\n%s" % (args.rounds, table(jobs, bench.measure(commands, args.rounds, False)))
        if args.cold_rounds > 0 and drop_caches():
            results = bench.measure(commands, args.cold_rounds, True)
            text += "\n\nCold cache, %d rounds:\n\n%s" % (args.cold_rounds, table(jobs, results))
    print(text)
    if args.docs:
        write_docs(args.docs, text, *(marker % (" " + args.part if args.part else "") for marker in MARKERS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
