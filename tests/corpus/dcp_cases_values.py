"""Cases about values: objects, dtypes, shapes, names, strides, and options of the writer."""
import argparse
import ctypes
import io
from collections import OrderedDict

from dcp_cases_sharded import chunk_sharded, shard
from dcp_torch import (
    Llama, Mini, Skip, case, fully_shard_fn, make_mesh, need, need_dtensor, torch, train_step)


# ---------------------------------------------------------------- training state

def objects():
    return {
        "step": 1234,
        "epoch": 0,
        "loss": 0.1,
        "tiny": 5e-324,
        "negzero": -0.0,
        "inf": float("inf"),
        "nan": float("nan"),
        "big": 2 ** 63,
        "huge": 3 ** 200,
        "neghuge": -(2 ** 64) - 1,
        "min64": -(2 ** 63),
        "betas": (0.9, 0.999),
        "empty_tuple": (),
        "raw": bytes(range(256)),
        "nothing": None,
        "name": 'r\u00fcn "7" \\ \u65e5\u672c \U0001f642\n\x01',
        "amp": True,
        "off": False,
        "list": [1, 2.5, "three", None, True, [4, [5]]],
        "conf": {"lr": 3e-4, "sched": {"warmup": [1, 2], "kind": "cosine"}, "ids": {"7": "seven"}},
        "nested": {"tensors": [torch.arange(3), torch.arange(4.0)], "mixed": [1, torch.ones(2, 2), {"k": torch.zeros(1)}]},
    }


@case("train", 2, "FSDP2 model + AdamW through get_state_dict after one step, and every kind of object")
def _(rank, world):
    fully_shard = fully_shard_fn()
    try:
        from torch.distributed.checkpoint.state_dict import get_state_dict
    except ImportError:
        raise Skip("no get_state_dict")
    mesh = make_mesh((2,), ("dp",))
    model = Mini(seed=30)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    train_step(model, optimizer)
    model_sd, optim_sd = get_state_dict(model, optimizer)
    out = {"model": model_sd, "optim": optim_sd}
    out.update(objects())
    return out, {"mesh": {"dp": 2}}


@case("objects", 1, "every kind of object, no sharding")
def _(rank, world):
    return dict(objects(), w=torch.arange(6.0).reshape(2, 3))


@case("objects-torch", 1, "objects whose pickles name allowed torch and stdlib globals, and tensors inside containers")
def _(rank, world):
    return {
        "dtype": torch.bfloat16, "size": torch.Size([2, 3]), "device": torch.device("cpu"),
        "ordered": [OrderedDict([("b", 1), ("a", 2)])], "set": {1, 2, 3}, "complex": 1 - 2j,
        "bytearray": bytearray(b"ab\x00"), "pair": (torch.arange(4), "x"), "generator": torch.Generator().get_state(),
        "intkeys": [{1: "a", (2, 3): "b"}], "deep": [[[[[[[[1]]]]]]]],
        "shared": [[1, 2]] * 3,
    }


@case("objects-foreign", 1, "an object whose pickle names a class outside the allowlist (argparse.Namespace, as Megatron saves)")
def _(rank, world):
    return {"args": argparse.Namespace(lr=0.1, layers=2), "w": torch.ones(3)}


# ---------------------------------------------------------------- dtypes, names, strides

NO_COPY_KERNEL = ["float4_e2m1fn_x2"]  # before 2.9 torch saves it but cannot copy it while loading
DTYPES = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
          "float8_e5m2fnuz", "float8_e8m0fnu", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
          "uint8", "bool", "complex32", "complex64", "complex128"]


def savable():
    """The dtypes that this torch has and can save and load again."""
    good, bad = [], []
    for name in DTYPES:
        try:
            f = io.BytesIO()
            torch.save(sample(name), f)
            f.seek(0)
            t = torch.load(f)
            torch.zeros_like(t).copy_(t)
            good.append(name)
        except Exception as e:
            bad.append("%s (%s)" % (name, "absent" if not hasattr(torch, name) else str(e).split("\n")[0][:80]))
    return good, "; ".join(bad)


def sample(name, n=12):
    """n elements of the dtype from raw bits, including NaNs, infinities and subnormals."""
    dtype = getattr(torch, name)
    size = torch.empty(0, dtype=dtype).element_size()
    if name == "bool":
        return torch.tensor([i % 3 == 0 for i in range(n)])
    g = torch.Generator().manual_seed(len(name) * 131 + size)
    raw = torch.randint(0, 256, (n * size,), generator=g, dtype=torch.uint8)
    out = torch.zeros(n, dtype=torch.uint8).repeat_interleave(size)
    out.copy_(raw)
    out[:size] = 255  # the first element is all ones: a NaN in every float
    out[size:2 * size] = 0
    if size > 1:
        out[2 * size - 1] = 128  # -0.0, or the least integer
    try:
        return out.view(dtype)
    except RuntimeError:
        t = torch.zeros(n, dtype=dtype)
        ctypes.memmove(t.data_ptr(), out.data_ptr(), n * size)
        return t


@case("dtypes", 1, "every dtype this torch has, as plain tensors")
def _(rank, world):
    sd = {}
    names, missing = savable()
    for name in names:
        sd[name] = sample(name).reshape(3, 4)
        sd["scalar_" + name] = sample(name)[5].clone()
    return sd, {"truth": dict(sd), "note": missing}


@case("dtypes-sharded", 2, "every dtype this torch has, cut by rows on 2 ranks")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2,), ("dp",))
    full = {name: sample(name).reshape(3, 4) for name in savable()[0]}
    return {k: shard(v, mesh, [dt.Shard(0)]) for k, v in full.items()}, {"truth": full, "mesh": {"dp": 2}}


@case("dtypes-packed", 1, "float4_e2m1fn_x2: two values a byte, a dtype with no place in HDF5")
def _(rank, world):
    need(hasattr(torch, "float4_e2m1fn_x2"), "no float4_e2m1fn_x2")
    t = torch.arange(12, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(3, 4)
    return {"fp4": t, "w": torch.ones(2)}, {"truth": {"fp4": t, "w": torch.ones(2)}}


@case("shapes", 1, "0-dim, zero-element, one-element and 8-dim tensors")
def _(rank, world):
    return {
        "scalar": torch.tensor(3.5), "iscalar": torch.tensor(-7), "bscalar": torch.tensor(True),
        "empty": torch.zeros(0), "empty2": torch.zeros(0, 3), "empty3": torch.zeros(2, 0, 3),
        "one": torch.ones(1), "one8": torch.full((1,) * 8, 2.0), "d8": torch.arange(256.).reshape((2,) * 8),
        "d4": torch.arange(60, dtype=torch.int16).reshape(3, 4, 5, 1),
    }


@case("names", 1, "names that need escaping: / % . spaces Unicode, the empty name, 300 characters")
def _(rank, world):
    keys = ["plain", "a/b", "/abs", "trail/", "a//b", "100%", "%2F", "%", "with space", " lead", "trail ",
            "\u00fcn\u00ef-\u65e5\u672c-\U0001f642", "e\u0301 vs \u00e9", ".", "..", "", "x.y", ".hidden", "end.", "back\\slash",
            'quo"te', "tab\tnl\n", "L" * 300, "-dash", "*glob?[x]", "0", "CASE", "case"]
    group = {k: torch.full((2,), float(i)) for i, k in enumerate(keys)}
    sd = {"g": group, "a": {"b": torch.tensor([40.0])}, "a/b": torch.tensor([41.0]), "": {"": {"z": torch.tensor([42.0])}},
          ".": {".": torch.tensor([43.0])}, "top level": 7, "obj/ect": [1, 2], "li": [torch.tensor([44.0]), [torch.tensor([45.0])]]}
    return sd


@case("tied", 2, "tied parameters under FSDP2 or replicated, and two names on one storage")
def _(rank, world):
    base = torch.arange(24.0).reshape(6, 4)
    model = Llama(seed=40)
    model.output.weight = model.tok_embeddings.weight
    sd = {"model": model.state_dict(), "v": {"whole": base, "again": base, "row": base[2], "tail": base[3:]}}
    return sd


@case("strided", 1, "non-contiguous tensors: transposed, sliced, expanded, permuted, channels-last")
def _(rank, world):
    a = torch.arange(24.0).reshape(4, 6)
    b = torch.arange(120, dtype=torch.int32).reshape(2, 3, 4, 5)
    return {
        "t": a.t(), "cols": a[:, 1:3], "step": a[::2, ::3], "expand": torch.arange(3.0).expand(4, 3),
        "expand0": torch.tensor(2.0).expand(2, 3), "perm": b.permute(3, 1, 0, 2), "offset": a.reshape(-1)[5:11],
        "cl": b.contiguous(memory_format=torch.channels_last), "bf": a.to(torch.bfloat16).t(),
        "diag": torch.arange(16.0).reshape(4, 4).diagonal(), "window": torch.arange(6.0).as_strided((4, 3), (1, 1)),
        # torch's writer copies a view unless its storage has exactly the same size, as for these three
        "overlap": torch.arange(12.0).as_strided((4, 3), (1, 1), 3), "still": torch.arange(12.0).as_strided((4, 3), (0, 1), 5),
        "hole": torch.arange(6.0).as_strided((2, 3), (4, 0), 1),
        "sym1": a[:, :1].t(), "tbool": (a > 9).t(), "tempty": torch.zeros(3, 0).t(),
    }


@case("strided-sharded", 2, "transposed local shards: DTensor over views, Shard(0) and Shard(1)")
def _(rank, world):
    dt = need_dtensor((2, 2))
    mesh = make_mesh((2,), ("dp",))
    a = torch.arange(35.0).reshape(5, 7)
    full = {"t0": a.t(), "t1": a.t(), "c1": a}
    sd = {"t0": shard(full["t0"], mesh, [dt.Shard(0)]), "t1": shard(full["t1"], mesh, [dt.Shard(1)]),
          "c1": shard(full["c1"], mesh, [dt.Shard(1)])}
    return sd, {"truth": full, "mesh": {"dp": 2}}


@case("lazy-bits", 1, "conjugate and negative views: the bytes in the file are not the values")
def _(rank, world):
    c = torch.complex(torch.arange(4.0), torch.arange(4.0) + 1)
    return {"plain": c, "conj": c.conj(), "neg": torch._neg_view(torch.arange(4.0)),
            "imag": c.conj().imag}


# ---------------------------------------------------------------- ways of writing

@case("many-files", 2, "single_file_per_rank=False: one file for each item")
def _(rank, world):
    torch.manual_seed(50)
    full = {"w": torch.randn(5, 4), "b": torch.randn(6)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    sd["step"] = 3
    return sd, {"truth": full, "writer": {"single_file_per_rank": False}}


@case("threads", 2, "thread_count=2: several files for each rank")
def _(rank, world):
    torch.manual_seed(51)
    full = {"w%d" % i: torch.randn(4, 4 + i) for i in range(5)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    return sd, {"truth": full, "writer": {"thread_count": 2}}


@case("flat", 2, "no flattening (flatten_state_dict=False): no planner_data, names taken as they are")
def _(rank, world):
    torch.manual_seed(52)
    full = {"model.w": torch.randn(5, 4), "model.b": torch.randn(6)}
    sd = {k: chunk_sharded(v, rank, world) for k, v in full.items()}
    sd["conf"] = {"nested": [1, {"x": 2}]}
    return sd, {"truth": full, "planner": {"flatten_state_dict": False}}
