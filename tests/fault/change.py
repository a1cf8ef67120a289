#!/usr/bin/env python3
"""Changes the source of a command before each of its system calls in turn.

The command must then behave as if the change came before it or after it, or end with exit status 3 and one line that says
what happened. It must never mix old and new data, never leave half a target, and never be killed by a signal.

usage: change.py FSDPCKPT SHIM SOURCE FORMAT CHANGE COMMAND [ARGUMENT...]

SOURCE is converted to FORMAT twice, with different values of the same names, types and sizes. The command reads SRC, writes
DST if it has that argument, and may read OTHER, a copy of the first. CHANGE is one of
    replace   each file is replaced by the one of the second checkpoint, with a rename
    rewrite   each file gets the bytes of the second one
    truncate  each file loses its last byte
    append    each file gets one more byte
    link      the directory is replaced by a link to the second checkpoint
    target    not the source, but the directory of the target is replaced by a link to another directory
"""
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time


def files(path):
    if os.path.isfile(path):
        return [""]
    return [os.path.relpath(os.path.join(folder, n), path) for folder, _, names in os.walk(path) for n in sorted(names)]


def content(path):
    """{name: bytes} of a file or a directory; None if it is missing."""
    if not os.path.exists(path):
        return None
    result = {}
    for name in files(path):
        with open(os.path.join(path, name) if name else path, "rb") as f:
            result[name] = f.read()
    return result


class Changer:
    def __init__(self, how, source, second, folder):
        self.how, self.source, self.second, self.folder, self.elsewhere = how, source, second, folder, folder + ".else"

    def __call__(self):
        if self.how in ("link", "target"):
            path, new = (self.source, self.second) if self.how == "link" else (self.folder, self.elsewhere)
            os.rename(path, path + ".gone")
            os.symlink(new, path)
            return
        for name in files(self.source):
            path, new = (os.path.join(p, name) if name else p for p in (self.source, self.second))
            if self.how == "replace":
                shutil.copyfile(new, path + ".tmp")
                os.rename(path + ".tmp", path)
            elif self.how == "rewrite":
                with open(path, "r+b") as f, open(new, "rb") as g:
                    f.write(g.read())
            elif self.how == "truncate":
                os.truncate(path, os.path.getsize(path) - 1)
            else:
                with open(path, "ab") as f:
                    f.write(b"\0")


def copy(source, target):
    if os.path.isdir(source):
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)


def clear(*paths):
    for path in paths:
        if os.path.islink(path) or os.path.isfile(path):
            os.remove(path)
        elif os.path.isdir(path):
            shutil.rmtree(path)


class Run:
    def __init__(self, program, shim, home, arguments):
        self.home, self.log = home, os.path.join(home, "log")
        self.source, self.folder, self.other = (os.path.join(home, n) for n in ("src", "out", "other"))
        self.target = os.path.join(self.folder, "dst")
        places = {"SRC": self.source, "DST": self.target, "OTHER": self.other}
        self.argv = [program, *(places.get(a, a) for a in arguments)]
        folders = [os.path.dirname(shim), os.environ.get("LD_LIBRARY_PATH")]  # LD_PRELOAD cannot hold blanks
        self.env = dict(os.environ, LD_PRELOAD=os.path.basename(shim), LD_LIBRARY_PATH=":".join(filter(None, folders)))

    def outcome(self, status, out):
        return status, out, content(self.target)

    def prepare(self, first):
        for path in (self.source, self.folder):
            clear(path, path + ".gone")
        clear(self.folder + ".else")
        copy(first, self.source)
        os.mkdir(self.folder)
        os.mkdir(self.folder + ".else")

    def plain(self, first, change):
        """The outcome when the source changes before the command starts."""
        self.prepare(first)
        change()
        p = subprocess.run(self.argv, capture_output=True, timeout=600)
        return self.outcome(p.returncode, p.stdout), p.stderr

    def good_target(self, status):
        """Whether the directory that was there at the start has the complete target or none, and the other one is empty. Names
                in the old one that begin with a dot are leftovers, which the next run there removes."""
        old = self.folder + ".gone" if os.path.exists(self.folder + ".gone") else self.folder
        expected = self.complete if status == 0 else None
        return content(os.path.join(old, "dst")) == expected and os.listdir(self.folder + ".else") == []

    def changed(self, first, n, change):
        """@return the outcome when the source changes before call `n`, the name of the call ("" if there is none), stderr"""
        self.prepare(first)
        time.sleep(0.01)  # file systems count time in steps of some milliseconds
        with open(self.log, "wb") as f:
            f.write(bytes(64))
        env = dict(self.env, FAULT_FAMILY="sys", FAULT_STOP="1", FAULT_AT=str(n), FAULT_LOG=self.log)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            p = subprocess.Popen(self.argv, env=env, stdout=out, stderr=err)
            _, status = os.waitpid(p.pid, os.WUNTRACED)
            if os.WIFSTOPPED(status):
                change()
                os.kill(p.pid, signal.SIGCONT)
                _, status = os.waitpid(p.pid, 0)
            p.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            err.seek(0)
            with open(self.log, "rb") as f:
                call = f.read().rstrip(b"\0").decode()
            return self.outcome(p.returncode, out.read()), call, err.read().decode()


def main():
    program, shim, source, form, how, *arguments = sys.argv[1:]
    home = os.path.realpath(tempfile.mkdtemp(prefix="fc-change-"))
    first, rounded, second = (os.path.join(home, n) for n in ("first", "rounded.h5", "second"))

    def convert(a, b, *options):
        command = ["consolidate"] if b.endswith(".h5") else ["reshard", "--dp", "2", "--to", form]
        subprocess.run([program, *command, a, "-o", b, "-q", "--include", "model.*", *options], check=True)

    try:
        convert(source, first)
        convert(source, rounded, "--dtype", "bf16")
        convert(rounded, second, "--dtype", "f32")
        assert files(first) == files(second) and content(first) != content(second)
        run = Run(program, shim, home, arguments)
        copy(first, run.other)
        change, refused = Changer(how, run.source, second, run.folder), 0
        unchanged, err = run.plain(first, lambda: None)
        assert unchanged[0] in (0, 1), err
        run.complete = unchanged[2]
        allowed = [unchanged, run.plain(first, change)[0]]
        for n in range(1, 100000):
            result, call, err = run.changed(first, n, change)
            where = f"{how} before call {n} ({call}): "
            if not call:
                assert result == unchanged, where + err
                print(f"changed {n - 1} times, {refused} times the command said so")
                return 0 if refused else 1
            refused += result[0] > 1
            if result in allowed or (how == "target" and result[0] in (0, 2, 3, 4) and run.good_target(result[0])):
                continue
            if result[0] != 3 or result[2] is not None or not err or ("verify" not in arguments and err.count("\n") != 1):
                print(f"{where}exit {result[0]}, stdout {result[1][:500]!r}, stderr {err!r}")
                return 1
    finally:
        shutil.rmtree(home)
    return 1


if __name__ == "__main__":
    sys.exit(main())
