"""Files of ranks with plain tensors, which say nothing about shards: copies, shards along a dimension of a TP plan, and optimizer
state that is sharded like a flat parameter."""
import json
import os
import shutil

import harness
import pickles
from pickles import Call, Global, Persistent

HYBRID = os.path.join(harness.CORPUS, "..", "pt", "fsdp1-hybrid-local-torch2.0.1")
F32, I32 = Global("torch", "FloatStorage"), Global("torch", "IntStorage")
NAME = "model.layers.0.self_attn.q_proj.weight"


def tensor(*size, offset=0, stride=None, kind=F32, count=24, key="0", flags=()):
    stride = stride or tuple(1 if i + 1 == len(size) else size[-1] for i in range(len(size)))
    storage = Persistent(("storage", kind, key, "cpu", count))
    return Call(Global("torch._utils", "_rebuild_tensor_v2"),
                (storage, offset, size, stride, False, Call(Global("collections", "OrderedDict"), ()), *flags))


def holder(count):
    """An object that holds a storage."""
    return (Persistent(("storage", F32, "0", "cpu", count)), 7)


A, B = bytes(range(96)), bytes(range(95)) + b"x"
NUMBERED = "optimizer state under a number, which differs between ranks"
COPY, SHAPE, PLAN = "is not a copy, and no file says", "whose dtype or shape differs between ranks", "does not match those of earlier ranks"
FEW, LACKS = "only 1 of 2 ranks' files contain it", "not all files of lower ranks have this tensor"

# The value and the storage of rank 0, those of rank 1, and what the one line says, or the values that inspect lists.
PLAIN = [
    (tensor(4, 6), A, tensor(4, 6), A, 0, ["t"]),
    (tensor(4, 5), A, tensor(4, 5), B, 0, ["t"]), # the CRCs differ, the elements do not
    (tensor(4, 5), A, tensor(4, 5, count=23), A[:92], 0, ["t"]),
    (tensor(4, 5), A, tensor(4, 5, offset=1), A, 5, COPY),
    (tensor(4, 6), A, tensor(4, 6), B, 5, COPY),
    (tensor(4, 6), A, tensor(4, 6, stride=(1, 4)), A, 5, COPY),
    (tensor(2, flags=({"neg": True},)), A, tensor(2), A, 5, COPY),
    (tensor(0, 6), A, tensor(0, 6), B, 0, ["t"]),
    (tensor(4, 6), A, tensor(6, 4), A, 5, SHAPE),
    (tensor(4, 6), A, tensor(24), A, 5, SHAPE),
    (tensor(4, 6), A, tensor(4, 6, kind=I32), A, 5, SHAPE),
    (7, A, tensor(4, 6), A, 5, SHAPE),
    (tensor(4, 6), A, 7, A, 0, ["t", "t.rank_1"]),
    (holder(24), A, holder(24), A, 0, ["t"]),
    (holder(24), A, holder(24), B, 0, ["t", "t.rank_1"]),
    (holder(24), A, holder(23), A[:92], 0, ["t", "t.rank_1"]),
    ((1, 2), A, (1, 2, 3), A, 0, ["t", "t.rank_1"]),
]

# The same with a plan that shards the tensor along dimension 0.
SHARDED = [
    (tensor(4, 6), A, tensor(4, 6), A, 0, (8, 6)),
    (tensor(3, 6), A, tensor(1, 6), A, 0, (4, 6)),
    (tensor(1, 6), A, tensor(3, 6), A, 0, (4, 6)),
    (tensor(4, 6), A, tensor(0, 6), A, 0, (4, 6)),
    (tensor(4, 6), A, tensor(4, 5), A, 3, PLAN),
    (tensor(4, 6), A, tensor(4, 6, kind=I32), A, 3, PLAN),
    (tensor(4, 6), A, tensor(24), A, 3, PLAN),
    (7, A, tensor(4, 6), A, 3, LACKS),
    (tensor(4, 6), A, None, A, 3, FEW),
    (None, A, tensor(4, 6), A, 3, LACKS),
    (tensor(1 << 40, stride=(0,)), A, tensor(1 << 62, stride=(0,)), A, 3, "its size is invalid"),
    (tensor(1 << 60, 1, stride=(0, 0)), A, tensor(1 << 60, 1, stride=(0, 0)), A, 3, PLAN),
]

UNKNOWN = "optimizer state of flat parameters, numbered together with other parameters or in several groups"


def group(d):
    return d["param_groups"][0]


def state(d):
    return d["state"][0]


# Changes of the optimizer's state of every rank, where the model is one flat parameter of 161 elements.
STATES = [
    (lambda d: d["param_groups"].append({"params": [1]}), 5, UNKNOWN),
    (lambda d: group(d).update(params=[0, 1]), 5, UNKNOWN),
    (lambda d: group(d).update(params=(0,)), 5, UNKNOWN),
    (lambda d: d.pop("param_groups"), 5, UNKNOWN),
    (lambda d: d["state"].update({1: dict(state(d))}), 5, NUMBERED),
    (lambda d: d["state"].update({-1: dict(state(d))}), 5, NUMBERED),
    (lambda d: state(d).update(exp_avg=(1,)), 0, ""),
    (lambda d: state(d).update(exp_avg=state(d)["step"]), 0, ""),
    (lambda d: d.update(other=[1]), 0, ""),
]


class Merge(harness.Case):
    def write(self, name, ranks):
        shutil.rmtree(self.path("in"), True)
        os.mkdir(self.path("in"))
        for rank, (value, storage) in enumerate(ranks):
            pickles.write_pt(self.path("in", f"model_rank_{rank}.pt"), {} if value is None else {name: value}, storages=[storage])

    def refused(self, status, words, *more):
        self.fails(status, "consolidate", "in", "-o", "out.h5", *more, contains=["in", words])
        self.assertNotIn("out.h5", self.listing())

    def test_plain_tensors(self):
        for number, (a, storage_a, b, storage_b, status, found) in enumerate(PLAIN):
            with self.subTest(number=number):
                self.write("t", [(a, storage_a), (b, storage_b)])
                if status:
                    self.refused(status, found)
                else:
                    listed = json.loads(self.ok("inspect", "in", "--json"))
                    self.assertEqual([t["name"] for t in listed["tensors"]] + [o["name"] for o in listed["objects"]], found)

    def test_shards_of_a_plan(self):
        with open(self.path("plan.json"), "w", encoding="utf-8") as f:
            json.dump({"q_proj": "colwise"}, f)
        for number, (a, storage_a, b, storage_b, status, found) in enumerate(SHARDED):
            with self.subTest(number=number):
                self.write(NAME, [(a, storage_a), (b, storage_b)])
                if status:
                    self.refused(status, found, "--tp-plan", "plan.json")
                else:
                    listed = json.loads(self.ok("inspect", "in", "--json", "--tp-plan", "plan.json"))
                    self.assertEqual(tuple(listed["tensors"][0]["shape"]), found)

    def test_optimizer_states(self):
        for number, (change, status, words) in enumerate(STATES):
            with self.subTest(number=number):
                shutil.rmtree(self.path("in"), True)
                shutil.copytree(HYBRID, self.path("in"), ignore=lambda _, names: ["full.pt"])
                for rank in range(4):
                    path = self.path("in", f"optim_world_size_4_rank_{rank}.pt")
                    value = pickles.read_pt(path)
                    change(value)
                    pickles.write_pt(path, value, like=path)
                if status:
                    self.refused(status, words)
                else:
                    self.assertIn("exp_avg_sq", self.ok("inspect", "in"))


if __name__ == "__main__":
    harness.main()
