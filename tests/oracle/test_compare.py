#!/usr/bin/env python3
"""compare.py must be able to fail: it has to find each damage that is done here to a good file.

Needs only h5py and numpy. The good file and its expected.json are made here by hand, which also documents what compare.py
accepts.
"""
import hashlib
import json
import os
import sys
import tempfile
import unittest

try:
    import h5py
    import numpy as np
    import compare
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

W = np.arange(6, dtype="<f4").reshape(2, 3)
BF = np.array([[0x3F80, 0x7FC1], [0xFF80, 0x0001]], dtype="<u2")  # a NaN with a payload must survive
ITEM = b"PK\x03\x04 an item"


def bf16_type():
    t = h5py.h5t.IEEE_F32LE.copy()
    t.set_fields(15, 7, 8, 0, 7)
    t.set_size(2)
    t.set_ebias(127)
    return t


def put(group, name, t, raw, shape, **attrs):
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    d = h5py.h5d.create(group.id, name.encode(), t, space)
    if raw:
        d.write(h5py.h5s.ALL, h5py.h5s.ALL, np.frombuffer(raw, dtype=np.uint8).copy(), t)
    for k, v in attrs.items():
        h5py.Dataset(d).attrs[k] = v


def opaque():
    t = h5py.h5t.create(h5py.h5t.OPAQUE, 1)
    t.set_tag(b"pickle")
    return t


def write(path, skip=(), item=ITEM, decoded="3", bits=None, w=W):
    with h5py.File(path, "w") as f:
        model = f.create_group("model")
        if "w" not in skip:
            put(model, "a%2Fb", h5py.h5t.py_create(w.dtype), w.tobytes(), w.shape)
        put(model, "bf", bf16_type(), (BF if bits is None else bits).tobytes(), (2, 2), dtype="bfloat16")
        put(model, "%2E", h5py.h5t.py_create(np.dtype("<i8")), np.int64(-7).tobytes(), ())
        put(model, "empty", h5py.h5t.py_create(np.dtype(bool), logical=True), b"", (0, 3))
        put(f, "step", opaque(), item, (len(item),), json=decoded)


def truth(path):
    def t(dtype, shape, raw, *where):
        return {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(raw).hexdigest(), "path": list(where)}

    doc = {"tensors": {
        "model.a/b": t("float32", W.shape, W.tobytes(), "model", "a/b"),
        "model.bf": t("bfloat16", (2, 2), BF.tobytes(), "model", "bf"),
        "model..": t("int64", (), np.int64(-7).tobytes(), "model", "."),
        "model.empty": t("bool", (0, 3), b"", "model", "empty"),
    }, "objects": {"step": {"repr": "3", "json": 3, "path": ["step"], "file": "__0_0.distcp", "offset": 0,
                            "length": len(ITEM), "sha256": hashlib.sha256(ITEM).hexdigest()}}}
    with open(path, "w") as f:
        json.dump(doc, f)


class Compare(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory()
        self.h5 = os.path.join(self.dir.name, "m.h5")
        self.expected = os.path.join(self.dir.name, "expected.json")
        truth(self.expected)

    def tearDown(self):
        self.dir.cleanup()

    def finds(self, what, **damage):
        write(self.h5, **damage)
        problems, _ = compare.compare(self.h5, self.expected)
        self.assertEqual(len(problems), 1, problems)
        self.assertIn(what, problems[0])

    def test_good(self):
        write(self.h5)
        self.assertEqual(compare.compare(self.h5, self.expected), ([], 5))

    def test_missing(self):
        self.finds("missing", skip=("w",))

    def test_missing_is_fine_in_a_subset(self):
        write(self.h5, skip=("w",))
        self.assertEqual(compare.compare(self.h5, self.expected, subset=True), ([], 4))

    def test_one_bit(self):
        w = W.copy()
        w.view("<u4")[1, 2] ^= 1
        self.finds("sha256", w=w)

    def test_nan_payload(self):
        bits = BF.copy()
        bits[0, 1] = 0x7FC0
        self.finds("sha256", bits=bits)

    def test_shape(self):
        self.finds("shape", w=W.reshape(3, 2))

    def test_dtype(self):
        self.finds("dtype", w=W.view("<i4"))

    def test_byte_order(self):
        self.finds("little-endian", w=W.astype(">f4"))

    def test_item_bytes(self):
        self.finds("sha256", item=ITEM[:-1] + b"M")

    def test_json_value(self):
        self.finds("attribute json", decoded="3.0")

    def test_json_syntax(self):
        self.finds("not JSON", decoded="three")

    def test_extra(self):
        write(self.h5)
        with h5py.File(self.h5, "a") as f:
            f["model"]["more"] = 1.0
        problems, _ = compare.compare(self.h5, self.expected)
        self.assertEqual(len(problems), 1, problems)
        self.assertIn("not in the checkpoint", problems[0])

    def test_bf16_without_its_name(self):
        write(self.h5)
        with h5py.File(self.h5, "a") as f:
            del f["model"]["bf"].attrs["dtype"]
        problems, _ = compare.compare(self.h5, self.expected)
        self.assertIn("no attribute dtype", problems[0])

    def test_uint8_bits(self):
        """Types such as e8m0 are stored as uint8 with a name; int8 is not accepted for them."""
        for code, good in (("u1", True), ("i1", False)):
            with h5py.File(self.h5, "w") as f:
                put(f, "e", h5py.h5t.py_create(np.dtype(code)), b"\x7f\xff", (2,), dtype="float8_e8m0fnu")
            with open(self.expected, "w") as f:
                json.dump({"tensors": {"e": {"dtype": "float8_e8m0fnu", "shape": [2], "path": ["e"],
                                             "sha256": hashlib.sha256(b"\x7f\xff").hexdigest()}}, "objects": {}}, f)
            self.assertEqual(compare.compare(self.h5, self.expected)[0] == [], good)

    def test_list_without_kind(self):
        for kind in ("list", None):
            with h5py.File(self.h5, "w") as f:
                f.attrs["fsdpckpt_schema"] = 1
                group = f.create_group("l")
                if kind:
                    group.attrs["kind"] = kind
                put(group, "0", h5py.h5t.py_create(np.dtype("<i2")), b"\1\0", (1,), dtype="int16")
            with open(self.expected, "w") as f:
                json.dump({"tensors": {"l.0": {"dtype": "int16", "shape": [1], "path": ["l", 0],
                                               "sha256": hashlib.sha256(b"\1\0").hexdigest()}}, "objects": {}}, f)
            problems, _ = compare.compare(self.h5, self.expected)
            self.assertEqual(problems == [], kind is not None, problems)

    def test_negative_zero(self):
        self.assertFalse(compare.same(-0.0, 0.0))
        self.assertFalse(compare.same([1], [1.0]))
        self.assertTrue(compare.same({"a": [0.1, None]}, {"a": [0.1, None]}))

    def test_link(self):
        write(self.h5, skip=("w",))
        with h5py.File(self.h5, "a") as f:
            f["model"]["a%2Fb"] = h5py.SoftLink("/model/bf")
        problems, _ = compare.compare(self.h5, self.expected)
        self.assertIn("link", problems[0])

    def test_no_file(self):
        problems, _ = compare.compare(self.h5, self.expected)
        self.assertIn("cannot open", problems[0])

    def sharded(self, offsets=(1, 0), damage=0):
        """Writes two shard files of one row each, and index.h5 with a virtual dataset over them."""
        target = os.path.join(self.dir.name, "out")
        os.makedirs(target)
        for r in range(2):
            with h5py.File(os.path.join(target, "shard-%05d-of-00002.h5" % r), "w") as f:
                d = f.create_dataset("model/w", data=W[r:r + 1] + (damage if r else 0))
                d.attrs["global_shape"], d.attrs["offsets"] = W.shape, offsets if r else (0, 0)
        layout = h5py.VirtualLayout(W.shape, W.dtype)
        for r in range(2):
            layout[r:r + 1] = h5py.VirtualSource("shard-%05d-of-00002.h5" % r, "model/w", (1, 3))
        with h5py.File(os.path.join(target, "index.h5"), "w") as f:
            f.create_virtual_dataset("model/w", layout)
        with open(self.expected, "w") as f:
            json.dump({"tensors": {"model.w": {"dtype": "float32", "shape": [2, 3], "path": ["model", "w"],
                                               "sha256": hashlib.sha256(W.tobytes()).hexdigest()}}, "objects": {}}, f)
        return compare.compare(target, self.expected, boxes=True)[0]

    def test_sharded(self):
        self.assertEqual(self.sharded(), [])

    def test_box_out_of_place(self):
        self.assertIn("not the bytes of the box", self.sharded(offsets=(0, 0))[0])

    def test_box_outside(self):
        self.assertIn("leaves", self.sharded(offsets=(2, 0))[0])

    def test_shard_bytes(self):
        self.assertIn("sha256", self.sharded(damage=1)[0])


if __name__ == "__main__":
    unittest.main()
