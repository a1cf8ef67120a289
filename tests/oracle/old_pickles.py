#!/usr/bin/env python3
"""Attacks in pickles that torch.save does not write, but torch.load runs: opcodes and numbers of protocols 0 and 1, extensions, the
four small pickles of a file of torch before 1.6, pickles that are too large to be decoded. Each attack here really runs. check says
that the file may be hostile, and no conversion writes it.

usage: old_pickles.py FSDPCKPT      exit 77 without torch
"""
import copyreg
import io
import logging
import os
import pickle
import shutil
import sys
import tempfile
import warnings

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish
from pickle_attacks import changed_archive, ran, run, text

EXTENSION = 200


def attacks(mark):
    """(name, bytes that replace PROTO, bytes that run the attack and leave nothing on the stack)"""
    command, proto = "touch " + mark, b"\x80\x02"
    call = b"cposix\nsystem\n" + text(command) + b"\x85R0"
    yield "INST", proto, b"(" + text(command) + b"iposix\nsystem\n0"
    yield "OBJ", proto, b"(cposix\nsystem\n" + text(command) + b"o0"
    yield "an extension", proto, b"\x82" + bytes([EXTENSION]) + text(command) + b"\x85R0"
    yield "an extension of two bytes", proto, b"\x83" + bytes([EXTENSION, 0]) + text(command) + b"\x85R0"
    yield "an extension of four bytes", proto, b"\x84" + bytes([EXTENSION, 0, 0, 0]) + text(command) + b"\x85R0"
    yield "STRING", proto, b"cposix\nsystem\nS'" + command.encode() + b"'\n\x85R0"
    yield "UNICODE", proto, b"cposix\nsystem\nV" + command.encode() + b"\n\x85R0"
    yield "PUT and GET", proto, b"cposix\nsystem\np900\n0g900\n" + text(command) + b"\x85R0"
    yield "DUP", proto, b"cposix\nsystem\n2" + text(command) + b"\x85R00"
    yield "no protocol", b"", call
    yield "protocol 0", b"\x80\x00", call
    yield "protocol 1", b"\x80\x01", call


def must_be_hostile(source, what, mark, load):
    check(ran(load, mark), "%s: does not run: the test is wrong" % what)
    r = run("check", source)
    check(r.returncode == 1 and "hostile" in r.stdout, "%s: check: %s" % (what, r))
    for to in ("pt", "dcp"):
        target = "%s.to.%s" % (source, to)
        r = run("convert", source, "-o", target, "--to", to)
        check(r.returncode == 3 and "hostile" in r.stderr and r.stderr.count("\n") == 1 and not os.path.exists(target),
              "%s: to %s: %s" % (what, to, r))
    check(not os.path.exists(mark), "%s: fsdpckpt ran it" % what)


def archive(value, change):
    """The bytes of a torch.save archive with another data.pkl."""
    made = io.BytesIO()
    torch.save(value, made)
    return changed_archive(made.getvalue(), change)


def write(path, data):
    with open(path, "wb") as f:
        f.write(data)


def checkpoint_with(folder, data):
    """A DCP checkpoint whose object "o" has these bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    dcp.save({"w": torch.ones(4), "o": "text"}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    info = metadata.storage_data[[i for i in metadata.storage_data if i.fqn == "o"][0]]
    info.relative_path, info.offset, info.length = "__1_0.distcp", 0, len(data)
    write(os.path.join(folder, info.relative_path), data)
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(metadata, f)


def load_checkpoint(folder):
    dcp.load({"w": torch.zeros(4), "o": None}, checkpoint_id=folder)


def in_archives_and_metadata(home, mark):
    path, folder = os.path.join(home, "a.pt"), os.path.join(home, "dcp")
    for what, head, call in attacks(mark):
        def changed(data):
            return head + call + data[2:]
        write(path, archive({"w": torch.ones(4)}, changed))
        must_be_hostile(path, what + " in .pt", mark, lambda: torch.load(path, weights_only=False))
        checkpoint_with(folder, archive("text", changed))
        must_be_hostile(folder, what + " in DCP", mark, lambda: load_checkpoint(folder))
        shutil.rmtree(folder)
        dcp.save({"w": torch.ones(4)}, checkpoint_id=folder)
        metadata = os.path.join(folder, ".metadata")
        with open(metadata, "rb") as f:
            data = f.read()
        write(metadata, changed(data))
        must_be_hostile(folder, what + " in .metadata", mark, lambda: dcp.load({"w": torch.zeros(4)}, checkpoint_id=folder))


def before_torch_1_6(home, mark):
    """torch.load executes five pickles of such a file: magic number, protocol, system, value, keys of the storages."""
    made = io.BytesIO()
    torch.save({"w": torch.ones(4)}, made, _use_new_zipfile_serialization=False)
    data, path, folder = made.getvalue(), os.path.join(home, "old.pt"), os.path.join(home, "dcp")
    made.seek(0)
    starts = [0]
    for _ in range(3):
        pickle.load(made)
        starts.append(made.tell())
    keys = data.rindex(b"\x80\x02]")
    call = b"cposix\nsystem\n" + text("touch " + mark) + b"\x85R0"
    for what, at in (("protocol", starts[1] + 2), ("system", starts[2] + 2), ("keys", keys + 2), ("magic number", 14)):
        write(path, data[:at] + call + data[at:])
        must_be_hostile(path, "a call beside the " + what, mark, lambda: torch.load(path, weights_only=False))
    for what, at in (("value", starts[3] + 2), ("protocol", starts[1] + 2)):  # DCP never writes them
        checkpoint_with(folder, data[:at] + call + data[at:])
        must_be_hostile(folder, "an old file in DCP, " + what, mark, lambda: load_checkpoint(folder))


def too_much(home, mark):
    """What is not examined is hostile. A harmless object of that size is not."""
    folder = os.path.join(home, "dcp")
    call = b"cposix\nsystem\n" + text("touch " + mark) + b"\x85R0"
    large = (17 << 20).to_bytes(8, "little") + bytes(17 << 20)
    checkpoint_with(folder, archive("text", lambda d: d[:2] + b"\x8e" + large + b"0" + call + d[2:]))
    must_be_hostile(folder, "a call in 17 MiB", mark, lambda: load_checkpoint(folder))
    checkpoint_with(folder, archive("text", lambda d: d[:2] + b"\x8e" + large + b"0" + d[2:]))
    r = run("check", folder)
    check(r.returncode == 0 and "hostile" not in r.stdout, "17 MiB: check: %s" % r)
    shared = b"ccollections\nOrderedDict\nq\x00](" + b"(K\x01K\x01t" * 3000 + b"eq\x010" + b"h\x00h\x01\x85R0" * 300
    checkpoint_with(folder, archive("text", lambda d: d[:2] + shared + b"0" + call + d[2:]))
    must_be_hostile(folder, "a call after shared values", mark, lambda: load_checkpoint(folder))


copyreg.add_extension("posix", "system", EXTENSION)
with tempfile.TemporaryDirectory(prefix="fc-old-") as home:
    for test in (in_archives_and_metadata, before_torch_1_6, too_much):
        test(home, os.path.join(home, "mark"))
sys.exit(finish("old_pickles"))
