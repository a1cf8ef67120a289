#!/usr/bin/env python3
"""Directories of torch.save files, one per rank. Reading: those of the corpus against the tensors that torch gathered, all styles
of file names, plain tensors of tensor-parallel ranks, Hugging Face's index, DCP with metadata per rank. Writing: against torch's own
cuts. Unsupported input must be refused.

usage: pt_ranks.py FSDPCKPT CORPUS        exit 77 without torch
"""
import glob
import json
import os
import sys

from pt import load, refused, run_tests, save, well_formed  # exits with 77 without torch

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gloo
from checks import must, must_run
from torch_values import must_equal


def flat(value, path=()):
    """{path: leaf} of dicts, and of lists of dicts."""
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and any(isinstance(v, (dict, torch.Tensor)) for v in value):
        items = enumerate(value)
    else:
        return {path: value}
    return {k: v for key, below in items for k, v in flat(below, path + (str(key),)).items()}


def unreadable(program, path, *words):
    """A value is listed, but a conversion that includes it is refused in one line with these words."""
    must_run(program, "inspect", path)
    target = path.with_name("never.pt")
    r = must_run(program, "consolidate", path, "-o", target, ok=(5,))
    must(all(w in r.stderr for w in words) and r.stderr.count("\n") == 1 and not target.exists(), path, r.stderr)


def reads_one_file_per_rank(program, home, corpus):
    cases = [c for c in sorted(glob.glob(str(corpus / "pt" / "*-torch*"))) if "-hybrid-" not in c]  # flat_state.py's
    must(len(cases) >= 7, "there are", len(cases), "cases")
    for case in cases:
        truth = torch.load(os.path.join(case, "full.pt"), weights_only=False)
        several = len(truth) > 1
        must_run(program, "verify", case)
        must_run(program, "consolidate", case, "-o", home / "ranks.pt", "-q", "--force")
        got = flat(load(home / "ranks.pt"))
        extra = {k for k in got if k[0] == "extra_state"}
        must(bool(extra) == several, case, "has", len(extra), "values of each rank alone")
        want = flat(truth if several else truth["model"])
        must(set(want) == set(got) - extra, case, "differs in", set(want) ^ (set(got) - extra))
        for key, value in want.items():
            must_equal(value, got[key], "%s %s" % (case, key))
        ranks = len(glob.glob(os.path.join(case, "model_world_size_*")))
        if extra:
            must_equal([got[("extra_state", "rank_%d" % r, "rng", "random")] for r in range(ranks)], list(range(ranks)), case)
        one = sorted(glob.glob(os.path.join(case, "model_world_size_*_rank_1.pt")))[0]
        must_run(program, "consolidate", one, "-o", home / "one.pt", "-q", "--force")
        model = flat(load(home / "one.pt"))
        for key, value in flat(truth["model"]).items():
            must_equal(value, model[key], "%s %s" % (one, key))


def reads_ranks_by_other_names(program, home, corpus):
    """File names that do not contain the number of ranks."""
    case = corpus / "pt" / "fsdp2-torch2.15.0"
    truth = flat(torch.load(case / "full.pt", weights_only=False)["model"])
    for i, name in enumerate(("rank%d.pth", "rank_%02d.pt", "model_rank_%d.pt", "ep0-ba10-rank%d.pt", "pytorch_model_fsdp_rank%d.bin")):
        loose = home / ("loose%d" % i)
        loose.mkdir()
        for rank in range(3):
            (loose / (name % rank)).write_bytes((case / ("model_world_size_3_rank_%d.pt" % rank)).read_bytes())
        save({"cuda": torch.full((4,), i)}, loose / "rng_rank_0.pt")
        save({"cuda": torch.full((4,), i + 1)}, loose / "rng_rank_1.pt")
        must_run(program, "consolidate", loose, "-o", home / "loose.pt", "-q", "--force")
        got = flat(load(home / "loose.pt"))
        got = {k if k[0] == "rng" else k[-1:]: v for k, v in got.items()}
        rng = {("rng", "rank_0", "cuda"), ("rng", "rank_1", "cuda")}  # only the names of model and rng say that they belong together
        must(set(got) - set(truth) == (rng if name == "model_rank_%d.pt" else set()), name, "has", set(got))
        for key, value in truth.items():
            must_equal(value, got[key], "%s %s" % (name, key))
        refused(program, loose / (name % 1), 5, "give the path of the directory")
        (loose / (name % 1)).unlink()
        refused(program, loose, 3, name % 1, "missing")
        for rank in range(2):
            (loose / ("rng_rank_%d.pt" % rank)).unlink()
    (loose / "pytorch_model_fsdp_rank_1.bin").write_bytes(b"")
    refused(program, loose, 2, "pytorch_*_fsdp_rank*.bin", "pytorch_*_fsdp_rank_*.bin")
    (loose / "pytorch_model_fsdp_rank_1.bin").unlink()
    (loose / (name % 1)).write_bytes((case / "model_world_size_3_rank_1.pt").read_bytes())
    for other, words in (("notes.pt", "notes.pt in the same directory is not part of the checkpoint and is not read"),
                         ("args.pkl", "2 files in the same directory are not part of the checkpoint and are not read, "
                                      "the first is args.pkl")):
        (loose / other).write_bytes(b"x")
        result = must_run(program, "consolidate", loose, "-o", home / "loose.pt", "--force")
        must(words in result.stderr and result.stderr.count("\n") == 1, "other files are not mentioned:", result.stderr)


def reads_tensor_parallel_ranks(program, home, corpus):
    """A TP plan assembles plain tensors of the ranks: cut unevenly, empty, or equal on all ranks."""
    attention = "model.layers.0.self_attn."
    whole = {attention + "q_proj.weight": torch.randn(10, 6), attention + "q_proj.bias": torch.zeros(10),
             attention + "k_proj.weight": torch.randn(2, 6).to(torch.bfloat16),
             attention + "o_proj.weight": torch.randn(6, 10), attention + "o_proj.bias": torch.randn(6),
             "model.norm.weight": torch.ones(6)}
    dims = {attention + "q_proj.weight": 0, attention + "q_proj.bias": 0, attention + "k_proj.weight": 0,
            attention + "o_proj.weight": 1}
    plan = home / "plan.json"
    plan.write_text(json.dumps({"q_proj": "colwise", "k_proj": "colwise", "o_proj": "rowwise"}))

    def part(name, rank):
        tensor = whole[name]
        if name not in dims:
            return tensor
        rows = -(-tensor.shape[dims[name]] // 3)
        start = min(rows * rank, tensor.shape[dims[name]])
        return tensor.narrow(dims[name], start, min(rows, tensor.shape[dims[name]] - start)).clone()

    def parts(name, **changed):
        directory = home / name
        directory.mkdir()
        for rank in range(3):
            state = {name: part(name, rank) for name in whole}
            if rank == 2:
                state.update(changed)
            save({"model": {name: value for name, value in state.items() if value is not None}, "step": 7},
                 directory / ("tp_rank_%d.pt" % rank))
        return directory

    ranks = parts("tp")
    unreadable(program, ranks, "--tp-plan")
    for told in (plan, "auto"):
        must_run(program, "consolidate", ranks, "-o", home / "whole.pt", "--tp-plan", told, "-q", "--force")
        got = load(home / "whole.pt")
        must_equal(whole, got["model"], told)
        must(got["step"] == 7, "the step is", got["step"])
    must_run(program, "convert", ranks, "-o", home / "again", "--to", "pt", "--tp-plan", plan, "-q")
    for rank in range(3):
        got = load(home / "again" / ("model_world_size_3_rank_%d.pt" % rank))["model"]
        must_equal({name: part(name, rank) for name in whole}, got, "rank %d" % rank)
    must_run(program, "extract", ranks, "model." + attention + "o_proj.weight", "-o", home / "o.npy", "--tp-plan", plan)
    shown = json.loads(must_run(program, "inspect", ranks, "--tp-plan", plan, "--json").stdout)
    cut = {t["name"]: t["placements"] for t in shown["tensors"]}
    must(cut["model." + attention + "o_proj.weight"] == "[Shard(1)]", "the cut is", cut)

    llama = home / "llama"
    llama.mkdir()
    for rank in range(3):
        save({name: part(name, rank) for name in whole}, llama / ("consolidated.%02d.pth" % rank))
    (llama / "params.json").write_text("{}")
    told = must_run(program, "consolidate", llama, "-o", home / "whole.pt", "--tp-plan", plan, "--force").stderr
    must_equal(whole, load(home / "whole.pt"), "consolidated.*.pth")
    must("4 tensors were merged according to the plan" in told and told.count("\n") == 1, told)

    def refuses(path, code, *words, told=plan):
        result = must_run(program, "consolidate", path, "-o", home / "no.pt", "--tp-plan", told, ok=(code,))
        must(result.stderr.count("\n") == 1 and all(w in result.stderr for w in words), words, result.stderr)
        must(not (home / "no.pt").exists(), words, "was written")

    refuses(home / "whole.pt", 2, "leave it out")
    refuses(parts("misfit", **{attention + "o_proj.weight": torch.ones(5, 2)}), 3, "tp_rank_2.pt", "o_proj", "dimension 1")
    refuses(parts("type", **{attention + "q_proj.bias": torch.ones(2).half()}), 3, "tp_rank_2.pt", "q_proj.bias")
    refuses(parts("gone", **{attention + "q_proj.bias": None}), 3, "q_proj.bias", "2 of 3 ranks' files")
    refuses(parts("norm", **{"model.norm.weight": torch.zeros(6)}), 5, "model.norm.weight", "differs")
    (home / "other.json").write_text('{"v_proj": "colwise"}')
    refuses(ranks, 2, "--tp-plan does not apply", told=home / "other.json")


def reads_an_index(program, home, corpus):
    """A Hugging Face model folder: pytorch_model-00001-of-00002.bin … with an index, or one file."""
    model = home / "model"
    model.mkdir()
    shared = torch.randn(4, 3)
    parts = [{"a.weight": shared, "b.weight": shared.t()}, {"c": torch.ones(5, dtype=torch.bfloat16), "d": torch.tensor(2)}]
    names = ["pytorch_model-0000%d-of-00002.bin" % (i + 1) for i in range(2)]
    for name, part in zip(names, parts):
        save(part, model / name)
    index = {"metadata": {"total_size": 114}, "weight_map": {k: n for n, p in zip(names, parts) for k in p}}
    (model / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (model / "config.json").write_text("{}")
    whole = {**parts[0], **parts[1]}
    for source in (model, model / "pytorch_model.bin.index.json"):
        must_run(program, "consolidate", source, "-o", home / "whole.pt", "-q", "--force")
        must_equal(whole, load(home / "whole.pt"), source)
    must_run(program, "verify", model)
    save({"c": torch.ones(5), "d": torch.tensor(2)} | {"a.weight": torch.ones(1)}, model / names[1])
    refused(program, model, 3, "a.weight", "in two files")
    save({"c": torch.ones(5)}, model / names[1])
    refused(program, model, 3, "tensor d", names[1])
    (model / names[1]).unlink()
    refused(program, model, 3, names[1])
    (model / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    refused(program, model, 3, "hostile")
    (model / "pytorch_model.bin.index.json").unlink()
    save(parts[0], model / "pytorch_model.bin")
    refused(program, model, 2, "has 2 checkpoints", "pytorch_model-*-of-00002.bin (pt), pytorch_model.bin (pt)")
    (model / names[0]).unlink()
    must_run(program, "consolidate", model, "-o", home / "whole.pt", "-q", "--force")
    must_equal(parts[0], load(home / "whole.pt"), "pytorch_model.bin")


def reads_metadata_of_ranks(program, home, corpus):
    """DCP without .metadata is assembled from the metadata of all ranks, and refused if one is missing."""
    source = corpus / "dcp-ranks-torch2.15.0"
    must_run(program, "consolidate", source, "-o", home / "dcp.pt", "-q")
    want, got = flat(torch.load(source / "full.pt")), flat(load(home / "dcp.pt"))
    must(set(want) == set(got), set(want) ^ set(got))
    for key, value in want.items():
        must_equal(value, got[key], str(key))
    broken = home / "broken"
    broken.mkdir()
    for path in source.glob("__*"):
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "__1.metadata").unlink()
    result = must_run(program, "inspect", broken, ok=(3,))
    must("__1.metadata" in result.stderr and "missing" in result.stderr, result.stderr)
    (broken / "__2.metadata").unlink()  # no file records that there was a third rank, but the missing rows show
    result = must_run(program, "consolidate", broken, "-o", home / "never.pt", ok=(3,))
    must("model." in result.stderr, result.stderr)


def writes_one_file_per_rank(program, home, corpus):
    value = {"layers.0.self_attn.q_proj.weight": torch.randn(10, 6), "layers.0.self_attn.o_proj.weight": torch.randn(6, 10),
             "norm.weight": torch.randn(7), "scalar": torch.tensor(2.5), "few": torch.arange(2), "none": torch.zeros(0, 2),
             "b": torch.tensor([True, False, True]), "step": 3, "nest": {"state": {0: torch.randn(5, 2)}}}
    source = save(value, home / "value.pt")
    for mesh in (["--dp", "3"], ["--tp", "2", "--dp", "2"], ["--replicas", "2", "--dp", "2"], ["--dp", "8"]):
        target = home / "ranks"
        must_run(program, "reshard", source, "-o", target, "--to", "pt", "-q", "--force", *mesh)
        files = sorted(target.iterdir())
        ranks = len(files)
        for rank in range(ranks):
            path = target / ("model_world_size_%d_rank_%d.pt" % (ranks, rank))
            well_formed(path)
            local = load(path)
            must(local["step"] == 3 and local["scalar"] == 2.5 and list(local["nest"]["state"]) == [0], mesh)
            must(list(local) == list(value), mesh, list(local))
            if mesh == ["--dp", "3"]:
                rows = lambda t: list(t.chunk(3)) + [t[:0]] * 3
                must_equal(rows(value["norm.weight"])[rank], local["norm.weight"], "rank %d" % rank)
                must_equal(rows(value["few"])[rank], local["few"], "rank %d" % rank)
            if mesh[0] == "--tp":
                q = value["layers.0.self_attn.q_proj.weight"].chunk(2)[rank % 2].chunk(2)[rank // 2]
                o = value["layers.0.self_attn.o_proj.weight"].chunk(2, 1)[rank % 2].chunk(2)[rank // 2]
                must_equal(q, local["layers.0.self_attn.q_proj.weight"], "q of rank %d" % rank)
                must_equal(o, local["layers.0.self_attn.o_proj.weight"], "o of rank %d" % rank)
        must_run(program, "consolidate", target, "-o", home / "back.pt", "-q", "--force")
        must_equal(value, load(home / "back.pt"), "from " + " ".join(mesh))
        must_run(program, "reshard", target, "-o", home / "other", "--to", "pt", "--dp", "5", "-q", "--force")
        must_run(program, "consolidate", home / "other", "-o", home / "back.pt", "-q", "--force")
        must_equal(value, load(home / "back.pt"), "from dp 5 from " + " ".join(mesh))


class Layer(torch.nn.Module):
    """More tensor-parallel ranks than some of its dimensions can be divided among."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.q_proj = torch.nn.Linear(3, 5)
        self.o_proj = torch.nn.Linear(6, 4, bias=False)
        self.norm = torch.nn.LayerNorm(3)


def on_a_mesh(dp, tp):
    """FSDP2 on tensor parallelism, as torch's own 2D tutorial combines them."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Layer(), mesh["tp"], {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def save_rank(rank, world, home, dp):
    state = on_a_mesh(dp, world // dp).state_dict()
    torch.save(state, "%s/model_world_size_%d_rank_%d.pt" % (home, world, rank))
    return [key for key, value in state.items() if value.to_local().shape.numel() == 0]


def reads_empty_shards(program, home, corpus):
    """Where the placements give a rank 2 × 0 elements, FSDP2 saves a tensor of 0 × 0."""
    empty = gloo.run(8, save_rank, home, 2)
    must("o_proj.weight" in empty[3] and "o_proj.weight" not in empty[0], empty)
    must_run(program, "consolidate", home, "-o", home / "whole.pt", "-q")
    must_equal(dict(Layer().state_dict()), load(home / "whole.pt"), "empty shards")


def load_rank(rank, world, home, dp):
    """docs/TORCH_SAVE.md: how a program loads local tensors into FSDP2."""
    model = on_a_mesh(dp, world // dp)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    file = torch.load("%s/model_world_size_%d_rank_%d.pt" % (home, world, rank), weights_only=True)
    state = {name: DTensor.from_local(file[name], p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
             for name, p in model.state_dict().items()}
    model.load_state_dict(state)
    return {name: value.full_tensor().numpy() for name, value in model.state_dict().items()}


def local_tensors_load_into_fsdp2(program, home, corpus):
    want = Layer().state_dict()
    source, plan = save(dict(want), home / "value.pt"), home / "plan.json"
    plan.write_text(json.dumps({"q_proj": "colwise", "o_proj": "rowwise"}))
    for dp, tp in ((3, 1), (2, 2)):
        out, told = home / ("%d.%d" % (dp, tp)), ["--tp-plan", plan] if tp > 1 else []
        must_run(program, "reshard", source, "-o", out, "--to", "pt", "--dp", str(dp), "--tp", str(tp), "-q", *told)
        for got in gloo.run(dp * tp, load_rank, out, dp):
            for name, value in want.items():
                must(got[name].tobytes() == value.numpy().tobytes(), dp, tp, name)


def save_alone(rank, world, home, name):
    model = fully_shard(Layer(), mesh=init_device_mesh("cpu", (world,)))
    state = {"model": model.state_dict(), "step": 3, "odd": {(0, 1): torch.ones(2)}}
    torch.save(state, home / ("%s%d" % (name, rank)))
    return {key: value.full_tensor().numpy() for key, value in model.state_dict().items()}


def reads_the_file_of_one_gpu(program, home, corpus):
    """Training on one GPU saves DTensors that have all elements, in a file of any name."""
    want = {k: torch.from_numpy(v) for k, v in gloo.run(1, save_alone, home, "alone.pt")[0].items()}
    must_run(program, "check", home / "alone.pt0")
    must("full: no tensor is sharded" in must_run(program, "inspect", home / "alone.pt0").stdout, "not full")
    must_run(program, "convert", home / "alone.pt0", "-o", home / "one.pt", "-q")
    must_equal({"model": want, "step": 3, "odd": {(0, 1): torch.ones(2)}}, load(home / "one.pt"), "one.pt")
    gloo.run(2, save_alone, home, "two.pt")
    refused(program, home / "two.pt0", 5, "model.", "one rank's shard")


def keeps_odd_objects_of_ranks(program, home, corpus):
    """Objects that hold tensors, and modules without parameters, are read again from the files that they were written to."""
    value = {"w": torch.arange(6.0), "odd": {(0, 1): torch.ones(2), None: 3}, "loss": torch.nn.GELU()}
    source = save(value, home / "value.pt")
    must_run(program, "reshard", source, "-o", home / "ranks", "--to", "pt", "--dp", "3", "-q")
    must_run(program, "diff", source, home / "ranks")
    must_run(program, "consolidate", home / "ranks", "-o", home / "again.pt", "-q")
    got = torch.load(home / "again.pt", weights_only=False)
    must(isinstance(got.pop("loss"), torch.nn.GELU), "the loss is lost")
    must_equal({k: value[k] for k in ("w", "odd")}, got, "again")


def refuses_one_file_per_rank(program, home, corpus):
    case = corpus / "pt" / "fsdp2-torch2.15.0"
    broken = home / "broken"
    broken.mkdir()
    for path in case.glob("model_*"):
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "model_world_size_3_rank_1.pt").unlink()
    refused(program, broken, 3, "model_world_size_3_rank_1.pt", "missing")
    refused(program, broken / "model_world_size_3_rank_0.pt", 3, "model_world_size_3_rank_1.pt", "missing")
    (broken / "model_world_size_3_rank_1.pt").write_bytes((broken / "model_world_size_3_rank_2.pt").read_bytes())
    result = must_run(program, "consolidate", broken, "-o", home / "never.pt", ok=(3,))
    must("weight" in result.stderr, result.stderr)
    (broken / "model_world_size_2_rank_0.pt").write_bytes(b"")
    # In the order of names, not in that of the file system.
    refused(program, broken, 2, "has 2 checkpoints", "*_world_size_2_rank_*.pt (pt), *_world_size_3_rank_*.pt (pt)")
    differ = home / "differ"
    differ.mkdir()
    for rank in range(2):
        save({"w": torch.full((3,), float(rank))}, differ / ("model_world_size_2_rank_%d.pt" % rank))
    unreadable(program, differ, "w", "differs")
    save({"w": torch.zeros(3)}, differ / "model_world_size_2_rank_1.pt")
    must_run(program, "consolidate", differ, "-o", home / "copies.pt")
    must_equal({"w": torch.zeros(3)}, load(home / "copies.pt"), "copies")
    save({"w": torch.zeros(4)}, differ / "model_world_size_2_rank_1.pt")
    unreadable(program, differ, "w", "shape")


def unreadable_values_stop_only_themselves(program, home, corpus):
    """verl with FSDP1 saves the optimizer's local tensors, which do not say how they fit together. The model is not affected."""
    case = corpus / "pt" / "fsdp2-torch2.15.0"
    run = home / "run"
    run.mkdir()
    for path in case.glob("model_*"):
        (run / path.name).write_bytes(path.read_bytes())
    for rank in range(3):
        save({"state": {0: {"exp_avg": torch.full((4 + rank,), float(rank)), "step": torch.tensor(7.0)}}},
             run / ("optim_world_size_3_rank_%d.pt" % rank))
    unreadable(program, run, "optim.state.0.exp_avg", "under a number, which differs between ranks")
    must_run(program, "consolidate", run, "-o", home / "model.pt", "--include", "model.*")
    want, got = flat(torch.load(case / "full.pt", weights_only=False)["model"]), flat(load(home / "model.pt"))
    must({("model", *k) for k in want} == set(got), set(got))
    for key, value in want.items():
        must_equal(value, got["model", *key], key)
    must_run(program, "consolidate", run, "-o", home / "rest.pt", "--exclude", "optim.state.0.exp_avg")
    must_equal(torch.tensor(7.0), load(home / "rest.pt")["optim"]["state"][0]["step"], "step")
    must("optim.state.0.exp_avg" in must_run(program, "check", run).stdout, "check does not name the value")
    must_run(program, "diff", run, home / "model.pt", "--include", "model.*")


def verl_flat_optimizer_loads(program, home, corpus):
    """The optimizer of FSDP1's flat parameters becomes one of the parameters: torch loads it into the model of the configuration."""
    from safetensors.torch import load_file
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
    from transformers import AutoConfig, AutoModelForCausalLM

    for case in ("fsdp1", "fsdp1-tied", "fsdp1-orig", "fsdp1-orig-tied"):
        run, file = corpus / "verl" / case, home / (case + ".pt")
        must_run(program, "consolidate", run / "actor", "-o", file)
        saved = load(file)["optim"]
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run / "actor" / "huggingface"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        set_optimizer_state_dict(model, optimizer, saved)
        want = load_file(run / "optimizer.safetensors")
        got = {"%s.%s" % (n, k): t for n, p in model.named_parameters() for k, t in optimizer.state[p].items()}
        must(set(got) == set(want), set(got) ^ set(want))
        for name, value in want.items():
            must_equal(value, got[name], name)
        must(optimizer.param_groups[0]["lr"] == saved["param_groups"][0]["lr"] != 1.0, "learning rate")
        steps = {s["step"].untyped_storage().data_ptr() for s in saved["state"].values()}
        must(len(steps) == len(saved["state"]), "torch changes steps in place, so none may share memory")


if __name__ == "__main__":
    sys.exit(run_tests([reads_one_file_per_rank, reads_ranks_by_other_names, reads_tensor_parallel_ranks, reads_an_index,
                        reads_metadata_of_ranks, writes_one_file_per_rank, reads_empty_shards,
                        local_tensors_load_into_fsdp2, reads_the_file_of_one_gpu,
                        keeps_odd_objects_of_ranks, refuses_one_file_per_rank, unreadable_values_stop_only_themselves, verl_flat_optimizer_loads]))
