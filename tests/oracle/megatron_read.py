#!/usr/bin/env python3
"""Megatron checkpoints: torch_dist by megatron-core (tests/corpus/make_megatron.py), one file per model-parallel rank by
megatron-core (tests/corpus/make_megatron_ranks.py), and the file of a single rank, which torch writes here in the layout of
Megatron's save_checkpoint.

usage: megatron_read.py FSDPCKPT CORPUS RANKS       exit 77 without torch or safetensors
"""
import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile

try:
    import numpy
    import torch
    from checks import check, finish, refused, run
    from megatron_files import digests, edited
    from torch_values import by_name, check_equal
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)


def torch_dist(program, case, home):
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)
    want = {n: (t["shape"], t["sha256"]) for n, t in expected["tensors"].items()}
    step = os.path.join(case, "iter_0000007")
    out, again, shards = (os.path.join(home, n) for n in ("a.safetensors", "b.safetensors", "shards"))
    for source in (case, step):
        run(program, "consolidate", source, "-o", out, "-q", "--force")
        check(digests(out) == want, "%s: %s" % (source, digests(out)))
    run(program, "reshard", case, "-o", shards, "--dp", "3", "-q")
    run(program, "consolidate", shards, "-o", again, "-q")
    check(digests(again) == want, "resharded and back")
    listed = json.loads(run(program, "inspect", case, "--json").stdout)
    values = {o["name"]: o["value"] for o in listed["objects"]}
    check(all(values.get(n) == v for n, v in expected["values"].items()), "common.pt: %s" % values)
    check(values.get("norm._extra_state/shard_1_2") == [{"rank": 1}], "sharded objects: %s" % values)
    run(program, "verify", case)
    copy = os.path.join(home, "copy")
    shutil.copytree(step, copy)
    with open(os.path.join(copy, "common.pt"), "r+b") as f:
        f.truncate(100)
    refused(program, copy, "common.pt cut off", "common.pt")
    wrong_shapes(program, step, home)


def wrong_shapes(program, step, home):
    """Shapes in mcore_data that do not belong to the flattened tensor."""
    with open(os.path.join(step, ".metadata"), "rb") as f:
        metadata = f.read()
    shape = b"nd_reformulated_orig_global_shape\x94K\x08K\x06\x86"
    for new, what in ((b"K\x08K\x07\x86", "does not fit its size"), (b"K\x00K\x06\x86", "does not fit its size"),
                      (b"J\xff\xff\xff\xffK\x06\x86", "is invalid"), (b"K\x08\x85", "is invalid")):
        if shape not in metadata:
            continue
        copy = os.path.join(home, "shape" + new.hex())
        shutil.copytree(step, copy)
        with open(os.path.join(copy, ".metadata"), "wb") as f:
            f.write(b"\x80\x04" + metadata[11:].replace(shape, shape[:-5] + new, 1))  # without the frame's length
        refused(program, copy, "shape " + new.hex(), "/.metadata: tensor optimizer.state.", "mcore_data", what)


def rank_files(program, home):
    """A single model-parallel rank, with the objects that Megatron stores."""
    case = os.path.join(home, "legacy")
    rank = os.path.join(case, "iter_0000010", "mp_rank_00")
    os.makedirs(rank)
    with open(os.path.join(case, "latest_checkpointed_iteration.txt"), "w") as f:
        f.write("10")
    weight = torch.randn(4, 3).half()
    state = {"args": argparse.Namespace(hidden_size=3, tensor_model_parallel_size=1), "checkpoint_version": 3.0,
             "iteration": 10, "model": {"decoder.weight": weight, "decoder._extra_state": None},
             "optimizer": {"optimizer": {"state": {0: {"exp_avg": weight.float(), "step": 10}},
                                         "param_groups": [{"lr": 0.1, "params": [0]}]},
                           "fp32_from_fp16_params": [[weight.float()]]},
             "rng_state": [{"random_rng_state": (3, (1, 2, 3), None), "np_rng_state": numpy.random.get_state(),
                            "torch_rng_state": torch.get_rng_state()}]}
    torch.save(state, os.path.join(rank, "model_optim_rng.pt"))
    out = os.path.join(home, "m.safetensors")
    run(program, "consolidate", case, "-o", out, "-q", "--force", "--include", "model.*")
    found = digests(out)
    check(found == {"model.decoder.weight": ([4, 3], hashlib.sha256(weight.numpy().tobytes()).hexdigest())},
          "mp_rank_00: %s" % found)
    pt = os.path.join(home, "m.pt")
    run(program, "consolidate", case, "-o", pt, "-q")
    back = torch.load(pt, weights_only=False)
    own = {"exp_avg": weight.float(), "step": 10, "fp32_param": weight.float()}
    want = {**state, "optim": {"state": {"decoder.weight": own},
                               "param_groups": [{"lr": 0.1, "params": ["decoder.weight"]}]}}
    del want["optimizer"]
    check_equal(by_name(want), by_name(back), "mp_rank_00 through .pt")
    state["optimizer"]["optimizer"]["param_groups"][0]["params"] = [0, 1]
    torch.save(state, os.path.join(rank, "model_optim_rng.pt"))
    listed = json.loads(run(program, "inspect", case, "--json").stdout)
    check("numbers" in (listed.get("note") or "") and
          "optimizer.optimizer.state.0.exp_avg" in {t["name"] for t in listed["tensors"]}, "mp_rank_00: unnamed")
    shutil.copytree(rank, rank[:-1] + "1")
    refused(program, case, "a rank more than args says", "1 tensor-parallel ranks", "files of 2")


def several_ranks(program, case, home):
    """Parameters and optimizer state equal those of megatron-core's dist_checkpointing."""
    with open(os.path.join(case, "expected.json")) as f:
        expected = json.load(f)
    want = {n: (t["shape"], t["sha256"]) for n, t in expected["tensors"].items()}

    def compare(path, what):
        found = {n: d for n, d in digests(path).items() if not n.startswith("rng_state") and not n.endswith(".step")}
        wrong = sorted(n for n in set(found) | set(want) if found.get(n) != want.get(n))
        check(not wrong, "%s, %s: %s" % (case, what, wrong[:8]))

    out, shards, again = (os.path.join(home, n) for n in ("s.safetensors", "s-shards", "s-again.safetensors"))
    run(program, "consolidate", case, "-o", out, "-q", "--force")
    compare(out, "consolidated")
    for argv in (["convert", "--to", "h5"], ["reshard", "--dp", "2", "--tp", "2", "--to", "dcp"]):
        run(program, argv[0], case, "-o", shards, "-q", *argv[1:])
        run(program, "consolidate", shards, "-o", again, "-q", "--force")
        compare(again, argv[0])
        run(program, "diff", case, shards, "-q")
        shutil.rmtree(shards) if os.path.isdir(shards) else os.remove(shards)
    run(program, "verify", case)
    run(program, "check", case)
    listed = json.loads(run(program, "inspect", case, "--json").stdout)
    names = {t["name"]: t for t in listed["tensors"]}
    check(not listed.get("note"), "note: %s" % listed.get("note"))
    check(len(names) == len({n.lower() for n in names}), "names")
    if expected["tp"] > 1:
        check("rng_state.0.torch_rng_state" in names and
              any(n.startswith("rng_state.0.torch_rng_state.mp_rank_01") for n in names), "a rank's own: %s" % list(names))


LEGACY = {  # (name, shape, dimension that is cut) of a layer's parameters
    "input_layernorm.weight": ((6,), None), "self_attention.query_key_value.weight": ((12, 6), 0),
    "self_attention.query_key_value.bias": ((12,), 0), "self_attention.dense.weight": ((6, 4), 1),
    "self_attention.dense.bias": ((6,), None), "mlp.dense_h_to_4h.weight": ((8, 6), 0),
    "mlp.dense_h_to_4h.bias": ((8,), 0), "mlp.dense_4h_to_h.weight": ((6, 8), 1), "mlp.dense_4h_to_h.bias": ((6,), None)}


def legacy_ranks(program, home):
    """Megatron-LM's older names in nested dicts, tp 2 and 2 stages. The parameters of a rank are views of one buffer."""
    tp, stages, layers = 2, 2, 3
    case, out = os.path.join(home, "older"), os.path.join(home, "older.safetensors")
    full, embedding = {}, "language_model.embedding.word_embeddings.weight"
    full[embedding] = (torch.randn(10, 6).half(), 0)
    full["language_model.embedding.position_embeddings.weight"] = (torch.randn(4, 6).half(), None)
    for i in range(layers):
        for name, (shape, dim) in LEGACY.items():
            full["language_model.encoder.layers.%d.%s" % (i, name)] = (torch.randn(shape).half(), dim)
    full["language_model.encoder.final_layernorm.weight"] = (torch.randn(6).half(), None)

    def part(name, t):
        weight, dim = full[name]
        return weight if dim is None else weight.chunk(tp, dim)[t].contiguous()

    def moment(half):
        return half.float() * 2

    for t in range(tp):
        for s in range(stages):
            own = [n for n in full if ("embedding" in n and s == 0) or ("final" in n and s == 1) or
                   ("layers.0." in n or "layers.1." in n) and s == 0 or "layers.2." in n and s == 1]
            parts = {n: part(n, t) for n in own}
            if s == 1:
                parts["word_embeddings_for_head.weight"] = part(embedding, t)
            buffer, at, model = torch.cat([p.reshape(-1) for p in parts.values()]), 0, {}
            for name, p in parts.items():
                view, at = buffer[at:at + p.numel()].view(p.shape), at + p.numel()
                keys = name.replace("layers.2.", "layers.0.").split(".")
                depth = 2 if "encoder" in keys else len(keys) - 1
                d = model
                for k in keys[:depth]:
                    d = d.setdefault(k, {})
                d[".".join(keys[depth:])] = view
            decay = [p for n, p in parts.items() if p.ndim > 1]
            plain = [p for n, p in parts.items() if p.ndim == 1]
            groups, masters, state = [], [], {}
            for params, rate in ((plain, 0.0), (decay, 0.01)):
                first = len(state)
                groups.append({"params": list(range(first, first + len(params))), "weight_decay": rate})
                masters.append([p.float() for p in params])
                for p in params:
                    state[len(state)] = {"exp_avg": moment(p)}
            args = argparse.Namespace(tensor_model_parallel_size=tp, pipeline_model_parallel_size=stages,
                                      num_layers=layers, untie_embeddings_and_output_weights=False)
            rank = os.path.join(case, "mp_rank_%02d_%03d" % (t, s))
            os.makedirs(rank)
            torch.save({"args": args, "iteration": 3, "model": model, "optimizer": {
                "optimizer": {"state": state, "param_groups": groups}, "fp32_from_fp16_params": masters}},
                       os.path.join(rank, "model_optim_rng.pt"))
    want = {}
    for name, (weight, dim) in full.items():
        for key, value in (("model.%s", weight), ("optim.state.%s.exp_avg", moment(weight)),
                           ("optim.state.%s.fp32_param", weight.float())):
            want[key % name] = (list(value.shape), hashlib.sha256(value.numpy().tobytes()).hexdigest())
    run(program, "consolidate", case, "-o", out, "-q")
    found = digests(out)
    wrong = sorted(n for n in set(found) | set(want) if found.get(n) != want.get(n))
    check(not wrong, "older names: %s" % wrong[:8])
    check(not json.loads(run(program, "inspect", case, "--json").stdout).get("note"), "older names: a note")
    run(program, "verify", case)
    os.rename(os.path.join(case, "mp_rank_01_001"), os.path.join(case, "mp_rank_01_001_001"))
    refused(program, case, "a third number", "mp_rank_01_001_001", "two checkpoints")
    os.rename(os.path.join(case, "mp_rank_01_001_001"), os.path.join(case, "mp_rank_01"))
    refused(program, case, "names of two checkpoints", "mp_rank_01", "two checkpoints")


EXTRA = "decoder.layers.0.mlp.experts.linear_fc1._extra_state"


def other_names(program, case, home):
    """Transformer Engine's grouped linear layers have one parameter per expert, whose name ends with its number. SwitchMLP was
        the first class with experts."""
    def te(key):
        parts = key.split(".")
        if "local_experts" not in parts or parts[-1] == "_extra_state":
            return key
        at = parts.index("local_experts")
        return ".".join(parts[:at] + parts[at + 2:]) + parts[at + 1]

    def switch(key):
        return key.replace(".experts.local_experts.", ".local_experts.")

    out, same = os.path.join(home, "renamed.safetensors"), os.path.join(home, "local.safetensors")
    run(program, "consolidate", case, "-o", same, "-q", "--force", "--include", "model.*")
    for name, last in ((te, "experts.linear_fc1.weight3"), (switch, "mlp.local_experts.3.linear_fc1.weight")):
        def rename(rank, state):
            state["model"] = {name(k): v for k, v in state["model"].items()}
            if name is te:
                state["model"][EXTRA] = torch.full((3,), int(rank[-1]), dtype=torch.uint8)
        copy = edited(case, home, name.__name__, rename)
        run(program, "consolidate", copy, "-o", out, "-q", "--force", "--include", "model.*")
        want = {name(n): d for n, d in digests(same).items()}
        found = {n: d for n, d in digests(out).items() if not n.startswith("model." + EXTRA)}
        kept = [n for n in digests(out) if n not in found]
        check(len(kept) == (2 if name is te else 0), "a rank's own: %s" % kept)
        check(found == want and any(n.endswith(last) for n in want), "%s: %s" % (last, sorted(digests(out))[:4]))


def experts_optimizer(program, case, home):
    """The groups of the experts' optimizer follow those of the main one; its other values stay separate."""
    def scaled(rank, state):
        for i, optimizer in enumerate(state["optimizer"]):
            optimizer["grad_scaler"] = {"scale": torch.full((1,), i + 1.0)}

    out = os.path.join(home, "scaled.pt")
    run(program, "consolidate", edited(case, home, "scaled", scaled), "-o", out, "-q")
    optim = torch.load(out, weights_only=False)["optim"]
    layer = "decoder.layers.0.mlp."
    groups = [g["params"] for g in optim["param_groups"]]
    first = groups[2] == [layer + "experts.local_experts.%d.linear_fc%d.weight" % (e, i) for e in (0, 1) for i in (1, 2)]
    second = optim["param_groups"][2]["params.mp_rank_00_001"]
    check(len(groups) == 4 and first and layer + "router.weight" in groups[0] and
          second[0] == layer + "experts.local_experts.2.linear_fc1.weight", "groups: %s %s" % (groups, second))
    check(optim["grad_scaler"]["scale"].item() == 1 and optim["chained_1"]["grad_scaler"]["scale"].item() == 2,
          "grad_scaler: %s" % [k for k in optim])


def distributed_optimizer(program, case, home):
    """The layout of distrib_optim.pt is inferred and checked. State in an unknown layout is left out with a note."""
    def note_of(source):
        listed = json.loads(run(program, "inspect", source, "--json").stdout)
        return listed.get("note") or "", {t["name"] for t in listed["tensors"]}

    def change(name, edit):
        copy = os.path.join(home, name)
        shutil.copytree(case, copy)
        path = os.path.join(copy, "iter_0000010", "mp_rank_01", "distrib_optim.pt")
        state = torch.load(path, weights_only=False)
        edit(path, state, *state[0].values())
        return copy

    def shifted(path, state, flat):
        flat["param"] = flat["param"].roll(1)
        torch.save(state, path)

    def longer(path, state, flat):
        for key in ("param", "exp_avg", "exp_avg_sq"):
            flat[key] = torch.cat([flat[key], torch.zeros(64)])
        torch.save(state, path)

    def gone(path, state, flat):
        os.remove(path)

    def other(path, state, flat):
        torch.save([state], path)

    def number(path, state, flat):
        torch.save(5, path)

    for edit, words in ((number, "unknown layout"),
                        (shifted, "unknown layout"), (longer, "unknown layout"), (gone, "some ranks lack"),
                        (other, "unknown layout")):
        note, names = note_of(change("distributed-" + edit.__name__, edit))
        left = [n for n in names if n.startswith("optim.state")]
        check("distrib_optim.pt" in note and words in note, "%s: note: %s" % (edit.__name__, note))
        check("model.output_layer.weight" in names and not left, "%s: %s" % (edit.__name__, left[:4]))

    one = os.path.join(home, "one")
    os.makedirs(os.path.join(one, "mp_rank_00"))
    weights = {"a.weight": torch.randn(3, 5), "b.bias": torch.randn(7)}
    flat = torch.zeros(64 + 15)
    flat[:7], flat[64:] = weights["b.bias"], weights["a.weight"].reshape(-1)
    torch.save({"model": {n: w.bfloat16() for n, w in weights.items()}, "iteration": 1},
               os.path.join(one, "mp_rank_00", "model_optim_rng.pt"))
    torch.save({"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): {
        "param": flat, "exp_avg": flat * 2, "exp_avg_sq": flat * 3, "numel_unpadded": 79}}},
               os.path.join(one, "mp_rank_00", "distrib_optim.pt"))
    out = os.path.join(home, "one.safetensors")
    run(program, "consolidate", one, "-o", out, "-q")
    want = {"model." + n: w.bfloat16() for n, w in weights.items()}
    for key, factor in (("fp32_param", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        want.update({"optim.state.%s.%s" % (n, key): w * factor for n, w in weights.items()})
    want = {n: (list(t.shape), hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest())
            for n, t in want.items()}
    check(digests(out) == want, "one rank: %s" % sorted(digests(out)))


def main():
    program, corpus, ranks = sys.argv[1:4]
    home = tempfile.mkdtemp(prefix="fc-megatron-")
    try:
        cases = sorted(os.listdir(corpus))
        check(len(cases) > 0, "no cases")
        for name in cases:
            os.mkdir(os.path.join(home, name))
            torch_dist(program, os.path.join(corpus, name), os.path.join(home, name))
        rank_files(program, home)
        several = sorted(os.listdir(ranks))
        check("tp2pp2-llama" in several, "no cases of several ranks")
        for name in several:
            several_ranks(program, os.path.join(ranks, name), home)
        legacy_ranks(program, home)
        distributed_optimizer(program, os.path.join(ranks, "tp2dp2-distributed"), home)
        other_names(program, os.path.join(ranks, "ep2-moe"), home)
        experts_optimizer(program, os.path.join(ranks, "ep2-moe"), home)
    finally:
        shutil.rmtree(home)
    return finish("megatron")


if __name__ == "__main__":
    sys.exit(main())
