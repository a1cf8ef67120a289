"""Changes an HDF5 file through h5py as a user would, and checks that all else is as it was: h5_edits.py FILE...

oracle.h5_keep runs this with every version of h5py that there is. The files are changed.
"""
import random
import sys

import h5py
import numpy as np
from checks import check, failures

SAMPLE = 20
PIECES = "/%pieces"  # of virtual datasets of a view, which refer to them by name


def groups_of(f):
    """Every group of the file with its members as the keys of a dict, in the order of creation."""
    found = {"/": dict.fromkeys(f["/"])}
    if len(found["/"]) > 1000:
        return found  # without groups
    f.visititems(lambda name, item: found.update({"/" + name: dict.fromkeys(item)}) if isinstance(item, h5py.Group) else None)
    return found


def plain(item, value):
    """The value of an attribute. A reference is that to the tables of an index.h5."""
    return sorted(item.file[value]) if isinstance(value, h5py.Reference) else np.asarray(value).tolist()


def content(item):
    """The attributes of a value or group, and the bits of a value."""
    attributes = {name: plain(item, item.attrs[name]) for name in item.attrs}
    if not isinstance(item, h5py.Dataset):
        return attributes, None
    raw = np.empty(item.shape, np.dtype(f"V{item.id.get_type().get_size()}"))
    if raw.size:
        item.id.read(h5py.h5s.ALL, h5py.h5s.ALL, raw, item.id.get_type())
    return attributes, (item.shape, raw.tobytes(), item.id.get_type().encode())


def sample(groups):
    """Paths of some groups and values."""
    rng, paths = random.Random(1), []
    for group, members in groups.items():
        paths += [group] + [f"{group.rstrip('/')}/{m}" for m in rng.sample(list(members), min(len(members), SAMPLE))]
    return rng.sample(paths, min(len(paths), 4 * SAMPLE))


class Edited:
    """A file and what it must contain."""

    def __init__(self, path):
        self.path = path
        with h5py.File(path) as f:
            self.groups = groups_of(f)
            self.known = {p: content(f[p]) for p in sample(self.groups)}
            check(all(len(f[p].attrs) == len(list(f[p].attrs)) for p in self.known), f"{path}: numbers of attributes")

    def check(self, what):
        where = f"{self.path}, {what}, libhdf5 {h5py.version.hdf5_version}"
        with h5py.File(self.path) as f:
            for path, members in self.groups.items():
                check(list(f[path]) == list(members), f"{where}: names in {path}")
            for path, known in self.known.items():
                found = content(f[path])
                check(found == known, f"{where}: {path}: {str(found)[:300]}, not {str(known)[:300]}")
                check(len(f[path].attrs) == len(known[0]), f"{where}: {path}: number of attributes")

    def step(self, edit):
        try:
            with h5py.File(self.path, "r+") as f:
                edit(f)
            self.check(edit.__name__)
        except Exception as e:
            check(False, f"{self.path}, {edit.__name__}, libhdf5 {h5py.version.hdf5_version}: {type(e).__name__}: {e}")
            return False
        return True

    # ---- what a user does ----

    def add(self, f, path, value, **how):
        group, name = path.rsplit("/", 1)
        f.create_dataset(path, data=value, **how)
        self.groups[group or "/"][name] = None
        self.known[path] = content(f[path])

    def forget(self, path):
        group, name = path.rsplit("/", 1)
        del self.groups[group or "/"][name]
        for kept in (self.known, self.groups):
            for below in [p for p in kept if p.startswith(path + "/")] if path in self.groups else ():
                del kept[below]
        self.known.pop(path, None)
        self.groups.pop(path, None)

    def one_name(self, f):
        self.add(f, "/x", [1])

    def many_names(self, f):
        for group in list(self.groups)[:3]:
            for i in range(2000 if len(self.groups[group]) > 1000 else 100):
                f[group][f"new {i}"] = f["/x"]
                self.groups[group][f"new {i}"] = None

    def chunks(self, f):
        self.add(f, "/chunks", np.arange(90000, dtype="<i4").reshape(300, 300), chunks=(3, 300), compression=1)

    def growing(self, f):
        self.add(f, "/growing", np.zeros((1, 4), "<f8"), maxshape=(None, 4), chunks=(1, 4))
        for n in range(2, 200):
            f["/growing"].resize((n, 4))
            f["/growing"][n - 1] = n
        self.known["/growing"] = content(f["/growing"])

    def groups_in_groups(self, f):
        for name in ("a", "b"):
            f.create_group(f"/new group/{name}")
        self.groups["/"]["new group"] = None
        self.groups.update({"/new group": {"a": None, "b": None}, "/new group/a": {}, "/new group/b": {}})

    def renamed(self, f):
        for path in [p for p in self.known if p not in self.groups and not p.startswith(PIECES)][:10]:
            f.move(path, path + " renamed")
            known = self.known[path]
            self.forget(path)
            group, name = path.rsplit("/", 1)
            self.groups[group or "/"][name + " renamed"] = None
            self.known[path + " renamed"] = known

    def deleted(self, f):
        for group in sorted(self.groups.keys() - {PIECES}, key=len):
            for name in list(self.groups.get(group, ()))[::3]:
                path = f"{group.rstrip('/')}/{name}"
                if path != PIECES:
                    del f[path]
                    self.forget(path)

    def attributes(self, f):
        for path in list(self.known)[:20]:
            attrs = f[path].attrs
            for i in range(12):
                attrs[f"note {i}"] = "n" * i
            attrs["a long one"] = np.arange(3000)
            attrs["note 3"] = 5
            del attrs["note 4"]
            h5py.h5a.rename(f[path].id, b"note 5", b"renamed")
            first = sorted(name for name in attrs if not name.startswith("note"))[0]
            attrs[first] = attrs[first]
            self.known[path] = content(f[path])

    def attributes_deleted(self, f):
        for path in list(self.known)[:20]:
            for name in list(f[path].attrs):
                del f[path].attrs[name]
            self.known[path] = content(f[path])

    def all_deleted(self, f):
        for name in list(f):
            del f[name]
            self.forget("/" + name)

    def one_more(self, f):
        self.add(f, "/last", np.arange(5))


def main():
    for path in sys.argv[1:]:
        edited = Edited(path)
        steps = (edited.one_name, edited.many_names, edited.chunks, edited.growing, edited.groups_in_groups, edited.renamed,
                 edited.attributes, edited.deleted, edited.attributes_deleted, edited.all_deleted, edited.one_more)
        for step in steps:
            if not edited.step(step):
                break
    sys.exit(1 if failures else 0)


main()
