#!/usr/bin/env python3
"""Makes the DCP corpus: small checkpoints written by the real torch.distributed.checkpoint.

Runs under every torch from 1.13 to 2.15, on the CPU, with gloo; the ranks are forked from this process. Each case becomes
<out>/dcp-torch<version>-<case>/ with the checkpoint and expected.json. For every tensor, expected.json has the dtype, the
global shape, the path and the sha256 of the row-major little-endian bytes of the full tensor, which torch gathers before it
saves. torch then loads the result in one process, and the values must agree, so every fixture is readable by torch. A case
that this torch cannot make is skipped, with the reason on stdout.

    python make_dcp.py --out good                 # every case
    python make_dcp.py --out good --only tp,fsdp2 # some
    python make_dcp.py --list
"""
import argparse
import base64
import contextlib
import ctypes
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import sys
import tempfile
import traceback
from collections import OrderedDict

from dcp_torch import CASES, Skip, V, VERSION, dcp, dist, dtensor_class, mp, need, torch
import dcp_cases_sharded  # noqa: F401  (importing it fills CASES)
import dcp_cases_values

# ---------------------------------------------------------------- truth

def raw_bytes(t):
    t = t.detach().cpu()
    for resolve in ("resolve_conj", "resolve_neg"):
        if hasattr(t, resolve):
            t = getattr(t, resolve)()
    t = t.contiguous()
    size = t.numel() * t.element_size()
    return ctypes.string_at(t.data_ptr(), size) if size else b""


def describe(t):
    data = raw_bytes(t)
    return {"dtype": str(t.dtype).replace("torch.", ""), "shape": list(t.shape), "sha256": hashlib.sha256(data).hexdigest()}


def flatten(state_dict, planner_options):
    try:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict
    except ImportError:
        return dict(state_dict)
    if not planner_options.get("flatten_state_dict", True):
        return dict(state_dict)
    return flatten_state_dict(state_dict)[0]


def holds_tensors(value):
    if isinstance(value, dict):
        return any(holds_tensors(v) for v in value.values())
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ShardedTensor"


def flat_by_hand(state_dict, prefix=""):
    """1.13 does not flatten: a nested dict would become one pickle, so its users saved flat dicts."""
    out = {}
    for k, v in state_dict.items():
        if isinstance(v, dict) and holds_tensors(v):
            out.update(flat_by_hand(v, prefix + str(k) + "."))
        else:
            out[prefix + str(k)] = v
    return out


def gather(value):
    """The full tensor of a sharded value. This is a collective, so all ranks call it in the same order."""
    dt = dtensor_class()
    if dt is not None and isinstance(value, dt.DTensor):
        value = value.detach()
        if hasattr(value, "full_tensor"):
            return value.full_tensor()
        mesh = value.device_mesh
        return value.redistribute(mesh, [dt.Replicate()] * mesh.mesh.ndim).to_local()
    if type(value).__name__ == "ShardedTensor":
        parts = [(list(s.metadata.shard_offsets), s.tensor.detach().clone()) for s in value.local_shards()]
        dt = dtensor_class()
        parts = [(o, gather(p) if dt is not None and isinstance(p, dt.DTensor) else p) for o, p in parts]
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, parts)
        full = torch.zeros(list(value.size()), dtype=value.dtype)
        for offsets, part in sum(every, []):
            window = full
            for d, (o, n) in enumerate(zip(offsets, part.shape)):
                window = window.narrow(d, o, n)
            window.copy_(part)
        return full
    return value


def worker(rank, name, world, target, port, answers):
    """Runs on each rank: builds the state, gathers the expected values, saves."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world),
                      LOCAL_RANK=str(rank))
    try:
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method="file://" + port)
        made = CASES[name][0](rank, world)
        state_dict, extra = made if isinstance(made, tuple) else (made, {})
        if V < (2, 0):
            state_dict = flat_by_hand(state_dict)
        flat = flatten(state_dict, extra.get("planner", {}))
        truth, tensors, objs = extra.get("truth", {}), {}, {}
        for fqn, value in flat.items():
            if isinstance(value, torch.Tensor) or type(value).__name__ == "ShardedTensor":
                tensors[fqn] = describe(truth[fqn] if fqn in truth else gather(value))
            else:
                objs[fqn] = {"repr": repr(value), "type": type(value).__name__}
                with contextlib.suppress(NoSpelling):
                    objs[fqn]["json"] = as_json(value)
        save(state_dict, target, extra.get("planner", {}), extra.get("writer", {}))
        dist.barrier()
        if rank == 0:
            boxes = {k: v for k, v in extra.items() if k in ("mesh", "note")}
            answers.put(("ok", tensors, objs, boxes))
    except Skip as e:
        answers.put(("skip", str(e)))
    except BaseException as e:
        answers.put(("fail", "rank %d: %s: %s" % (rank, type(e).__name__, str(e).strip().split("\n")[0 if str(e).count("\n") < 3 else -1][:200]), traceback.format_exc()))
    finally:
        sys.stdout.flush()
        answers.close()
        answers.join_thread()
        os._exit(0)  # if another rank skipped the case, gloo's destructor would wait for it


class NoSpelling(Exception):
    """docs/HDF5_SCHEMA.md leaves open how this value is written."""


def as_json(x):
    """The value as JSON as in docs/HDF5_SCHEMA.md, "Objects". This is a second implementation on purpose."""
    if x is None or isinstance(x, (bool, str)):
        return x
    if type(x) is int:
        return x if -(2 ** 63) <= x < 2 ** 63 else {"$int": str(x)}
    if type(x) is float:
        return x if math.isfinite(x) else {"$float": repr(x)}
    if type(x) is complex:
        return {"$complex": [as_json(x.real), as_json(x.imag)]}
    if type(x) is list:
        return [as_json(v) for v in x]
    if isinstance(x, torch.Size):
        return {"$size": list(x)}
    for kind in (tuple, set, frozenset):
        if type(x) is kind:
            return {"$" + kind.__name__: [as_json(v) for v in x]}
    if type(x) in (bytes, bytearray):
        return {"$" + type(x).__name__: base64.b64encode(bytes(x)).decode()}
    if type(x) is dict:
        if all(type(k) is str and not k.startswith("$") and "\0" not in k for k in x):
            return {k: as_json(v) for k, v in x.items()}
        return {"$dict": [[as_json(k), as_json(v)] for k, v in x.items()]}
    if isinstance(x, torch.dtype):
        return {"$dtype": str(x).replace("torch.", "")}
    if isinstance(x, torch.device):
        return {"$device": str(x)}
    if type(x) is torch.Tensor and x.layout is torch.strided:
        return {"$tensor": {"dtype": str(x.dtype).replace("torch.", ""), "shape": list(x.shape)}}
    if isinstance(x, argparse.Namespace):
        return {"$object": "argparse.Namespace", "state": as_json(vars(x))}
    raise NoSpelling(type(x).__name__)


def save(state_dict, target, planner_options, writer_options):
    planner = None
    if planner_options:
        need(V >= (2, 0), "its planner never flattens: every 1.13 checkpoint is flat")
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        planner = DefaultSavePlanner(**planner_options)
    need(V >= (2, 0) or "thread_count" not in writer_options, "its writer has no threads")
    writer = dcp.FileSystemWriter(target, **dict({"single_file_per_rank": True}, **writer_options))
    if hasattr(dcp, "save"):
        dcp.save(state_dict, storage_writer=writer, planner=planner)
    elif planner is not None:
        dcp.save_state_dict(state_dict, writer, planner=planner)
    else:
        dcp.save_state_dict(state_dict, writer)


def load_again(target, metadata):
    """Loads the checkpoint with torch's own reader, in one process."""
    try:
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    except ImportError:
        from torch.distributed._shard.checkpoint.default_planner import DefaultLoadPlanner

    flat = {}
    for fqn, md in metadata.state_dict_metadata.items():
        if hasattr(md, "chunks"):
            flat[fqn] = torch.zeros(list(md.size), dtype=md.properties.dtype)
    for fqn in list(flat):
        reader = dcp.FileSystemReader(target)
        planner = DefaultLoadPlanner(**({"flatten_state_dict": False, "flatten_sharded_tensors": False} if V >= (2, 0) else {}))
        one = {fqn: flat[fqn]}
        try:
            if V >= (2, 3):
                dcp.load(one, storage_reader=reader, planner=planner)
            else:
                dcp.load_state_dict(one, reader, planner=planner, no_dist=True)
            flat[fqn] = describe(one[fqn])
        except BaseException as e:  # CheckpointException is not an Exception
            flat[fqn] = "torch cannot load it: %s" % str(e).strip().split("\n")[-1][:200]
    return flat


def one_line_each(doc):
    """JSON with one line per tensor and object: small, and a diff shows which one changed."""
    lines = []
    for key, value in doc.items():
        if key in ("tensors", "objects"):
            rows = ["  %s: %s" % (json.dumps(k), json.dumps(v)) for k, v in value.items()]
            lines.append(" %s: {%s}" % (json.dumps(key), "\n" + ",\n".join(rows) + "\n " if rows else ""))
        else:
            lines.append(" %s: %s" % (json.dumps(key), json.dumps(value)))
    return "{\n" + ",\n".join(lines) + "\n}\n"


def finish(target, name, tensors, objs, extra):
    with open(os.path.join(target, ".metadata"), "rb") as f:
        metadata = pickle.load(f)
    paths = metadata.planner_data or {}
    again = load_again(target, metadata)
    problems = []
    for fqn, t in tensors.items():
        if again.get(fqn) != t and t["dtype"] not in dcp_cases_values.NO_COPY_KERNEL:
            problems.append("%s: had %s, loaded %s" % (fqn, t, again.get(fqn)))
    for fqn in again:
        if fqn not in tensors:
            problems.append("%s: in the file, not in the state dict" % fqn)
    out_t, out_o = OrderedDict(), OrderedDict()
    storage = {}
    for index, info in metadata.storage_data.items():
        storage.setdefault(index.fqn, []).append((index, info))
    for fqn in sorted(tensors):
        md = metadata.state_dict_metadata[fqn]
        chunks = []
        for c in md.chunks:
            where = [i.relative_path for ix, i in storage.get(fqn, []) if list(ix.offset or []) == list(c.offsets)]
            chunks.append({"offsets": list(c.offsets), "sizes": list(c.sizes), "file": where[0] if where else None})
        out_t[fqn] = dict(tensors[fqn], path=list(paths.get(fqn, (fqn,))), chunks=chunks)
    for fqn in sorted(objs):
        info = storage[fqn][0][1]
        with open(os.path.join(target, info.relative_path), "rb") as f:
            f.seek(info.offset)
            item = f.read(info.length)
        torch.load(io.BytesIO(item), **({"weights_only": False} if V >= (1, 13) else {}))
        out_o[fqn] = dict(objs[fqn], path=list(paths.get(fqn, (fqn,))), file=info.relative_path, offset=info.offset,
                          length=info.length, sha256=hashlib.sha256(item).hexdigest())
    doc = OrderedDict([("torch", VERSION), ("case", name), ("why", CASES[name][2]), ("ranks", CASES[name][1])])
    doc.update({k: v for k, v in extra.items() if v})
    doc["tensors"], doc["objects"] = out_t, out_o
    with open(os.path.join(target, "expected.json"), "w", encoding="utf-8") as f:
        f.write(one_line_each(doc))
    return problems


def run_case(name, out, broken=None):
    fn, world, why = CASES[name]
    target = os.path.join(out, "dcp-torch%s-%s" % (VERSION, name))
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    ctx = mp.get_context("fork")
    answers = ctx.Queue()
    store = tempfile.mktemp(prefix="make_dcp_")
    procs = [ctx.Process(target=worker, args=(r, name, world, target, store, answers), daemon=True) for r in range(world)]
    for p in procs:
        p.start()
    try:
        answer = answers.get(timeout=600)
    except Exception:
        answer = ("fail", "no answer in 120 s", "")
    if answer[0] != "ok":
        for p in procs:
            p.terminate()
    for p in procs:
        p.join(20)
    if os.path.exists(store):
        os.unlink(store)
    if answer[0] == "ok":
        try:
            problems = finish(target, name, *answer[1:])
        except BaseException as e:
            problems = ["%s: %s" % (type(e).__name__, e)]
            if os.environ.get("MAKE_DCP_DEBUG"):
                traceback.print_exc()
        if not problems:
            size = sum(os.path.getsize(os.path.join(target, f)) for f in os.listdir(target))
            print("made  %-18s %4d KB  %s" % (name, (size + 1023) // 1024, answer[3].get("note", "")), flush=True)
            return "made"
        if broken:
            kept = os.path.join(broken, os.path.basename(target))
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(target, kept)
            os.unlink(os.path.join(kept, "expected.json"))
        answer = ("fail", "torch does not read back what the model had: " + "; ".join(problems[:3])[:600], "")
    shutil.rmtree(target, ignore_errors=True)
    print("%-5s %-18s %s" % (answer[0], name, answer[1]), flush=True)
    if answer[0] == "fail" and os.environ.get("MAKE_DCP_DEBUG"):
        print(answer[2])
    return answer[0]


def main():
    ap = argparse.ArgumentParser(description="make the DCP corpus with the torch of this interpreter")
    ap.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "good"))
    ap.add_argument("--only", default="", help="comma-separated case names")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--broken", help="keep checkpoints here that torch wrote but cannot read, without expected.json")
    ap.add_argument("--strict", action="store_true", help="exit 1 unless every case was made")
    args = ap.parse_args()
    if args.list:
        for name, (fn, world, why) in CASES.items():
            print("%-18s %d ranks  %s" % (name, world, why))
        return 0
    wanted = [n for n in args.only.split(",") if n] or list(CASES)
    unknown = [n for n in wanted if n not in CASES]
    if unknown:
        print("make_dcp.py: unknown case %s; --list names them" % ", ".join(unknown), file=sys.stderr)
        return 2
    os.makedirs(args.out, exist_ok=True)
    print("torch %s" % VERSION, flush=True)
    if args.broken:
        args.broken = os.path.abspath(args.broken)
    os.chdir(args.out)  # torch writes the name of the target into .metadata; a relative path reveals no machine
    results = [run_case(n, "", args.broken) for n in wanted]
    return 1 if args.strict and set(results) != {"made"} else 0


if __name__ == "__main__":
    sys.exit(main())
