"""Objects in files of torch.save: their values as JSON, and pickles that no pickler writes."""
import datetime
import json
import pickle
import struct

import harness
import pickles
from pickles import Call, Global, Opcodes, Persistent


def builtin(name, *args):
    return Call(Global("builtins", name), args)


def python(value):
    """A real Python value."""
    return pickles.loads(pickle.dumps(value, 2))


def dtype(code, state=(3, "<", None, None, None, -1, -1, 0)):
    return Call(Global("numpy", "dtype"), (code, False, True), state=state)


def scalar(code, data, module="numpy.core.multiarray", **more):
    return Call(Global(module, "scalar"), (dtype(code, **more), data))


def array(*state, module="numpy.core.multiarray"):
    return Call(Global(module, "_reconstruct"), (Global("numpy", "ndarray"), (0,), b"b"), state=state)


def number(code, kind, fmt, value):
    """A NumPy scalar, its type and its value as Python's struct knows them."""
    data = struct.pack("<" + fmt, *(value if isinstance(value, tuple) else (value,)))
    unpacked = struct.unpack("<" + fmt, data)
    return scalar(code, data), {"$scalar": {"dtype": kind, "value": plain(*unpacked)}}


def plain(value, imaginary=None):
    if imaginary is not None:
        return {"$complex": [value, imaginary]}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"$float": "nan" if value != value else "inf" if value > 0 else "-inf"}
    return {"$int": str(value)} if isinstance(value, int) and value >= 1 << 63 else value


def timezone(*args, **more):
    return datetime.timezone(datetime.timedelta(*args, **more))


def node(cls, state):
    return Call(Global("omegaconf." + cls[0], cls[1]), (), True, state)


def nested(depth):
    value = None
    for _ in range(depth):
        value = Call(Global("mine", "C"), (value,))
    return value


DAY = datetime.datetime(2024, 2, 29, 13, 5, 9, 42)
INF = float("inf")

# Values and their JSON (docs/HDF5_SCHEMA.md).
VALUES = [
    *[number("f2", "float16", "e", v) for v in (1.5, -0.0, 6e-8, 65504.0, INF, -INF, float("nan"))],
    *[number("f8", "float64", "d", v) for v in (1.5, INF, -INF, float("nan"))],
    *[number("f4", "float32", "f", v) for v in (-1.5, INF)],
    *[number("i%d" % n, "int%d" % (8 * n), f, v) for n, f in ((1, "b"), (2, "h"), (4, "i"), (8, "q")) for v in (-3, 100)],
    *[number("u%d" % n, "uint%d" % (8 * n), f, v) for n, f in ((1, "B"), (2, "H"), (4, "I"), (8, "Q")) for v in (0, (1 << 8 * n) - 1)],
    number("b1", "bool", "?", True),
    number("c8", "complex64", "ff", (1.0, -2.0)),
    (scalar("i4", b"\1\0\0\0", module="numpy._core.multiarray"), {"$scalar": {"dtype": "int32", "value": 1}}),
    (python(DAY.date()), {"$date": DAY.date().isoformat()}),
    (python(DAY.time()), {"$time": DAY.time().isoformat()}),
    (python(DAY.replace(microsecond=0)), {"$datetime": DAY.replace(microsecond=0).isoformat()}),
    *[(python(v), {"$datetime": v.isoformat()}) for v in
      (DAY, DAY.replace(tzinfo=timezone(hours=2)), DAY.replace(tzinfo=timezone(hours=-5, minutes=-30)),
       DAY.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=1), "CET")), DAY.replace(tzinfo=datetime.timezone.utc))],
    (python(datetime.timedelta(1, 2, 3)), {"$timedelta": [1, 2, 3]}),
    (Opcodes(b"\x8a\0"), 0),
    (Call(Global("argparse", "Namespace"), (), True, {"a": 1}), {"$object": "argparse.Namespace", "state": {"a": 1}}),
    (python((1, 2.5, [b"x"])), {"$tuple": [1, 2.5, [{"$bytes": "eA=="}]]}),
    (array(1, (2,), dtype("i2"), False, b"\1\0\2\0"), {"$array": {"dtype": "int16", "shape": [2], "order": "C", "data": "AQACAA=="}}),
    (array(1, (2, 1), dtype("u1"), True, b"\1\2", module="numpy._core.multiarray"), {"$array": {"dtype": "uint8", "shape": [2, 1], "order": "F", "data": "AQI="}}),
    (node(("dictconfig", "DictConfig"), {"_metadata": None, "_content": {"a": node(("nodes", "AnyNode"), {"_val": 3}),
                                                                        "b": node(("listconfig", "ListConfig"), {"_content": [1]})}}),
     {"$object": "omegaconf.dictconfig.DictConfig", "value": {"a": 3, "b": [1]}}),
]


def stamp(name, *args):
    return Call(Global("datetime", name), args)


def zone(*args):
    """A time whose zone is the object timezone(*args)."""
    return stamp("time", b"\0" * 6, stamp("timezone", *args))


DELTA = "timedelta"

# Instances of the same classes in forms that their own picklers do not write: they are shown by their fields.
FIELDS = [
    scalar("V2", b"ab"), scalar("i2", b"abc"), scalar("i2", "ab"), scalar(7, b"ab"), scalar("i2", b"ab", state=None),
    scalar("i2", b"ab", state=[3, "<"]), scalar("i2", b"ab", state=(3,)), scalar("i2", b"ab", state=(3, 4)),
    scalar("i2", b"ab", state=(3, ">", None)), scalar("i2", b"ab", module="mine"),
    Call(Global("numpy.core.multiarray", "scalar"), (7, b"ab")), Call(Global("numpy.core.multiarray", "scalar"), (Call(Global("mine", "dtype"), ("i2",)), b"ab")),
    Call(Global("numpy.core.multiarray", "scalar"), (Call(Global("numpy", "dtype"), ("i2",), state=(3, "<")), b"ab")),
    array(1, [2], dtype("i2"), False, b"abcd"), array(1, (2,), dtype("V2"), False, b"abcd"), array(1, (2,), dtype("i2"), False, "abcd"),
    array(1, (2,), dtype("i2"), False), array(1, (2,), dtype("i2"), False, b"abcd", module="mine"),
    Call(Global("numpy.core.multiarray", "_reconstruct"), (Global("mine", "array"), (0,), b"b"), state=(1, (2,), dtype("i2"), False, b"abcd")),
    stamp("date", b"abc"), stamp("date", "abcd"), stamp("date", 1, 2, 3), stamp("time", b"abcd"), stamp("datetime", b"abcdefghi"),
    stamp(DELTA, "1", 2, 3), stamp(DELTA, 1, "2", 3), stamp(DELTA, 1, 2, "3"), stamp(DELTA, 1, 2),
    zone(), zone(7), zone(stamp(DELTA, -2, 0, 0)), zone(stamp(DELTA, 1, 0, 0)), zone(stamp(DELTA, 0, -60, 0)), zone(stamp(DELTA, 0, 86400, 0)),
    zone(stamp(DELTA, 0, 61, 0)), zone(stamp(DELTA, 0, 60, 1)), stamp("time", b"\0" * 6, 7), stamp("time", b"\0" * 6, stamp("date", b"abcd")),
    node(("nodes", "AnyNode"), {"_metadata": 1}), node(("nodes", "AnyNode"), (1, 2)),
]

SIZE, ORDERED, DEFAULT = Global("torch", "Size"), Global("collections", "OrderedDict"), Global("collections", "defaultdict")
CALLS, NO_FUNCTION = "with invalid arguments", "it calls a value that is not a function"
NO_STATE, NOT_A, UNHASHABLE = "BUILD on a value that has no state", "items are added to a value that is not a ", "a key of a dict or set cannot be hashed"


def encode(*args):
    return Call(Global("_codecs", "encode"), args)


# Calls that make data, and their JSON.
MADE = [
    (Call(SIZE, ([1, 2],)), {"$size": [1, 2]}), (Call(SIZE, ()), {"$size": []}), (Call(SIZE, (Call(SIZE, ((3,),)),)), {"$size": [3]}),
    (Call(SIZE, ((True, 1 << 70),)), {"$size": [True, {"$int": str(1 << 70)}]}),
    (Call(ORDERED, ([["a", 1]],)), {"a": 1}), (Call(ORDERED, ((("a", 1),),)), {"a": 1}), (builtin("dict", {"a": 1}), {"a": 1}),
    (Call(DEFAULT, (None, {"a": 1})), {"a": 1}), (Call(DEFAULT, ()), {}), (Call(DEFAULT, (Global("builtins", "list"),)), {}),
    (builtin("list", (1, 2)), [1, 2]), (builtin("list", builtin("set", [1])), [1]), (builtin("list", builtin("frozenset", [1])), [1]), (builtin("list"), []),
    (builtin("set", (1,)), {"$set": [1]}), (builtin("frozenset", [1]), {"$frozenset": [1]}),
    (encode("a\xff", "latin-1"), {"$bytes": "Yf8="}), (encode("a"), {"$bytes": "YQ=="}), (builtin("bytes", b"a"), {"$bytes": "YQ=="}), (builtin("bytes"), {"$bytes": ""}),
    (builtin("bytearray", builtin("bytearray", b"a")), {"$bytearray": "YQ=="}), (builtin("bytearray", "a", "latin1"), {"$bytearray": "YQ=="}),
    (Call(Global("torch", "device"), ("cuda",)), {"$device": "cuda"}), (Call(Global("torch", "device"), ("cuda", 1)), {"$device": "cuda:1"}),
    (Opcodes(b"]Nb"), []), (Opcodes(b"\x8a\x05abcde"), int.from_bytes(b"abcde", "little")), (Opcodes(b"\x8b\x02\0\0\0\1\0"), 1),
    (Opcodes(b"\x8d\1" + bytes(7) + b"a"), "a"), (Opcodes(b"\x8e\1" + bytes(7) + b"a"), {"$bytes": "YQ=="}),
    (Opcodes(b"U\1a"), "a"), (Opcodes(b"T\1\0\0\0a"), "a"), (Opcodes(b"U\1\xff"), {"$bytes": "/w=="}),
    (Opcodes(b"c__builtin__\nset\n](\x4b\1e\x85R"), {"$set": [1]}),
]

# Values that make the pickle damaged, and what the one line says.
DAMAGED = [
    (Call(SIZE, (5,)), CALLS), (Call(SIZE, (1, 2)), CALLS), (Call(SIZE, ((1, "a"),)), CALLS), (Call(SIZE, (["a"],)), CALLS),
    (Call(ORDERED, ([5],)), CALLS), (Call(ORDERED, ([(1, 2, 3)],)), CALLS), (Call(ORDERED, (5,)), CALLS), (builtin("dict", builtin("set", [1])), CALLS),
    (Call(ORDERED, ([([], 1)],)), UNHASHABLE), (builtin("set", [[1]]), UNHASHABLE), (builtin("set", 5), CALLS), (builtin("list", {}), CALLS),
    (builtin("list", 1, 2, 3), CALLS), (builtin("bytes", 5), CALLS), (encode("a", "utf8"), CALLS), (encode("a", 5), CALLS), (encode("\u0100"), CALLS),
    (Call(Global("torch", "float32"), ()), CALLS), (Call(Global("torch", "FloatStorage"), ()), CALLS),
    (Opcodes(b"c__builtin__\nset\nNR"), "the arguments of a call are not a tuple"), (Opcodes(b"N)R"), NO_FUNCTION), (Opcodes(b"N)\x81"), NO_FUNCTION),
    (Opcodes(b"N\x8c\1a\x93"), "a global's name is not a string"), (Opcodes(b"\x8c\1aN\x93"), "a global's name is not a string"),
    (Opcodes(b"]]b"), NO_STATE), (Opcodes(b"K\1Nb"), NO_STATE), (Opcodes(b"\x8f]b"), NO_STATE), (Opcodes(b"ccollections\ndefaultdict\n)R}b"), NO_STATE), (Opcodes(b"}}b"), NO_STATE),
    (Opcodes(b"K\1(K\2e"), NOT_A + "list"), (Opcodes(b"](K\1K\2u"), NOT_A + "dict"), (Opcodes(b"](K\1\x90"), NOT_A + "set"), (Opcodes(b"}(K\1u"), "a dict has a key without a value"),
    (Opcodes(b"X\1\0\0\0\xff"), "UTF-8"), (Opcodes(b"X\2\0\0\0\xe0\x80"), "UTF-8"), (Opcodes(b"X\3\0\0\0\xe0\x80\x80"), "UTF-8"),
    (Opcodes(b"X\4\0\0\0\xf0\x80\x80\x80"), "UTF-8"), (Opcodes(b"X\4\0\0\0\xf4\x90\x80\x80"), "UTF-8"), (Opcodes(b"X\1\0\0\0\xc1"), "UTF-8"), (Opcodes(b"X\2\0\0\0\xc3\x28"), "UTF-8"),
]


def of(module, name, *args, **more):
    """A call of module.name."""
    return Call(Global(module, name), args, **more)


def from_type(function, *more):
    return of("torch._tensor", "_rebuild_from_type_v2", function, *more)


def chain(times):
    """A tensor that a function rebuilds through the same function, and so on."""
    args = (Global("torch._utils", "_rebuild_tensor_v2"), Global("torch", "Tensor"), ())
    for _ in range(times):
        args = (Global("torch._tensor", "_rebuild_from_type_v2"), Global("torch", "Tensor"), args)
    return from_type(*args)


INT, OPTIONAL, OR = Global("builtins", "int"), Global("typing", "Optional"), Global("_operator", "or_")
OPTIONAL_INT = of("_operator", "getitem", OPTIONAL, INT)
UNSAFE, OPAQUE, OBJECT = "$unsafe", "$opaque", "$object"

# What a call may run if Python loads it: nothing (it is shown by its fields), unknown code, or code that does anything.
RISKS = [
    (OPTIONAL_INT, OBJECT), (of("_operator", "getitem", Global("typing", "sys"), "modules"), UNSAFE),
    (of("_operator", "getitem", Global("typing", "Optional.x"), INT), UNSAFE), (of("_operator", "getitem", 7, 0), UNSAFE),
    (of("_operator", "getitem", Global("typing", "[x"), 0), UNSAFE), (of("_operator", "getitem", Global("mine", "X"), 0), UNSAFE),
    (of("_operator", "or_", INT, None), OBJECT), (of("_operator", "or_", INT, OPTIONAL_INT), OBJECT),
    (of("_operator", "or_", 7, INT), UNSAFE), (of("_operator", "or_", INT, 7), UNSAFE), (of("_operator", "or_", INT, of("os", "getcwd")), UNSAFE),
    (of("_operator", "or_", INT, of("_operator", "getitem", OPTIONAL, INT, state=7)), UNSAFE), (of("_operator", "add", INT, INT), UNSAFE),
    (of("_operator", "or_", INT, of("argparse", "Namespace", new=True)), UNSAFE), (of("_operator", "or_", INT, INT, INT), UNSAFE),
    (of("functools", "reduce", OR, (INT, INT)), OBJECT), (of("__builtin__", "reduce", OR, (INT, INT)), OBJECT),
    (of("functools", "reduce", OR, 7), UNSAFE), (of("functools", "reduce", OR, (INT, 7)), UNSAFE), (of("functools", "reduce", Global("_operator", "add"), (1, 2)), UNSAFE),
    (of("types", "GenericAlias", INT, (INT,)), OBJECT), (of("types", "GenericAlias", 7, (INT,)), UNSAFE),
    (of("builtins", "type", None), OBJECT), (of("__builtin__", "type", None), OBJECT), (of("builtins", "type", 7), UNSAFE), (of("builtins", "len", None), OPAQUE),
    (of("builtins", "getattr", 1, 2, 3), UNSAFE), (of("builtins", "getattr", Global("torch.distributed.fsdp.api", "ShardingStrategy"), 7), UNSAFE),
    (Call(of("mine", "make"), ()), UNSAFE), (Call(Call(of("mine", "make"), ()), ()), UNSAFE), (of("torch", "os.system"), UNSAFE), (of("mine", "A.b"), OPAQUE), (of("torch", "load"), UNSAFE),
    (of("builtins", "eval", "1"), UNSAFE), (of("pathlib", "PosixPath", 7), OPAQUE), (of("builtins", "complex", 1.0), OPAQUE),
    (of("torch", "device", 7, 8), OPAQUE), (of("torch", "device", "cuda", "x"), OPAQUE), (of("torch.serialization", "_get_layout", 1, 2), OPAQUE),
]


NO_STORAGE, FEW, DENSE = "it refers to something that is not a storage", "it has too few arguments", "only dense tensors are supported"

# Calls of storages, and functions that rebuild tensors with the help of others: only known functions may do so.
REBUILT = [
    (Call(Persistent(7), ()), 5, NO_STORAGE), (Call(Persistent(("module", 7, "x.py", "")), ()), 5, NO_STORAGE),
    (Call(Persistent(("module", Global("os", "system"), "x.py", "")), ()), 5, NO_STORAGE), (Persistent(7), 5, NO_STORAGE),
    (Persistent(("storage", 1, 2, 3, 4)), 5, NO_STORAGE), (Persistent(("storage", 1, "2", 3)), 5, NO_STORAGE),
    (from_type(1), 5, DENSE), (from_type(1, 2, 3), 5, DENSE), (from_type(Global("os", "system"), 2, ()), 5, DENSE), (from_type(Global("mine", "f"), 2, ()), 5, DENSE),
    (chain(2), 3, FEW), (chain(20), 3, "it is wrapped too many times"),
]


class Objects(harness.Case):
    def write(self, value, protocol=2):
        pickles.write_pt(self.path("x.pt"), pickles.dumps({"o": value}, protocol))

    def shown(self, value):
        self.write((value,))  # a dict would be several objects
        return json.loads(self.ok("extract", "x.pt", "o", "--to", "json"))["$tuple"][0]

    def test_values(self):
        for number, (value, expected) in enumerate(VALUES):
            with self.subTest(number=number):
                self.assertEqual(self.shown(value), expected)

    def test_other_forms_of_known_classes(self):
        for number, value in enumerate(FIELDS):
            with self.subTest(number=number):
                found = self.shown(value)
                self.assertEqual(found.get("$object", found.get("$opaque")), f"{value.callee.module}.{value.callee.name}")

    def test_calls_that_make_data(self):
        for number, (value, expected) in enumerate(MADE):
            with self.subTest(number=number):
                self.assertEqual(self.shown(value), expected)

    def test_what_calls_run(self):
        for number, (value, key) in enumerate(RISKS):
            with self.subTest(number=number):
                self.assertEqual(next(iter(self.shown(value))), key)

    def test_calls_of_storages_and_for_tensors(self):
        for number, (value, status, words) in enumerate(REBUILT):
            with self.subTest(number=number):
                self.write([value])
                self.fails(status, "consolidate", "x.pt", "-o", "out.pt", contains=["x.pt", words])
                self.assertEqual(self.listing(), ["x.pt"])

    def test_long_integers(self):
        for value in (1 << 20000, -(1 << 20000)):
            self.assertEqual(int(self.shown(value)["$int"], 16), value)

    def test_damaged_pickles(self):
        for number, (value, words) in enumerate(DAMAGED):
            with self.subTest(number=number):
                self.write([value])
                self.fails(3, "consolidate", "x.pt", "-o", "out.h5", contains=["x.pt", "offset", words])
                self.assertEqual(self.listing(), ["x.pt"])


if __name__ == "__main__":
    harness.main()
