"""Runs the command and makes copies of checkpoints, intact and damaged. Uses only Python's standard library.

The environment variable FSDPCKPT names the binary, FSDPCKPT_CORPUS the directory of good checkpoints.
"""

import collections
import contextlib
import copyreg
import io
import json
import os
import re
import pickle
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import unittest

BINARY = os.environ["FSDPCKPT"]
CORPUS = os.environ["FSDPCKPT_CORPUS"]
PHASES = ["starting", "gathering", "opening", "planning", "copying", "reading", "comparing", "verifying", "checking", "syncing"]
HANG = 600  # seconds; only a hang takes this long, even on a busy machine


def corpus(name):
    path = os.path.join(CORPUS, name)
    assert os.path.isdir(path), path
    return path


def preload(library):
    """The environment that preloads a library. LD_PRELOAD cannot hold a path with blanks, so it gets only the file name, and
        LD_LIBRARY_PATH gets the directory."""
    folders = [os.path.dirname(library), os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_PRELOAD": os.path.basename(library), "LD_LIBRARY_PATH": ":".join(filter(None, folders))}


def without_progress(text):
    """Drops the lines about progress that a command writes to a log when it takes two seconds, as on a busy machine."""
    return re.sub(r"^fsdpckpt: (%s)(,.*| \d.*)?\n" % "|".join(PHASES), "", text, flags=re.MULTILINE)


def unexpected(text):
    """The lines of stderr that a test with the corpus must explain. Vocabularies there have odd sizes, so tp does not divide them; some
    folders have the truth (full.pt), an older copy of the weights or the two sides of a recipe; and parts of checkpoints are selected."""
    expected = (" does not divide evenly by tp ", ", and not full.pt (pt); ", ", and not pytorch_model.bin (pt); ",
                ", and not from.safetensors (safetensors), ", "--include and --exclude left out, besides the optimizer: ")
    return [line for line in text.splitlines() if not any(part in line for part in expected)]


class Case(unittest.TestCase):
    """A test in an empty directory of its own."""

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="fsdpckpt-cli-")
        self.addCleanup(shutil.rmtree, self.dir, True)

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def run_tool(self, *args, stdout=subprocess.PIPE, env=None, timeout=HANG):
        full = {**os.environ, "LC_ALL": "C.UTF-8", **(env or {})}
        p = subprocess.run([BINARY, *map(str, args)], stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
                           cwd=self.dir, env=full, timeout=timeout, text=True, errors="replace")
        p.stderr = p.stderr if "--progress" in args else without_progress(p.stderr)
        return p

    def ok(self, *args, **kwargs):
        """Runs the command and expects exit status 0 and nothing unexpected on stderr."""
        p = self.run_tool(*args, **kwargs)
        told = unexpected(p.stderr)
        self.assertEqual((p.returncode, told), (0, []), args)
        return p.stdout

    def fails(self, status, *args, contains=(), **kwargs):
        """Runs the command and expects this exit status, one line on stderr and nothing on stdout."""
        p = self.run_tool(*args, **kwargs)
        self.assertEqual(p.returncode, status, (args, p.stdout, p.stderr))
        self.assertEqual(p.stderr.count("\n"), 1, p.stderr)
        self.assertTrue(p.stderr.startswith("fsdpckpt: "), p.stderr)
        self.assertTrue(p.stderr.endswith("\n"), p.stderr)
        self.assertNotIn("\x1b", p.stderr)
        if p.stdout is not None:
            self.assertEqual(p.stdout, "")
        for text in contains:
            self.assertIn(text, p.stderr)
        return p.stderr

    def copy(self, name, to="ckpt"):
        """A copy of a checkpoint of the corpus, for a test to damage."""
        target = self.path(to)
        shutil.copytree(corpus(name), target)
        return target

    @contextlib.contextmanager
    def flipped(self, path, place):
        """Flips one bit of a file for the duration of the `with` block."""
        def turn():
            with open(path, "r+b") as f:
                f.seek(place)
                byte = f.read(1)[0]
                f.seek(place)
                f.write(bytes([byte ^ 16]))

        turn()
        yield
        turn()

    def flipped_chunk(self, ckpt, tensor, number):
        """Flips one bit of the elements of chunk `number` of a tensor."""
        chunk = json.loads(self.ok("inspect", ckpt, "--tensor", tensor, "--json"))["chunks"][number]
        files = json.loads(self.ok("inspect", ckpt, "--json"))["files"]
        path = self.path(ckpt)
        path = os.path.join(path, files[chunk["file"]]["name"]) if os.path.isdir(path) else path
        return self.flipped(path, chunk["data_offset"] + 5)

    def listing(self):
        return sorted(os.listdir(self.dir))


class Inert:
    """Stands for any class or function in a pickle. It remembers how it was made and pickles itself the same way."""

    def __new__(cls, *args):
        self = object.__new__(cls)
        self.args, self.called, self.state = args, False, None
        return self

    def __init__(self, *args):  # REDUCE calls this, NEWOBJ does not
        self.called = True

    def __setstate__(self, state):
        self.state = state

    def __reduce_ex__(self, protocol):
        if self.called:
            return (type(self), self.args, self.state)
        return (copyreg.__newobj__, (type(self), *self.args), self.state)

    def __getattr__(self, name):
        if name.startswith("__") or name not in (self.state or {}):
            raise AttributeError(name)
        return self.state[name]

    def __eq__(self, other):
        return type(self) is type(other) and (self.args, self.state) == (other.args, other.state)

    def __hash__(self):
        return hash(type(self))


class _Dtype:
    """A dtype such as torch.float32, which is pickled as a global, not as a call."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        return self.name


def _stand_in(module, name):
    """Registers a class (or a dtype) as module.name, so that pickle finds it by that name."""
    parts = module.split(".")
    for i in range(len(parts)):
        sys.modules.setdefault(".".join(parts[: i + 1]), types.ModuleType(".".join(parts[: i + 1])))
    home = sys.modules[module]
    if not hasattr(home, name):
        value = _Dtype(name) if module == "torch" and name.islower() else type(name, (Inert,), {})
        value.__module__ = module
        setattr(home, name, value)
    return getattr(home, name)


class _Reader(pickle.Unpickler):
    def find_class(self, module, name):
        if module.startswith(("torch", "pathlib")):
            return _stand_in(module, name)
        return super().find_class(module, name)


def _forget_stand_ins():
    for name in [m for m in sys.modules if m == "torch" or m.startswith("torch.") or m == "pathlib"]:
        del sys.modules[name]


def edit_metadata(checkpoint, edit):
    """Reads a .metadata without torch, lets `edit` change the object, writes it back."""
    path = os.path.join(checkpoint, ".metadata")
    saved = {k: v for k, v in sys.modules.items() if k == "pathlib"}
    try:
        sys.modules.pop("pathlib", None)
        with open(path, "rb") as f:
            data = _Reader(io.BytesIO(f.read())).load()
        edit(data)
        blob = pickle.dumps(data, protocol=4)
    finally:
        _forget_stand_ins()
        sys.modules.update(saved)
    with open(path, "wb") as f:
        f.write(blob)


def tensor_of(data, name):
    return data.state_dict_metadata[name]


def storage_key(data, name, index):
    """The key in storage_data of chunk `index` of a tensor."""
    chunk = tensor_of(data, name).chunks[index]
    for key in data.storage_data:
        if key.fqn == name and key.offset == chunk.offsets:
            return key
    raise KeyError(name)


def _zip_stored(entries, sparse):
    """Builds a zip archive of stored entries (name, bytes) and one entry `sparse` = (name, size) that is a hole. Yields bytes,
        or an int for a hole. CRCs are 0, as torch writes them when it is configured not to compute any."""
    central, offset = b"", 0
    for name, data in entries + [sparse]:
        size = data if isinstance(data, int) else len(data)
        common = struct.pack("<HHHHHIIIHH", 20, 0, 0, 0, 33, 0, size, size, len(name), 0)
        local = b"PK\3\4" + common + name.encode()
        central += b"PK\1\2" + struct.pack("<H", 20) + common + struct.pack("<HHHII", 0, 0, 0, 0, offset) + name.encode()
        offset += len(local) + size
        yield local
        yield data
    count = len(entries) + 1
    yield central + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, count, count, len(central), offset, 0)


class _Writer(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.tuple if isinstance(obj, _Storage) else None


class _Storage:
    def __init__(self, count):
        self.tuple = ("storage", _stand_in("torch", "FloatStorage"), "0", "cpu", count)


def make_large(path, elements):
    """A checkpoint of one float32 tensor "w" in a sparse file: it takes long to convert but no space on disk."""
    os.mkdir(path)
    try:
        buf = io.BytesIO()
        rebuild = _stand_in("torch._utils", "_rebuild_tensor_v2")
        tensor = rebuild(_Storage(elements), 0, (elements,), (1,), False, collections.OrderedDict())
        _Writer(buf, protocol=2).dump(tensor)
        entries = [("archive/data.pkl", buf.getvalue()), ("archive/byteorder", b"little"), ("archive/version", b"3\n")]
        with open(os.path.join(path, "__0_0.distcp"), "wb") as f:
            for part in _zip_stored(entries, ("archive/data/0", 4 * elements)):
                f.seek(part, 1) if isinstance(part, int) else f.write(part)
            length = f.tell()

        def new(module, name, **state):
            made = Inert.__new__(_stand_in(module, name))
            made.state = state
            return made

        dcp = "torch.distributed.checkpoint.metadata"
        size = lambda *n: _stand_in("torch", "Size")(n)
        properties = new(dcp, "TensorProperties")
        properties.state = (_stand_in("torch", "float32"), _stand_in("torch.serialization", "_get_layout")("torch.strided"),
                            False, _stand_in(dcp, "_MEM_FORMAT_ENCODING")(0), False)
        chunk = new(dcp, "ChunkStorageMetadata", offsets=size(0), sizes=size(elements))
        data = new(dcp, "Metadata",
                   state_dict_metadata={"w": new(dcp, "TensorStorageMetadata", properties=properties, size=size(elements),
                                                 chunks=[chunk])},
                   planner_data={"w": ("w",)},
                   storage_data={new(dcp, "MetadataIndex", fqn="w", offset=size(0), index=0):
                                 new("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                                     relative_path="__0_0.distcp", offset=0, length=length)},
                   storage_meta=None)
        with open(os.path.join(path, ".metadata"), "wb") as f:
            pickle.dump(data, f, protocol=4)
    finally:
        _forget_stand_ins()
    return path


def largest_shard(checkpoint):
    shards = [os.path.join(checkpoint, n) for n in os.listdir(checkpoint) if n.endswith(".distcp")]
    return max(shards, key=os.path.getsize)


def main():
    unittest.main(verbosity=1)
