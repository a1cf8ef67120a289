#!/usr/bin/env python3
"""What --force replaces: every target of every format, of 1 kB to 10 MB, and checkpoints of PyTorch and safetensors; but no file of
another program, whatever its name. Files next to the weights of a model stay.

usage: force_foreign.py FSDPCKPT       exit 77 without torch, h5py or safetensors
"""
import io
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile

try:
    import h5py
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

from checks import check, finish, must_run

HUB = {"config.json": "{}", "tokenizer.json": "{}", "README.md": "# mine", ".gitattributes": "*.bin", "chat/template.jinja": "x"}


def archive(names):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name in names:
            z.writestr(name, b"x" * 100)
    return out.getvalue()


def made(make):
    """The bytes of the file that `make` writes."""
    with tempfile.TemporaryDirectory() as folder:
        make(os.path.join(folder, "f"))
        with open(os.path.join(folder, "f"), "rb") as f:
            return f.read()


def foreign_h5(path):
    with h5py.File(path, "w") as f:
        f["fsdpckpt_schema"] = np.ones(4)
        f.create_group("data").attrs["fsdpckpt_schema"] = 1


class Scripted(torch.nn.Module):
    def forward(self, x):
        return x + 1


def foreign():
    """{kind: bytes} of files of other programs."""
    npz = io.BytesIO()
    np.savez(npz, a=np.ones(4))
    return {"HDF5": made(foreign_h5), "pickle": pickle.dumps({"years": list(range(100))}), "old pickle": pickle.dumps([1], 2),
            "npz": npz.getvalue(), "document": archive(["[Content_Types].xml", "word/document.xml"]),
            "zip with data.pkl": archive(["archive/data.pkl", "archive/version"]), "empty zip": archive([]),
            "TorchScript": made(torch.jit.script(Scripted()).save), "random": np.random.default_rng(1).bytes(5000),
            "zeros": bytes(9000), "text": b"Dear reader, " * 20, "JSON": b'{"metadata": {"mine": 1}, "settings": [1]}',
            "JSON of safetensors": b'\x10\0\0\0\0\0\0\0{"a": {"b": 1}} '}


# What writes a single file, and the name that it has.
FILES = [(["consolidate"], "x.h5"), (["consolidate"], "x.pt"), (["consolidate"], "x.safetensors"), (["view"], "view.h5")]
# What writes a directory, and names of files in it.
FOLDERS = {"h5": (["reshard", "--dp", "1"], ["index.h5", "shard-00000-of-00001.h5"]),
           "dcp": (["reshard", "--to", "dcp", "--dp", "1"], [".metadata", "__0_0.distcp"]),
           "accelerate": (["reshard", "--to", "accelerate", "--dp", "1"],
                          ["pytorch_model_fsdp_0/.metadata", "pytorch_model_fsdp_0/__0_0.distcp", "optimizer_0/.metadata"]),
           "pt": (["reshard", "--to", "pt", "--dp", "1"], ["model_world_size_1_rank_0.pt"]),
           "safetensors": (["consolidate", "--to", "safetensors", "--max-shard-size", "5GB"],
                           ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]),
           "hub": (["export"], ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"])}


def snapshot(path):
    if os.path.isfile(path):
        return open(path, "rb").read()
    return {os.path.relpath(os.path.join(d, n), path): open(os.path.join(d, n), "rb").read() for d, _, names in os.walk(path)
            for n in names}


def put(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as f:
        f.write(content if isinstance(content, bytes) else content.encode())


def refuse(program, argv, target, what):
    before = snapshot(target)
    r = subprocess.run([program, *argv, "-o", target, "--force", "-q"], capture_output=True, text=True)
    check(r.returncode == 2 and "would delete" in r.stderr, "%s: exit %d: %s" % (what, r.returncode, r.stderr))
    check(snapshot(target) == before, "%s: was changed" % what)


def foreign_files(program, home, source):
    at = lambda *names: os.path.join(home, *names)
    for kind, content in foreign().items():
        for command, name in FILES:
            put(at("file", name), content)
            refuse(program, [*command, source], at("file", name), "%s as %s" % (kind, name))
        for form, (command, names) in FOLDERS.items():
            for name in names:
                folder = at("folder", form, kind, name.replace("/", "-"))
                put(os.path.join(folder, name), content)
                refuse(program, [command[0], source, *command[1:]], folder, "%s as %s/%s" % (kind, form, name))
    for form, (command, _) in FOLDERS.items():
        for name in ("thesis.bin", "sub/deeper/notes.txt") if form in ("hub", "safetensors") else ("thesis", "sub/notes.txt"):
            folder = at("other", form, "of-%s" % name.split("/")[0])
            put(os.path.join(folder, name), "years")
            refuse(program, [command[0], source, *command[1:]], folder, "%s with %s" % (form, name))


def own_targets(program, home):
    """Every target of ours takes the place of the one before."""
    for elements in (256, 20_000, 2_500_000):
        source = os.path.join(home, "%d.pt" % elements)
        torch.save({"model.w": torch.arange(elements, dtype=torch.float32), "model.v": torch.ones(40, 50)}, source)
        for command, name in FILES:
            for round in range(2):
                must_run(program, *command, source, "-o", os.path.join(home, name), "--force", "-q")
        for form, (command, _) in FOLDERS.items():
            folder = os.path.join(home, "our-" + form)
            for more in ([], ["--dp", "3"] if "--dp" in command else []):
                argv = command[:-2] + more if more else command
                must_run(program, argv[0], source, *argv[1:], "-o", folder, "--force", "-q")
    for empty in ("e.h5", "e.pt"):
        put(os.path.join(home, empty), "")
        must_run(program, "consolidate", source, "-o", os.path.join(home, empty), "--force", "-q")


def attributes(program, home, source):
    """Our file stays ours with so many attributes of others that HDF5 moves them into a heap."""
    path = os.path.join(home, "noted.h5")
    must_run(program, "consolidate", source, "-o", path, "-q")
    with h5py.File(path, "r+") as f:
        for i in range(40):
            f.attrs["note%d" % i] = i
    must_run(program, "consolidate", source, "-o", path, "--force", "-q")


def checkpoints_of_others(program, home, source):
    """A checkpoint of a format that is written here, by the packages of the format."""
    tensors = {"a": torch.ones(70_000)}
    at = lambda name: os.path.join(home, name)
    torch.save(tensors, at("t.pt"))
    torch.save(tensors, at("old.pt"), _use_new_zipfile_serialization=False)
    save_file(tensors, at("t.safetensors"))
    for name in ("t.pt", "old.pt", "t.safetensors"):
        must_run(program, "consolidate", source, "-o", at(name), "--force", "-q")
    dcp.save(tensors, checkpoint_id=at("t.dcp"), no_dist=True)
    must_run(program, "reshard", source, "-o", at("t.dcp"), "--to", "dcp", "--dp", "2", "--force", "-q")


def hub(program, home, source):
    """What people copied next to the weights stays; a file that --like copies is the one of the model."""
    folder, model = os.path.join(home, "hub"), os.path.join(home, "model")
    must_run(program, "export", source, "-o", folder, "-q")
    for name, text in HUB.items():
        put(os.path.join(folder, name), text)
    os.chmod(os.path.join(folder, "config.json"), 0o600)
    must_run(program, "export", source, "-o", model, "-q")
    put(os.path.join(model, "config.json"), '{"theirs": 1}')
    for argv, config in ((["export", source], "{}"), (["consolidate", source, "--to", "safetensors"], "{}"),
                         (["export", source, "--like", model], '{"theirs": 1}')):
        r = must_run(program, *argv, "-o", folder, "--force")
        check("kept:" in r.stdout and "tokenizer.json" in r.stdout and "missing:" not in r.stdout, "%s: says %s" % (argv, r.stdout))
        found = {n: c.decode() for n, c in snapshot(folder).items() if not n.endswith(".safetensors")}
        check(found == {**HUB, "config.json": config}, "%s: the files next to the weights are %s" % (argv, found))
        check(list(load_file(os.path.join(folder, "model.safetensors"))) == ["v", "w"], "%s: the weights" % argv)


def main():
    program = sys.argv[1]
    with tempfile.TemporaryDirectory() as home:
        source = os.path.join(home, "source.pt")
        torch.save({"model.w": torch.ones(3, 4), "model.v": torch.ones(2)}, source)
        foreign_files(program, home, source)
        attributes(program, home, source)
        checkpoints_of_others(program, home, source)
        own_targets(program, home)
    with tempfile.TemporaryDirectory() as home:
        source = os.path.join(home, "source.pt")
        torch.save({"w": torch.ones(3, 4), "v": torch.ones(2)}, source)
        hub(program, home, source)
    sys.exit(finish("force_foreign"))


main()
