#!/usr/bin/env python3
"""Reading and writing torch.save files, compared with PyTorch itself.

Reading: files that torch writes in all its ways (zip and legacy, nested, tied, strided, lazy views, every dtype), and files as
other tools write them (deflated, other byte order, protocol 4, 4 GiB and more). Writing: torch.load with weights_only=True and
with mmap=True must return what was saved, to the bit, with the same shared storages and key types; CRCs must be right and data
aligned to 64 bytes. Then each DCP checkpoint of the corpus is compared with torch's dcp_to_torch_save, and unsupported input
must be refused. Directories with one file per rank are in pt_ranks.py.

usage: pt.py FSDPCKPT CORPUS        exit 77 without torch
"""
import collections
import glob
import io
import logging
import os
import pathlib
import pickle
import struct
import sys
import tempfile
import warnings
import zipfile

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import numpy
    import torch
    import torch.distributed.checkpoint.format_utils as format_utils
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import must, must_run
from torch_values import kept, must_equal

DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
          "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
          "bool", "complex32", "complex64", "complex128"]
UNTYPED = ("float8", "uint64", "uint32", "uint16", "complex32")  # torch cannot load its own legacy files with these


def well_formed(path):
    """Checks that CRCs are right and data is aligned to 64 bytes."""
    with zipfile.ZipFile(path) as archive:
        must(archive.testzip() is None, path, "has a wrong CRC")
        with open(path, "rb") as f:
            for info in archive.infolist():
                f.seek(info.header_offset + 26)
                name, extra = struct.unpack("<HH", f.read(4))
                must((info.header_offset + 30 + name + extra) % 64 == 0, path, info.filename, "is not aligned")
                must(info.CRC != 0 or info.file_size == 0 or archive.read(info).strip(b"\0") == b"", info.filename,
                      "has no CRC")


def load(path, **more):
    plain = torch.load(path, weights_only=more.get("weights_only", True))
    must_equal(plain, torch.load(path, mmap=True, weights_only=more.get("weights_only", True)), "mmap")
    return plain


def tensor(dtype, *shape):
    bytes_ = torch.randint(0, 256, (torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size(),),
                           dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))
    return (bytes_ % 2).bool().reshape(shape) if dtype == torch.bool else bytes_.view(dtype).reshape(shape)


def dtypes(legacy=False):
    names = [d for d in DTYPES if hasattr(torch, d) and not (legacy and d.startswith(UNTYPED))]
    return {d: {"vector": tensor(getattr(torch, d), 5), "scalar": tensor(getattr(torch, d), 1)[0].clone(),
                "empty": torch.empty(0, 3, dtype=getattr(torch, d))} for d in names}


def nested():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.BatchNorm1d(10), torch.nn.Linear(10, 6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 7, "lr": 0.1,
            "betas": (0.9, 0.99), "none": None, "names": ["a", "b"], "empty": {}, "nothing": [], "void": (),
            "list": [torch.ones(2), 3, {"x": torch.zeros(3)}, [], [torch.arange(4)]],
            "tuple": (torch.arange(3), "s", {"deep": torch.ones(1)}), "param": torch.nn.Parameter(torch.ones(3)),
            "ordered": collections.OrderedDict(b=1, a=torch.ones(2)), "counter": collections.Counter("abca"),
            "set": {torch.int8, "q"}, "size": torch.Size([1, 2]), "big": 1 << 80, "negative": -(1 << 70),
            "small": -5, "bytes": b"\x00\xff", "array": bytearray(b"xyz"), "complex": 1 + 2j, "dtype": torch.float16,
            "device": torch.device("cuda:1"), "odd keys": {(1, 2): "x", None: 3, 1.5: 2}, "é": "ü", "nan": float("nan"),
            "true": True, "a.b": {"c.d": torch.ones(1)}, "within": (torch.ones(2), {"s": {1}}),
            -3: torch.ones(1), "long": "x" * 70000}


def shared():
    whole, buffer = torch.randn(8, 5), torch.randn(100)
    return {"whole": whole, "tied": whole, "transposed": whole.t(), "row": whole[3], "column": whole[:, 2],
            "slice": buffer[10:20:2], "part": buffer[50:], "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
            "conj": torch.tensor([1 + 2j, 3 - 1j]).conj(), "neg": torch._neg_view(torch.tensor([1.0, 2.0])),
            "last": torch.arange(24).reshape(2, 3, 4).to(memory_format=torch.contiguous_format).permute(2, 0, 1),
            "flat": [p for p in torch.arange(100.0).split(7)]}


def storages(value):
    address = lambda t: t.untyped_storage().data_ptr()
    return [len({address(value[k]) for k in ("whole", "tied", "transposed", "row", "column")}),
            len({address(value[k]) for k in ("whole", "slice")})]


def save(value, path, **more):
    torch.save(value, path, **more)
    return path


def round_trip(program, home, name, source, value, **more):
    target = home / ("out-%s.pt" % name)
    must_run(program, "consolidate", source, "-o", target, "-q", "--force")
    well_formed(target)
    must_equal(kept(value), load(target, **more), name)
    return target


def rewrite(source, target, change, method=zipfile.ZIP_STORED):
    """Rewrites an archive with changed records and without alignment, as another tool might."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", method) as new:
        for info in old.infolist():
            new.writestr(info.filename, change(info.filename.split("/", 1)[1], old.read(info)))
    return target


def big_endian(value, source, target):
    """Writes the file as a big-endian machine would, with the bytes of each number reversed."""
    sizes = {}

    class Pickler(pickle.Unpickler):
        def persistent_load(self, pid):
            dtype = pid[1]().dtype
            sizes["data/" + pid[2]] = torch._utils._element_size(dtype) // (2 if dtype.is_complex else 1)
            return torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(pid[4] * 16), dtype=pid[1]().dtype,
                                              _internal=True)

    with zipfile.ZipFile(source) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        Pickler(io.BytesIO(archive.read(name))).load()

    def change(record, data):
        size = sizes.get(record, 1)
        swapped = b"".join(data[i:i + size][::-1] for i in range(0, len(data), size))
        return b"big" if record == "byteorder" else swapped

    return rewrite(source, target, change)


def reads_what_torch_writes(program, home, corpus):
    values = {"nested": nested(), "shared": shared(), "dtypes": dtypes()}
    for name, value in values.items():
        source = save(value, home / (name + ".pt"))
        target = round_trip(program, home, name, source, value)
        again = round_trip(program, home, name + "-again", target, value)
        must(target.read_bytes() == again.read_bytes(), name, "is not the same when written again")
        for threads in ("1", "4"):
            must_run(program, "consolidate", source, "-o", home / "threads.pt", "-q", "--force", "-j", threads)
            must(target.read_bytes() == (home / "threads.pt").read_bytes(), name, "depends on the number of threads")
        torch.serialization.set_crc32_options(False)
        round_trip(program, home, name, save(value, home / "no-crc.pt"), value)
        torch.serialization.set_crc32_options(True)
        round_trip(program, home, name, rewrite(source, home / "deflated.pt", lambda n, d: d, zipfile.ZIP_DEFLATED),
                   value)
        round_trip(program, home, name, save(value, home / "protocol4.pt", pickle_protocol=4), value)
        buffer = io.BytesIO()
        torch.save(value, buffer)
        (home / "buffer.bin").write_bytes(buffer.getvalue())
        round_trip(program, home, name, home / "buffer.bin", value)
    must(storages(load(home / "out-shared.pt")) == [1, 2], "tied weights are not tied")
    must((home / "out-shared.pt").stat().st_size < 9000, "tied weights are stored more than once")
    keys = load(home / "out-nested.pt")["optim"]["state"]
    must(list(keys) == [0, 1, 2, 3, 4, 5], "the optimizer's keys are", list(keys))
    legacy = dict(nested(), dtypes=dtypes(legacy=True))
    round_trip(program, home, "legacy", save(legacy, home / "old.pt", _use_new_zipfile_serialization=False), legacy)
    legacy = shared()
    target = round_trip(program, home, "legacy-shared",
                        save(legacy, home / "old.pt", _use_new_zipfile_serialization=False), legacy)
    must(storages(load(target)) == [1, 2], "tied weights of a legacy file are not tied")
    numbers = {d: v for d, v in dtypes(legacy=True).items() if d != "complex32"}
    plain = save(numbers, home / "plain.pt")
    round_trip(program, home, "big-endian", big_endian(numbers, plain, home / "big.pt"), numbers)
    round_trip(program, home, "list", save([torch.ones(3), torch.zeros(2)], home / "list.pt"),
               [torch.ones(3), torch.zeros(2)])
    round_trip(program, home, "bare", save(torch.ones(3), home / "bare.pt"), {"tensor": torch.ones(3)})
    foreign = {"default": collections.defaultdict(list, {"k": [1]}), "frozen": frozenset([1]), "w": torch.ones(1)}
    target = round_trip(program, home, "foreign", save(foreign, home / "foreign.pt"), foreign, weights_only=False)
    must(torch.load(target, weights_only=False)["default"].default_factory is list, "a defaultdict lost its factory")


def more_than_4_gib(program, home, corpus):
    """Extracts one small tensor that lies after the hole in a sparse file of more than 4 GiB."""
    path, large = home / "large.pt", 4_400_000_000
    head = (corpus / "pt" / "layout-zip64.bin").read_bytes()
    with open(path, "wb") as f:
        f.write(head[:832])
        f.seek(large + 832)
        f.write(head[832:])
    with open(path, "r+b") as f:
        f.seek(4400000960)  # the offset of data/1 in this file
        must(f.read(16) == struct.pack("<4f", 0, 1, 2, 3), "the fixture is not laid out as expected")
    listed = must_run(program, "inspect", path).stdout
    must("4400000000" in listed.replace(",", ""), listed)
    must_run(program, "consolidate", path, "-o", home / "small.pt", "--exclude", "a", "-q", "--force")
    must_equal({"b": torch.arange(4.0), "c": torch.zeros(0)}, load(home / "small.pt"), "zip64")
    path.unlink()


def many(program, home, corpus):
    """Ten thousand tensors, and names that nest in every way."""
    value = {"layers": {i: {"w": torch.full((3,), float(i)), "n": i} for i in range(5000)},
             "list": [torch.full((2,), float(i)) for i in range(5000)]}
    round_trip(program, home, "many", save(value, home / "many.pt"), value)


def writes_what_torch_converts(program, home, corpus):
    compared = 0
    for source in sorted(glob.glob(str(corpus / "good" / "dcp-torch*"))):
        name = os.path.basename(source)
        target, reference = home / "dcp.pt", home / "reference.pt"
        must_run(program, "consolidate", source, "-o", target, "-q", "--force")
        well_formed(target)
        try:
            format_utils.dcp_to_torch_save(source, reference)
        except BaseException:  # noqa: BLE001: this version of torch cannot read it either
            torch.load(target, weights_only=False)
            continue
        theirs = torch.load(reference, weights_only=False)
        must_equal(theirs, torch.load(target, weights_only=False), name)
        compared += 1
        if "foreign" not in name:
            load(target)
    must(compared >= 30, "only", compared, "checkpoints were compared")


def refused(program, path, code, *words):
    result = must_run(program, "inspect", path, ok=range(1, 6))
    must(result.returncode == code and result.stderr.count("\n") == 1, path, result.returncode, result.stderr)
    for word in words:
        must(word in result.stderr, path, "does not say", repr(word), "but", result.stderr)


class Holder:
    def __init__(self):
        self.weight = torch.ones(2)


def refusals(program, home, corpus):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    refused(program, save(3, home / "three.pt"), 5, "state dict")
    refused(program, save({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, home / "twice.pt"), 5, "a.b")
    refused(program, save({(1, 2): torch.ones(1)}, home / "keys.pt"), 5, "keys")
    torch.jit.script(module).save(home / "script.pt")
    refused(program, home / "script.pt", 5, "TorchScript")
    with zipfile.ZipFile(home / "other.zip", "w") as archive:
        archive.writestr("hello/readme", "hello")
    refused(program, home / "other.zip", 3, "data.pkl")
    torch.export.save(torch.export.export(module, (torch.ones(1, 2),)), home / "program.pt2")
    refused(program, home / "program.pt2", 5, "torch.export")
    numpy.savez(home / "arrays.npz", a=numpy.ones(3))
    refused(program, home / "arrays.npz", 5, "NumPy archive")
    with zipfile.ZipFile(home / "model.keras", "w") as archive:
        for name in "model.weights.h5", "metadata.json", "config.json":  # another order than Keras'
            archive.writestr(name, "{}")
    refused(program, home / "model.keras", 5, "use its model.weights.h5")
    import tarfile
    with tarfile.open(home / "old.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name in ("sys_info", "pickle", "storages"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    refused(program, home / "old.tar", 5, "0.1.10")


def damage_in_shared_records(program, home, corpus):
    """Conversions compare the CRC of a record even if several tensors share it or none fills it."""
    base = torch.arange(1000, dtype=torch.float32)
    cases = {
        "slices": {"b": base[500:900].view(20, 20), "a": base[:300], "c": base[300:302]},
        "overlapping": {"a": base[:600], "b": base[400:], "c": base[400:]},
        "strided": {"a": base[1::3].view(3, 111).t()},
        "expanded": {"a": base[2:7].expand(4, 5), "b": base[999]},
        "transposed": {"a": base.view(40, 25).t(), "b": base},
    }
    ways = [("consolidate", "-o", f"{home}/o.h5"), ("consolidate", "-o", f"{home}/o.pt", "-j", "3"),
            ("reshard", "-o", f"{home}/o", "--dp", "3"), ("consolidate", "-o", f"{home}/o.h5", "--compress", "1")]
    for name, value in cases.items():
        path = save(value, f"{home}/{name}.pt")
        with open(path, "rb") as f:
            good = f.read()
        start = good.index(bytes(base.numpy().tobytes()))
        for command, *way in ways:
            must_run(program, command, path, *way, "--force", "-q")
        for at in (0, 1205, 1650, 3999) if name != "slices" else (0, 1205, 1215, 2003, 3999):
            with open(path, "wb") as f:
                f.write(good[:start + at] + bytes([good[start + at] ^ 4]) + good[start + at + 1:])
            for command, *way in ways:
                text = must_run(program, command, path, *way, "--force", "-q", ok=(3,)).stderr
                must("CRC-32" in text and text.count("\n") == 1, name, at, command, text)
    # A comparison that would read far more than was requested is left to verify.
    path = save({"a": torch.zeros(1 << 20)[:10]}, f"{home}/large.pt")
    with open(path, "r+b") as f:
        f.seek(2 << 20)
        f.write(b"x")
    must_run(program, "consolidate", path, "-o", f"{home}/o.h5", "--force", "-q")
    must_run(program, "verify", path, ok=(1,))


def nesting_survives_other_formats(program, home, corpus):
    """HDF5 keeps all nesting. DCP turns integer keys into text."""
    value = nested()
    del value[-3]  # a dict with integer and text keys gets text keys in HDF5
    source = save(value, home / "nested.pt")
    must_run(program, "consolidate", source, "-o", home / "x.h5", "-q")
    must_run(program, "consolidate", home / "x.h5", "-o", home / "h5.pt", "-q")
    must_equal(kept(value), load(home / "h5.pt"), "through h5")
    must_run(program, "reshard", source, "-o", home / "x", "--dp", "2", "-q")
    must_run(program, "consolidate", home / "x", "-o", home / "shards.pt", "-q")
    must_equal(kept(value), load(home / "shards.pt"), "through shards of h5")
    must_run(program, "consolidate", source, "-o", home / "dcp", "--to", "dcp", "-q")
    must_run(program, "consolidate", home / "dcp", "-o", home / "dcp.pt", "-q")
    must(list(load(home / "dcp.pt")["optim"]["state"]) == ["0", "1", "2", "3", "4", "5"], "DCP's keys are text")
    format_utils.dcp_to_torch_save(home / "dcp", home / "torch.pt")
    must_equal(torch.load(home / "torch.pt", weights_only=False), load(home / "dcp.pt"), "torch's own way back")


def objects_that_hold_tensors(program, home, corpus):
    value = {"h": Holder(), "w": torch.ones(3), "s": {"t": {1, 2}}}
    target = home / "holder-out.pt"
    must_run(program, "consolidate", save(value, home / "holder.pt"), "-o", home / "holder.h5", "-q")
    must_run(program, "consolidate", home / "holder.h5", "-o", target, "-q", "--trust-objects")
    well_formed(target)
    must_equal(value, torch.load(target, weights_only=False), "an object and its tensor")


def run_tests(tests):
    """Runs each test in its own folder, even after a failure. Returns the exit status."""
    program, corpus = sys.argv[1], pathlib.Path(sys.argv[2])
    failed = 0
    for test in tests:
        with tempfile.TemporaryDirectory() as home:
            try:
                test(program, pathlib.Path(home), corpus)
                print("ok", test.__name__)
            except Exception as e:  # noqa: BLE001: torch.load raises anything
                failed += 1
                print("FAILED", test.__name__, type(e).__name__, str(e)[:2000])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run_tests([reads_what_torch_writes, more_than_4_gib, many, writes_what_torch_converts, refusals,
                        damage_in_shared_records, nesting_survives_other_formats, objects_that_hold_tensors]))
