"""Every argument of every public function, with values that it must refuse: each is a UsageError that names it."""

import inspect
import os
import shutil
import tempfile
import unittest
from pathlib import Path

import fsdpckpt
import harness

TRAIN = harness.GOOD / "dcp-torch2.15.0-train"


class OfBytes:
    """A path that os.fspath turns into bytes."""

    def __fspath__(self):
        return b"path"


# A wrong value, the types in the annotations that take it, and whether it is of another type than every other parameter takes.
WRONG = (
    (object(), (), True),
    (b"bytes", (), True),
    (OfBytes(), (), True),
    (["*", object()], (), True),
    ("a\0b", (), False),
    ("a\ud800b", (), False),
    (["*", "a\0b"], (), False),
    (["*", "a\ud800b"], (), False),
    (None, ("None", "Strings", "Progress"), True),
    (True, ("bool",), True),
    (5, ("int", "float"), True),
    (1.5, ("float",), True),
    (10**30, ("float",), False),
    ({"a": 1}, ("Mapping[str, Any]", "MeshLike"), True),
    ((), ("Strings", "Sequence[str]", "Sequence[Path]", "Sequence[object]", "MeshLike"), True),
)


def functions():
    """The functions and methods with arguments that people call, by name."""
    from fsdpckpt.pytest import assert_compatible
    from fsdpckpt.torch import HDF5Reader, HDF5Writer, delta

    checkpoint = fsdpckpt.open(TRAIN)
    tensor = checkpoint["model.tok_embeddings.weight"]
    public = {name: getattr(fsdpckpt, name) for name in fsdpckpt.__all__}
    return {
        **{name: f for name, f in public.items() if inspect.isfunction(f) and inspect.signature(f).parameters},
        "Checkpoint": fsdpckpt.Checkpoint,
        "Checkpoint.state_dict": checkpoint.state_dict,
        "Tensor.local": tensor.local,
        "Tensor.local_box": tensor.local_box,
        "Mesh.of": fsdpckpt.Mesh.of,
        "HDF5Reader": HDF5Reader,
        "HDF5Reader.reset": HDF5Reader().reset,
        "HDF5Writer": HDF5Writer,
        "HDF5Writer.reset": HDF5Writer().reset,
        "torch.delta": delta,
        "assert_compatible": assert_compatible,
    }


GOOD = {"Path": "no checkpoint", "Sequence[Path]": ["no checkpoint"], "Mapping[str, Any]": {}, "int": 0, "MeshLike": {"dp": 2}}


class Arguments(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.functions = functions()
        cls.before = os.getcwd()
        cls.folder = tempfile.mkdtemp()
        os.chdir(cls.folder)  # which must stay empty

    @classmethod
    def tearDownClass(cls):
        os.chdir(cls.before)
        shutil.rmtree(cls.folder)

    def parameters(self):
        """Each function with each of its parameters, and the other arguments that it needs."""
        for name, function in self.functions.items():
            parameters = inspect.signature(function).parameters.values()
            needed = {
                p.name: GOOD[p.annotation.split(" | ")[0]] for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD
            }
            for parameter in parameters:
                if parameter.kind is not parameter.VAR_KEYWORD:
                    yield name, function, parameter, needed

    def refused(self, function, arguments, name, another_type):
        with self.assertRaises(fsdpckpt.UsageError) as caught:
            function(**arguments)
        self.assertTrue(str(caught.exception).startswith(name), caught.exception)
        self.assertIsNone(caught.exception.path)
        if another_type:
            self.assertIsInstance(caught.exception, TypeError)

    def test_wrong_values_are_refused(self):
        tried = 0
        seen = set()
        for name, function, parameter, needed in self.parameters():
            taken = set(parameter.annotation.split(" | "))
            for number, (value, takers, another_type) in enumerate(WRONG):
                if taken.intersection(takers) or (number and (parameter.name, parameter.annotation) in seen):
                    continue  # commands share their options: the first value tells whether each function checks them
                with self.subTest(function=name, parameter=parameter.name, value=value):
                    self.refused(function, {**needed, parameter.name: value}, parameter.name, another_type)
                    tried += 1
            seen.add((parameter.name, parameter.annotation))
        self.assertGreater(tried, 600)
        self.assertEqual(os.listdir("."), [])

    def test_missing_and_unknown_arguments(self):
        for name, function in self.functions.items():
            with self.subTest(name), self.assertRaisesRegex(fsdpckpt.ArgumentError, r"^[\w.]+\(\): "):
                function(1, 2, 3, 4, 5, 6)
        for call in (fsdpckpt.open, fsdpckpt.check, fsdpckpt.load):
            with self.assertRaisesRegex(TypeError, "path|src"):
                call()
        for call in (fsdpckpt.open, fsdpckpt.check, fsdpckpt.load, self.functions["assert_compatible"]):
            with self.assertRaisesRegex(fsdpckpt.ArgumentError, "nonsense"):
                call(TRAIN, nonsense=1)

    def test_values_of_other_libraries_are_taken(self):
        import numpy as np

        with fsdpckpt.open(np.str_(TRAIN), include=np.array(["tok*"]), model_only=np.bool_(True)) as checkpoint:
            tensor = checkpoint["tok_embeddings.weight"]
            self.assertEqual(tensor.local_box(np.int64(1), {"dp": np.int32(2)}), tensor.local_box(1, {"dp": 2}))
        self.assertTrue(fsdpckpt.verify(Path(TRAIN), memory=np.int64(1 << 33), jobs=np.uint8(1), progress=None).ok)
        self.assertTrue(fsdpckpt.check(TRAIN, exclude=None, progress=None).ok)

    def test_a_path_of_any_bytes_is_a_path(self):
        for call in (
            lambda path: fsdpckpt.open(path),
            lambda path: fsdpckpt.open(TRAIN, schema=path),
            lambda path: fsdpckpt.open(TRAIN, recipe="nanogpt", config=path),
            lambda path: fsdpckpt.check(path),
        ):
            with self.assertRaisesRegex(fsdpckpt.Error, r"nothing(\\xff|\udcff).*[Nn]o such file"):
                call("nothing\udcff.json")

    def test_meshes_and_placements(self):
        local = self.functions["Tensor.local"]
        for mesh in (
            [1], ["dp"], [("dp",)], [("dp", 1.5)], [("dp", "2")], [(1, 2)], [("d\0", 2)], [("d\ud800", 2)], {"dp": 0}, {"dp": -1},
            {"dp": 1 << 70}, {"dp": 1 << 20, "tp": 1 << 20}, {"d" * 300: 2}, {f"d{i}": 1 for i in range(40)},
            fsdpckpt.Mesh(("dp",), (2, 2)), fsdpckpt.Mesh("dp", 2), fsdpckpt.Mesh(("dp",), (None,)),
        ):  # fmt: skip
            with self.subTest(mesh=mesh), self.assertRaises(fsdpckpt.UsageError):
                local(0, mesh)
        Shard = fsdpckpt.Shard
        for placements in ([], [1], "S", [None], [Shard("x")], [Shard(1.5)], [Shard(1 << 40)], [Shard(9)], [Shard(0)] * 2):
            with self.subTest(placements=placements), self.assertRaises(fsdpckpt.UsageError):
                local(0, {"dp": 2}, placements)
        for rank in (2, -1, 1 << 40):
            with self.subTest(rank=rank), self.assertRaises(fsdpckpt.UsageError):
                local(rank, {"dp": 2})

    def test_state_dicts(self):
        import numpy as np

        one = {"w": np.ones(2)}
        for state, options in (
            ({"a\ud800": np.ones(1)}, {}), ({"a\0": np.ones(1)}, {}), ({"a": {"b\ud800": 1}}, {}), ({"a": lambda: 0}, {}),
            ({"a": np.array(["text"])}, {}), ({"a": np.array([None])}, {}), (one, {"to": "x"}), (one, {"jobs": -1}),
            (one, {"jobs": 1 << 40}), (one, {"compress": 10}), (one, {"compress": -1}),
        ):  # fmt: skip
            with self.subTest(state=state, **options), self.assertRaises(fsdpckpt.UsageError):
                fsdpckpt.save(state, "x.h5", progress=None, **options)
        self.assertEqual(os.listdir("."), [])

    def test_mappings_and_indices_are_those_of_python(self):
        with fsdpckpt.open(TRAIN) as checkpoint:
            for key in ("no such name", "", 5, None, b"x", "a\0b", "a\ud800"):
                for get in (checkpoint.__getitem__, checkpoint.objects.__getitem__, checkpoint.objects.raw):
                    with self.subTest(key=key), self.assertRaises(KeyError):
                        get(key)
                self.assertIsNone(checkpoint.get(key))
            tensor = checkpoint["model.tok_embeddings.weight"]
            for index in ("a", None, 1.5, [0], b"x", object(), 10**30):
                if index is not None:
                    with self.subTest(index=index), self.assertRaises(IndexError):
                        tensor[index]
        with self.assertRaisesRegex(fsdpckpt.UsageError, "closed"):
            tensor[0]


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes", "torch", "pytest")
