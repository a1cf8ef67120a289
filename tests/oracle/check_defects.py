"""The defects that check_messages.py shows to check, each made by real torch and h5py. CHECKS lists them.

The importing script's first arguments are FSDPCKPT and CORPUS. Exits with 77 without torch.
"""
import argparse
import collections
import itertools
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
import types
import warnings
import zipfile

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
try:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

PROGRAM, CORPUS = map(os.path.abspath, sys.argv[1:3])


# ---- what is saved ----

def model(**changes):
    """The state dict of a small Llama. `changes` replaces tensors by name, with _ for a dot; None leaves one out."""
    g = torch.Generator().manual_seed(1)
    shapes = {"embed_tokens.weight": (64, 16), "norm.weight": (16,), "lm_head.weight": (64, 16)}
    for i in range(2):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes["layers.%d.self_attn.%s.weight" % (i, name)] = (16, 16)
        shapes["layers.%d.mlp.up_proj.weight" % i] = (48, 16)
        shapes["layers.%d.mlp.down_proj.weight" % i] = (16, 48)
        shapes["layers.%d.input_layernorm.weight" % i] = (16,)
    state = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    for name, value in changes.items():
        found = [n for n in state if n.replace(".", "_") == name]
        state.pop(found[0]) if value is None else state.__setitem__(found[0] if found else name, value)
    return state


def renamed(state, old, new):
    return {k.replace(old, new): v for k, v in state.items()}


def save(state, path="ckpt"):
    dcp.save(state, checkpoint_id=path, no_dist=True)


def training(state, skip=(), groups=True):
    """A training checkpoint: the model, AdamW's state by parameter name, the parameter groups, a step."""
    names = [n for n in state if "norm" not in n]
    optim = {n: {"step": torch.tensor(3.0), "exp_avg": torch.zeros_like(state[n]), "exp_avg_sq": torch.zeros_like(state[n])}
             for n in names if n not in skip}
    whole = {"model": state, "optim": {"state": optim}, "step": 3}
    if groups:
        whole["optim"]["param_groups"] = [{"params": list(optim), "lr": 1e-3}]
    return whole


def schema_of(path, name="model.json"):
    with open(name, "w") as f:
        subprocess.run([PROGRAM, "schema", path], stdout=f, check=True)


def against(state, reference):
    """Saves ckpt, and the schema model.json to check it against."""
    save(reference, "reference")
    schema_of("reference")
    shutil.rmtree("reference")
    save(state)


def tool(*args):
    subprocess.run([PROGRAM, *args], check=True, stdout=subprocess.DEVNULL)


def corpus(name, to="ckpt"):
    shutil.copytree(os.path.join(CORPUS, name), to)


def edit_metadata(edit, path="ckpt"):
    where = os.path.join(path, ".metadata")
    with open(where, "rb") as f:
        data = pickle.load(f)
    edit(data)
    with open(where, "wb") as f:
        pickle.dump(data, f)


# ---- check: the checkpoint alone ----

def cut_metadata():
    """The offset in the message depends on every byte before it, and so on the Python that pickled them. The corpus has the
        same bytes everywhere."""
    corpus("dcp-torch2.15.0-fsdp2")
    os.truncate("ckpt/.metadata", 900)


def half_a_file():
    tool("consolidate", os.path.join(CORPUS, "dcp-torch2.15.0-fsdp2"), "-o", "model.h5", "-q")
    os.truncate("model.h5", 2000)


def file_missing():
    corpus("dcp-torch2.15.0-fsdp2")
    os.unlink("ckpt/__1_0.distcp")
    os.unlink("ckpt/__3_0.distcp")


def sharded():
    corpus("dcp-torch2.15.0-fsdp2", "source")
    tool("reshard", "source", "-o", "sharded", "--dp", "4", "-q")


def shard_missing():
    sharded()
    os.unlink("sharded/shard-00002-of-00004.h5")


def file_cut():
    corpus("dcp-torch2.15.0-fsdp2")
    os.truncate("ckpt/__0_0.distcp", 1000)


def shard_cut():
    sharded()
    os.truncate("sharded/shard-00001-of-00004.h5", 3000)


def shard_is_text():
    sharded()
    with open("sharded/shard-00003-of-00004.h5", "w") as f:
        f.write("<html>404 Not Found: the object store said so instead of the file</html>\n")


def shard_is_directory():
    corpus("dcp-torch2.15.0-fsdp2")
    os.unlink("ckpt/__2_0.distcp")
    os.mkdir("ckpt/__2_0.distcp")


def hole():
    corpus("dcp-torch2.15.0-fsdp2")

    def edit(data):
        chunks = data.state_dict_metadata["model.output.weight"].chunks
        gone = chunks.pop(1)
        for key in [k for k in data.storage_data if k.fqn == "model.output.weight" and k.offset == gone.offsets]:
            del data.storage_data[key]

    edit_metadata(edit)


def overlap():
    corpus("dcp-torch2.15.0-fsdp2")

    def edit(data):
        chunk = data.state_dict_metadata["model.output.weight"].chunks[1]
        for key in [k for k in data.storage_data if k.fqn == "model.output.weight" and k.offset == chunk.offsets]:
            place = data.storage_data.pop(key)
            data.storage_data[type(key)(key.fqn, torch.Size([2, 0]), key.index)] = place
        object.__setattr__(chunk, "offsets", torch.Size([2, 0]))

    edit_metadata(edit)


def distributed_data_parallel():
    save({"module." + k: v for k, v in model().items()})


def compiled_layers():
    save({k.replace("layers.0.", "layers.0._orig_mod."): v for k, v in model().items()})


def flat_parameters():
    save({"_flat_param": torch.zeros(1000), "layers.0._fsdp_wrapped_module._flat_param": torch.zeros(2000)})


class Command:
    def __reduce__(self):
        return os.system, ("true",)


def running_object():
    torch.save({"weight": torch.zeros(4), "config": Command()}, "model.pt")


def unknown_object():
    """An instance of a class of the user's own training script."""
    script = sys.modules["train"] = types.ModuleType("train")
    script.Warmup = type("Warmup", (), {"__module__": "train"})
    torch.save({"weight": torch.zeros(4), "schedule": script.Warmup()}, "model.pt")


def class_call(cls, *args):
    """Pickles as a call of the class."""
    return type("Call", (), {"__reduce__": lambda self: (cls, args)})()


def calling_argument():
    """UserDict calls `keys` of its argument."""
    held = argparse.Namespace(keys=torch.nn.functional.relu)
    torch.save({"weight": torch.zeros(4), "config": class_call(collections.UserDict, held)}, "model.pt")


def odd_argument():
    """A deque of an endless iterator."""
    torch.save({"weight": torch.zeros(4), "history": class_call(collections.deque, itertools.count())}, "model.pt")


def running_file():
    """A call whose result is dropped."""
    torch.save({"weight": torch.zeros(4)}, "whole.pt")
    with zipfile.ZipFile("whole.pt") as source, zipfile.ZipFile("model.pt", "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("/data.pkl"):
                data = data[:2] + b"cposix\nsystem\nX\x04\0\0\0true\x85R0" + data[2:]
            target.writestr(name, data)


def damaged_object():
    corpus("dcp-torch2.15.0-train")
    with open("ckpt/.metadata", "rb") as f:
        places = pickle.load(f).storage_data
    place = [v for k, v in places.items() if k.fqn == "step"][0]
    with open("ckpt/" + place.relative_path, "r+b") as f:
        f.seek(place.offset)
        f.write(b"\0" * place.length)


def odd_tensor():
    torch.save({**model(), "mask": torch.empty(3, device="meta")}, "model.pt")


def orphan():
    state = training(model(), groups=False)
    del state["model"]["layers.1.mlp.up_proj.weight"]
    save(state)


def orphan_flattened():
    """get_optimizer_state_dict with flatten_optimizer_state_dict=True."""
    state = {"state.%s.%s" % (n, k): torch.zeros_like(t) for n, t in model().items() for k in ("exp_avg", "exp_avg_sq")}
    state.update(model(lm_head_weight=None))
    save(state)


def wrong_state_shape():
    state = training(model(), groups=False)
    state["optim"]["state"]["embed_tokens.weight"]["exp_avg_sq"] = torch.zeros(32, 16)
    save(state)


def incomplete_state():
    state = training(model(), groups=False)
    del state["optim"]["state"]["layers.0.self_attn.q_proj.weight"]["exp_avg_sq"]
    save(state)


def unknown_member():
    state = training(model())
    state["optim"]["param_groups"][0]["params"] += ["layers.2.mlp.up_proj.weight", "layers.2.mlp.down_proj.weight"]
    save(state)


def unknown_member_flattened():
    state = {"state.%s.exp_avg" % n: torch.zeros_like(t) for n, t in model().items()}
    state.update({"param_groups.%s.%s" % (n, k): 0.1 for n in [*model(), "layers.9.bias"] for k in ("lr", "eps")})
    save({**model(), **state})


def no_member():
    state = training(model())
    state["optim"]["param_groups"][0]["params"].remove("lm_head.weight")
    save(state)


# ---- check: against a reference ----

def object_missing():
    against({"model": model()}, {"model": model(), "scheduler": {"last_epoch": 3}})


def object_unexpected():
    against({"model": model(), "rng": "0x1234"}, {"model": model()})


def tied_head():
    save(model())
    os.mkdir("hub")
    torch.save(model(lm_head_weight=None), "hub/pytorch_model.bin")
    with open("hub/config.json", "w") as f:
        json.dump({"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}, f)


def compiled_against():
    state = {k.replace("layers.0.", "layers.0._orig_mod.").replace("layers.1.", "layers.1._orig_mod."): v
             for k, v in model().items()}
    against(state, model())


def fsdp_and_checkpointing():
    state = {k.replace(".self_attn.", "._fsdp_wrapped_module._checkpoint_wrapped_module.self_attn."): v
             for k, v in model().items()}
    against(state, model())


def some_lack_prefix():
    state = model()
    reference = {("model." + k if k.startswith("layers.") else k): v for k, v in state.items()}
    against(state, reference)


def most_lack_prefix():
    against({**model(), "step": 3}, {**{"model." + k: v for k, v in model().items()}, "step": 3})


def all_lack_prefix():
    against(model(), {"model." + k: v for k, v in model().items()})


def hub_names():
    state = renamed(renamed(model(), "layers.", "h."), "self_attn.", "attn.")
    against(state, renamed(model(), "layers.", "h."))


def one_name():
    state = model()
    state["lm_head.weights"] = state.pop("lm_head.weight")
    against(state, model())


def consolidated(state, name):
    """An HDF5 file of ours, which has the digest of each tensor."""
    save(state, "source")
    tool("consolidate", "source", "-o", name, "-q")
    shutil.rmtree("source")


def renamed_with_digests():
    state = model()
    consolidated(state, "old.h5")
    state["head.kernel"] = state.pop("lm_head.weight")
    consolidated(state, "new.h5")


def all_renamed_with_digests():
    consolidated(model(), "old.h5")
    consolidated(renamed(model(), "self_attn", "attention"), "new.h5")


def object_for_tensor():
    against({"model": model(), "step": 3}, {"model": model(), "step": torch.tensor(3)})


def tensor_for_object():
    against({"model": model(), "step": torch.tensor(3)}, {"model": model(), "step": 3})


def nested_otherwise():
    against({"model": {"a": {"b": torch.zeros(2)}}, "x": torch.zeros(1)}, {"model": {"a.b": torch.zeros(2)}, "x": torch.zeros(1)})


def mixed_dtypes():
    state, reference = model(), model()
    state["norm.weight"] = state["norm.weight"].bfloat16()
    reference["lm_head.weight"] = reference["lm_head.weight"].bfloat16()
    against(state, reference)


def integer_dtype():
    against({**model(), "ids": torch.arange(4, dtype=torch.int32)}, {**model(), "ids": torch.arange(4)})


# ---- check: versions of a model ----

def versions(*numbers, bases={}):
    """Deltas of a model that changes a little in each version."""
    os.mkdir("updates")
    states = [model()]
    for number in range(1, max(numbers) + 1):
        states.append({k: v + number / 8 if "norm" in k else v for k, v in states[-1].items()})
    for number, state in enumerate(states):
        os.mkdir("v%d" % number)
        save_file(state, "v%d/model.safetensors" % number)
    for number in numbers:
        base = bases.get(number, number - 1)
        tool("delta", "v%d" % base, "v%d" % number, "-o", "updates/weight_v%06d" % number, "--base", str(base), "-q")


def version_cut():
    versions(1, 2)
    path = "updates/weight_v000002/model-00001-of-00001.safetensors"
    os.truncate(path, os.path.getsize(path) - 10)


def version_begun():
    versions(1)
    os.mkdir("updates/weight_v000002")


# ---- check: for a mesh ----

def plan(rules):
    with open("plan.json", "w") as f:
        json.dump(rules, f)


LLAMA_PLAN = {"layers.*.self_attn.q_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}

# (defect, command, function that makes it)
CHECKS = [
    ("# The checkpoint alone", None, None),
    ("The save died while `.metadata` was written", "check ckpt", cut_metadata),
    ("A download of an HDF5 file stopped half-way", "check model.h5", half_a_file),
    ("Two of four ranks' files were not copied", "check ckpt", file_missing),
    ("A shard of an HDF5 checkpoint is gone", "check sharded", shard_missing),
    ("A rank's file was cut off", "check ckpt", file_cut),
    ("An HDF5 shard was cut off", "check sharded", shard_cut),
    ("The object store sent an error page for a shard", "check sharded", shard_is_text),
    ("A directory has the name of a data file", "check ckpt", shard_is_directory),
    ("A rank did not save its rows", "check ckpt", hole),
    ("Two ranks say they hold the same rows", "check ckpt", overlap),
    ("Shards of torch's HuggingFaceStorageWriter", "check hf", lambda: corpus("st-torch2.15.0-1d", "hf")),
    ("An empty state dict was saved", "check ckpt", lambda: save({})),
    ("Saved from DistributedDataParallel", "check ckpt", distributed_data_parallel),
    ("One layer was compiled", "check ckpt", compiled_layers),
    ("FSDP1, saved as LOCAL_STATE_DICT", "check ckpt", flat_parameters),
    ("A tensor without data is among the others", "check model.pt", odd_tensor),
    ("An object runs a command when PyTorch loads it", "check model.pt", running_object),
    ("The file runs a command outside of its objects", "check model.pt", running_file),
    ("An object of a class that is not known to be harmless", "check model.pt", unknown_object),
    ("A harmless class is given something that it might call", "check model.pt", calling_argument),
    ("A harmless class is given something that no program gives it", "check model.pt", odd_argument),
    ("The bytes of an object are lost", "check ckpt", damaged_object),
    ("A parameter is lost, but its optimizer state exists", "check ckpt", orphan),
    ("The same with a flattened optimizer", "check ckpt", orphan_flattened),
    ("Optimizer state of a smaller vocabulary", "check ckpt", wrong_state_shape),
    ("One parameter lacks a moment", "check ckpt", incomplete_state),
    ("param_groups lists layers that do not exist", "check ckpt", unknown_member),
    ("The same in a flattened optimizer", "check ckpt", unknown_member_flattened),
    ("param_groups forgets a parameter", "check ckpt", no_member),
    ("# Versions of a model", None, None),
    ("A version was deleted", "check updates", lambda: versions(1, 2, 4)),
    ("The trainer was started again from version 1", "check updates", lambda: versions(1, 2, 3, bases={3: 1})),
    ("A file of a version was cut off", "check updates", version_cut),
    ("A version is still being copied", "check updates", version_begun),
    ("# Against a reference", None, None),
    ("A tensor is missing", "check ckpt --schema model.json", lambda: against(model(norm_weight=None), model())),
    ("A layer is missing", "check ckpt --schema model.json",
     lambda: against({k: v for k, v in model().items() if "layers.1.self" not in k}, model())),
    ("An object is missing", "check ckpt --schema model.json", object_missing),
    ("An unexpected tensor", "check ckpt --schema model.json",
     lambda: against({**model(), "rotary.inv_freq": torch.zeros(8)}, model())),
    ("The head is tied in a folder of transformers", "check ckpt --against hub", tied_head),
    ("An unexpected object", "check ckpt --schema model.json", object_unexpected),
    ("Saved from DistributedDataParallel", "check ckpt --schema model.json",
     lambda: against({"module." + k: v for k, v in model().items()}, model())),
    ("Saved as `{\"model\": …}`, but the model has no prefix", "check ckpt --schema model.json",
     lambda: against({"model." + k: v for k, v in model().items()}, model())),
    ("DistributedDataParallel around torch.compile", "check ckpt --schema model.json",
     lambda: against({"module._orig_mod." + k: v for k, v in model().items()}, model())),
    ("A custom prefix", "check ckpt --schema model.json",
     lambda: against({"policy.backbone." + k: v for k, v in model().items()}, model())),
    ("The model has a prefix", "check ckpt --schema model.json", all_lack_prefix),
    ("The model has a prefix for most names", "check ckpt --schema model.json", most_lack_prefix),
    ("The model has a prefix for some names", "check ckpt --schema model.json", some_lack_prefix),
    ("Layers were compiled one by one", "check ckpt --schema model.json", compiled_against),
    ("FSDP1 and activation checkpointing left their names", "check ckpt --schema model.json", fsdp_and_checkpointing),
    ("The reference is of a compiled model", "check ckpt --schema model.json",
     lambda: against(model(), renamed(model(), "layers.0.", "layers.0._orig_mod."))),
    ("Another library's name for a module", "check ckpt --schema model.json", hub_names),
    ("The first component has another name", "check ckpt --schema model.json",
     lambda: against(renamed(model(), "layers.", "blocks."), model())),
    ("One name was misspelt", "check ckpt --schema model.json", one_name),
    ("The head has another name, but the same digest", "check new.h5 --against old.h5", renamed_with_digests),
    ("A module has another name, but the same digests", "check new.h5 --against old.h5", all_renamed_with_digests),
    ("A linear layer of other sizes", "check ckpt --schema model.json",
     lambda: against(model(lm_head_weight=torch.zeros(60, 12)), model())),
    ("A weight is transposed", "check ckpt --schema model.json",
     lambda: against({**model(), "layers.0.mlp.up_proj.weight": torch.zeros(16, 48)}, model())),
    ("A weight was flattened", "check ckpt --schema model.json",
     lambda: against({**model(), "layers.0.mlp.up_proj.weight": torch.zeros(768)}, model())),
    ("One rank's shard was saved as the tensor", "check ckpt --schema model.json",
     lambda: against({**model(), "embed_tokens.weight": torch.zeros(16, 16)}, model())),
    ("The vocabulary was padded", "check ckpt --schema model.json",
     lambda: against({**model(), "embed_tokens.weight": torch.zeros(72, 16)}, model())),
    ("The whole model is in bfloat16", "check ckpt --schema model.json",
     lambda: against({k: v.bfloat16() for k, v in model().items()}, model())),
    ("One tensor is in bfloat16, and another should be", "check ckpt --schema model.json", mixed_dtypes),
    ("Another integer type", "check ckpt --schema model.json", integer_dtype),
    ("The step is a number instead of a tensor", "check ckpt --schema model.json", object_for_tensor),
    ("The step is a tensor instead of a number", "check ckpt --schema model.json", tensor_for_object),
    ("The same name with another nesting", "check ckpt --schema model.json", nested_otherwise),
    ("A name of --allow-missing is no longer missing",
     "check ckpt --schema model.json --allow-missing lm_head.weight", lambda: against(model(), model())),
    ("A name of --allow-unexpected no longer exists",
     "check ckpt --schema model.json --allow-unexpected *.inv_freq", lambda: against(model(), model())),
    ("# For a mesh", None, None),
    ("Rows do not divide by the ranks", "check ckpt --dp 5 --include *.up_proj.*", lambda: save(model())),
    ("More ranks than rows", "check ckpt --dp 24 --include *norm*", lambda: save(model())),
    ("TP shards first, FSDP shards the rest", "check ckpt --dp 5 --tp 2 --include *.q_proj.*", lambda: save(model())),
    ("A dimension does not divide by the TP ranks", "check ckpt --tp 3 --include *.o_proj.*", lambda: save(model())),
    ("More TP ranks than columns", "check ckpt --tp 32 --include *.o_proj.*", lambda: save(model())),
    ("A matrix that the plan does not know", "check ckpt --tp 2",
     lambda: save({**model(), "layers.0.adapter.weight": torch.zeros(16, 16), "layers.1.adapter.weight": torch.zeros(16, 16)})),
    ("A plan for another model", "check ckpt --tp 2 --include *norm*", lambda: save(model())),
    ("A misspelt rule", "check ckpt --tp 2 --tp-plan plan.json --include *.q_proj.* --include *.down_proj.*",
     lambda: (save(model()), plan({**LLAMA_PLAN, "layers.*.self_atn.k_proj": "colwise"}))),
]
