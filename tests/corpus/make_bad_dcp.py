#!/usr/bin/env python3
"""Makes bad/dcp-* and unsupported/dcp-*: small DCP checkpoints that must be refused, each with expected-error.

expected-error is "<exit status> <the whole message>", where {} stands for the folder of the case. torch is not needed: the
pickles get torch's class names from stand-ins, and the archives are written byte by byte so that they can be wrong.

    make_bad_dcp.py CORPUS
"""
import os
import pickle
import shutil
import struct
import sys
import types
import zlib

BAD, UNSUPPORTED = "bad", "unsupported"


# ---------------------------------------------------------------- stand-ins for torch's classes

def stand_in(module, name, base=object, **members):
    parts = module.split(".")
    for i in range(len(parts)):
        sys.modules.setdefault(".".join(parts[:i + 1]), types.ModuleType(".".join(parts[:i + 1])))
    cls = type(name, (base,), {"__module__": module, **members})
    setattr(sys.modules[module], name, cls)
    return cls


def fields(**defaults):
    def init(self, **values):
        self.__dict__.update(defaults, **values)

    return {"__init__": init}


class Call:
    """Pickles as a call of a global."""

    def __init__(self, callee, *args):
        self.callee, self.args = callee, args

    def __reduce__(self):
        return self.callee, self.args


META = "torch.distributed.checkpoint.metadata"
Metadata = stand_in(META, "Metadata", **fields())
TensorStorageMetadata = stand_in(META, "TensorStorageMetadata", **fields())
BytesStorageMetadata = stand_in(META, "BytesStorageMetadata")
ChunkStorageMetadata = stand_in(META, "ChunkStorageMetadata", **fields())
TensorProperties = stand_in(META, "TensorProperties", **fields(),
                            __getstate__=lambda self: (self.dtype, self.layout, False, 0, False))
MetadataIndex = stand_in(META, "MetadataIndex", **fields())
StorageInfo = stand_in("torch.distributed.checkpoint.filesystem", "_StorageInfo", **fields())
Size = stand_in("torch", "Size", tuple, __reduce__=lambda self: (Size, (tuple(self),)))
OrderedDict = __import__("collections").OrderedDict


def function(module, name):
    return stand_in(module, name)  # a class pickles like a function: by its name


def dtype(name):
    return function("torch", name)


get_layout = function("torch.serialization", "_get_layout")
rebuild = function("torch._utils", "_rebuild_tensor_v2")


# ---------------------------------------------------------------- archives

class Item(pickle.Pickler):
    def persistent_id(self, value):
        return value.id if isinstance(value, Storage) else None


class Storage:
    def __init__(self, cls="FloatStorage", numel=6):
        self.id = ("storage", function("torch", cls), "0", "cpu", numel)


def pickled(value, protocol=2):
    import io
    f = io.BytesIO()
    Item(f, protocol).dump(value)
    return f.getvalue()


def tensor(sizes=(2, 3), strides=(3, 1), offset=0, storage=None, flags=None):
    args = [storage or Storage(), offset, tuple(sizes), tuple(strides), False, OrderedDict()]
    return Call(rebuild, *(args + ([flags] if flags else [])))


class Record:
    def __init__(self, name, data, **wrong):
        self.name, self.data, self.wrong = name.encode(), data, wrong


def archive(records):
    """A zip of stored records. `wrong` overrides fields: local_name, attributes, header, crc, deflate, says."""
    out, central = b"", b""
    for r in records:
        at = len(out)
        crc = r.wrong.get("crc", zlib.crc32(r.data))
        body, method = r.data, 0
        if r.wrong.get("deflate"):
            z = zlib.compressobj(9, zlib.DEFLATED, -15)
            body, method = z.compress(r.data) + z.flush(), 8
        local = r.wrong.get("local_name", r.name)
        says = r.wrong.get("says", len(r.data))
        out += struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, method, 0, 0, crc, len(body), says, len(local), 0)
        out += local + body
        central += struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 20, 20, r.wrong.get("flags", 0), method, 0, 0, crc,
                               r.wrong.get("stored", len(body)), r.wrong.get("size", says), len(r.name), 0, 0,
                               0, 0, r.wrong.get("attributes", 0), r.wrong.get("header", at)) + r.name
    end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, len(records), len(records), len(central), len(out), 0)
    return out + central + end


FLOATS = struct.pack("<6f", *range(6))


def item(value=None, data=FLOATS, extra=(), **wrong):
    return archive([Record("archive/data.pkl", pickled(value or tensor()), **wrong.get("pkl", {})),
                    Record("archive/byteorder", wrong.get("byteorder", b"little")),
                    Record("archive/data/0", data, **wrong.get("storage", {})), *extra])


# ---------------------------------------------------------------- checkpoints

def metadata(fqn="w", shape=(2, 3), boxes=(((0, 0), (2, 3)),), length=0, element="float32", layout="torch.strided",
             path="__0_0.distcp", entries=None, keys=None, **info):
    chunks = [ChunkStorageMetadata(offsets=Size(o), sizes=Size(s)) for o, s in boxes]
    properties = TensorProperties(dtype=dtype(element), layout=Call(get_layout, layout))
    state = {fqn: TensorStorageMetadata(properties=properties, size=Size(shape), chunks=chunks)}
    storage = {}
    for i, (of, offset) in enumerate(entries or [(fqn, boxes[0][0])]):
        storage[MetadataIndex(fqn=of, offset=Size(offset), index=i)] = StorageInfo(
            relative_path=path if isinstance(path, str) else path[i], offset=0, length=length, **info)
    return Metadata(state_dict_metadata=state, planner_data={fqn: keys or (fqn,)}, storage_data=storage, storage_meta=None)


CASES = []


def case(kind, name, error):
    def register(make):
        CASES.append((kind, name, error, make))
        return make

    return register


def simple(kind, name, error, data=None, **meta):
    """A checkpoint of one tensor, with the given item bytes and metadata."""
    def make(folder):
        body = item() if data is None else data
        meta.setdefault("length", len(body))
        write(folder, ".metadata", pickle.dumps(metadata(**meta), 4))
        write(folder, "__0_0.distcp", body)

    CASES.append((kind, name, error, make))


def write(folder, name, data):
    with open(os.path.join(folder, name), "wb") as f:
        f.write(data)


@case(BAD, "hostile-global", "3 {}/.metadata: offset 14: pickle global os.system is not allowed: this file may be hostile")
def _(folder):
    write(folder, ".metadata", b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.")


@case(BAD, "hostile-getattr", "3 {}/.metadata: offset 27: pickle global builtins.getattr is not allowed: this file may "
      "be hostile")
def _(folder):
    write(folder, ".metadata", b"\x80\x02cbuiltins\ngetattr\nX\x00\x00\x00\x00N\x86R.")


@case(BAD, "not-a-pickle", "3 {}/.metadata: offset 0: not a pickle of protocol 2 to 5, the only ones that are examined: it may be hostile")
def _(folder):
    write(folder, ".metadata", b"(a text file)\n")


@case(BAD, "empty-metadata", "3 {}/.metadata: offset 0: the pickle is cut off: 1 more bytes are expected, 0 are left")
def _(folder):
    write(folder, ".metadata", b"")


@case(BAD, "other-pickle", "3 {}/.metadata: not the metadata of a checkpoint: the pickle contains something else")
def _(folder):
    write(folder, ".metadata", pickle.dumps({"w": 1}, 4))


@case(BAD, "truncated-metadata", "3 {}/.metadata: offset 298: the pickle is cut off: 20 more bytes are expected, 0 "
      "are left")
def _(folder):
    write(folder, ".metadata", pickle.dumps(metadata(), 4)[:300])


@case(BAD, "claims-4-gib", "3 {}/.metadata: offset 2: the pickle is cut off: 4294967295 more bytes are expected, 0 "
      "are left")
def _(folder):
    write(folder, ".metadata", b"\x80\x04X\xff\xff\xff\xff")


@case(BAD, "memo-4-gib", "3 {}/.metadata: offset 3: the pickle is damaged: it fetches memo entry 4294967295, which "
      "was never stored")
def _(folder):
    write(folder, ".metadata", b"\x80\x04Nj\xff\xff\xff\xff.")


@case(BAD, "missing-metadata", "3 {}: the file .metadata is missing: the save did not finish, or the copy is "
      "incomplete; no other file has the names of the tensors")
def _(folder):
    write(folder, "__0_0.distcp", item())


@case(BAD, "missing-file", "3 {}/__0_0.distcp: the file is missing: .metadata places 1 item in it, for example of "
      "tensor w")
def _(folder):
    write(folder, ".metadata", pickle.dumps(metadata(length=10), 4))


@case(BAD, "missing-files", "3 {}/__0_0.distcp: the file is missing: .metadata places 1 item in it, for example of "
      "tensor w; 1 more file is missing too")
def _(folder):
    write(folder, ".metadata", pickle.dumps(metadata(
        length=10, boxes=[((0, 0), (1, 3)), ((1, 0), (1, 3))], path=["__0_0.distcp", "__1_0.distcp"],
        entries=[("w", (0, 0)), ("w", (1, 0))]), 4))


@case(BAD, "symlink-out", "3 {}/__0_0.distcp: a symbolic link that leads out of the checkpoint, to /dev/null; "
      "--follow-external allows it")
def _(folder):
    write(folder, ".metadata", pickle.dumps(metadata(), 4))
    os.symlink("/dev/null", os.path.join(folder, "__0_0.distcp"))


simple(BAD, "truncated-file", "3 {}/__0_0.distcp: truncated: it has 528 bytes, .metadata places items up to byte 2000 "
       "in it, the last one of tensor w: copy the file again, or save again", length=2000)
simple(BAD, "path-up", "3 {}/.metadata: tensor w: the file name ../dcp-path-up/__0_0.distcp leads out of the "
       "checkpoint: this file may be hostile", path="../dcp-path-up/__0_0.distcp")
simple(BAD, "path-absolute", "3 {}/.metadata: tensor w: the file name /dev/zero leads out of the checkpoint: this file "
       "may be hostile", path="/dev/zero")
simple(BAD, "box-outside", "3 {}/.metadata: tensor w: a chunk of 3 elements at offset 1 does not fit into dimension 1 "
       "of size 3", boxes=[((0, 1), (2, 3))])
simple(BAD, "shape-overflow", "3 {}/.metadata: tensor w: its size is invalid", shape=(2 ** 40, 2 ** 40))
simple(BAD, "shape-negative", "3 {}/.metadata: tensor w: its size is invalid", shape=(-2, 3))
simple(BAD, "no-place", "3 {}/.metadata: tensor w: storage_data does not list its chunk at [1, 0]",
       boxes=[((0, 0), (1, 3)), ((1, 0), (1, 3))])
simple(BAD, "no-tensor", "3 {}/.metadata: tensor x: it is in storage_data, but not in state_dict_metadata",
       entries=[("w", (0, 0)), ("x", (0, 0))])
simple(BAD, "no-chunk", "3 {}/.metadata: tensor w: storage_data has a chunk at [1, 0] that is not in "
       "state_dict_metadata", entries=[("w", (0, 0)), ("w", (1, 0))])
simple(BAD, "two-places", "3 {}/.metadata: tensor w: storage_data lists one of its chunks twice",
       entries=[("w", (0, 0)), ("w", (0, 0))])
simple(BAD, "item-garbage", "3 tensor w: {}/__0_0.distcp: offset 0: the torch.save archive is damaged: the end record "
       "is missing; the archive may be truncated, or its offset in the file is wrong", b"x" * 700)
simple(BAD, "item-dtype", "3 tensor w: {}/__0_0.distcp: offset 0: the item has the dtype int32, but .metadata says "
       "float32",
       item(tensor(storage=Storage("IntStorage"))))
simple(BAD, "item-sizes", "3 tensor w: {}/__0_0.distcp: offset 0: the item's sizes differ from those in .metadata",
       item(tensor((3, 2), (2, 1))))
simple(BAD, "item-outside", "3 tensor w: {}/__0_0.distcp: offset 0: the pickled tensor is damaged: its elements are "
       "outside its storage", item(tensor(offset=1)))
simple(BAD, "item-stride-overflow", "3 tensor w: {}/__0_0.distcp: offset 0: the pickled tensor is damaged: its "
       "elements are outside its storage", item(tensor(strides=(2 ** 62, 1))))
simple(BAD, "item-stride-negative", "3 tensor w: {}/__0_0.distcp: offset 0: the pickled tensor is damaged: a stride is "
       "not an integer >= 0", item(tensor(strides=(-3, 1), offset=3)))
simple(BAD, "item-storage-size", "3 tensor w: {}/__0_0.distcp: offset 297: record archive/data/0 has 20 bytes, but the "
       "pickle says 24", item(data=FLOATS[:20]))
simple(BAD, "item-crc", "3 tensor w: {}/__0_0.distcp: offset 46: record archive/data.pkl is damaged: its CRC does not "
       "match", item(pkl={"crc": 1}))
simple(BAD, "item-directory", "3 tensor w: {}/__0_0.distcp: offset 446: the torch.save archive is damaged: a record is "
       "marked as a directory", item(storage={"attributes": 0x10}))
simple(BAD, "item-twice", "3 tensor w: {}/__0_0.distcp: offset 321: the torch.save archive is damaged: two records are "
       "called archive/data/0", item(extra=[Record("archive/data/0", FLOATS)]))
simple(BAD, "item-header-elsewhere", "3 tensor w: {}/__0_0.distcp: offset 253: the torch.save archive is damaged: the "
       "header of record archive/other disagrees with the directory",
       item(extra=[Record("archive/other", FLOATS, header=253)]))
INNER = struct.pack("<IHHHHHIIIHH", 0x04034B50, 20, 0, 0, 0, 0, 0, 0, 0, 13, 0) + b"archive/other"
simple(BAD, "item-overlap", "3 tensor w: {}/__0_0.distcp: offset 297: the torch.save archive is damaged: records "
       "archive/data/0 and archive/other overlap",
       item(data=INNER, extra=[Record("archive/other", b"", header=297)]))
simple(BAD, "item-local", "3 tensor w: {}/__0_0.distcp: offset 253: the torch.save archive is damaged: the header of "
       "record archive/data/0 disagrees with the directory", item(storage={"local_name": b"archive/data/1"}))
simple(BAD, "item-too-long", "3 tensor w: {}/__0_0.distcp: offset 253: the torch.save archive is damaged: the header "
       "of record archive/data/0 disagrees with the directory", item(storage={"stored": 4000, "size": 4000}))
simple(BAD, "item-inflates-short", "3 tensor w: {}/__0_0.distcp: offset 46: record archive/data.pkl is damaged: it "
       "does not inflate to its declared size", item(pkl={"deflate": True, "says": 400}))
simple(BAD, "item-inflates-long", "3 tensor w: {}/__0_0.distcp: offset 46: record archive/data.pkl is damaged: it "
       "does not inflate to its declared size", item(pkl={"deflate": True, "says": 20}))
simple(BAD, "item-ratio", "3 tensor w: {}/__0_0.distcp: offset 46: record archive/data.pkl is damaged: its declared "
       "size is invalid", item(pkl={"deflate": True, "says": 2 ** 31}))
simple(BAD, "item-no-tensor", "3 tensor w: {}/__0_0.distcp: offset 0: the pickled tensor is damaged: the value is not "
       "a tensor", item([1, 2]))
simple(BAD, "item-byteorder", "3 tensor w: {}/__0_0.distcp: offset 247: record archive/byteorder says neither "
       "\"little\" nor \"big\"", item(byteorder=b"mixed"))

simple(UNSUPPORTED, "transform", "5 {}/.metadata: tensor w: it was saved with the extension stream.zstd, which is not "
       "supported; save it without _extensions", transform_descriptors=["stream.zstd"])
simple(UNSUPPORTED, "sparse", "5 {}: w: only dense tensors are supported, this one is "
       "torch.sparse_coo; --exclude 'w' leaves it out", layout="torch.sparse_coo")
simple(UNSUPPORTED, "quantized", "5 {}: w: the element type torch.quint8 is not supported; --exclude 'w' leaves it out",
       element="quint8")
simple(UNSUPPORTED, "33-dims", "5 {}: w: it has 33 dimensions; at most 32 are supported; --exclude 'w' leaves it out",
       shape=(1,) * 33, boxes=[((0,) * 33, (1,) * 33)])
simple(UNSUPPORTED, "surrogate-name", "5 {}/.metadata: tensor a\udc80: a name with NUL or lone surrogates is not "
       "supported", fqn="a\udc80")
simple(BAD, "item-conjugated-float", "3 tensor w: {}/__0_0.distcp: offset 0: the pickled tensor is damaged: it is a "
       "lazy view of a type that has no such views", item(tensor(flags={"conj": True})))
simple(UNSUPPORTED, "compressed", "5 tensor w: {}/__0_0.distcp: offset 297: record archive/data/0 is compressed; "
       "unpack and save the checkpoint again; --exclude 'w' leaves it out", item(storage={"deflate": True}))
simple(UNSUPPORTED, "encrypted", "5 tensor w: {}/__0_0.distcp: offset 446: the archive is encrypted; "
       "--exclude 'w' leaves it out", item(storage={"flags": 1}))
simple(UNSUPPORTED, "legacy-item", "5 tensor w: {}/__0_0.distcp: offset 0: an item in the format of torch before 1.6; "
       "load and save it again with a newer PyTorch; --exclude 'w' leaves it out",
       b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03." + b"\0" * 100)


simple(BAD, "path-of-another-name", "3 {}/.metadata: tensor a.weight: its path in planner_data does not match its "
       "name: it has the key weiGht; .metadata is damaged; copy it again, or save again", fqn="a.weight", keys=("a", "weiGht"))
simple(BAD, "path-too-short", "3 {}/.metadata: tensor a.weight: its path in planner_data ends before its name: .metadata is "
       "damaged; copy it again, or save again", fqn="a.weight", keys=("a",))


@case(UNSUPPORTED, "newer-torch", "5 {}/.metadata: unsupported: class Metadata3 of torch.distributed.checkpoint.metadata")
def _(folder):
    write(folder, ".metadata", pickle.dumps(stand_in(META, "Metadata3")(), 4))


@case(BAD, "rank-missing", "3 {}/__0.metadata: the file is missing, but the directory has __1.metadata; each rank "
      "wrote one")
def _(folder):
    write(folder, "__1.metadata", pickle.dumps(metadata(), 4))
    write(folder, "__0_0.distcp", item())


def main():
    corpus, = sys.argv[1:]
    for kind, name, error, make in CASES:
        folder = os.path.join(corpus, kind, "dcp-" + name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        make(folder)
        write(folder, "expected-error", (error + "\n").encode("utf-8", "surrogatepass"))
    print(f"{len(CASES)} cases")


if __name__ == "__main__":
    main()
