"""Files of ranks, written by torch.save, in which one value is wrong or has the form of another version of PyTorch."""
import json
import os
import shutil
import zipfile

import harness
import pickles
from pickles import Call, Global, find, replaced

PT = os.path.join(harness.CORPUS, "..", "pt")
LAYOUT = ".data/fsdpckpt_layout.json"
HUGE = 1 << 40


def spec(d):
    return find(d["0.weight"], "DTensorSpec").state


def mesh(d):
    return spec(d)["mesh"].state


def axes(d, *shapes):
    """Gives the mesh one axis for each shape."""
    mesh(d)["_layout"].state["axes"] = tuple(Call(Global("m", "_FlatLayout"), (), True, {"shape": s}) for s in shapes)


def layout(d, **state):
    mesh(d)["_layout"].state = state


def rebuild(d, index, value):
    d["0.weight"].args = replaced(d["0.weight"].args, index, value)


def size(d, value):
    rebuild(d, 2, replaced(d["0.weight"].args[2], 2, value))


def placement(d, name, **state):
    spec(d)["placements"] = (Call(Global("torch.distributed.tensor.placement_types", name), (), True, state),)


def local(d, index, value):
    """Changes an argument of the local tensor."""
    tensor = d["0.weight"].args[3][1]["_local_tensor"]
    tensor.args = replaced(tensor.args, index, value)


NOT_DTENSOR, MESH, NO_DIM = "it is not a DTensor that torch.save wrote", "its device mesh has an unknown form", "its placement has no dimension"
SUM = "which is not supported: the ranks hold parts of a sum, or the kind is unknown"
BAD_MESH = "its device mesh is invalid"
DIFFERS = "its dtype or shape differs from that of earlier ranks"

NAME_USED = "the ranks have different values, and the name steps.rank_1 for one of them is already in use"
OF_ALL = ("0.weight", NAME_USED)  # messages that name no file

# Changes of rank 0's "0.weight", a DTensor, and what the one line says.
DTENSORS = [
    (lambda d: rebuild(d, 2, None), 3, NOT_DTENSOR),
    (lambda d: rebuild(d, 2, (1, 2)), 3, NOT_DTENSOR),
    (lambda d: rebuild(d, 3, None), 3, NOT_DTENSOR),
    (lambda d: rebuild(d, 3, (None, {})), 3, NOT_DTENSOR),
    (lambda d: rebuild(d, 3, {"_spec": 1}), 3, NOT_DTENSOR),
    (lambda d: size(d, None), 3, NOT_DTENSOR),
    (lambda d: size(d, (10, -6)), 3, NOT_DTENSOR),
    (lambda d: size(d, (10, "6")), 3, NOT_DTENSOR),
    (lambda d: size(d, (1,) * 33), 3, NOT_DTENSOR),
    (lambda d: size(d, (HUGE, HUGE)), 3, "its size or its placements are invalid"),
    (lambda d: setattr(d["0.weight"], "args", d["0.weight"].args[:3]), 5, "only dense tensors are supported, this one is a torch.distributed.tensor.DTensor"),
    (lambda d: spec(d).update(mesh=None), 5, MESH),
    (lambda d: setattr(spec(d)["mesh"], "state", [1]), 5, MESH),
    (lambda d: axes(d, *[(1,)] * 9), 5, MESH),
    (lambda d: axes(d, None), 5, MESH),
    (lambda d: axes(d, (HUGE, HUGE)), 5, MESH),
    (lambda d: layout(d), 5, MESH),
    (lambda d: layout(d, axes=1), 5, MESH),
    (lambda d: axes(d, (0,)), 3, BAD_MESH),
    (lambda d: mesh(d).update(_coordinate_on_dim=(3,)), 3, BAD_MESH),
    (lambda d: mesh(d).update(_coordinate_on_dim=(0, 0)), 3, "the coordinate of the rank in its device mesh is missing"),
    (lambda d: mesh(d).pop("_coordinate_on_dim"), 3, "the coordinate of the rank in its device mesh is missing"),
    (lambda d: spec(d).update(placements=None), 3, "the number of placements differs"),
    (lambda d: spec(d).update(placements=()), 3, "the number of placements differs"),
    (lambda d: spec(d).update(placements=(1,)), 5, "its placement is ?, " + SUM),
    (lambda d: placement(d, "Partial"), 5, "placement_types.Partial, " + SUM),
    (lambda d: placement(d, "Shard"), 3, NO_DIM),
    (lambda d: placement(d, "Shard", dim=-1), 3, NO_DIM),
    (lambda d: placement(d, "Shard", dim=99), 3, NO_DIM),
    (lambda d: placement(d, "Shard", dim=2), 3, "its size or its placements are invalid"),
    (lambda d: placement(d, "_StridedShard", dim=0), 3, NO_DIM),
    (lambda d: placement(d, "_StridedShard", dim=0, split_factor=0), 3, NO_DIM),
    (lambda d: placement(d, "Shard", dim=1), 3, "its local tensor does not have the shape that its placements give the rank"),
    (lambda d: placement(d, "Replicate"), 3, "its local tensor does not have the shape that its placements give the rank"),
    (lambda d: local(d, 2, (24,)), 3, "its sizes and strides do not match"),
    (lambda d: (local(d, 2, (24,)), local(d, 3, (1,))), 3, "its local tensor does not have the shape"),
    (lambda d: size(d, (10, 7)), 3, "its local tensor does not have the shape"),
    (lambda d: d["0.weight"].args[3][1]["_local_tensor"].args[0].identity[1].__init__("torch", "IntStorage"), 3, DIFFERS),
    (lambda d: d["0.weight"].args[3][1].update(_local_tensor=7), 3, "the value is not a tensor"),
    (lambda d: mesh(d).update(_coordinate_on_dim=None), 3, "0.weight"),
    # Forms of other versions: the result must be the same.
    (lambda d: rebuild(d, 3, d["0.weight"].args[3][1]), 0, None),
    (lambda d: rebuild(d, 3, [d["0.weight"].args[3][1], None]), 0, None),
    (lambda d: setattr(spec(d)["mesh"], "state", (mesh(d), None)), 0, None),
    (lambda d: layout(d, shape=3), 0, None),
    (lambda d: layout(d, shape=(3,)), 0, None),
    (lambda d: mesh(d).update(_mesh_dim_names=None), 0, None),
    (lambda d: mesh(d).update(_mesh_dim_names=(5,)), 0, None),
    (lambda d: mesh(d).update(_mesh_dim_names=("x" * 1000,)), 0, None),
]

# The same for a mesh that is given by the tensor of its ranks (torch 2.5).
MESH_TENSORS = [
    (lambda d: mesh(d).update(mesh=7), 5, MESH),
    (lambda d: setattr(mesh(d)["mesh"], "args", ()), 5, MESH),
    (lambda d: setattr(mesh(d)["mesh"], "args", (*mesh(d)["mesh"].args[:2], (1,) * 8 + (2,), (1,) * 9, *mesh(d)["mesh"].args[4:])), 5, MESH),
    (lambda d: setattr(mesh(d)["mesh"], "args", (*mesh(d)["mesh"].args[:2], (), (), *mesh(d)["mesh"].args[4:])), 5, MESH),
]


def state(d):
    return d["0.weight"].args[3]


def shard(d):
    return state(d)[0][0].state[1]


def metadata(d):
    return shard(d)["metadata"].state[1]


def with_state(d, value):
    rebuild(d, 3, value)


def as_torch_1(d):
    """The form of torch 1.13: an instance with a state."""
    d["0.weight"] = Call(d["0.weight"].args[1], (), True, state(d))


NOT_SHARDED, NO_OFFSETS = "it is not a ShardedTensor that torch.save wrote", "the offsets of a shard are missing"

SHARDED_TENSORS = [
    (lambda d: with_state(d, ([state(d)[0][0]], None)), 3, NOT_SHARDED),
    (lambda d: state(d)[1].state.update(size=(10, "6")), 3, NOT_SHARDED),
    (lambda d: state(d)[1].state.update(size=(HUGE, HUGE)), 3, "its size is invalid"),
    (lambda d: shard(d).pop("tensor"), 3, NO_OFFSETS),
    (lambda d: shard(d).update(metadata=None), 3, NO_OFFSETS),
    (lambda d: metadata(d).update(shard_offsets=[0]), 3, NO_OFFSETS),
    (lambda d: metadata(d).update(shard_sizes=[5]), 3, NO_OFFSETS),
    (lambda d: metadata(d).update(shard_offsets=[6, 0]), 3, "a shard is outside the tensor"),
    (lambda d: metadata(d).update(shard_sizes=[4, 6]), 3, "its local tensor does not have the shape"),
    (lambda d: state(d)[1].state.update(size=(11, 6)), 3, DIFFERS),
    (lambda d: with_state(d, None), 3, "0.weight"),
    (lambda d: with_state(d, (1, 2)), 3, "0.weight"),
    (lambda d: state(d)[0].clear(), 3, "0.weight"),
    (as_torch_1, 0, None),
]

# Changes of rank 1's file, so that the ranks do not agree. Status 0: the listing of tensors contains the words.
OTHER_RANK = [
    (lambda d: d.__setitem__("0.weight", 7), 0, "0.weight.rank_1"),
    (lambda d: d.__setitem__("0.weight", d["steps"]), 5, "a plain tensor whose dtype or shape differs between ranks"),
    (lambda d: d.__setitem__("steps", d["0.weight"]), 3, DIFFERS),
    (lambda d: d.__setitem__("steps", 7), 0, "steps.rank_1"),
    (lambda d: setattr(d, "entries", {"steps.rank_1": 1, **d.entries, "steps": 7}), 5, NAME_USED),
    (lambda d: local(d, 0, d["0.bias"].args[3][1]["_local_tensor"].args[0]), 3, "its elements are outside its storage"),
]
NO_MESH, NO_LAYOUT = "the mesh is missing or invalid", "the layout of a tensor is missing"


def of_a(record, **members):
    record["tensors"]["a"].update(members)


# Changes of the record that we write into a rank's file, as JSON or as bytes.
RECORDS = [
    (lambda r: b"{", 3, "it is not JSON"),
    (lambda r: b"[]", 5, "is not of version 1"),
    (lambda r: r.update(fsdpckpt_layout=2), 5, "is not of version 1"),
    (lambda r: r.pop("mesh_shape"), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=[]), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=["2"]), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=[-2]), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=[0]), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=[1] * 9, mesh_names=["a"] * 9), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=[HUGE, HUGE], mesh_names=["a", "b"]), 3, NO_MESH),
    (lambda r: r.update(mesh_names=[]), 3, NO_MESH),
    (lambda r: r.update(mesh_names=[1]), 3, NO_MESH),
    (lambda r: r.update(mesh_names=["x" * 1000]), 3, NO_MESH),
    (lambda r: r.update(mesh_shape=[3]), 3, "its rank or its number of ranks differs from the file's name"),
    (lambda r: r.update(rank=1), 3, "its rank or its number of ranks differs from the file's name"),
    (lambda r: of_a(r, shape=None), 3, NO_LAYOUT),
    (lambda r: of_a(r, offsets=[0, 0]), 3, NO_LAYOUT),
    (lambda r: of_a(r, placements=1), 3, NO_LAYOUT),
    (lambda r: of_a(r, placements="[Shard(0)"), 3, NO_LAYOUT),
    (lambda r: of_a(r, placements="[Shard(1)]"), 3, "the shape or the placements of a tensor are invalid"),
    (lambda r: of_a(r, shape=[HUGE << 20]), 3, "the shape or the placements of a tensor are invalid"),
    (lambda r: of_a(r, offsets=[5]), 3, "the offsets of a tensor disagree with its placements"),
    (lambda r: r["tensors"].pop("a"), 3, DIFFERS),
]

# Names that no tool gives to a rank's file.
NOT_RANKS = ["model_rank_x.pt", "frank_0.pt", "model_rank_0.txt", "model_rank_9999999.pt", "model_rank_000000000.pt",
             "model_world_size_2_rank_2.pt", "_world_size_2_rank_0.pt", "model_world_size_02_rank_0.pt",
             "model_world_size_2x_rank_0.pt", "model_world_size_2-rank_0.pt", "consolidated.x.pth", "consolidated.0.pt",
             "m" * 64 + "_rank_0.pt"]


class Ranks(harness.Case):
    def ranks(self, source):
        """Rank files of the model, as a fresh directory `in`."""
        shutil.rmtree(self.path("in"), True)
        shutil.copytree(os.path.join(PT, source), self.path("in"),
                        ignore=lambda _, names: [n for n in names if not n.startswith("model")])

    def edit(self, rank, change):
        name = next(n for n in os.listdir(self.path("in")) if n.endswith(f"_rank_{rank}.pt"))
        path = self.path("in", name)
        value = pickles.read_pt(path)
        change(value)
        pickles.write_pt(path, value, like=path)
        return name

    def check_table(self, source, table, rank=0):
        for number, (change, status, words) in enumerate(table):
            with self.subTest(source=source, number=number):
                self.ranks(source)
                name = self.edit(rank, change)
                if status == 0 and words:
                    self.assertIn(words, self.ok("inspect", "in"))
                elif status == 0:
                    self.ok("diff", "in", "good", "--data")
                else:
                    said = self.fails(status, "consolidate", "in", "-o", "out.h5", contains=[words])
                    self.assertIn("_rank_1.pt" if words == DIFFERS else "in: " if words in OF_ALL else name, said)
                    self.assertNotIn("out.h5", self.listing())

    def table(self, source, table, **more):
        self.ranks(source)
        os.rename(self.path("in"), self.path("good"))
        self.check_table(source, table, **more)

    def test_dtensors(self):
        self.table("fsdp2-torch2.15.0", DTENSORS)

    def test_meshes_of_torch_2_5(self):
        self.table("tp-torch2.5.1", MESH_TENSORS)

    def test_sharded_tensors(self):
        self.table("fsdp1-sharded-torch2.15.0", SHARDED_TENSORS)

    def test_ranks_that_disagree(self):
        self.table("fsdp2-torch2.15.0", OTHER_RANK, rank=1)

    def test_records_of_the_layout(self):
        source = os.path.join(PT, "layout.pt")
        for number, (change, status, words) in enumerate(RECORDS):
            with self.subTest(number=number):
                self.ok("reshard", source, "-o", "in", "--to", "pt", "--dp", "2", "-q", "--force")
                path = self.path("in", "model_world_size_2_rank_0.pt")
                with zipfile.ZipFile(path) as archive:
                    record = json.loads(archive.read("archive/" + LAYOUT))
                changed = change(record)
                data = changed if isinstance(changed, bytes) else json.dumps(record)
                pickles.write_pt(path, pickles.read_pt(path), like=path, **{LAYOUT: data})
                said = self.fails(status, "consolidate", "in", "-o", "out.h5", contains=[words])
                self.assertIn("_rank_1.pt" if words == DIFFERS else path[len(self.dir) + 1:], said)
                self.assertEqual(self.listing(), ["in"])

    def named(self, *names):
        shutil.rmtree(self.path("in"), True)
        os.mkdir(self.path("in"))
        for name in names:
            shutil.copyfile(os.path.join(PT, "layout.pt"), self.path("in", name))

    def test_names_of_files(self):
        for name in NOT_RANKS:
            with self.subTest(name=name):
                self.named(name)
                self.fails(3, "consolidate", "in", "-o", "out.h5", contains=["in: not a checkpoint"])
        for names in (["rank0.pt", "rank1.pt"], ["model-rank0.bin", "model-rank1.bin"], ["consolidated.00.pth", "consolidated.01.pth"],
                      ["x.rank_0.ckpt", "x.rank_1.ckpt"]):
            with self.subTest(names=names):
                self.named(*names)
                self.ok("diff", "in", os.path.join(PT, "layout.pt"), "--data")
                os.remove(self.path("in", names[0]))
                self.fails(3, "consolidate", "in", "-o", "out.h5", contains=[names[0] + ": the file is missing; 1 files of 2 ranks"])
        self.named("model_rank_0.pt", "model-rank0.pt")
        self.fails(2, "consolidate", "in", "-o", "out.h5", contains=["*-rank*.pt (pt), *_rank_*.pt (pt)"])
        self.named(*[f"s{i}_rank_0.pt" for i in range(65)])
        self.fails(2, "consolidate", "in", "-o", "out.h5", contains=["in: the directory has 65 checkpoints", " and 59 more"])
        self.named("model_rank_0.pt", "model_rank_1.pt", "optim_rank_0.pt")
        self.fails(3, "consolidate", "in", "-o", "out.h5", contains=["there are 2 files model_rank_<rank>.pt, but 1 files optim_rank_"])
        self.assertEqual(self.listing(), ["in"])


if __name__ == "__main__":
    harness.main()
