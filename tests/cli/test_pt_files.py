"""Files of torch.save in which one value is wrong, or that torch.save wrote in a form of its own: zip and legacy."""
import json
import struct

import harness
import pickles
from pickles import Call, Global, Persistent, replaced

HUGE = 1 << 40
DATA = bytes(range(65, 89))
F32, U8, I64 = Global("torch", "FloatStorage"), Global("torch", "ByteStorage"), Global("torch", "LongStorage")
DICT = Global("collections", "OrderedDict")
UTILS = "torch._utils"
DENSE = "only dense tensors are supported, this one is "


def identity(storage=F32, key="0", count=6):
    return ("storage", storage, key, "cpu", count)


def v2(*last, storage=None, offset=0, size=(2, 3), stride=(3, 1)):
    """_rebuild_tensor_v2 as torch.save writes it."""
    return Call(Global(UTILS, "_rebuild_tensor_v2"), (Persistent(storage or identity()), offset, size, stride, False, Call(DICT, ()), *last))


def v3(*last, dtype=Global("torch", "uint16"), count=12):
    return Call(Global(UTILS, "_rebuild_tensor_v3"),
                (Persistent(identity(Global("torch.storage", "UntypedStorage"), "0", count)), 0, (2, 3), (3, 1), False, Call(DICT, ()), dtype, False, *last))


def rebuilt(name, *args, module=UTILS):
    return Call(Global(module, name), args)


def parameter(tensor):
    return rebuilt("_rebuild_parameter", tensor, True, Call(DICT, ()))


def of_type(*args):
    return rebuilt("_rebuild_from_type_v2", *args, module="torch._tensor")


def wrapped(times):
    tensor = v2()
    for _ in range(times):
        tensor = parameter(tensor)
    return tensor


PLAIN = Global(UTILS, "_rebuild_tensor_v2")
PARAMETER = Global("torch.nn.parameter", "Parameter")
STORAGE, OUTSIDE = "its storage was not written by torch.save", "its elements are outside its storage"
NO_MATCH, NO_SIZE, NO_STRIDE = "its sizes and strides do not match", "a size is not an integer >= 0", "a stride is not an integer >= 0"
LAZY = "it is a lazy view of a type that has no such views"

# The value of {"t": value}, and what the one line says. Status 0: a float32 tensor of size [2, 3], or as the words say.
TENSORS = [
    (v2(), 0, ""),
    (v2(None), 0, ""),
    (v2({"requires_grad": 1}), 0, ""),
    (v2(offset=0, size=Call(Global("torch", "Size"), ((2, 3),))), 0, ""),
    (v3(), 0, "uint16  2×3"),
    (parameter(v2()), 0, ""),
    (of_type(PLAIN, PARAMETER, v2().args, {}), 0, ""),
    (v2(storage=("storage", F32, "0", "cpu")), 3, STORAGE),
    (v2(storage=("module", F32, "0", "cpu", 6)), 3, STORAGE),
    (v2(storage=7), 3, STORAGE),
    (v2(storage=("storage", "F", "0", "cpu", 6)), 3, STORAGE),
    (v2(storage=("storage", PLAIN, "0", "cpu", 6)), 3, STORAGE),
    (v2(storage=identity(key=0)), 3, STORAGE),
    (v2(storage=identity(count="6")), 3, STORAGE),
    (v2(storage=identity(count=-6)), 3, STORAGE),
    (Call(PLAIN, replaced(v2().args, 0, 7)), 3, STORAGE),
    (v2(storage=identity(count=HUGE << 22)), 3, "its storage is too large"),
    (v2(storage=identity(key="9")), 3, "data/9"),
    (v2(storage=identity(Global("torch", "QInt8Storage"))), 5, "quantized tensors are not supported"),
    (v2(storage=identity(Global("torch.storage", "UntypedStorage"))), 3, "the element type of its storage is missing"),
    (v2(offset="0"), 3, "its offset is not an integer"),
    (v2(offset=-1), 3, OUTSIDE),
    (v2(offset=1), 3, OUTSIDE),
    (v2(offset=HUGE << 22), 3, OUTSIDE),
    (v2(size=[2, 3]), 3, NO_MATCH),
    (v2(stride=[3, 1]), 3, NO_MATCH),
    (v2(size=(6,)), 3, NO_MATCH),
    (v2(size=(1,) * 33, stride=(1,) * 33), 5, "dimensions; at most"),
    (v2(size=(2, "3")), 3, NO_SIZE),
    (v2(size=(2, -3)), 3, NO_SIZE),
    (v2(stride=(3, None)), 3, NO_STRIDE),
    (v2(stride=(3, -1)), 3, NO_STRIDE),
    (v2(stride=(HUGE << 22, 1)), 3, OUTSIDE),
    (v2(size=(HUGE, 3), stride=(HUGE, 1)), 3, OUTSIDE),
    (v2(size=(2, 2), stride=((1 << 63) - 1, (1 << 63) - 1)), 3, OUTSIDE),
    (v2({"conj": True}), 3, LAZY),
    (v2({"neg": True}, storage=identity(Global("torch", "IntStorage"))), 3, LAZY),
    (v3(dtype=None), 3, "its type is not a dtype"),
    (v3(dtype=PLAIN), 3, "its type is not a dtype"),
    (v3(dtype=Global("torch", "uint4")), 5, "the element type torch.uint4 is not supported"),
    (Call(PLAIN, ()), 3, "it has too few arguments"),
    (Call(v3().callee, v2().args), 3, "it has too few arguments"),
    (wrapped(9), 3, "it is wrapped too many times"),
    (parameter(7), 5, DENSE + "a tensor of an unknown kind"),
    (rebuilt("_rebuild_parameter"), 5, DENSE + "a tensor of an unknown kind"),
    (of_type(PLAIN, PARAMETER, 7, {}), 3, "its arguments are not a tuple"),
    (of_type(PLAIN, PARAMETER), 5, DENSE + "a tensor of an unknown kind"),
    (of_type(Global("mine", "rebuild"), Global("mine", "Tensor"), (), {}), 5, DENSE + "a mine.Tensor, which only that class can rebuild"),
    (parameter(Call(Global("mine", "rebuild"), ())), 5, DENSE + "a tensor of an unknown kind"),
    (of_type(v2(), 7, (), {}), 5, DENSE + "a tensor of an unknown kind"),
    (rebuilt("_rebuild_sparse_tensor", 1, 2), 5, DENSE + "a sparse tensor"),
    (rebuilt("_rebuild_qtensor", 1), 5, DENSE + "a quantized tensor"),
    (rebuilt("_rebuild_nested_tensor", 1), 5, DENSE + "a nested tensor"),
    (rebuilt("_rebuild_meta_tensor_no_storage", 1), 5, DENSE + "a tensor on the device meta, which has no data"),
    (parameter(rebuilt("_rebuild_sparse_tensor", 1)), 5, DENSE + "a sparse tensor"),
]


def module(parameters, cls=Global("mine", "Model"), **members):
    return Call(cls, (), True, {"_parameters": parameters, "_buffers": {}, "_non_persistent_buffers_set": Call(Global("builtins", "set"), ([],)), "_modules": {}, **members})


SET = Global("builtins", "set")

NO_STATE_DICT, NOT_A_MODULE = "is not a state dict: save a dict of tensors", "a module that was not pickled by torch.nn.Module"

# Whole modules, alone in a file or in a dict: the names of the tensors, or what the one line says.
MODULES = [
    (module({"w": v2()}), 0, ["w"]),
    (module({"w": v2(), "none": None}, _buffers={"b": v2(), "t": v2()}, _non_persistent_buffers_set=Call(SET, (["t"],))), 0, ["w", "b"]),
    (module({}, _modules={"0": module({"w": v2()}), "1": None, "2": module({}, _modules={"x": module({"w": v2()})})}), 0, ["0.w", "2.x.w"]),
    ({"model": module({"w": v2()}), "step": 3}, 0, ["model.w"]),
    ({"model": module({}), "w": v2()}, 0, ["w"]),
    (module(7, _modules={"x": module({"w": v2()})}), 0, ["x.w"]),
    (module({5: v2()}), 5, NOT_A_MODULE),
    (module({"a\0": v2()}), 5, NOT_A_MODULE),
    (module({"n" * 5000: v2()}), 5, NOT_A_MODULE),
    (module({}, _modules={5: module({"w": v2()})}), 5, NOT_A_MODULE),
    (module({"w": v2()}, cls=Persistent(("module", Global("mine", "Model"), "model.py", "class Model: ..."))), 0, ["w"]),
    ([module({"w": v2()})], 0, ["0.w"]),
    (Call(Global("mine", "Config"), (), True, {"x": 1}), 5, "mine.Config was pickled as a whole and " + NO_STATE_DICT),
    (Call(Global("mine", "Config"), (), True, {"x": v2()}), 5, "mine.Config was pickled as a whole and " + NO_STATE_DICT),
    (Call(Call(Global("mine", "Config"), ()), ()), 5, "its value was pickled as a whole and " + NO_STATE_DICT),
    (7, 5, NO_STATE_DICT),
]


def legacy(protocol=1001, value=None, keys=("0",), numbers=(6,), data=DATA):
    """The form before torch 1.6."""
    head = [0x1950A86A20F9469CFC6C, protocol, {"little_endian": True}, {"t": v2(storage=(*identity(), None))} if value is None else value]
    storages = b"".join(struct.pack("<q", n) + data for n in numbers)
    return b"".join(map(pickles.dumps, head)) + pickles.dumps(list(keys) if isinstance(keys, tuple) else keys) + storages


NOT_A_STORAGE, TWO_SIZES = "its pickle refers to something that is not a storage", "its pickle gives two sizes for one storage"
LIST, SIZE = "its list of storages does not match its pickle", "the size of a storage differs from the one in its pickle"


def of_legacy(*storage):
    return {"t": v2(storage=storage)}


LEGACY = [
    (legacy(), 0, ""),
    (legacy(value=of_legacy(*identity())), 0, ""),
    (legacy(value={"t": v2(storage=(*identity(), None)), "u": v2(storage=(*identity(), None))}), 0, ""),
    (legacy(protocol=1002), 5, "the protocol of torch.save is not 1001"),
    (legacy(protocol="1001"), 5, "the protocol of torch.save is not 1001"),
    (legacy(value=of_legacy("storage", F32, "0", "cpu")), 3, NOT_A_STORAGE),
    (legacy(value={"t": Persistent(7)}), 3, NOT_A_STORAGE),
    (legacy(value=of_legacy("storage", F32, 0, "cpu", 6, None)), 3, NOT_A_STORAGE),
    (legacy(value=of_legacy("storage", 7, "0", "cpu", 6, None)), 3, NOT_A_STORAGE),
    (legacy(value=of_legacy("storage", PLAIN, "0", "cpu", 6, None)), 3, NOT_A_STORAGE),
    (legacy(value=of_legacy("storage", F32, "0", "cpu", "6", None)), 3, NOT_A_STORAGE),
    (legacy(value=of_legacy("storage", F32, "0", "cpu", -6, None)), 3, NOT_A_STORAGE),
    (legacy(value=of_legacy("storage", F32, "0", "cpu", 6, ("1", 0, 6))), 5, "a file of torch before 0.4 with views of storages"),
    (legacy(value={"t": v2(storage=(*identity(), None)), "u": v2(storage=(*identity(U8), None))}), 3, TWO_SIZES),
    (legacy(value={"t": v2(storage=(*identity(), None)), "u": v2(storage=(*identity(count=7), None))}), 3, TWO_SIZES),
    (legacy(keys=7), 3, "the list of storages is missing"),
    (legacy(keys=("1",)), 3, LIST),
    (legacy(keys=(0,)), 3, LIST),
    (legacy(keys=("0", "0"), numbers=(6, 6)), 3, LIST),
    (legacy(keys=()), 3, "storage 0 is missing"),
    (legacy(numbers=(7,)), 3, SIZE),
    (legacy(data=bytes(23)), 3, SIZE),
    (legacy(value=of_legacy("storage", F32, "0", "cpu", HUGE << 22, None), numbers=(HUGE << 22,)), 3, SIZE),
]


class Files(harness.Case):
    def write(self, value):
        if isinstance(value, bytes):
            with open(self.path("x.pt"), "wb") as f:
                f.write(value)
        else:
            pickles.write_pt(self.path("x.pt"), value, storages=[DATA])

    def refused(self, status, words):
        said = self.fails(status, "consolidate", "x.pt", "-o", "out.h5", contains=["x.pt", words])
        self.assertEqual(self.listing(), ["x.pt"])
        return said

    def check_value(self, name, size=24):
        """The tensor's bytes are those of DATA"""
        self.assertEqual(self.ok("extract", "x.pt", name, "--to", "raw"), DATA[:size].decode())

    def test_tensors(self):
        for number, (value, status, words) in enumerate(TENSORS):
            with self.subTest(number=number):
                size = 12 if value.name == "_rebuild_tensor_v3" else 24
                pickles.write_pt(self.path("x.pt"), {"t": value}, storages=[DATA[:size]])
                if status == 0:
                    self.assertIn(words or "float32  2×3", self.ok("inspect", "x.pt"))
                    self.check_value("t", size)
                else:
                    self.refused(status, words)

    def test_modules(self):
        for number, (value, status, words) in enumerate(MODULES):
            with self.subTest(number=number):
                self.write(value)
                if status == 0:
                    found = json.loads(self.ok("inspect", "x.pt", "--json"))["tensors"]
                    self.assertEqual([t["name"] for t in found], words)
                    self.check_value(words[-1])
                else:
                    self.refused(status, words)

    def test_legacy_files(self):
        for number, (value, status, words) in enumerate(LEGACY):
            with self.subTest(number=number):
                self.write(value)
                if status == 0:
                    self.check_value("t")
                else:
                    self.refused(status, words)


if __name__ == "__main__":
    harness.main()
