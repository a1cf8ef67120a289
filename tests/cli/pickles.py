"""Reads pickles without their classes, lets a test change them, and writes them again: like torch.save, but any value may be
wrong. Uses only Python's standard library."""
import io
import pickle
import zipfile


class Global:
    """A class or function, by name."""

    def __init__(self, module, name):
        self.module, self.name = module, name
        self.__new__ = lambda cls, *args: Call(cls, args, True)  # NEWOBJ

    def __call__(self, *args):  # REDUCE
        return Call(self, args)


class Call:
    """What a call returned, with the state and the items that it got later."""

    def __init__(self, callee, args, new=False, state=None):
        self.callee, self.args, self.new, self.state = callee, args, new, state
        self.entries, self.values = {}, []
        self.__new__ = lambda cls, *more: Call(cls, more, True)

    def __setstate__(self, state):
        self.state = state

    def __setitem__(self, key, value):
        self.entries[key] = value

    def __getitem__(self, key):
        return self.entries[key]

    def append(self, value):
        self.values.append(value)

    @property
    def name(self):
        return getattr(self.callee, "name", None)


class Persistent:
    """A value outside the pickle: for PyTorch, a storage."""

    def __init__(self, identity):
        self.identity = identity


class Opcodes(bytes):
    """Bytes that are written as they are. They must push one value."""


class Reader(pickle._Unpickler):
    def find_class(self, module, name):
        return Global(module, name)

    def persistent_load(self, identity):
        return Persistent(identity)


class Writer(pickle._Pickler):
    dispatch = dict(pickle._Pickler.dispatch)

    def persistent_id(self, value):
        return value.identity if isinstance(value, Persistent) else None

    def save_global_name(self, value):
        self.write(b"c%s\n%s\n" % (value.module.encode(), value.name.encode()))

    def save_opcodes(self, value):
        self.write(bytes(value))

    def save_call(self, value):
        self.save(value.callee)
        self.save(value.args)
        self.write(pickle.NEWOBJ if value.new else pickle.REDUCE)
        self.memoize(value)
        self._batch_appends(value.values)
        self._batch_setitems(value.entries.items())
        if value.state is not None:
            self.save(value.state)
            self.write(pickle.BUILD)

    dispatch.update({Global: save_global_name, Call: save_call, Opcodes: save_opcodes})


def loads(data):
    return Reader(io.BytesIO(data)).load()


def dumps(value, protocol=2):
    out = io.BytesIO()
    Writer(out, protocol).dump(value)
    return out.getvalue()


def find(root, name):
    """The first call of a function or class with this name, or None."""
    todo, seen = [root], set()
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen.add(id(v))
        if isinstance(v, Call):
            if v.name == name:
                return v
            todo += [v.state, *reversed(v.entries.values()), *reversed(v.values), v.args, v.callee]
        elif isinstance(v, dict):
            todo += reversed([*v, *v.values()])
        elif isinstance(v, (list, tuple)):
            todo += reversed(v)
        elif isinstance(v, Persistent):
            todo.append(v.identity)
    return None


def replaced(sequence, index, value):
    """A tuple with one item replaced."""
    return (*sequence[:index], value, *sequence[index + 1:])


def read_pt(path):
    """The pickled value of a file of torch.save."""
    with zipfile.ZipFile(path) as archive:
        name = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
        return loads(archive.read(name))


def write_pt(path, value, like=None, storages=(), **records):
    """A file of torch.save: `value` is pickled, or bytes of a pickle. The records come from the file `like` or are `storages`."""
    found = {"x/version": b"3\n", "x/byteorder": b"little"}
    if like:
        with zipfile.ZipFile(like) as archive:
            found = {"x/" + n.split("/", 1)[1]: archive.read(n) for n in archive.namelist()}
    found["x/data.pkl"] = value if isinstance(value, bytes) else dumps(value)
    found.update({f"x/data/{i}": s for i, s in enumerate(storages)})
    found.update({f"x/{n}": r for n, r in records.items()})
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in found.items():
            if data is not None:
                archive.writestr(name, data)
