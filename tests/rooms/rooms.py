#!/usr/bin/env python3
"""Checks that dependencies between rooms point one way: by the includes of every file, and by the calls of every object. Checks
also that the programs that only convert contain nothing of the rooms for training.

Usage: rooms.py SOURCE_DIR BUILD_DIR

ROOMS lists the rooms from the lowest to the highest. A file may use its own room and lower ones. docs/ARCHITECTURE.md describes
the purpose of each. The last three are for training, so that no conversion can use them. A public header belongs to the room that implements it, found by its private files or, if these do not
show it, in HEADERS.
"""

import os
import re
import subprocess
import sys

ROOMS = """lib/base lib/net lib/io lib/sharding lib/checkpoint lib/plan lib/codec lib/comm lib/integrity lib/read lib/ranks
lib/move lib/flat lib/wrap lib/derived lib/weights lib/recipe lib/stats lib/diff lib/infer lib/check lib/export lib/verify
formats/torch/names formats/torch/zip formats/torch/pickle formats/torch/object formats/torch/file formats/safetensors
formats/dcp formats/pt formats/hdf5 formats/schema formats/flax formats/accelerate formats/lightning formats/deepspeed
formats/nanotron formats/megatron formats/torch_dist formats/fsdp_dtensor formats/delta formats cli/output cli/options cli cli/inspect cli/commands
lib/sharded_tensor lib/gather train""".split()
TRAINING = ("lib/sharded_tensor", "lib/gather", "train")
LEVEL = {room: level for level, room in enumerate(ROOMS)}

HEADERS = {
    "lib/base": "arena atomic decls digest dtype error order progress try",
    "lib/io": "io",
    "lib/sharding": "box layout mesh",
    "lib/checkpoint": "checkpoint format memory seal target",
    "lib/plan": "sharding plan replica_owner select",
    "lib/codec": "cast",
    "lib/comm": "comm gather_files",
    "lib/read": "read",
    "lib/move": "move shards",
    "lib/wrap": "wrap_policy",
    "lib/flat": "flat_param",
    "lib/derived": "average flatten unflatten",
    "lib/weights": "weights",
    "lib/recipe": "recipe",
    "lib/stats": "stats",
    "lib/diff": "compare",
    "lib/infer": "infer",
    "lib/check": "check",
    "lib/export": "export",
    "lib/verify": "verify",
    "formats/hdf5": "view",
    "formats/delta": "delta",
    "formats": "fsdpckpt",
    "lib/sharded_tensor": "sharded_tensor/dtensor sharded_tensor/sharding_spec",
    "lib/gather": "gather/array gather/device gather/device_comm gather/dtensor_data",
    "train": "train/flat_data train/fsdp train/state_dict",
}
PUBLIC = {f"fsdpckpt/{name}.h": room for room, names in HEADERS.items() for name in names.split()}

# The library calls the tables of formats and of encodings, which are defined in higher rooms.
UPWARD_CALLS = {"fc_formats", "fc_object_encoding_find"}
# Libraries that one room hides from all others.
ONLY_IN = {r"zstd\w*\.h|bzlib\.h": "lib/codec", r"hdf5(_hl)?\.h|H5\w+\.h": "formats/hdf5", r"mpi\.h": "lib/comm", r"curl\.h": "lib/net", r"nccl\.h|cuda\w*\.h": "lib/gather"}


def room_of(path):
    """The room of a source file: the deepest folder of ROOMS that contains it."""
    if "include/fsdpckpt/" in path:
        return PUBLIC.get(path[path.index("fsdpckpt/"):])
    if path in ("formats/registry.h", "formats/format_list.h"):  # each format checks its definition against it
        return "formats/torch/object"
    while path and path not in LEVEL:
        path = os.path.dirname(path)
    return path or None


def sources(root):
    listed = []
    for top in ("lib", "formats", "train", "cli"):
        for directory, _, names in os.walk(os.path.join(root, top)):
            listed += [os.path.relpath(os.path.join(directory, n), root) for n in names if re.search(r"\.(c|h|cu)$", n)]
    return sorted(listed)


def target_of(root, includer, name):
    """The room and path of an included file, or None for the system's."""
    if name in PUBLIC:
        return PUBLIC[name]
    for base in (os.path.dirname(includer), "lib", "formats", "train", "cli", ""):
        path = os.path.normpath(os.path.join(base, name))
        if os.path.isfile(os.path.join(root, path)):
            return room_of(path)
    return None


def check_includes(root, problems):
    files = sources(root)
    for path in files:
        room = room_of(path)
        if room is None:
            problems.append(f"{path}: belongs to no room; add its folder to ROOMS in tests/rooms/rooms.py")
            continue
        text = open(os.path.join(root, path), encoding="utf-8").read()
        for name in re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', text, re.M):
            to = target_of(root, path, name)
            for pattern, owner in ONLY_IN.items():
                if to is None and re.fullmatch(pattern, os.path.basename(name)) and not path.startswith(owner + "/"):
                    problems.append(f"{path}: includes {name}, which belongs to {owner} alone")
            if to is not None and LEVEL[to] > LEVEL[room]:
                problems.append(f"{path}: includes {name}: an arrow up from {room} to {to}")
            if path.startswith("cli/") and to is not None and not to.startswith("cli") and not name.startswith("fsdpckpt/"):
                problems.append(f"{path}: includes {name}: the command uses public headers only")
            if "include/fsdpckpt/" in path and to is not None and not name.startswith("fsdpckpt/"):
                problems.append(f"{path}: includes {name}: a public header includes public headers only")
    return len(files)


def check_names(root, problems):
    """No file of lib/ may contain the name of a format."""
    names = re.findall(r"^X\((\w+)\)", open(os.path.join(root, "formats/format_list.h"), encoding="utf-8").read(), re.M)
    pattern = re.compile(r"\bfc_format_(" + "|".join(names) + r")\b|\bfc_(h5|dcp|pt|st|ds|mg)_")
    for path in sources(root):
        if path.startswith("lib/"):
            for number, line in enumerate(open(os.path.join(root, path), encoding="utf-8"), 1):
                if pattern.search(line):
                    problems.append(f"{path}:{number}: names a format: {line.strip()}")


def objects(root, build):
    """(room, source, object file) of everything in the two libraries. Skips objects of deleted sources."""
    for base in ("CMakeFiles/fsdpckpt.dir", "train/CMakeFiles/fsdpckpt-train.dir"):
        top = os.path.join(build, base)
        for directory, _, names in os.walk(top):
            for name in names:
                if name.endswith(".o"):
                    path = os.path.relpath(os.path.join(directory, name), top)[:-2]
                    path = os.path.join("train", path) if base.startswith("train") else path
                    if os.path.isfile(os.path.join(root, path)):
                        yield room_of(path), path, os.path.join(directory, name)


def check_calls(root, build, problems):
    defined, used = {}, []
    for room, path, file in objects(root, build):
        listing = subprocess.run(["nm", file], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            fields = line.split()
            if len(fields) == 3 and fields[1] in "TDRBV":
                defined[fields[2]] = room
            elif len(fields) == 2 and fields[0] == "U":
                used.append((room, path, fields[1]))
    for room, path, symbol in used:
        to = defined.get(symbol)
        if to is not None and LEVEL[to] > LEVEL[room] and symbol not in UPWARD_CALLS:
            problems.append(f"{path}: calls {symbol}: an arrow up from {room} to {to}")
    return used, defined


def check_sorts(used, problems):
    """qsort and bsearch have no behaviour defined for NULL, which an empty list often is. fsdpckpt/order.h defines one."""
    for _, path, symbol in used:
        if symbol in ("qsort", "qsort_r", "bsearch") and path != "lib/base/order.c":
            problems.append(f"{path}: calls {symbol}: use fsdpckpt/order.h, which takes an empty list")


def check_exports(build, used, defined, problems):
    """What the training library calls of the other one is exported by a shared library (cmake/exports.cmake)."""
    exported = set(re.findall(r"fc_\w+", open(os.path.join(build, "fsdpckpt.map"), encoding="utf-8").read()))
    called = {symbol for room, _, symbol in used if room == "train" and defined.get(symbol, "train") != "train"}
    for symbol in sorted(called - exported):
        problems.append(f"train: calls {symbol}, which a shared libfsdpckpt does not export: cmake/exports.cmake")


def check_programs(build, defined, problems):
    """The command and the Python extension only convert."""
    for program in ("cli/fsdpckpt", "python/fsdpckpt/_native.abi3.so"):
        path = os.path.join(build, program)
        if not os.path.isfile(path) and program != "cli/fsdpckpt":
            continue
        listing = subprocess.run(["nm", path], capture_output=True, text=True, check=True).stdout
        symbols = {fields[2] for fields in map(str.split, listing.splitlines()) if len(fields) == 3 and fields[1] in "TDRBV"}
        if not symbols & {"main", "PyInit__native"}:
            problems.append(f"{program}: has no symbols, so nothing was checked")
        for symbol in sorted(symbols):
            if defined.get(symbol) in TRAINING:
                problems.append(f"{program}: contains {symbol} of {defined[symbol]}: it only converts")


def main():
    root, build = sys.argv[1:3]
    problems = []
    files = check_includes(root, problems)
    check_names(root, problems)
    used, defined = check_calls(root, build, problems)
    calls = len(used)
    check_sorts(used, problems)
    check_exports(build, used, defined, problems)
    check_programs(build, defined, problems)
    if files < 100 or calls < 1000:
        problems.append(f"only {files} files and {calls} calls were found, so nothing was checked")
    for problem in problems:
        print(problem)
    print(f"{files} files, {calls} uses of symbols, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
