#!/usr/bin/env python3
"""DCP whose items FileSystemWriter compressed with its extension ZStandard (stream.zstd/1): the corpus against the tensors that torch
gathered, and streams that no writer makes. Frames of uncompressed and of repeated bytes are made here, without a zstd library.

usage: dcp_zstd.py FSDPCKPT CORPUS        exit 77 without torch, or if fsdpckpt was built without libzstd
"""
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys

from pt import load, refused, run_tests  # exits with 77 without torch

import torch
import torch.distributed.checkpoint as dcp

from checks import must, must_run
from pt_ranks import flat, unreadable
from torch_values import must_equal

CASE = "dcp-zstd-torch2.15.0"


def truth_of(corpus):
    want = flat(torch.load(corpus / CASE / "full.pt", weights_only=False))
    want[("many",)] = (torch.arange(1 << 21, dtype=torch.int32) // 4096).view(2048, 1024)
    return want


def must_be(path, want, what):
    got = flat(load(path))
    must(set(want) == set(got), what, set(want) ^ set(got))
    for key, value in want.items():
        must_equal(value, got[key], "%s %s" % (what, key))


def every_command_reads_it(program, home, corpus):
    source, want = corpus / CASE, truth_of(corpus)
    must_run(program, "consolidate", source, "-o", home / "whole.pt", "-q")
    must_be(home / "whole.pt", want, "consolidate")
    must_run(program, "diff", source, home / "whole.pt")
    must("many" in must_run(program, "inspect", source).stdout, "inspect")
    must_run(program, "inspect", source, "--headers-only")
    must_run(program, "check", source, ok=(0, 1))
    told = must_run(program, "verify", source)
    must("8.41 MB of data read" in told.stdout and "no defects" in told.stdout, told.stdout)
    for argv in (("reshard", "--to", "h5", "--dp", "3"), ("reshard", "--to", "dcp", "--dp", "2", "--replicas", "2"), ("convert", "--to", "h5"),
                 ("convert", "--to", "dcp", "--memory", "24M")):
        made = home / "-".join(argv).replace("--", "")
        must_run(program, argv[0], source, "-o", made, "-q", *argv[1:])
        must_run(program, "consolidate", made, "-o", home / "again.pt", "-q", "--force")
        must_be(home / "again.pt", want, argv)
    must_run(program, "extract", source, "model.0.weight", "-o", home / "w.npy")
    must_run(program, "extract", source, "words", "-o", home / "words.json")
    must(json.loads((home / "words.json").read_text()) == ["a", "b"] * 40, "words")
    shutil.copytree(source, home / "sealed")
    must_run(program, "verify", home / "sealed", "--seal")
    must_run(program, "verify", home / "sealed")


def a_chunk_larger_than_memory_is_streamed(program, home, corpus):
    """Of 8 MiB, when less than half of them may be decoded at once: by rows, by columns, a part of it, and with several threads."""
    small, want = ("--memory", "4M", "-j", "3"), truth_of(corpus)
    for name, argv in (("rows", ("--dp", "5")), ("columns", ("--tp", "2", "--tp-plan", home / "plan.json"))):
        (home / "plan.json").write_text('{"many": "rowwise"}')
        must_run(program, "reshard", corpus / CASE, "-o", home / name, "--to", "dcp", "-q", *argv, *small)
        must_run(program, "consolidate", home / name, "-o", home / "again.pt", "-q", "--force")
        must_be(home / "again.pt", want, name)
    must_run(program, "consolidate", corpus / CASE, "-o", home / "whole.h5", "-q", "--compress", "1", "--memory", "16M")
    must_run(program, "diff", corpus / CASE, home / "whole.h5", "--memory", "16M")
    must_run(program, "verify", corpus / CASE, *small)
    large = packed(home, "turned", lambda fqn, item: frame(item), torch.arange(3000000.0).view(1000, 3000).t())
    must_run(program, "consolidate", large, "-o", home / "turned.pt", "-q", *small)
    must_equal(torch.arange(3000000.0).view(1000, 3000).t(), load(home / "turned.pt")["w"], "turned")
    for name, change, word in (("crc", lambda i: flip(i, len(i) // 2), "CRC-32"), ("directory", lambda i: flip(i, i.index(b"PK\x01\x02") + 16), "records"),
                               ("cut", lambda i: i[:len(i) // 2], "fewer bytes")):
        bad = packed(home, name, of_w(lambda i: frame(change(i))), torch.rand(3000000))
        r = must_run(program, "consolidate", bad, "-o", home / "no.pt", *small, ok=(3,))
        must("w" in r.stderr and word in r.stderr and r.stderr.count("\n") == 1, name, r.stderr)


def frame(data, window=0x38):
    """A zstd frame of uncompressed blocks. window 0x38: 128 KiB."""
    out = bytearray(b"\x28\xb5\x2f\xfd\0" + bytes([window]))
    blocks = [data[i:i + (128 << 10)] for i in range(0, len(data), 128 << 10)] or [b""]
    for i, block in enumerate(blocks):
        out += struct.pack("<I", len(block) << 3 | (i == len(blocks) - 1))[:3] + block
    return bytes(out)


def bomb(data, zeros):
    """A frame of the data, and then blocks of zeros that are stored in four bytes each."""
    out = bytearray(frame(data))
    out[6] &= 0xfe
    for i in range(zeros):
        out += struct.pack("<I", (128 << 10) << 3 | 2 | (i == zeros - 1))[:3] + b"\0"
    return bytes(out)


def packed(home, name, change=lambda fqn, item: frame(item), w=torch.arange(60.0).view(10, 6), descriptors=("stream.zstd/1",)):
    """A small checkpoint of one file with every item compressed."""
    home = home / name
    value = {"w": w, "b": torch.ones(3, dtype=torch.bfloat16), "step": 5}
    dcp.save(value, checkpoint_id=home, no_dist=True)
    with open(home / ".metadata", "rb") as f:
        metadata = pickle.load(f)
    files = {}
    for index, info in metadata.storage_data.items():
        item = (home / info.relative_path).read_bytes()[info.offset:info.offset + info.length]
        made = change(index.fqn, item)
        info.offset, info.length, info.transform_descriptors = len(files.get(info.relative_path, b"")), len(made), list(descriptors)
        files[info.relative_path] = files.get(info.relative_path, b"") + made
    for file, content in files.items():
        (home / file).write_bytes(content)
    with open(home / ".metadata", "wb") as f:
        pickle.dump(metadata, f)
    return home


def small_frames_are_read(program, home, corpus):
    must_run(program, "consolidate", packed(home, "good"), "-o", home / "good.pt", "-q")
    must_be(home / "good.pt", {("w",): torch.arange(60.0).view(10, 6), ("b",): torch.ones(3, dtype=torch.bfloat16), ("step",): 5}, "good")


def of_w(edit):
    return lambda fqn, item: edit(item) if fqn == "w" else frame(item)


def flip(item, at):
    return item[:at] + bytes([item[at] ^ 1]) + item[at + 1:]


def stopped(program, source, code, *words):
    """A conversion fails in one line with these words, and leaves nothing."""
    target = source.with_name("never.pt")
    r = must_run(program, "consolidate", source, "-o", target, ok=(code,))
    must(all(w in r.stderr for w in words) and r.stderr.count("\n") == 1 and not target.exists(), source.name, words, r.stderr)


def lying_streams_are_refused(program, home, corpus):
    at = lambda item: item.index(struct.pack("<f", 7.0))
    cases = {
        "cut": (of_w(lambda i: frame(i)[:-5]), 3, "cut off"),
        "more": (of_w(lambda i: frame(i) + b"more"), 3, "bytes follow"),
        "two": (of_w(lambda i: frame(i[:100]) + frame(i[100:])), 3, "bytes follow"),
        "not": (of_w(lambda i: b"\x28\xb5\x2f\xfc" + frame(i)[4:]), 3, "damaged"),
        "plain": (of_w(lambda i: i), 3, "damaged"),
        "short": (of_w(lambda i: frame(i[:at(i) + 40])), 3, "fewer bytes"),
        "pickle": (of_w(lambda i: frame(i[:80])), 3, "cut off"),
        "value": (of_w(lambda i: frame(flip(i, at(i)))), 3, "CRC-32"),
        "directory": (of_w(lambda i: frame(flip(i, i.index(b"PK\x01\x02") + 16))), 3, "disagrees with its records"),
        "end": (of_w(lambda i: frame(i[:-1])), 3, "end record"),
        "window": (of_w(lambda i: frame(i, window=0xa8)), 3, "window"),
        "bomb": (of_w(lambda i: bomb(i, 20000)), 3, "many more bytes"),
        "object": (lambda fqn, i: frame(i) if fqn != "step" else frame(i)[:-3], 3, "step", "cut off"),
    }
    for name, (change, code, *words) in cases.items():
        source = packed(home, name, change)
        stopped(program, source, code, *words)
        if name != "object":
            r = must_run(program, "verify", source, ok=(1,))
            must("w" in r.stdout + r.stderr, name, "verify does not name it", r.stdout)
    for name, names in (("lz4", ["stream.lz4/1"]), ("later", ["stream.zstd/2"]), ("twice", ["stream.zstd/1"] * 2)):
        refused(program, packed(home, name, descriptors=names), 5, names[0], "not supported")


def a_bomb_takes_no_memory(program, home, corpus):
    """2.6 GB of zeros in 80 kB, as an object and as a tensor."""
    tensor, thing = packed(home, "tensor", of_w(lambda i: bomb(i, 20000))), packed(
        home, "thing", lambda fqn, i: bomb(i, 20000) if fqn == "step" else frame(i))

    def limited(*argv):
        limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (600 << 20, 600 << 20))
        return subprocess.run(list(map(str, (program,) + argv)), capture_output=True, text=True, preexec_fn=limit)

    r = limited("consolidate", tensor, "-o", home / "no.pt")
    must(r.returncode == 3 and "many more bytes" in r.stderr, r.stderr)
    r = limited("inspect", thing)
    must(r.returncode == 0 and "step" in r.stdout, r.returncode, r.stderr)
    unreadable(program, thing, "step", "64 MiB")


def built_with_zstd(program):
    return "zstd" in subprocess.run([program, "--version"], capture_output=True, text=True).stdout.lower()


if __name__ == "__main__":
    if not built_with_zstd(sys.argv[1]):
        print("skipped: built without libzstd")
        sys.exit(77)
    sys.exit(run_tests([every_command_reads_it, a_chunk_larger_than_memory_is_streamed, small_frames_are_read, lying_streams_are_refused,
                        a_bomb_takes_no_memory]))
