"""Compares a value from torch with one that was read back. Values are equal only if no program could tell them apart by type, by
bits or by the order of a dict's keys.

`differences` lists what differs. Where docs/TORCH_SAVE.md says that we do not keep a type, `kept` converts the expected value
to our form first, so the comparison itself needs no exceptions.
"""
import collections
import struct
import types

import numpy
import torch

from checks import check, must


def bits(tensor):
    """The bytes of the elements in row-major order, including NaN bits and the sign of zero."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def typed(values):
    """Keys with their types: for a dict or a set, 1, 1.0 and True are the same key."""
    return [(type(v), v) for v in values]


def short(value):
    return " ".join(repr(value).split())[:200]


def differences(want, got, path=""):
    """Yields a line for each leaf or container that differs."""
    if type(want) is not type(got):
        yield "%s: %s became %s: %s" % (path, type(want).__name__, type(got).__name__, short(got))
    elif isinstance(want, torch.Tensor):
        if (want.dtype, want.shape) != (got.dtype, got.shape):
            yield "%s: %s %s became %s %s" % (path, want.dtype, tuple(want.shape), got.dtype, tuple(got.shape))
        elif bits(want) != bits(got):
            yield "%s: other bytes, %s became %s" % (path, short(want), short(got))
    elif isinstance(want, numpy.ndarray):
        if (want.dtype, want.shape, want.tobytes()) != (got.dtype, got.shape, got.tobytes()):
            yield "%s: %s became %s" % (path, short(want), short(got))
    elif isinstance(want, dict):
        if typed(want) != typed(got):
            yield "%s: keys %s became %s" % (path, short(list(want)), short(list(got)))
            return
        for key in want:
            yield from differences(want[key], got[key], "%s[%r]" % (path, key))
        yield from attributes(want, got, path)
    elif isinstance(want, (list, tuple)):
        if len(want) != len(got):
            yield "%s: %d members became %d" % (path, len(want), len(got))
            return
        for i, pair in enumerate(zip(want, got)):
            yield from differences(*pair, "%s[%d]" % (path, i))
        yield from attributes(want, got, path)
    elif isinstance(want, (set, frozenset)):
        if set(typed(want)) != set(typed(got)):
            yield "%s: %s became %s" % (path, short(want), short(got))
    elif isinstance(want, (float, complex)):
        numbers = [struct.pack("<2d", v.real, v.imag) for v in (want, got)]
        if numbers[0] != numbers[1]:
            yield "%s: %r became %r" % (path, want, got)
    elif want != got and (type(want).__eq__ is not object.__eq__ or not has_attributes(want)):
        yield "%s: %s became %s" % (path, short(want), short(got))
    else:
        yield from attributes(want, got, path)


def has_attributes(value):
    """Classes and functions are compared by name, not by attributes."""
    return hasattr(value, "__dict__") and not isinstance(value, (type, types.FunctionType))


def attributes(want, got, path):
    """Compares the attributes of objects. A plain dict or list has none, but a subclass may."""
    if has_attributes(want):
        yield from differences(vars(want), vars(got), path + ".__dict__")
    if isinstance(want, collections.defaultdict):
        yield from differences(want.default_factory, got.default_factory, path + ".default_factory")


def must_equal(want, got, path=""):
    """Fails the case at the first difference."""
    for difference in differences(want, got, str(path)):
        must(False, difference)


def check_equal(want, got, path=""):
    """Counts the first difference."""
    difference = next(differences(want, got, str(path)), None)
    check(difference is None, difference)


def by_name(value):
    """Sorts the keys of dicts, for values that have lost their order."""
    if type(value) is dict:
        return {key: by_name(value[key]) for key in sorted(value, key=lambda k: (type(k).__name__, k))}
    return type(value)(map(by_name, value)) if type(value) in (list, tuple) else value


def kept(value):
    """What our files keep of a value's types: a non-empty OrderedDict becomes a dict, and a Parameter becomes its tensor. An
        empty OrderedDict is stored whole and stays one."""
    if type(value) is dict or type(value) is collections.OrderedDict and value:
        return {key: kept(of) for key, of in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(kept, value))
    return value.detach() if isinstance(value, torch.nn.Parameter) else value
