#!/usr/bin/env python3
"""Cuts the power at every point of a conversion that replaces its target, by replaying a log of its system calls.

What was not synced may be lost: bytes of a file until fsync of the file, a change of names until fsync of one of its directories.
After each call, the disk is made with nothing of that, with all of it, with only the names, with only the bytes, and with random
parts of it, in the order of the calls but with gaps. Then the name of the target must lead to the complete old or the complete new
one. Where names cannot be exchanged, there may be no target, but the next command puts one in place. After the command has
succeeded, it must be the new one. The next run replaces the target, whatever was left behind, and removes or names what was.

usage: power.py FSDPCKPT TRACE_LIBRARY OLD NEW exchange|two-steps COMMAND [OPTION...]
"""
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile

RANDOM = 6  # random disks after each call


def tree(path):
    """{relative path: bytes, or None for a directory}"""
    found = {}
    for folder, folders, names in os.walk(path):
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), path)] = None
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                found[os.path.relpath(os.path.join(folder, name), path)] = f.read()
    return found


class Disk:
    """Inodes: bytearrays are files, dicts of names are directories. The root is the directory of the target."""

    def __init__(self, root):
        self.root, self.inodes = root, {}
        for folder, folders, names in os.walk(root):
            self.inodes[os.stat(folder).st_ino] = {n: os.stat(os.path.join(folder, n)).st_ino for n in folders + names}
            for name in names:
                path = os.path.join(folder, name)
                with open(path, "rb") as f:
                    self.inodes[os.stat(path).st_ino] = bytearray(f.read())
        self.top = os.stat(root).st_ino

    def place(self, path):
        """The inode of the directory of `path`, and the last name; None if it is not on this disk."""
        if not path.startswith(self.root + "/"):
            return None, None
        at, *names = self.top, *path[len(self.root) + 1:].split("/")
        for name in names[:-1]:
            at = self.inodes[at].get(name) if isinstance(self.inodes.get(at), dict) else None
        return at, names[-1]

    def apply(self, change):
        kind = change[0]
        if kind == "bytes":
            _, inode, at, data = change
            content = self.inodes[inode]
            content.extend(bytes(max(0, at + len(data) - len(content))))
            content[at:at + len(data)] = data
        elif kind == "size":
            _, inode, size = change
            del self.inodes[inode][size:]
            self.inodes[inode].extend(bytes(size - len(self.inodes[inode])))
        else:
            for directory, name, inode in change[1]:
                if inode is None:
                    self.inodes[directory].pop(name, None)
                else:
                    self.inodes[directory][name] = inode

    def listing(self):
        """Like tree()."""
        found, todo = {}, [("", self.top)]
        while todo:
            path, inode = todo.pop()
            for name, below in self.inodes[inode].items():
                content = self.inodes[below]
                found[path + name] = None if isinstance(content, dict) else bytes(content)
                if isinstance(content, dict):
                    todo.append((path + name + "/", below))
        return found


class Replay:
    """A disk that is always synced (`now`), one that loses what is not (`synced`), and the changes between them."""

    def __init__(self, root):
        self.now, self.synced, self.pending = Disk(root), Disk(root), []

    def change(self, change, directories=()):
        self.now.apply(change)
        self.pending.append((change, set(directories)))

    def new(self, inode, content):
        for disk in (self.now, self.synced):
            disk.inodes[inode] = copy.copy(content)

    def sync(self, inode):
        left = []
        for change, directories in self.pending:
            if inode in directories or change[0] != "names" and change[1] == inode:
                self.synced.apply(change)
            else:
                left.append((change, directories))
        self.pending = left

    def names(self, *entries):
        self.change(("names", entries), [e[0] for e in entries])

    def call(self, line, data):
        name, inode, *rest = line.split(" ")
        inode = int(inode)
        paths = [self.now.place(p) for p in rest if p.startswith("/")]
        if any(p[0] is None for p in paths) or not paths and inode not in self.now.inodes:
            return  # not on this disk, such as a scratch file
        at = [(d, n, self.now.inodes[d].get(n)) for d, n in paths]
        if name == "pwrite":
            self.change(("bytes", inode, int(rest[0]), data))
        elif name == "truncate":
            self.change(("size", inode, int(rest[0])))
        elif name == "fsync":
            self.sync(inode)
        elif name in ("open", "creat", "mkdir"):
            if at[0][2] is None:
                self.new(inode, {} if name == "mkdir" else bytearray())
                self.names((*at[0][:2], inode))
            elif name == "creat":
                self.change(("size", inode, 0))
        elif name == "unlink":
            self.names((*at[0][:2], None))
        elif name == "link":
            self.names((*at[1][:2], at[0][2]))
        elif name == "rename":
            self.names((*at[0][:2], None), (*at[1][:2], at[0][2]))
        else:
            assert name == "exchange", line
            self.names((*at[0][:2], at[1][2]), (*at[1][:2], at[0][2]))

    def disks(self, chance):
        """What may be on the disk after a power failure."""
        return (disk.listing() for disk in self.states(chance))

    def states(self, chance):
        def part(keep):
            disk = copy.deepcopy(self.synced)
            for change, _ in self.pending:
                if keep(change):
                    disk.apply(change)
            return disk
        yield part(lambda c: False)
        yield part(lambda c: True)
        yield part(lambda c: c[0] == "names")
        yield part(lambda c: c[0] != "names")
        for _ in range(RANDOM if self.pending else 0):
            yield part(lambda c: chance.random() < 0.5)


def records(log):
    with open(log, "rb") as f:
        while line := f.readline():
            line = line.decode().rstrip("\n")
            yield line, f.read(int(line.split()[3])) if line.startswith("pwrite") else b""


def target_of(disk, name):
    return {p: c for p, c in disk.items() if p == name or p.startswith(name + "/")}


def write_tree(disk, folder):
    os.mkdir(folder)
    for path in sorted(disk):
        full = os.path.join(folder, path)
        if disk[path] is None:
            os.makedirs(full, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            with open(full, "wb") as f:
                f.write(disk[path])


class Power:
    def __init__(self, program, library, old, new, way, command):
        self.home = os.path.realpath(tempfile.mkdtemp(prefix="fc-power-"))
        self.program, self.command = program, command
        self.name = "target" if command[0] == "reshard" or "--to" in command else "target.h5"
        self.old, self.new, self.two_steps = old, new, way == "two-steps"
        folders = [os.path.dirname(library), os.environ.get("LD_LIBRARY_PATH")]  # LD_PRELOAD cannot hold blanks
        self.env = dict(os.environ, LD_PRELOAD=os.path.basename(library), LD_LIBRARY_PATH=":".join(filter(None, folders)),
                        TRACE_LOG=os.path.join(self.home, "log"), **({"TRACE_NO_EXCHANGE": "1"} if self.two_steps else {}))
        self.checked = set()

    def run(self, source, folder, *options, env=None):
        argv = [self.program, self.command[0], source, "-o", os.path.join(folder, self.name), "-q", "-j1", *self.command[1:], *options]
        p = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
        assert p.returncode == 0, p.stderr
        return p

    def check(self, disk, where, done):
        """Checks the disk, and once for each distinct set of names what the program makes of it."""
        target = target_of(disk, self.name)
        kind = "old" if target == self.before else "new" if target == self.after else "none" if not target else "torn"
        assert kind == "new" if done else kind != "torn" and (kind != "none" or self.two_steps or not self.before), \
            f"{where}: the target is {kind}: {[(p, c and len(c)) for p, c in target.items()]}"
        key = (kind, *sorted((p.split("/", 1)[-1], c and len(c)) for p, c in disk.items() if p not in target))
        if key in self.checked:
            return
        self.checked.add(key)
        folder = os.path.join(self.home, "crashed")
        write_tree(disk, folder)
        if self.before or kind == "new":
            p = subprocess.run([self.program, "verify", os.path.join(folder, self.name)], capture_output=True, text=True)
            assert p.returncode == 0, f"{where}: {kind}: {p.stderr}{sorted(disk)}"
            assert target_of(tree(folder), self.name) in (self.before, self.after), where
        told = self.run(self.new, folder, "--force").stderr
        found = tree(folder)
        assert found == self.after, f"{where}: {sorted(found)}: {told}"
        shutil.rmtree(folder)

    def cut(self, replaced):
        """Cuts the power in a run that makes the target, or replaces one."""
        folder = os.path.join(self.home, "disk")
        os.mkdir(folder)
        if replaced:
            self.run(self.old, folder)
        self.before, disks = tree(folder), 0
        replay = Replay(folder)
        self.run(self.new, folder, "--force", env=self.env)
        self.after = tree(folder)
        assert self.before != self.after
        chance = random.Random(1)
        log = list(records(self.env["TRACE_LOG"]))
        for n, (line, data) in enumerate(log):
            replay.call(line, data)
            for disk in replay.disks(chance):
                self.check(disk, f"after call {n + 1} ({line})", False)
                disks += 1
        assert replay.now.listing() == self.after, "the log lacks calls"
        renamed = max(n for n, (line, _) in enumerate(log) if line.startswith(("rename", "exchange")))
        assert any(line.startswith("fsync") for line, _ in log[renamed:])
        for disk in replay.disks(chance):
            self.check(disk, "after the command", True)
        shutil.rmtree(folder)
        os.remove(self.env["TRACE_LOG"])
        return len(log), disks


def main():
    program, library, old, new, way, *command = sys.argv[1:]
    power = Power(program, library, old, new, way, command)
    try:
        for replaced in (False, True):
            calls, disks = power.cut(replaced)
            print(f"{calls} calls, {disks} disks after a power failure: each has the {'old or the new' if replaced else 'new'} "
                  f"target{'' if replaced and not power.two_steps else ' or none'}; {len(power.checked)} were given to the program")
    finally:
        shutil.rmtree(power.home)


if __name__ == "__main__":
    sys.exit(main())
