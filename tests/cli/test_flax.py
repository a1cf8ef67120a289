"""Msgpack files of Flax that are damaged, hostile or odd, and what Orbax wrote. tests/oracle/flax_read.py reads those that Flax wrote."""

import json
import os
import struct
import unittest

import harness

FLAX = os.path.join(os.path.dirname(harness.CORPUS), "flax")
DAMAGED, TOO_LONG = "an array of Flax is damaged: ", "a value is longer than what is left"


def raw(kind, payload):
    """A STR (d9) or BIN (c4) or, for larger ones, their 32-bit forms."""
    return bytes([kind, len(payload)]) + payload if len(payload) < 256 else bytes([kind + 2]) + struct.pack(">I", len(payload)) + payload


def pack(value):
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, dict):
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(pack(k) + pack(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(pack, value))
    if isinstance(value, str):
        return raw(0xd9, value.encode())
    if isinstance(value, bytes):
        return raw(0xc4, value)
    return bytes([value]) if 0 <= value < 128 else b"\xd3" + struct.pack(">q", value)


class Raw:
    def __init__(self, data):
        self.data = data


def extension(kind, payload):
    return Raw(b"\xc9" + struct.pack(">Ib", len(payload), kind) + payload)


def array(shape=(2,), dtype="float32", data=bytes(8), kind=1, parts=None):
    return extension(kind, pack([list(shape), dtype, data] if parts is None else parts))


def chunked(shape, chunks, **members):
    return {"__msgpack_chunked_array__": Raw(b"\xc3"), "shape": {str(i): n for i, n in enumerate(shape)},
            "chunks": {str(i): c for i, c in enumerate(chunks)}, **members}


def in_file(value):
    return b"\xdf" + struct.pack(">I", 1) + pack("w") + pack(value)


HUGE = Raw(b"\xc6\xff\xff\xff\xff")
BOOLEAN = Raw(b"\xc3")
# The bytes of a file, the exit status, words of the line.
REFUSED = {
    "truncated": (in_file(array())[:-1], 3, TOO_LONG),
    "no value": (b"\x81\xa1w", 3, TOO_LONG),
    "behind": (in_file(array()) + b"\0", 3, "it ends before the file"),
    "byte": (b"\x81\xa1w\xc1", 3, "no value begins with the byte 0xc1"),
    "string of 4 GiB": (b"\x81\xa1w\xdb\xff\xff\xff\xff", 3, TOO_LONG),
    "bytes of 4 GiB": (in_file(HUGE), 3, TOO_LONG),
    "map of 2^32": (b"\xdf\xff\xff\xff\xff\xa1w\x01", 3, TOO_LONG),
    "list of 2^32": (b"\x81\xa1w\xdd\xff\xff\xff\xff", 3, TOO_LONG),
    "lists of lists": (b"\x81\xa1w" + b"\xdd\0\0\0\x09" * 3 + bytes(9), 3, "longer than the file"),
    "deep dicts": (b"\x81\xa1w" * 200 + b"\x01", 5, "nested more than 128 levels deep"),
    "deep lists": (b"\x81\xa1w" + b"\x91" * 200 + b"\x01", 5, "nested more than 128 levels deep"),
    "key": (b"\x82\xa1w\x01\xc0\x01", 5, "a dict has a key that is neither a text"),
    "key NUL": (b"\x82\xa1w\x01\xa1\0\x01", 5, "a key of a dict is not UTF-8 without NUL"),
    "key not UTF-8": (b"\x82\xa1w\x01\xa1\xff\x01", 5, "a key of a dict is not UTF-8 without NUL"),
    "twice": (b"\x82\xa1w\x01\xa1w\x02", 3, "two values have the name w"),
    "twice by dots": (b"\x82\xa3a.b\x01\xa1a\x81\xa1b\x02", 3, "two values have the name a.b"),
    "parts": (in_file(array(parts=[[2], "float32"])), 3, DAMAGED + "it is not [shape, dtype, bytes]"),
    "not a list": (in_file(extension(1, pack("x"))), 3, DAMAGED + "it is not [shape, dtype, bytes]"),
    "empty extension": (in_file(extension(1, b"")), 3, TOO_LONG),
    "shape": (in_file(array(parts=["x", "float32", bytes(8)])), 3, DAMAGED + "its shape is no list"),
    "negative size": (in_file(array((-2,))), 3, DAMAGED + "a size is not an integer >= 0"),
    "size of 2^64": (in_file(array(parts=[[Raw(b"\xcf" + b"\xff" * 8)], "float32", bytes(8)])), 3, "a size is not an integer"),
    "dtype": (in_file(array(parts=[[2], 7, bytes(8)])), 3, DAMAGED + "its dtype is no name"),
    "bytes are short": (in_file(array((3,))), 3, DAMAGED + "its bytes are not as many as its shape needs"),
    "overflow": (in_file(array((2**62, 2**62))), 3, "its bytes are not as many as its shape needs"),
    "behind the bytes": (in_file(extension(1, pack([[2], "float32", bytes(8)]) + b"\0")), 3, DAMAGED + "its bytes do not end where it ends"),
    "bytes beyond": (in_file(extension(1, pack([[2], "float32", HUGE]))), 3, TOO_LONG),
    "complex": (in_file(extension(2, pack([1, 2]))), 3, "a complex number of Flax is damaged"),
    "dtype unknown": (in_file(array((2,), "int4", bytes(2))), 5, "w: the element type int4 is not supported"),
    "nine dimensions": (in_file(array((1,) * 33, "int8", b"\1")), 5, "w: it has 33 dimensions; at most"),
    "other extension": (in_file(extension(-1, bytes(4))), 5, "w: extension -1 of msgpack, which Flax does not write"),
    "chunks of two dtypes": (in_file(chunked((4,), [array(), array(dtype="int32")])), 3, "its chunks have different dtypes"),
    "chunks too few": (in_file(chunked((5,), [array(), array()])), 3, "its chunks have fewer elements than its shape"),
    "chunks too many": (in_file(chunked((3,), [array(), array()])), 3, "its chunks have more elements than its shape"),
    "chunk of a scalar": (in_file(chunked((4,), [array(), 7])), 3, "a chunk is no array"),
    "chunk of a matrix": (in_file(chunked((4,), [array((2, 1)), array()])), 3, "a chunk has more than one dimension"),
    "no chunks": (in_file(chunked((0,), [])), 3, "it has no chunks"),
    "chunk missing": (in_file({**chunked((4,), []), "chunks": {"0": array(), "2": array()}}), 3, "lacks one"),
    "chunked and more": (in_file(chunked((2,), [array()], more=1)), 3, "is not {mark, shape, chunks}"),
    "chunked in disorder": (in_file({"shape": {"0": 2}, "__msgpack_chunked_array__": BOOLEAN, "chunks": {"0": array()}}), 3,
                            "does not begin as Flax writes it"),
    "chunked shape": (in_file({**chunked((), []), "shape": 3}), 3, "its shape is no dict"),
    "chunked size": (in_file({**chunked((), []), "shape": {"0": "x"}}), 3, "a size is not an integer >= 0"),
    "chunked overflow": (in_file(chunked((2**62, 2**62), [array()])), 3, "its shape is too large"),
    "chunks of int4": (in_file(chunked((2,), [array((2,), "int4", bytes(2))])), 5, "w: the element type int4 is not supported"),
}


class Flax(harness.Case):
    def write(self, data, name="x.msgpack"):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as f:
            f.write(data)
        return name

    def test_refused(self):
        for name, (data, status, words) in REFUSED.items():
            with self.subTest(name):
                self.write(data)
                said = self.fails(status, "consolidate", "x.msgpack", "-o", "out.h5", contains=["x.msgpack", words])
                if status == 3 and "two values" not in words:
                    self.assertIn("offset ", said)
                self.assertFalse(os.path.exists(self.path("out.h5")))

    def test_every_length(self):
        """A file that ends anywhere is refused, and so is one with any byte changed, or it can be read completely."""
        with open(os.path.join(FLAX, "chunked.msgpack"), "rb") as f:
            good = f.read()
        for length in range(0, len(good), 7):
            self.write(good[:length])
            p = self.run_tool("verify", "x.msgpack")
            self.assertEqual((p.returncode, p.stderr.count("\n")), (3, 1), (length, p.stderr))
        for at in range(0, len(good), 11):
            self.write(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1:])
            self.assertIn(self.run_tool("verify", "x.msgpack").returncode, (0, 1, 3, 5), at)

    def test_content_decides(self):
        """A dict of msgpack is recognised by its first bytes, whatever its name is; another value by .msgpack."""
        self.write(in_file(array()), "anything")
        self.assertIn("float32", self.ok("inspect", "anything"))
        self.write(pack(array()), "alone.msgpack")
        self.assertIn("tensor ", self.ok("inspect", "alone.msgpack"))
        self.fails(3, "inspect", self.write(pack(array()), "alone"), contains=["alone"])

    def test_folder(self):
        """save_pretrained's files. PyTorch's go before them."""
        self.write(in_file(array()), "hub/flax_model.msgpack")
        self.assertIn("Flax (msgpack)", self.ok("inspect", "hub"))
        self.ok("convert", "hub", "-o", "hub/model.safetensors", "-q")
        p = self.run_tool("inspect", "hub")
        self.assertIn("safetensors", p.stdout)
        self.assertIn("flax_model.msgpack", p.stderr)

    def sharded(self, weights, files):
        self.write(json.dumps({"metadata": {"total_size": 8}, "weight_map": weights}).encode(), "s/flax_model.msgpack.index.json")
        for name, data in files.items():
            self.write(data, "s/" + name)

    def test_index(self):
        first, second = pack({"a": {"w": array()}}), pack({"b": array((2,), "int32")})
        files = {"1.msgpack": first, "2.msgpack": second}
        weights = {"a/w": "1.msgpack", "b": "2.msgpack"}
        self.sharded(weights, files)
        for path in ("s", "s/flax_model.msgpack.index.json"):
            self.assertIn("a.w ", self.ok("inspect", path))
        self.sharded({"a/w": "2.msgpack", "b": "2.msgpack"}, files)
        self.fails(3, "inspect", "s", contains=["the index says that it is in 2.msgpack, but it is not"])
        self.sharded({**weights, "c": "1.msgpack"}, files)
        self.fails(3, "inspect", "s", contains=["c: the index says"])
        self.sharded({**weights, "b": "../2.msgpack"}, files)
        self.fails(3, "inspect", "s", contains=["leads out of the checkpoint"])
        self.sharded(weights, {"2.msgpack": first})
        self.fails(3, "inspect", "s", contains=["two values have the name a.w"])
        os.remove(self.path("s/2.msgpack"))
        self.fails(3, "inspect", "s", contains=["2.msgpack"])

    def test_memory(self):
        """Arrays of any size stay in the file: 64 GiB that are a hole, in chunks of 1 GiB, as Flax makes them."""
        rows, chunk = 64, 1 << 30
        with open(self.path("big.msgpack"), "wb") as f:
            f.write(b"\x82\xa1w\x83" + pack("__msgpack_chunked_array__") + b"\xc3" + pack("shape") +
                    pack({"0": rows, "1": chunk // 2}) + pack("chunks") + b"\xdf" + struct.pack(">I", rows))
            for i in range(rows):
                inner = b"\x93" + b"\x91\xce" + struct.pack(">I", chunk // 2) + pack("bfloat16") + b"\xc6" + struct.pack(">I", chunk)
                f.write(pack(str(i)) + b"\xc9" + struct.pack(">Ib", len(inner) + chunk, 1) + inner)
                f.seek(chunk, os.SEEK_CUR)
            f.write(pack("z") + pack(array(data=b"ABCDEFGH")))
        self.assertIn("64×536870912", self.ok("inspect", "big.msgpack"))
        self.ok("extract", "big.msgpack", "z", "-o", "z.bin")
        with open(self.path("z.bin"), "rb") as f:
            self.assertEqual(f.read(), b"ABCDEFGH")


class Orbax(harness.Case):
    """Checkpoints that orbax-checkpoint wrote are named, with what to do, and that works."""

    def test_named(self):
        home = os.path.join(os.path.dirname(FLAX), "orbax")
        for path in ("standard", "zarr3", "manager", "manager/0", "manager/0/default", "zarr3/_METADATA"):
            for command in (["inspect"], ["consolidate", "-o", "out.h5"]):
                self.fails(5, command[0], os.path.join(home, path), *command[1:],
                           contains=[path, "an Orbax checkpoint (JAX), which only TensorStore reads: write flax.serialization"])
        self.fails(5, "inspect", os.path.join(home, "standard", "manifest.ocdbt"), contains=["give the path of the checkpoint"])
        listed = json.loads(self.ok("inspect", os.path.join(home, "restored.msgpack"), "--json"))
        self.assertEqual({t["name"]: (t["dtype"], t["shape"]) for t in listed["tensors"]},
                         {"params.dense.kernel": ("float32", [3, 4]), "params.dense.bias": ("bfloat16", [4])})
        self.ok("extract", os.path.join(home, "restored.msgpack"), "params.dense.kernel", "-o", "k.bin")
        with open(self.path("k.bin"), "rb") as f:
            self.assertEqual(f.read(), struct.pack("<12f", *range(12)))


if __name__ == "__main__":
    unittest.main()
