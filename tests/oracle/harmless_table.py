#!/usr/bin/env python3
"""Every entry of the table of harmless classes (formats/torch/names/harmless.c), made in each way that a pickle can make it, with arguments,
states and items whose every attribute is a function. Python loads each, with functions that record their calls. What called one must
be refused by fsdpckpt; for fsdpckpt, the function is one that the table allows as a value.

usage: harmless_table.py FSDPCKPT      exit 77 without torch
"""
import collections
import io
import json
import logging
import os
import pickle
import re
import signal
import struct
import sys
import tempfile
import warnings

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
try:
    import torch
    import torch.distributed.checkpoint  # noqa: F401
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish
from pickle_attacks import changed_archive, run, text

TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "formats", "torch", "names", "harmless.c")
LAYERS = ("Identity", "Linear", "Softmax", "Conv1d", "AvgPool3d", "LSTM", "MultiheadAttention", "TransformerEncoderLayer",
          "TransformerDecoderLayer", "Upsample", "BatchNorm1d", "ParameterDict", "ModuleList")


def table():
    """(module, name, reduce, newobj, state) of each entry."""
    with open(TABLE) as f:
        source = f.read()
    macros = {"RECORD": '.newobj = "", .state = "R"', "ENUM": '.reduce = "k"', "PATH": '.reduce = "s*"'}
    source = source[source.index("static const fc_harmless table[]"):].replace('" ATTRIBUTES "', "[nM([nM][nM])]")
    for macro, module, rest in re.findall(r'^    (?:(RECORD|ENUM|PATH)\(|\{)"([^"]+)",\s+(.*?)[)}],$', source, re.M | re.S):
        name = re.match(r'"([^"]+)"', rest).group(1)
        yield entry(module, name, macros.get(macro, rest))
    for name, rest in re.findall(r'^    BUILTIN\("([^"]+)", (.*)\),$', source, re.M):
        yield entry("builtins", name, rest)
    for name in LAYERS:
        yield entry(getattr(torch.nn, name).__module__, name, macros["RECORD"])


def entry(module, name, rest):
    found = [re.search(r'\.%s = "([^"]*)"' % field, rest) for field in ("reduce", "newobj", "state")]
    return (module, name, *(m and m.group(1) for m in found))


# ---- what records ----

calls = []


class Found:
    """A function that records its call."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        calls.append(self.name)
        return Holder()


def attribute(name):
    if name.startswith("__") and name.endswith("__"):  # fsdpckpt allows no attribute with such a name
        raise AttributeError(name)
    return Found(name)


class Holder:
    """Any attribute that an instance of Namespace can be given is a function."""

    def __getattr__(self, name):
        return attribute(name)


class HoldingDict(collections.OrderedDict):
    """Likewise for an OrderedDict, where an attribute hides a method of that name."""

    def __getattribute__(self, name):
        return object.__getattribute__(self, name) if name.startswith("__") else attribute(name)


# ---- pieces of pickles: (what fsdpckpt sees, what Python loads) ----

def both(data):
    return (data, data)


def join(*parts):
    parts = [both(p) if isinstance(p, bytes) else p for p in parts]
    return tuple(b"".join(p[i] for p in parts) for i in (0, 1))


def named(module, name):
    return both(("c%s\n%s\n" % (module, name)).encode())


def tuple_of(items):
    return join(b"(", *items, b"t")


def dict_of(pairs):
    return join(b"}(", *[part for key, value in pairs for part in (text(key), value)], b"u")


HELD = ("keys", "items", "detach", "x")
FUNCTION = b"ctorch.nn.functional\nrelu\n"
HOLDER = (b"cargparse\nNamespace\n)\x81}(" + b"".join(text(n) + FUNCTION for n in HELD) + b"ub", b"c__main__\nHolder\n)\x81")
HOLDING_DICT = (b"ccollections\nOrderedDict\n)R}(" + b"".join(text(n) + FUNCTION for n in HELD) + b"ub",
                b"c__main__\nHoldingDict\n)R" + text("x") + b"Ns")
HOLDERS = (HOLDER, HOLDING_DICT, (FUNCTION, b"c__main__\nfound\n"))
found = Found("the value itself")

SAMPLES = {
    "i": b"K\1", "f": b"K\1", "s": text("a"), "x": b"c_codecs\nencode\n" + text("a") + text("latin1") + b"\x86R", "k": b"K\1", "n": b"N",
    "1": b"\x88", "q": text("f4"), "l": b"]K\1a", "z": b"K\4\x85", "d": b"}", "e": b"N", "v": b"K\1", "R": b"}" + text("a") + b"K\1s",
    "M": b"}" + text("a") + b"K\1s", "c": b"c__builtin__\nint\n", "r": b"ctorch._utils\n_rebuild_tensor_v2\n", "y": b"ctorch\nfloat32\n",
    "V": b"ctorch\ndevice\n" + text("cpu") + b"\x85R",
    "g": b"ctorch\nper_tensor_affine\n", "E": b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R",
    "P": b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\4tQ",
    "Z": b"cdatetime\ntimedelta\n)R", "W": b"ctorch\nTensor\n", "N": b"cnumpy\nndarray\n",
    "L": b"ctorch.serialization\n_get_layout\n" + text("torch.strided") + b"\x85R",
    "Q": b"cnumpy.random.bit_generator\nSeedSequence\n"}
SAMPLES["D"] = (b"cnumpy\ndtype\n" + text("f4") + b"\x89\x88\x87R(K\3" + text("<") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb")
SAMPLES["O"] = (b"cnumpy\ndtype\n" + text("O8") + b"\x89\x88\x87R(K\3" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb")
SAMPLES["A"] = (b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85" + SAMPLES["x"] + b"\x87R")
SAMPLES["T"] = b"ctorch._utils\n_rebuild_tensor_v2\n(" + SAMPLES["P"] + b"K\0K\4\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR"
SAMPLES["#"] = (b"cnumpy.random.bit_generator\n__pyx_unpickle_SeedSequence\n" + SAMPLES["Q"] + b"J" + struct.pack("<i", 65708578) + b"N\x87R")


def slots(pattern):
    """The slots of a pattern without alternatives."""
    at = 0
    while at < len(pattern):
        start, depth = at, 0
        while True:
            depth += (pattern[at] in "([{") - (pattern[at] in ")]}")
            at += 1
            if depth == 0:
                break
        at += at < len(pattern) and pattern[at] in "?*"
        yield pattern[start:at].rstrip("?*")


def alternatives(pattern):
    depth, start, out = 0, 0, []
    for i, c in enumerate(pattern):
        depth += (c in "([{") - (c in ")]}")
        if c == "|" and depth == 0:
            out.append(pattern[start:i])
            start = i + 1
    return out + [pattern[start:]]


def sample(slot):
    if slot[0] == "[":
        return sample(next(slots(slot[1:-1])))
    if slot[0] == "(":
        return tuple_of([sample(s) for s in slots(slot[1:-1])])
    if slot[0] == "{":
        return dict_of([("values", sample(slot[1:-1]))])
    return both(SAMPLES[slot])


def holding():
    """Values that hold functions, themselves or in containers."""
    for h in HOLDERS:
        yield h
        if h is not HOLDERS[-1]:
            yield join(b"]", h, b"a")
            yield join(h, b"\x85")
            yield dict_of([("x", h)])


def changed(slot):
    """A sample of the slot with something that holds functions in each place."""
    if slot[0] == "[":
        for s in slots(slot[1:-1]):
            yield from changed(s)
        return
    yield from holding()
    if slot[0] == "(":
        inner = list(slots(slot[1:-1]))
        for i, s in enumerate(inner):
            for c in HOLDERS if s.isalnum() else changed(s):
                yield tuple_of([sample(s) for s in inner[:i]] + [c] + [sample(s) for s in inner[i + 1:]])
    elif slot[0] == "{":
        for c in changed(slot[1:-1]):
            yield dict_of([("values", c)])


def arguments(pattern):
    """Tuples of arguments: those of a pattern, and the same with something that holds functions in each place."""
    yield tuple_of([])
    for h in HOLDERS:
        for n in (1, 2, 3, 5, 8):
            yield tuple_of([h] * n)
    for one in alternatives(pattern or ""):
        known = list(slots(one))
        yield tuple_of([sample(s) for s in known])
        for i, s in enumerate(known):
            for c in changed(s):
                yield tuple_of([sample(s) for s in known[:i]] + [c])
                yield tuple_of([sample(s) for s in known[:i]] + [c] + [sample(s) for s in known[i + 1:]])


def field_names(cls):
    """Names that a class looks for in a state."""
    names = set()
    for method in ("__setstate__", "__getattr__", "__setattr__"):
        for base in getattr(cls, "__mro__", ()):
            code = getattr(base.__dict__.get(method), "__code__", None)
            names |= {c for c in (code.co_consts if code else ()) if isinstance(c, str) and c.isidentifier()}
    return sorted(n for n in names if not n.startswith("__"))


def states(pattern, cls):
    yield from holding()
    names = field_names(cls)
    for h in HOLDERS:
        fields = dict_of([("x", h), *[(n, h) for n in names]])
        yield fields
        for n in names:
            yield dict_of([(n, h)])
        yield tuple_of([both(b"N"), fields])
        yield tuple_of([both(b"N"), dict_of([("__class__", named("collections", "OrderedDict")), ("__dict__", h)])])
        yield tuple_of([both(b"N"), h])
        yield tuple_of([h, both(b"N")])
        for n in (2, 3, 5, 6, 8):
            yield tuple_of([h] * n)
    for one in alternatives(pattern or ""):
        for s in slots(one):
            yield sample(s)
            yield from changed(s)


def variants(one):
    """Values that a pickle can make with an entry."""
    module, name, reduce, newobj, state = one
    cls = loaded(module, name)
    made = []
    for op, pattern in ((b"R", reduce), (b"\x81", newobj)):
        for args in arguments(pattern):
            yield join(named(module, name), args, op)
        if pattern is not None:
            known = [sample(s) for s in slots(alternatives(pattern)[0])]
            made += [join(named(module, name), tuple_of(args), op) for args in {(), tuple(known)}]
    for instance in made:
        for s in states(state, cls):
            yield join(instance, s, b"b")
        for h in HOLDERS:
            yield join(instance, h, b"a")
            yield join(instance, text("x"), h, b"s")
            yield join(b"}", instance, h, b"s")
            yield join(b"}(", instance, h, instance, h, b"u")
        if state:
            good = join(instance, sample(next(slots(alternatives(state)[0]))), b"b")
            for h in HOLDERS:
                yield join(good, h, b"b")
                yield join(good, h, b"a")
                yield join(good, dict_of([("x", h)]), b"b")


# ---- Python ----

class Loader(pickle.Unpickler):
    def find_class(self, module, name):
        return globals()[name] if module == "__main__" else super().find_class(module, name)

    def persistent_load(self, pid):
        return torch.storage.TypedStorage(4, dtype=torch.float32)


def loaded(module, name):
    """The class or function, or None if its package is missing."""
    try:
        return pickle.Unpickler(io.BytesIO(b"\x80\2c" + ("%s\n%s\n." % (module, name)).encode())).load()
    except Exception:
        return None


def load_all(todo, out):
    """Writes the index of each value before it is loaded, and the name of a function that it called."""
    for i in todo:
        os.write(out, b"%d\n" % i)
        calls.clear()
        signal.alarm(5)
        try:
            Loader(io.BytesIO(b"\x80\2" + values[i][1] + b".")).load()
        except Exception:
            pass
        signal.alarm(0)
        if calls:
            os.write(out, b"%d %s\n" % (i, calls[0].encode()))


def called():
    """{index: the function that loading the value called}. A child loads them; a crash counts as a call, and a new child goes on."""
    out, left = {}, range(len(values))
    while left:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            sys.stderr = open(os.devnull, "w")
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            load_all(left, write)
            os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as f:
            lines = f.read().decode().split("\n")[:-1]
        status = os.waitpid(child, 0)[1]
        for line in lines:
            if " " in line:
                out[int(line.split()[0])] = line.split(" ", 1)[1]
        last = int(lines[-1].split()[0])
        if status:
            out[last] = "a crash: signal %d" % os.WTERMSIG(status)
        left = range(last + 1, len(values))
    return out


# ---- fsdpckpt ----

def write(path, todo):
    """Writes a file with values, each in a list of its own. The keys are their indexes."""
    empty = io.BytesIO()
    torch.save({}, empty)
    data = b"\x80\2}(" + b"".join(text("v%d" % i) + b"]" + values[i][0] + b"a" for i in todo) + b"u."
    with open(path, "wb") as f:
        f.write(changed_archive(empty.getvalue(), lambda old: data, {"data/0": bytes(16)}))


def refused(path, todo):
    """The indexes of the values that fsdpckpt does not call harmless. A value that looks damaged makes the file unreadable, so then
    the halves are tried."""
    write(path, todo)
    r = run("inspect", path, "--json")
    if r.returncode != 0:
        check(r.returncode in (3, 5), "inspect: %s" % r)
        half = len(todo) // 2
        return refused(path, todo[:half]) | refused(path, todo[half:]) if half else set(todo)
    objects = json.loads(r.stdout)["objects"]
    return {int(re.match(r"v(\d+)", o["name"]).group(1)) for o in objects if "risk" in o}


def is_reported(path, i):
    """Whether check reports the value, or the file. A call whose result becomes a tensor or a plain dict is in no object."""
    write(path, [i])
    r = run("check", path)
    return r.returncode == 1 and "may be hostile" in r.stdout or "leave it out with --exclude" in r.stdout


warnings.filterwarnings("ignore")  # again, because importing torch resets it
entries = list({(id(loaded(*e[:2])), *e[2:]): e for e in table() if loaded(*e[:2]) is not None}.values())
check(len(entries) > 100, "only %d entries were found in the table" % len(entries))
CONTAINERS = [("collections", "OrderedDict"), ("collections", "Counter"), ("collections", "defaultdict"), ("__builtin__", "dict"),
              ("__builtin__", "list"), ("__builtin__", "set"), ("torch", "Size"), ("__builtin__", "bytearray")]
values, owner = [], []
for one in entries + [(m, n, "d" if "dict" in n.lower() else None, None, None) for m, n in CONTAINERS]:
    for value in dict.fromkeys(variants(one)):
        values.append(value)
        owner.append(one)
with tempfile.TemporaryDirectory(prefix="fc-table-") as home:
    did = called()
    path = os.path.join(home, "values.pt")
    bad = refused(path, list(range(len(values))))
    bad |= {i for i in did if i not in bad and is_reported(path, i)}
check(any(v == "keys" for v in did.values()) and any(v == "detach" for v in did.values()), "no value called anything: the test is wrong")
for i, name in sorted(did.items()):
    check(i in bad, "%s.%s: loading %r calls %s, and is called harmless" % (*owner[i][:2], values[i][0], name))
print("%d entries, %d values, %d call something, %d are refused" % (len(entries), len(values), len(did), len(bad)))
sys.exit(finish("harmless_table"))
