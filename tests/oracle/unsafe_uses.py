#!/usr/bin/env python3
"""Objects of harmless classes that are given something which is not: Python calls an attribute of an argument, follows a pointer from the
file, never ends, or changes the class of an instance. check and verify report them, and no format that PyTorch loads receives them.

usage: unsafe_uses.py FSDPCKPT      exit 77 without torch
"""
import argparse
import collections
import functools
import logging
import os
import pickle
import shutil
import sys
import tempfile
import warnings

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
try:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.nested._internal import nested_tensor
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish
from pickle_attacks import Reduced, ran, run, text, with_pickle


def attribute_calls(mark):
    """Values of harmless classes that call an attribute of what they are given. (name, value, whether fsdpckpt can name a function)"""
    start = functools.partial(SubprocessHandler, "touch", (mark,), {}, None, None, 0, None)

    def holder(name):
        return argparse.Namespace(**{name: start})
    attributes = collections.OrderedDict(a=1)
    attributes.keys = start
    yield "UserDict", Reduced(collections.UserDict, (holder("keys"),))
    yield "layer", Reduced(torch.nn.Identity.__new__, (torch.nn.Identity,), holder("keys"))
    yield "parameter", Reduced(torch.nn.Parameter, (holder("detach"),))
    yield "rebuilt parameter", Reduced(torch._utils._rebuild_parameter, (holder("detach"), False, None))
    yield "parameter with a state", Reduced(torch._utils._rebuild_parameter_with_state, (torch.ones(1), False, None, holder("items")))
    yield "dict of an OrderedDict", Reduced(dict, (attributes,))
    yield "arguments by name", Reduced(nested_tensor._rebuild_njt, (holder("keys"),))


class NewObject(pickle._Pickler):
    """Writes object.__new__ of a class as the opcode that Python's pickler writes for it."""

    def save_reduce(self, func, args, state=None, *rest, **kwargs):
        if getattr(func, "__name__", "") != "__new__":
            return super().save_reduce(func, args, state, *rest, **kwargs)
        self.save(args[0])
        self.save(())
        self.write(pickle.NEWOBJ)
        self.save(state)
        self.write(pickle.BUILD)


class PickleModule:
    Pickler, dump, load, Unpickler = NewObject, pickle.dump, pickle.load, pickle.Unpickler


def attribute_call(home):
    """They are reported, at any depth and in every format, and they are written to none that PyTorch loads."""
    mark = os.path.join(home, "mark")
    for what, value in attribute_calls(mark):
        folder = os.path.join(home, "attribute_" + what.replace(" ", "_"))
        os.mkdir(folder)
        for depth in (0, 39):
            nested = value
            for i in range(depth):
                nested = argparse.Namespace(x=[nested]) if i % 2 else (nested, {"y": 1})
            pt = os.path.join(folder, "%d.pt" % depth)
            torch.save({"w": torch.ones(4), "evil": [nested]}, pt, pickle_module=PickleModule)
            check(ran(lambda: torch.load(pt, weights_only=False), mark), "%s: does not run: the test is wrong" % what)
            r = run("check", pt)
            check(r.returncode == 1 and "may be hostile" in r.stdout, "%s at depth %d: check: %s" % (what, depth, r))
            check(run("verify", pt).returncode == 1, "%s at depth %d: verify" % (what, depth))
            for to in ("pt", "dcp", "h5", "safetensors") if depth else ("pt", "dcp"):
                target = os.path.join(folder, "%d.to.%s" % (depth, to))
                r = run("convert", pt, "-o", target, *(("--to", to) if to in ("pt", "dcp") else ()))
                if to in ("pt", "dcp"):
                    check(r.returncode in (0, 3, 5), "%s at depth %d: to %s: %s" % (what, depth, to, r))
                if r.returncode == 0:  # a plain dict is left of a call that makes one; h5 and safetensors keep bytes
                    again = target + ".pt"
                    r = run("convert", target, "-o", again)
                    good = r.returncode in (3, 5) or not ran(lambda: torch.load(again, weights_only=False), mark)
                    check(good, "%s at depth %d: by %s: it travelled" % (what, depth, to))
                    check(to != "dcp" or not dcp_runs(target, mark), "%s at depth %d: it travelled to DCP" % (what, depth))
        check(not os.path.exists(mark), "%s: fsdpckpt ran it" % what)
        shutil.rmtree(folder)


def dcp_runs(path, mark):
    """Returns True if dcp.load runs the attack."""
    names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    return ran(lambda: dcp.load({n: None for n in names if n != "w"}, checkpoint_id=path), mark)


def opcodes(*items):
    return b"".join(i if isinstance(i, bytes) else text(i) for i in items)


def bad_states():
    """Values that crash Python, never end, or change their class. No function is called."""
    dtype = opcodes(b"cnumpy\ndtype\n", "O8", b"\x89\x88\x87R(K\3", "|", b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff")
    data = opcodes(b"c_codecs\nencode\n", "A" * 8, "latin1", b"\x86R")
    array = opcodes(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85", "b", b"\x87R(K\1K\1\x85")
    yield "a pointer in a NumPy scalar", b"cnumpy.core.multiarray\nscalar\n" + dtype + b"K\0tb" + data + b"\x86R"
    yield "a pointer in a NumPy array", array + dtype + b"K\0tb\x89" + data + b"tb"
    yield "a NumPy array with too few objects", array.replace(b"K\1\x85", b"M\xff\x0f\x85") + dtype + b"K?tb\x89]tb"
    yield "an endless deque", b"ccollections\ndeque\ncitertools\ncount\n)R\x85R"
    yield "an endless array", opcodes(b"carray\narray\n", "i", b"citertools\ncount\n)R\x86R")
    yield "a state that sets the class", opcodes(b"cargparse\nNamespace\n)\x81N}", "__class__", b"ctypes\nSimpleNamespace\ns\x86b")
    yield "a state of an OrderedDict that sets the class", opcodes(b"ccollections\nOrderedDict\n)RN}", "__class__",
                                                                   b"ccollections\nCounter\ns\x86b")
    yield "a place of a storage that is an instance", opcodes(
        b"ctorch._utils\n_rebuild_tensor_v2\n((", "storage", b"ctorch\nFloatStorage\n", "0", b"cargparse\nNamespace\n)\x81}",
        "startswith", b"ctorch.nn.functional\nrelu\nsbK\4tQK\0K\4\x85K\1\x85\x89NtR")
    yield "a function of torch", b"ctorch\nfrom_file\n"
    yield "a function of torch in an instance", opcodes(b"cargparse\nNamespace\n)\x81}", "x", b"ctorch.hub\nload\nsb")


def bad_state(home):
    path = os.path.join(home, "state.pt")
    for what, value in bad_states():
        torch.save({"w": torch.ones(4)}, path)
        with_pickle(path, lambda data: data[:-1] + text("bad") + b"(" + text("x") + value + b"ts.")
        r = run("check", path)
        check("not known to be harmless" in r.stdout or "may be hostile" in r.stdout or r.returncode == 3, "%s: check: %s" % (what, r))
        for to in ("pt", "dcp"):
            target = os.path.join(home, "state_to_" + to)
            r = run("convert", path, "-o", target, "--to", to)
            if "storage" in what and r.returncode == 0:  # the tensor is written anew, without the place
                check(run("check", target).returncode == 0, "%s: %s" % (what, to))
                shutil.rmtree(target, ignore_errors=True) if to == "dcp" else os.remove(target)
                continue
            check(r.returncode in (3, 5) and not os.path.exists(target), "%s: %s: %s" % (what, to, r))


with tempfile.TemporaryDirectory(prefix="fc-uses-") as home:
    for test in (attribute_call, bad_state):
        test(home)
sys.exit(finish("unsafe_uses"))
