"""`.metadata` files in which one value is wrong, or has the form of another version or program."""
import os
import shutil

import harness
import pickles
from pickles import Call, Global, Opcodes, replaced

SOURCE = "dcp-torch2.15.0-fsdp2"
NAME = "model.tok_embeddings.weight"  # four chunks of 3, 3, 3 and 2 rows
HUGE = 1 << 62


def size(*numbers):
    return Call(Global("torch", "Size"), (numbers,))


def tensor(m):
    return m["state_dict_metadata"][NAME].state


def chunk(m, index=0):
    return tensor(m)["chunks"][index].state


def properties(m, index, value, name=NAME):
    p = m["state_dict_metadata"][name].state["properties"]
    p.state = replaced(p.state, index, value)


def storage(m, offset=0):
    """(index, info) of the chunk that begins at this row."""
    return next((k, v) for k, v in m["storage_data"].items() if k.state["fqn"] == NAME and list(k.state["offset"].args[0]) == [offset, 0])


def index(m):
    return storage(m)[0].state


def info(m):
    return storage(m)[1].state


def as_class(call, name, module="mine", **more):
    """The same fields in another class."""
    call.callee = Global(module, name)
    call.state = {**call.state, **more}


def slots(call):
    call.state = (None, call.state)


def without_hints(m):
    for key in m["storage_data"]:
        key.state["index"] = None


PROPERTIES, TYPE, NO_SIZE, BAD_SIZE = "its properties are missing", "its element type is missing", "its size is missing", "its size is invalid"
CHUNKS, CHUNK, PATH = "its list of chunks is missing", "the offsets or sizes of a chunk are invalid", "its path in planner_data is not a tuple of keys"
INFO, EXTENSION = "its entry in storage_data is invalid", "which is not supported; save it without _extensions"

# Changes of the state of Metadata, and what the one line says. Status 0: the checkpoint has the same values.
CHANGES = [
    (lambda m: m.pop("state_dict_metadata"), 3, "state_dict_metadata is missing"),
    (lambda m: m.update(state_dict_metadata=7), 3, "state_dict_metadata is missing"),
    (lambda m: m["state_dict_metadata"].__setitem__(7, m["state_dict_metadata"][NAME]), 3, "the name of a tensor is not a string"),
    (lambda m: m["state_dict_metadata"].__setitem__("a\0b", m["state_dict_metadata"][NAME]), 5, "a name with NUL or lone surrogates"),
    (lambda m: m["state_dict_metadata"].__setitem__(NAME, 7), 3, "the kind of its metadata is unknown"),
    (lambda m: m["state_dict_metadata"].__setitem__(NAME, tensor(m)["properties"]), 3, "the kind of its metadata is unknown"),
    (lambda m: tensor(m).pop("properties"), 3, PROPERTIES),
    (lambda m: tensor(m).update(properties=tensor(m)["size"]), 3, PROPERTIES),
    (lambda m: properties(m, 0, None), 3, TYPE),
    (lambda m: properties(m, 0, Global("torch", "Size")), 3, TYPE),
    (lambda m: tensor(m).pop("size"), 3, NO_SIZE),
    (lambda m: tensor(m).update(size=[11, 8]), 3, NO_SIZE),
    (lambda m: tensor(m).update(size=(11, "8")), 3, BAD_SIZE),
    (lambda m: tensor(m).update(size=size(11, -8)), 3, BAD_SIZE),
    (lambda m: tensor(m).update(size=size(HUGE, 8)), 3, BAD_SIZE),
    (lambda m: tensor(m).update(size=size(HUGE, 8, 0)), 3, BAD_SIZE),
    (lambda m: tensor(m).pop("chunks"), 3, CHUNKS),
    (lambda m: tensor(m).update(chunks=(7,)), 3, CHUNKS),
    (lambda m: tensor(m).update(chunks=[7]), 3, CHUNK),
    (lambda m: chunk(m).pop("offsets"), 3, CHUNK),
    (lambda m: chunk(m).update(offsets=size(0)), 3, CHUNK),
    (lambda m: chunk(m).update(sizes=(3, "8")), 3, CHUNK),
    (lambda m: chunk(m).update(sizes=size(3, 9)), 3, "does not fit into dimension 1 of size 8"),
    (lambda m: chunk(m).update(offsets=size(1, 0)), 3, "storage_data has a chunk at [0, 0] that is not in state_dict_metadata"),
    (lambda m: m["planner_data"].update({NAME: 7}), 3, PATH),
    (lambda m: m["planner_data"].update({NAME: ()}), 3, PATH),
    (lambda m: m["planner_data"].update({NAME: ("model", None)}), 3, PATH),
    (lambda m: m["planner_data"].update({NAME: ("model", -1)}), 3, PATH),
    (lambda m: m["planner_data"].update({NAME: ("model", "other")}), 3, "does not match its name: it has the key other"),
    (lambda m: m["planner_data"].update({NAME: ("mod", "el.tok_embeddings.weight")}), 3, "does not match its name"),
    (lambda m: m["planner_data"].update({NAME: ("mo\0",)}), 3, "does not match its name"),
    (lambda m: m["planner_data"].update({NAME: ("model", "tok_embeddings")}), 3, "ends before its name"),
    (lambda m: m.update(storage_data=None), 3, "storage_data is missing"),
    (lambda m: m.update(storage_data=[1]), 3, "storage_data is missing"),
    (lambda m: m["storage_data"].__setitem__(7, storage(m)[1]), 3, "storage_data"),
    (lambda m: index(m).update(fqn=7), 3, "storage_data"),
    (lambda m: index(m).update(fqn="other"), 3, "other: it is in storage_data, but not in state_dict_metadata"),
    (lambda m: index(m).update(offset=None), 3, "the offsets of its entry in storage_data are invalid"),
    (lambda m: index(m).update(offset=size(0)), 3, "the offsets of its entry in storage_data are invalid"),
    (lambda m: index(m).update(offset=size(3, 0)), 3, "storage_data lists one of its chunks twice"),
    (lambda m: index(m).update(offset=size(20, 0)), 3, "storage_data has a chunk at [20, 0] that is not in state_dict_metadata"),
    (lambda m: m["storage_data"].__setitem__(storage(m)[0], 7), 3, INFO),
    (lambda m: info(m).pop("offset"), 3, INFO),
    (lambda m: info(m).update(length=None), 3, INFO),
    (lambda m: info(m).update(offset=-1), 3, INFO),
    (lambda m: info(m).update(length=-1), 3, INFO),
    (lambda m: info(m).update(offset=(1 << 63) - 1), 3, INFO),
    (lambda m: info(m).update(relative_path=7), 3, NAME),
    (lambda m: info(m).update(relative_path=""), 3, NAME),
    (lambda m: info(m).update(relative_path="a\0b"), 3, NAME),
    (lambda m: info(m).update(transform_descriptors=["zstd"]), 5, "the extension zstd, " + EXTENSION),
    (lambda m: info(m).update(transform_descriptors=("zstd",)), 5, "the extension zstd, " + EXTENSION),
    (lambda m: info(m).update(transform_descriptors=[7]), 5, "the extension ?, " + EXTENSION),
    (lambda m: info(m).update(transform_descriptors=7), 5, "the extension ?, " + EXTENSION),
    (lambda m: as_class(storage(m)[1], "Info", relative_path=None) or storage(m)[1].state.pop("length"), 5, "unsupported: class Info of mine"),
    (lambda m: setattr(storage(m)[1], "state", 7), 3, "the state of torch.distributed.checkpoint.filesystem._StorageInfo is neither a dict nor a tuple"),
    (lambda m: m.update(x=Call(Global("mine", "Config"), (), True, {"a": 1})), 5, "unsupported: class Config of mine"),
    (lambda m: m.update(x=Call(Global("mine", "make"), ())), 5, "unsupported: class make of mine"),
    (lambda m: m.update(x=Call(Global("os", "system"), ("true",))), 3, "pickle global os.system is not allowed: this file may be hostile"),
    (lambda m: m.update(x=Call(Global("builtins", "getattr"), (7, "x"))), 3, "pickle global builtins.getattr is not allowed"),
    (lambda m: m.update(x=Call(Global("builtins", "getattr"), (Global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"), 7))), 3, "pickle global builtins.getattr is not allowed"),
    (lambda m: m.update(x=Call(Global("builtins", "getattr"), (1, 2, 3))), 3, "pickle global builtins.getattr is not allowed"),
    (lambda m: m.update(x=Call(tensor(m)["properties"].state[1], ())), 3, "calls something that is not a global: this file may be hostile"),
    (lambda m: m["storage_data"].pop(storage(m)[0]), 3, "storage_data does not list its chunk at [0, 0]"),
    (lambda m: m["state_dict_metadata"].__setitem__(Opcodes(b"\x8c" + bytes([len(NAME)]) + NAME.encode()), m["state_dict_metadata"][NAME]), 3, "it is listed twice"),
    # Other forms of the same.
    (lambda m: tensor(m)["chunks"].insert(0, tensor(m)["chunks"][0]), 0, None),
    (lambda m: tensor(m)["chunks"].append(tensor(m)["chunks"][0]), 0, None),
    (lambda m: m.update(version="1.0.0"), 0, None),
    (lambda m: m.update(version="<b>"), 0, None),
    (lambda m: m.update(version=7), 0, None),
    (lambda m: m["planner_data"].update({7: ("x",), "unknown": 5}), 0, None),
    (lambda m: m.update(planner_data=7), 0, "flat"),
    (lambda m: m.update(new_field=7), 0, None),
    (without_hints, 0, None),
    (lambda m: index(m).update(index=9), 0, None),
    (lambda m: index(m).update(index=-1), 0, None),
    (lambda m: index(m).update(index=1), 0, None),
    (lambda m: info(m).update(transform_descriptors=[]), 0, None),
    (lambda m: info(m).update(transform_descriptors=()), 0, None),
    (lambda m: info(m).update(transform_descriptors=None), 0, None),
    (lambda m: as_class(storage(m)[1], "_StorageInfo"), 0, None),
    (lambda m: as_class(storage(m)[0], "Index"), 0, None),
    (lambda m: as_class(tensor(m)["chunks"][0], "Chunk"), 0, None),
    (lambda m: as_class(m["state_dict_metadata"][NAME], "Tensor"), 0, None),
    (lambda m: slots(storage(m)[1]), 0, None),
    (lambda m: slots(storage(m)[0]), 0, None),
    (lambda m: setattr(storage(m)[1], "state", [info(m)["relative_path"], info(m)["offset"], info(m)["length"]]), 0, None),
    (lambda m: tensor(m).update(size=(11, 8)), 0, None),
    (lambda m: properties(m, 1, Global("torch", "strided")), 0, None),
    # Values that are listed, but cannot be read.
    (lambda m: properties(m, 0, Global("torch", "quint8")), 5, "the element type torch.quint8 is not supported"),
    (lambda m: properties(m, 1, Call(Global("torch.serialization", "_get_layout"), ("torch.sparse_coo",))), 5, "only dense tensors are supported, this one is torch.sparse_coo"),
    (lambda m: properties(m, 1, Call(Global("torch.serialization", "_get_layout"), (7,))), 5, "torch.serialization._get_layout is not known to be harmless as it is used here"),
    (lambda m: tensor(m).update(size=(1,) * 33), 5, "it has 33 dimensions; at most"),
]


def without(m, name):
    """Removes the places of a value."""
    m["storage_data"] = {k: v for k, v in m["storage_data"].items() if k.state["fqn"] != name}
    return m["state_dict_metadata"].pop(name)


def other_shape(m, *shape):
    m["state_dict_metadata"]["model.weight"] = without(m, "model.weight")
    m["state_dict_metadata"]["model.weight"].state.update(size=size(*shape), chunks=[])


def renamed(m, old, new):
    if new in m["state_dict_metadata"]:
        without(m, new)
    m["state_dict_metadata"][new] = m["state_dict_metadata"].pop(old)
    for key in m["storage_data"]:
        key.state["fqn"] = new if key.state["fqn"] == old else key.state["fqn"]
    m["planner_data"] = None


OTHER = "model.weight: its dtype or shape in __1.metadata differs from that in __0.metadata"

# Changes of rank 1's file, where each rank wrote one.
RANKS = [
    (lambda m: other_shape(m, 10, 7), 3, OTHER),
    (lambda m: other_shape(m, 60), 3, OTHER),
    (lambda m: properties(m, 0, Global("torch", "float16"), "model.weight"), 3, OTHER),
    (lambda m: renamed(m, "step", "model.weight"), 3, OTHER),
    (lambda m: renamed(m, "model.weight", "step"), 3, "step is a tensor in __1.metadata, but not in __0.metadata"),
    (lambda m: renamed(m, "names", "rank.rank_1"), 5, "the ranks have different values, and the name rank.rank_1 for one of them is already in use"),
    (lambda m: m.update(planner_data=None), 0, None),
]


class Metadata(harness.Case):
    def test_files_of_ranks(self):
        good = os.path.join(harness.CORPUS, "..", "dcp-ranks-torch2.15.0")
        shutil.copytree(good, self.path("ckpt"))
        path = self.path("ckpt", "__1.metadata")
        with open(path, "rb") as f:
            data = f.read()
        for name in ("__x.metadata", "__99999999999999999999.metadata", "__4294967296.metadata", "__9.metadat"):
            shutil.copyfile(path, self.path("ckpt", name))  # not the file of a rank
        for number, (change, status, words) in enumerate(RANKS):
            with self.subTest(number=number):
                root = pickles.loads(data)
                change(root.state)
                with open(path, "wb") as f:
                    f.write(pickles.dumps(root, 4))
                if status:
                    self.fails(status, "consolidate", "ckpt", "-o", "out.h5", contains=["ckpt", words])
                else:
                    self.ok("diff", "ckpt/", good, "--data")
        os.remove(self.path("ckpt", "__0.metadata"))
        self.fails(3, "consolidate", "ckpt", "-o", "out.h5", contains=["__0.metadata: the file is missing, but the directory has __2.metadata"])
        self.assertEqual(self.listing(), ["ckpt"])

    def test_names_of_data_files(self):
        """Other programs may name them as they like."""
        good = harness.corpus(SOURCE)
        self.copy(SOURCE)
        with open(os.path.join(good, ".metadata"), "rb") as f:
            root = pickles.loads(f.read())
        infos = [i.state for i in root.state["storage_data"].values() if i.state["relative_path"] == "__0_0.distcp"]
        last = "__0_0.distcp"
        for name in ("data.distcp", "__x_0.distcp", "__4294967296_0.distcp", "__7.distcp", "__7_0.distcp"):
            with self.subTest(name=name):
                os.rename(self.path("ckpt", last), self.path("ckpt", name))
                last = name
                for i in infos:
                    i["relative_path"] = name
                with open(self.path("ckpt", ".metadata"), "wb") as f:
                    f.write(pickles.dumps(root, 4))
                self.ok("diff", "ckpt", good, "--data")
        self.dir = self.path("ckpt")  # where the command runs
        for path in (".metadata", "./", ".", "../ckpt/.metadata"):
            self.ok("diff", path, good, "--data")

    def test_list_index_that_became_a_string(self):
        """set_element of torch 2.15 makes a dict if all indexes of a list are strings. It fails if some are, or makes a dict
                with twice as many keys. The last value took the place of the others in files that were converted."""
        self.copy("dcp-torch2.15.0-train")
        with open(self.path("ckpt", ".metadata"), "rb") as f:
            data = f.read()
        names = [n for n in pickles.loads(data).state["planner_data"] if n.startswith("optim.param_groups.")]
        self.assertGreater(len(names), 2)
        for change in (names[:1], names[1:2], names[-1:], names[1:], names):
            root = pickles.loads(data)
            paths = root.state["planner_data"]
            for n in change:
                self.assertEqual(paths[n][2], 0)
                paths[n] = (*paths[n][:2], "0", *paths[n][3:])
            with open(self.path("ckpt", ".metadata"), "wb") as f:
                f.write(pickles.dumps(root, 4))
            with self.subTest(change=change):
                if change == names:
                    self.ok("diff", "ckpt", harness.corpus("dcp-torch2.15.0-train"), "--data")
                else:
                    line = self.fails(3, "consolidate", "ckpt", "-o", "out.pt", contains=[
                        ": its path in planner_data has the key '0' of a dict where other paths have a list; .metadata is "
                        "damaged; copy it again"])
                    self.assertIn(line.split(": ")[2], ["tensor " + n for n in change])

    def test_changes(self):
        good = harness.corpus(SOURCE)
        self.copy(SOURCE)
        with open(os.path.join(good, ".metadata"), "rb") as f:
            data = f.read()
        for number, (change, status, words) in enumerate(CHANGES):
            with self.subTest(number=number):
                root = pickles.loads(data)
                change(root.state)
                with open(self.path("ckpt", ".metadata"), "wb") as f:
                    f.write(pickles.dumps(root, 4))
                if status:
                    self.fails(status, "consolidate", "ckpt", "-o", "out.h5", contains=["ckpt", words])
                else:
                    self.ok("diff", "ckpt", good, "--data")
                self.assertEqual(self.listing(), ["ckpt"])


if __name__ == "__main__":
    harness.main()
