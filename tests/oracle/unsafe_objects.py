#!/usr/bin/env python3
"""Objects that run code when PyTorch loads them. check, verify and inspect report them in every format. They are never written
into a format that runs them on load; HDF5 and safetensors keep them as bytes. Each attack here really runs in torch.load. Pickles
that torch cannot load are reported as damage.

usage: unsafe_objects.py FSDPCKPT      exit 77 without torch
"""
import argparse
import collections
import functools
import glob
import io
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import warnings
import zipfile

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
try:
    import torch
    import torch.distributed.checkpoint as dcp
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish
from pickle_attacks import Reduced, ran, run, text, with_pickle


# ---- attacks: each leaves a file called `mark` behind when it is loaded ----

def system(mark):
    return Reduced(os.system, ("touch " + mark,))


def attacks(mark):
    yield "system", "posix.system", system(mark)
    yield "nested", "posix.system", [1, (2, {3, system(mark)})]
    yield "eval", "builtins.eval", Reduced(eval, ("open(%r, 'w')" % mark,))
    yield "exec", "builtins.exec", Reduced(exec, ("open(%r, 'w')" % mark,))
    yield "popen", "subprocess.Popen", Reduced(subprocess.Popen, (["touch", mark],))
    yield "partial", "functools.partial", Reduced(Reduced(functools.partial, (os.system, "touch " + mark)), ())
    yield "getattr", "builtins.getattr", Reduced(Reduced(getattr, (Reduced(__import__, ("os",)), "system")), ("touch " + mark,))
    yield "state", "posix.system", Reduced(argparse.Namespace, (), {"x": system(mark)})
    yield "factory", "posix.system", collections.defaultdict(list, {"x": system(mark)})
    inner = io.BytesIO()
    torch.save(system(mark), inner)
    yield "nested pickle", "torch.storage._load_from_bytes", Reduced(torch.storage._load_from_bytes, (inner.getvalue(),))


def runs(path, mark):
    """Returns True if torch.load runs the attack."""
    return ran(lambda: torch.load(path, weights_only=False), mark)


def must_be_caught(source, name, what, word):
    """Every command reports the object, and only HDF5 and safetensors are written."""
    r = run("check", source)
    check(r.returncode == 1 and name in r.stdout and "may be hostile" in r.stdout, "%s: check: %s" % (what, r))
    r = run("verify", source)
    check(r.returncode == 1 and name in r.stdout and "may be hostile" in r.stdout, "%s: verify: %s" % (what, r))
    r = run("inspect", source)
    check(r.returncode == 0 and "Unsafe      %s: " % name in r.stdout, "%s: inspect: %s" % (what, r))
    r = run("inspect", source, "--json")
    found = [o for o in json.loads(r.stdout)["objects"] if o.get("risk") == "runs"]
    check([o["name"] for o in found] == [name], "%s: inspect --json: %s" % (what, r))
    for to in ("pt", "dcp"):
        target = "%s.to.%s" % (source, to)
        r = run("convert", source, "-o", target, "--to", to)
        check(r.returncode == 3 and "--exclude '%s'" % name in r.stderr and "--trust-objects" in r.stderr
              and r.stderr.count("\n") == 1, "%s: to %s: %s" % (what, to, r))
        check(not os.path.exists(target), "%s: %s was written" % (what, to))
        r = run("convert", source, "-o", target, "--to", to, "--exclude", name)
        check(r.returncode == 0, "%s: to %s without it: %s" % (what, to, r))


def attack_everywhere(home):
    for what, word, value in attacks(os.path.join(home, "mark")):
        mark = os.path.join(home, "mark")
        folder = os.path.join(home, what.replace(" ", "_"))
        os.mkdir(folder)
        pt = os.path.join(folder, "a.pt")
        torch.save({"w": torch.ones(4), "evil": value}, pt)
        check(runs(pt, mark), "%s: does not run: the test is wrong" % what)
        must_be_caught(pt, "evil", what + " in .pt", word)
        kept = [os.path.join(folder, n) for n in ("kept.h5", "kept.safetensors")]
        for target in kept:
            r = run("convert", pt, "-o", target)
            check(r.returncode == 0, "%s: to %s: %s" % (what, target, r))
            must_be_caught(target, "evil", what + " in " + target, word)
        trusted = os.path.join(folder, "trusted_dcp")
        r = run("convert", kept[0], "-o", trusted, "--to", "dcp", "--trust-objects")
        check(r.returncode == 0, "%s: --trust-objects: %s" % (what, r))
        must_be_caught(trusted, "evil", what + " in DCP", word)
        check(not os.path.exists(mark), "%s: fsdpckpt ran it" % what)


def dropped_call(home):
    """A call whose result is dropped is in no object, but torch.load still runs it."""
    mark = os.path.join(home, "mark")
    path = os.path.join(home, "dropped.pt")
    torch.save({"w": torch.ones(4)}, path)
    command = ("touch " + mark).encode()
    call = b"cposix\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R0"
    with_pickle(path, lambda data: data[:2] + call + data[2:])
    check(runs(path, mark), "dropped call: does not run: the test is wrong")
    for command in ("check", "verify", "inspect"):
        r = run(command, path)
        check("calls posix.system: it may be hostile" in r.stdout, "dropped call: %s: %s" % (command, r))
    check(run("check", path).returncode == 1 and run("verify", path).returncode == 1, "dropped call: it is good")
    target = os.path.join(home, "clean.pt")
    check(run("convert", path, "-o", target).returncode == 0 and not runs(target, mark), "dropped call: it travelled")
    torch.save({"w": torch.ones(4)}, target)
    for name in ("w", "_flat_param"):
        torch.save({name: torch.ones(4)}, path)
        with_pickle(path, lambda data: data[:2] + call + data[2:])
        r = run("check", path, "--against", target)
        check(r.returncode == 1 and "calls posix.system: it may be hostile" in r.stdout,
              "dropped call: %s against a model: %s" % (name, r))


CORPUS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "corpus")


def dropped_call_of_a_rank(home):
    """The same in the file of one rank: the value is dropped there, too."""
    call = b"cposix\nsystem\nX\4\0\0\0true\x85R0"
    for source, name in (("deepspeed/0.19.8-zero2-bf16", "bf16_zero_pp_rank_1_*optim_states.pt"),
                         ("deepspeed/0.19.8-zero3-bf16", "*rank_1_*optim_states.pt"),
                         ("deepspeed/0.19.8-zero1-bf16-universal", "zero/*/exp_avg.pt"),
                         ("megatron-ranks/tp2-gpt", "mp_rank_01/model_optim_rng.pt"),
                         ("megatron-ranks/tp2dp2-distributed", "mp_rank_01/distrib_optim.pt"),
                         ("pt/fsdp2-torch2.15.0", "*rank_1.pt")):
        path = os.path.join(home, "ranks")
        shutil.copytree(os.path.join(CORPUS, source), path)
        found = sorted(glob.glob(os.path.join(path, "**", name), recursive=True))
        check(found, "%s: there is no %s" % (source, name))
        check(run("check", path, "-q").returncode != 3, "%s: cannot be read" % source)
        with_pickle(found[-1], lambda data: data[:2] + call + data[2:])
        r = run("check", path)
        check(r.returncode == 1 and "system: it may be hostile" in r.stdout and os.path.basename(found[-1]) in r.stdout,
              "%s: a dropped call is not reported: %s" % (source, r))
        shutil.rmtree(path)


def hidden_calls(mark):
    """Values that call an attribute of an instance when they are loaded. No REDUCE names the function. (name, value, whether this
    Python and these packages run it)"""
    inner = io.BytesIO()
    torch.save(system(mark), inner, _use_new_zipfile_serialization=False)
    payload = b"c_codecs\nencode\n" + text(inner.getvalue().decode("latin1")) + text("latin1") + b"\x86R"
    load, space = b"ctorch.storage\n_load_from_bytes\n", b"cargparse\nNamespace\n)\x81"
    state = b"}" + text("__setstate__") + load + b"s"
    yield "two states", space + state + b"b" + payload + b"b", True
    yield "append to an attribute", space + b"}" + text("append") + load + b"sb" + payload + b"a", True
    yield "extend an attribute", space + b"}" + text("extend") + load + b"sb(" + payload + b"e", False
    yield "two states of an OrderedDict", b"ccollections\nOrderedDict\n)R" + state + b"b" + payload + b"b", True
    yield "two states of a partial", (b"cfunctools\npartial\nc__builtin__\nint\n\x85R(c__builtin__\nint\n)}" + state
                                      + b"tb" + payload + b"b"), True
    yield "a state after an item", (b"clightning_fabric.utilities.data\nAttributeDict\n)\x81" + text("__setstate__") + load
                                    + b"s" + payload + b"b"), False
    yield "a state after an argument", (b"ctypes\nSimpleNamespace\n}" + text("__setstate__") + load + b"s\x85R" + payload
                                        + b"b"), sys.version_info >= (3, 13)
    yield "a state of a type", (b"c_operator\ngetitem\nctyping\nCounter\nc__builtin__\nint\n\x86RN}" + text("update") + load
                                + b"s\x86b"), False
    yield "an item of a ChainMap", b"ccollections\nChainMap\nctyping\nsys.modules\n\x85R" + text("x") + load + b"s", False
    yield "a name behind two modules", b"ctorch\nserialization.os.system\n" + text("touch " + mark) + b"\x85R", False
    yield "a function for a random generator", (b"cnumpy.random._pickle\n__generator_ctor\n" + text("touch " + mark)
                                                + b"cposix\nsystem\n\x86R"), None
    yield "an attribute of a class that makes data", (b"c__builtin__\ngetattr\nczoneinfo\nZoneInfo\n" + text("__init_subclass__")
                                                      + b"\x86R)R"), False


def hidden_call(home):
    """They are reported, and they do not travel."""
    mark, path = os.path.join(home, "mark"), os.path.join(home, "hidden.pt")
    for what, value, must_run in hidden_calls(mark):
        torch.save({"w": torch.ones(4)}, path)
        with_pickle(path, lambda data: data[:-1] + text("evil") + value + b"s.")
        check(must_run in (None, False) or runs(path, mark), "%s: does not run: the test is wrong" % what)
        said = ("not known to be harmless",) if must_run is None else ("may be hostile",)
        for command in ("check", "verify", "inspect"):
            r = run(command, path)
            check(any(s in r.stdout for s in said), "%s: %s: %s" % (what, command, r))
            check(command == "inspect" or must_run is None or r.returncode == 1, "%s: it is good: %s" % (what, r))
        for to in ("pt", "dcp"):
            target = os.path.join(home, "hidden_to_" + to)
            r = run("convert", path, "-o", target, "--to", to)
            check(r.returncode in (0, 3, 5) and not os.path.exists(mark), "%s: %s" % (what, r))
            if r.returncode == 0:
                good = run("check", target)
                check(good.returncode == 0 and (to == "dcp" or not runs(target, mark)), "%s: it travelled: %s" % (what, good))
                shutil.rmtree(target) if to == "dcp" else os.remove(target)


def hidden_call_in_metadata(home):
    """The same in DCP's `.metadata`."""
    folder = os.path.join(home, "hidden_metadata")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder)
    path = os.path.join(folder, ".metadata")
    with open(path, "rb") as f:
        data = f.read()
    hidden = (b"ccollections\nOrderedDict\n)R}" + text("__setstate__") + b"ctorch.optim\nAdam\nsb}" + text("x") + b"Nsb0")
    with open(path, "wb") as f:
        f.write(data[:2] + hidden + data[2:])
    r = run("convert", folder, "-o", folder + ".h5")
    check(r.returncode == 3 and "may be hostile" in r.stderr and r.stderr.count("\n") == 1, "hidden call in .metadata: %s" % r)


def wrapped_call(home):
    """torch's function that rebuilds tensor subclasses calls any function that it gets."""
    mark = os.path.join(home, "mark")
    path = os.path.join(home, "wrapped.pt")
    torch.save({"w": torch.ones(4), "evil": Reduced(torch._tensor._rebuild_from_type_v2,
                                                    (os.system, torch.Tensor, ("touch " + mark,), {}))}, path)
    check(runs(path, mark), "wrapped call: does not run: the test is wrong")
    for command in ("check", "verify", "inspect"):
        r = run(command, path)
        check("calls posix.system: it may be hostile" in r.stdout, "wrapped call: %s: %s" % (command, r))
    check(run("check", path).returncode == 1 and run("verify", path).returncode == 1, "wrapped call: it is good")
    check(run("convert", path, "-o", path + ".pt").returncode == 5, "wrapped call: it travelled")


def hooked_tensor(home):
    """A call in the pickle of a DCP tensor, where no value keeps its result."""
    mark = os.path.join(home, "mark")
    folder = os.path.join(home, "hooked")
    dcp.save({"w": torch.ones(4)}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    (index, info), = metadata.storage_data.items()
    item = io.BytesIO()
    torch.save(torch.ones(4), item)
    path = os.path.join(home, "item.pt")
    with open(path, "wb") as f:
        f.write(item.getvalue())
    command = ("touch " + mark).encode()
    call = b"cposix\nsystem\nX" + len(command).to_bytes(4, "little") + command + b"\x85R0"
    with_pickle(path, lambda data: data[:2] + call + data[2:])
    with open(path, "rb") as f:
        data = f.read()
    with open(os.path.join(folder, info.relative_path), "wb") as f:
        f.write(data)
    info.offset, info.length = 0, len(data)
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(metadata, f)
    check(runs(path, mark), "hooked tensor: does not run: the test is wrong")
    r = run("verify", folder)
    check(r.returncode == 1 and "w: loading it calls posix.system" in r.stdout, "hooked tensor: verify: %s" % r)
    target = os.path.join(home, "unhooked")
    check(run("convert", folder, "-o", target, "--to", "dcp").returncode == 0, "hooked tensor: its data is not read")
    check(run("verify", target).returncode == 0, "hooked tensor: it travelled")


def torchscript_object(home):
    """torch.load compiles the code in an archive that has the record constants.pkl."""
    folder = os.path.join(home, "script")
    dcp.save({"w": torch.ones(4), "o": "text"}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    index = [i for i in metadata.storage_data if i.fqn == "o"][0]
    info = metadata.storage_data[index]
    path = os.path.join(home, "script.pt")
    torch.save("text", path)
    with_pickle(path, lambda data: data, {"constants.pkl": b"\x80\x02)."})
    with open(path, "rb") as f:
        data = f.read()
    info.relative_path, info.offset, info.length = "__1_0.distcp", 0, len(data)
    with open(os.path.join(folder, info.relative_path), "wb") as f:
        f.write(data)
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(metadata, f)
    must_be_caught(folder, "o", "TorchScript in DCP", "torch.jit.load")


def archive(records, prefix=b""):
    out = io.BytesIO(prefix)
    out.seek(len(prefix))
    with zipfile.ZipFile(out, "w") as z:
        for name, data in records:
            z.writestr(name, data)
    return out.getvalue()


def ambiguous(mark):
    """Archives that hold {"x": 1} for one reader and an attack for another. PyTorch takes the first bytes, and names in any case."""
    legacy = io.BytesIO()
    torch.save(system(mark), legacy, _use_new_zipfile_serialization=False)
    evil, good = pickle.dumps(system(mark), 2), pickle.dumps({"x": 1}, 2)
    plain = [("a/data.pkl", good), ("a/version", b"3\n")]
    yield "a file of old torch before the archive", True, legacy.getvalue() + archive(plain)
    yield "a pickle before the archive", True, evil + archive(plain)
    yield "a pickle before the archive that its directory knows", True, archive(plain, evil)
    yield "the name in capitals", True, archive([("a/DATA.PKL", evil), *plain])
    yield "an archive after an archive", False, archive(plain) + archive([("a/data.pkl", evil), ("a/version", b"3\n")])
    yield "an attack in a record that nobody reads", False, archive([*plain, ("a/x/data.pkl", evil)])


def two_readers(home):
    """None of them travels into a file that PyTorch loads."""
    mark = os.path.join(home, "mark")
    for what, must_run, data in ambiguous(mark):
        path, folder, target = (os.path.join(home, n) for n in ("two.pt", "two", "two_out"))
        with open(path, "wb") as f:
            f.write(data)
        check(runs(path, mark) == must_run, "%s: torch.load does not do what the test thinks" % what)
        dcp.save({"w": torch.ones(4), "o": "text"}, checkpoint_id=folder)
        metadata = dcp.FileSystemReader(folder).read_metadata()
        info = metadata.storage_data[[i for i in metadata.storage_data if i.fqn == "o"][0]]
        info.relative_path, info.offset, info.length = "__1_0.distcp", 0, len(data)
        shutil.copy(path, os.path.join(folder, info.relative_path))
        with open(os.path.join(folder, ".metadata"), "wb") as f:
            pickle.dump(metadata, f)
        r = converted = run("convert", folder, "-o", target, "--to", "dcp")
        check(r.returncode in (3, 5) if must_run else r.returncode in (0, 3), "%s: %s" % (what, r))
        if must_run:
            for source in (path, folder):
                r = run("check", source)
                check(r.returncode in (1, 3, 5) or "cannot be examined" in r.stdout, "%s: check: %s" % (what, r))
        if converted.returncode == 0:
            loaded = {"o": None}
            dcp.load(loaded, checkpoint_id=target)
            check(loaded == {"o": {"x": 1}} and not os.path.exists(mark), "%s: loaded as %s" % (what, loaded))
            for name in os.listdir(target):
                with open(os.path.join(target, name), "rb") as f:
                    check(b"posix" not in f.read(), "%s: the attack is in %s" % (what, name))
        shutil.rmtree(folder)
        shutil.rmtree(target, ignore_errors=True)


# ---- unknown but harmless classes ----

class Mine:
    def __init__(self):
        self.x = 1


def unknown_class(home):
    path = os.path.join(home, "mine.pt")
    torch.save({"w": torch.ones(4), "mine": Mine(), "part": functools.partial(Mine)}, path)
    r = run("check", path)
    check(r.returncode == 0 and "unsupported: class Mine of __main__" in r.stdout and "hostile" not in r.stdout,
          "unknown class: check: %s" % r)
    r = run("verify", path)
    check(r.returncode == 0 and "not known to be harmless: 2 objects, e.g. mine" in r.stdout and "hostile" not in r.stdout,
          "unknown class: verify: %s" % r)
    r = run("inspect", path)
    check("Unknown     mine: unsupported: class Mine of __main__" in r.stdout, "unknown class: inspect: %s" % r)
    for to in ("pt", "dcp"):
        target = path + "." + to
        r = run("convert", path, "-o", target, "--to", to)
        check(r.returncode == 5 and "class Mine of __main__" in r.stderr and "hostile" not in r.stderr
              and "--exclude 'mine'" in r.stderr and "--trust-objects" in r.stderr, "unknown class: %s: %s" % (to, r))
        r = run("convert", path, "-o", target, "--to", to, "--trust-objects")
        check(r.returncode == 0, "unknown class: --trust-objects: %s" % r)
    check(torch.load(path + ".pt", weights_only=False)["mine"].x == 1, "unknown class: it was not copied")


# ---- pickles that torch cannot load ----

def unloadable(home):
    path = os.path.join(home, "bad.pt")
    text = b"X\x01\x00\x00\x00x"
    for what, value in (("a str that is called", text + b")R"), ("arguments that are no tuple", b"ctorch\nSize\nNR"),
                        ("a list as a key", b"}]Ns"),
                        ("a tuple with a list as a key", b"}]\x85Ns"), ("a set of dicts", b"c__builtin__\nset\n]}a\x85R"),
                        ("a state for a dict", b"}}b"), ("a size of text", b"ctorch\nSize\n" + text + b"\x85\x85R")):
        torch.save({"w": torch.ones(4)}, path)
        with_pickle(path, lambda data: data[:2] + value + b"0" + data[2:])
        try:
            torch.load(path, weights_only=False)
            check(False, "%s: torch loads it: the test is wrong" % what)
        except Exception:
            pass
        target = os.path.join(home, "bad.h5")
        r = run("convert", path, "-o", target)
        check(r.returncode == 3 and r.stderr.count("\n") == 1 and not os.path.exists(target), "%s: %s" % (what, r))
        check(run("verify", path).returncode in (1, 3), "%s: verify is content" % what)


with tempfile.TemporaryDirectory(prefix="fc-unsafe-") as home:
    for test in (attack_everywhere, dropped_call, dropped_call_of_a_rank, hidden_call,
                 hidden_call_in_metadata, wrapped_call, hooked_tensor, torchscript_object, two_readers, unknown_class, unloadable):
        test(home)
sys.exit(finish("unsafe_objects"))
