"""What the tests of harmless and dangerous objects share: the command, values that are pickled as calls, archives with
another pickle, and whether loading one runs the attack in it, which creates the file `mark`."""
import io
import os
import subprocess
import sys
import zipfile

PROGRAM = os.path.abspath(sys.argv[1])


class Reduced:
    """Pickles as the given call."""

    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how

    def __call__(self):
        """pickle requires a callable, so this lets the result of one call be the function of the next."""


def run(*argv):
    return subprocess.run([PROGRAM, *map(str, argv)], capture_output=True, text=True)


def text(value):
    """The opcode of a string."""
    return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()


def ran(load, mark):
    """Returns True if loading runs the attack."""
    try:
        load()
    except BaseException:  # as DCP raises
        pass
    for _ in range(200):
        if os.path.exists(mark):
            os.remove(mark)
            return True
        subprocess.run(["sleep", "0.01"])
    return False


def changed_archive(data, change, extra=None):
    """The bytes of a torch.save archive with another data.pkl, and with more records."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        names = old.namelist()
        for name in names:
            new.writestr(name, change(old.read(name)) if name.endswith("/data.pkl") else old.read(name))
        for name, record in (extra or {}).items():
            new.writestr(names[0].split("/")[0] + "/" + name, record)
    return out.getvalue()


def with_pickle(path, change, extra=None):
    """Replaces data.pkl in a torch.save archive, and adds records."""
    with open(path, "rb") as f:
        data = f.read()
    with open(path, "wb") as f:
        f.write(changed_archive(data, change, extra))
