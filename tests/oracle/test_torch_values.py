#!/usr/bin/env python3
"""Tests that torch_values.py accepts equal values and notices every difference that it claims to compare.

usage: test_torch_values.py        exit 77 without torch
"""
import collections
import sys
import unittest

try:
    import numpy
    import torch
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

import checks
from torch_values import by_name, check_equal, differences, kept, must_equal


class Hyper:
    def __init__(self, width):
        self.width = width


class Named(collections.UserDict):
    """A class whose __eq__ ignores an attribute."""


def named(label):
    value = Named(a=1)
    value.label = label
    return value


def ordered(**attributes):
    value = collections.OrderedDict(a=torch.ones(1))
    vars(value).update(attributes)
    return value


NAN = torch.tensor([float("nan")])
OTHER_NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
DIFFERENT = [
    (1, 1.0), (1, True), (0.0, -0.0), (1.0, 1.5), (1j, 1j - 0.0j + 1), ("a", b"a"), (None, 0), ("a", "b"),
    (float("nan"), -float("nan")), ([1], (1,)), ([1], [1, 1]), ([1], [1.0]), ((1, [2]), (1, [3])),
    (torch.Size([1]), (1,)), ({"a": 1}, {"a": 2}), ({"a": 1}, {"b": 1}), ({"a": 1}, {}), ({}, {"a": 1}),
    ({1: "x"}, {True: "x"}), ({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"a": 1}, collections.OrderedDict(a=1)),
    ({1}, {1.0}), ({1}, {2}), ({1}, frozenset({1})), (torch.float16, torch.bfloat16),
    (torch.device("cuda:0"), torch.device("cuda:1")), (int, float), (len, abs), (named, ordered), (range(3), range(4)),
    (torch.ones(2), torch.ones(2).double()), (torch.ones(2), torch.ones(2, 1)), (torch.zeros(0, 2), torch.zeros(0, 3)),
    (torch.ones(2), [1.0, 1.0]), (torch.ones(2), torch.nn.Parameter(torch.ones(2))), (torch.tensor(1), 1),
    (torch.zeros(1), -torch.zeros(1)), (NAN, OTHER_NAN), (torch.tensor([1, 2]), torch.tensor([1, 3])),
    (torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])), (torch.eye(2)[:1].t(), torch.ones(2, 1)),
    (Hyper(3), Hyper(4)), (Hyper(3), Hyper(3.0)), (Hyper(torch.ones(1)), Hyper(torch.zeros(1))),
    (Hyper(3), vars(Hyper(3))),
    (numpy.ones(2), numpy.zeros(2)), (numpy.ones(2), numpy.ones(2, "f4")), (numpy.ones(2), numpy.ones((1, 2))),
    (named("x"), named("y")), (ordered(), ordered(_metadata=1)), (object(), object()),
    (collections.defaultdict(list), collections.defaultdict(dict)),
]
ALIKE = [
    lambda: {"a": [1, (2.5, None), {"b": torch.arange(3)}], 2: float("nan"), (1, 2): {1, "x"}},
    lambda: NAN.clone(), lambda: torch.tensor([1 + 2j]).conj(), lambda: torch.arange(6).reshape(2, 3).t(),
    lambda: Hyper(torch.ones(2)), lambda: named("x"), lambda: ordered(_metadata={"": 1}), lambda: torch.Size([1, 2]),
    lambda: collections.Counter("abca"), lambda: collections.defaultdict(list, a=[1]), lambda: torch.zeros(0, 3),
    lambda: (numpy.arange(3), numpy.array([float("nan")])),
]


class TorchValues(unittest.TestCase):
    def test_differences_are_found(self):
        for want, got in DIFFERENT:
            for a, b in ((want, got), (got, want), ({"k": [want]}, {"k": [got]})):
                with self.subTest(want=a, got=b):
                    self.assertEqual(len(list(differences(a, b))), 1)
                    with self.assertRaises(checks.Failure):
                        must_equal(a, b)

    def test_equal_values_are_accepted(self):
        for make in ALIKE:
            with self.subTest(value=make()):
                self.assertEqual(list(differences(make(), make())), [])

    def test_every_difference_is_listed(self):
        told = list(differences({"a": [1, 2], "b": torch.ones(1)}, {"a": [1, 3], "b": torch.zeros(1)}, "x"))
        self.assertEqual([line.split(":")[0] for line in told], ["x['a'][1]", "x['b']"])

    def test_strides_do_not_matter(self):
        must_equal(torch.arange(6)[::2], torch.tensor([0, 2, 4]))

    def test_failures_are_counted(self):
        check_equal(1, 1)
        self.assertEqual(checks.failures, [])
        check_equal([1, 2], [3, 4], "x")
        self.assertEqual(checks.failures, ["x[0]: 1 became 3"])
        checks.failures.clear()

    def test_by_name_ignores_only_the_order(self):
        value = {"b": [{"d": 1, "c": 2}], "a": collections.OrderedDict(f=1, e=2), 3: 4}
        must_equal({3: 4, "a": value["a"], "b": [{"c": 2, "d": 1}]}, by_name(value))

    def test_kept_describes_our_output(self):
        value = ordered(_metadata=1)
        value["deep"] = [(torch.nn.Parameter(torch.ones(2)), collections.OrderedDict(), collections.Counter("a"))]
        must_equal({"a": torch.ones(1), "deep": [(torch.ones(2), collections.OrderedDict(), collections.Counter("a"))]},
                   kept(value))


if __name__ == "__main__":
    unittest.main()
