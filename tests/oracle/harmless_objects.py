#!/usr/bin/env python3
"""Objects of classes that are known to be harmless: they are converted, load in torch unchanged, and inspect shows their values.

usage: harmless_objects.py FSDPCKPT      exit 77 without torch
"""
import argparse
import array
import base64
import collections
import datetime
import decimal
import fractions
import functools
import http
import io
import ipaddress
import itertools
import json
import logging
import operator
import os
import pathlib
import pickle
import random
import re
import sys
import tempfile
import time
import types
import typing
import uuid
import warnings
import zoneinfo

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")
try:
    import numpy as np
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import distributed
    from torch.distributed import fsdp
    from torch.distributed.checkpoint.state_dict import StateDictOptions
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError as e:
    print("skipped: %s" % e)
    sys.exit(77)

try:
    import omegaconf
except ImportError:
    omegaconf = None

from checks import check, finish
from pickle_attacks import run


def look_alikes(home):
    """OLMo-core has its own _StorageInfo; other programs have subclasses with other names."""
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    class Info(filesystem._StorageInfo):
        pass

    class Chunk(ChunkStorageMetadata):
        pass
    folder = os.path.join(home, "alike")
    dcp.save({"w": torch.arange(6.0), "o": {"x": 1}}, checkpoint_id=folder)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for index, old in metadata.storage_data.items():
        new = Info(old.relative_path, old.offset, old.length)
        metadata.storage_data[index] = new
    for value in metadata.state_dict_metadata.values():
        if hasattr(value, "chunks"):
            value.chunks = [Chunk(c.offsets, c.sizes) for c in value.chunks]
    Info.__module__, Info.__qualname__ = "olmo_core.distributed.checkpoint.filesystem", "_StorageInfo"
    Chunk.__module__, Chunk.__qualname__ = "somebody.else", "Piece"

    class Writer(pickle._Pickler):
        """Writes classes without importing them."""

        def save_global(self, obj, name=None):
            if obj not in (Info, Chunk):
                return pickle._Pickler.save_global(self, obj, name)
            self.save(obj.__module__)
            self.save(obj.__qualname__)
            self.write(pickle.STACK_GLOBAL)
            return self.memoize(obj)
    Writer.dispatch = dict(pickle._Pickler.dispatch)
    Writer.dispatch[type] = Writer.save_global
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        Writer(f, 4).dump(metadata)
    target = os.path.join(home, "alike.pt")
    r = run("consolidate", folder, "-o", target)
    check(r.returncode == 0, "look-alikes: %s" % r)
    if r.returncode == 0:
        got = torch.load(target)
        check(torch.equal(got["w"], torch.arange(6.0)) and got["o"] == {"x": 1}, "look-alikes: read as %s" % got)


# ---- harmless classes ----

def config():
    """Types and values of a structured configuration."""
    return {"types": [typing.Any, typing.Optional[int], typing.Dict[str, typing.List[float]], list[int], int | str, type(None)],
            "partial": functools.partial(int, "11", base=2), "chain": collections.ChainMap({"a": 1}),
            "user_dict": collections.UserDict({"a": 1}), "user_list": collections.UserList([1]), "ellipsis": [...],
            "version": torch.__version__, "mixed": fsdp.MixedPrecision(torch.bfloat16), "address": ipaddress.ip_address("1.2.3.4"),
            "state_dict": fsdp.FullStateDictConfig(), "strategy": [fsdp.ShardingStrategy.FULL_SHARD]}


def omega():
    if not omegaconf:
        return {}
    return {"conf": omegaconf.OmegaConf.create({"a": 1, "b": {"c": [1, 2.5, "x", True, None]}, "ref": "${a}", "todo": "???"}),
            "conf_list": omegaconf.OmegaConf.create([1, {"a": pathlib.Path("p")}])}


def harmless():
    d = collections.OrderedDict(b=1, a=2)
    d.attribute = 3
    return {
        "namespace": argparse.Namespace(lr=0.1, betas=(0.9, 0.99), path=pathlib.Path("/a/b")),
        "simple": types.SimpleNamespace(x=1), "ordered": (d,), "counter": collections.Counter("abca"),
        "default": collections.defaultdict(list, {"a": [1]}), "deque": collections.deque([1, 2], maxlen=3),
        "scalar": np.float32(3.5), "integer": np.int64(7), "bool": np.bool_(True), "dtype": np.dtype("float32"),
        "array": {1.5: np.arange(6).reshape(2, 3)}, "path": pathlib.PurePosixPath("a/b"), "size": torch.Size([1, 2]),
        "torch_dtype": torch.bfloat16, "device": torch.device("cuda", 1), "layout": [torch.strided],
        "date": datetime.date(2026, 1, 2), "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
        "delta": datetime.timedelta(1, 2, 3), "uuid": uuid.UUID(int=5), "decimal": decimal.Decimal("1.50"),
        "fraction": fractions.Fraction(1, 3), "complex": 1 + 2j, "set": {1, 2}, "frozenset": frozenset([1]),
        "bytes": b"\0\xff", "bytearray": bytearray(b"x"), "range": range(3), "slice": slice(1, 2), "none": None,
        "zone": zoneinfo.ZoneInfo("UTC"), "reduce": distributed.ReduceOp.SUM, "pattern": re.compile("a+b", re.I), "flag": [re.I],
        "network": ipaddress.ip_network("10.0.0.0/8"), "interface": ipaddress.ip_interface("::1/64"),
        "relu": [torch.relu, torch.nn.functional.gelu], "getter": operator.itemgetter(1), "http": [http.HTTPStatus.OK],
        "strided": _StridedShard(0, split_factor=2), "moment": time.gmtime(0), "options": StateDictOptions(cpu_offload=True),
        "big": 2 ** 100, "float": float("inf"), "class": [torch.optim.Adam], "random": np.random.RandomState(1).get_state(),
        "extra_state": io.BytesIO(b"a\0b"), "text": io.StringIO("a"), "count": itertools.count(3), "words": array.array("h", [1, -2]),
        "generator": torch.Generator(), "numpy_generator": np.random.default_rng(1), "python_random": random.Random(1),
    }


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a) and (
            getattr(a, "__dict__", None) == getattr(b, "__dict__", None))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, zoneinfo.ZoneInfo):
        return a.key == b.key
    if isinstance(a, (operator.itemgetter, itertools.count)):
        return repr(a) == repr(b)
    if isinstance(a, (io.BytesIO, io.StringIO)):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, random.Random):
        return a.getstate() == b.getstate()
    if isinstance(a, np.random.Generator):
        return same(a.bit_generator.state, b.bit_generator.state)
    if isinstance(a, torch.Generator):
        return torch.equal(a.get_state(), b.get_state())
    if isinstance(a, functools.partial):
        return (a.func, a.args, a.keywords) == (b.func, b.args, b.keywords)
    return a == b


def decoded(home):
    """inspect shows the values of known classes."""
    path = os.path.join(home, "decoded.pt")
    zone = datetime.timezone(datetime.timedelta(hours=-3, minutes=-30))
    array = np.asfortranarray(np.arange(6, dtype="f4").reshape(2, 3))
    numbers = [np.float16(-1.5), np.float16(6e-8), np.float32(3.5), np.float64("-inf"), np.int8(-3), np.int64(-2 ** 63), np.uint64(2 ** 64 - 1),
               np.bool_(True), np.complex64(1 + 2j)]
    want = {
        "space": {"$object": "argparse.Namespace", "state": {"lr": 0.1, "path": {"$path": "/a"}}},
        "numbers": [{"$scalar": {"dtype": str(n.dtype), "value": v}} for n, v in zip(numbers, (
            -1.5, 2 ** -24, 3.5, {"$float": "-inf"}, -3, -2 ** 63, {"$int": str(2 ** 64 - 1)}, True, {"$complex": [1.0, 2.0]}))],
        "array": {"$array": {"dtype": "float32", "shape": [2, 3], "order": "F",
                             "data": base64.b64encode(array.tobytes("A")).decode()}},
        "times": [{"$date": "2026-01-02"}, {"$time": "03:04:05"}, {"$datetime": "2026-01-02T03:04:05.000006-03:30"},
                  {"$timedelta": [-1, 2, 3]}],
        "deque": {"$object": "collections.deque", "arguments": [{"$tuple": []}, 3], "items": [1, 2]},
        "decimal": {"$object": "decimal.Decimal", "arguments": ["1.50"]}, "counter": {"a": 2},
        "strategy": {"$object": "torch.distributed.fsdp.api.ShardingStrategy",
                     "arguments": ["FULL_SHARD" if b"getattr" in pickle.dumps(fsdp.ShardingStrategy.FULL_SHARD) else 1]}}
    loop = argparse.Namespace()
    loop.me = loop
    torch.save({"w": torch.ones(4), "space": argparse.Namespace(lr=0.1, path=pathlib.PurePosixPath("/a")), "numbers": numbers,
                "array": array, "deque": collections.deque([1, 2], 3), "decimal": decimal.Decimal("1.50"), "loop": loop,
                "times": [datetime.date(2026, 1, 2), datetime.time(3, 4, 5), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, zone),
                          datetime.timedelta(-1, 2, 3)],
                "counter": collections.Counter("aa"), "strategy": fsdp.ShardingStrategy.FULL_SHARD, **omega()}, path)
    r = run("inspect", path, "--json")
    got = {}
    for o in json.loads(r.stdout)["objects"]:
        got[".".join(map(str, o["path"]))] = o.get("value")
    for key, value in want.items():
        shown = got.get(key, {k.split(".")[-1]: v for k, v in got.items() if k.startswith(key + ".")})
        if isinstance(value, list):
            shown = shown if isinstance(shown, list) else [shown[k] for k in sorted(shown, key=int)]
        check(shown == value, "decoded: %s is %s" % (key, shown))
    check(got["loop"] == {"$object": "argparse.Namespace", "state": {"me": {"$omitted": "cycle"}}}, "decoded: %s" % got["loop"])
    for key, value in omega().items():
        plain = json.loads(json.dumps(omegaconf.OmegaConf.to_container(value), default=lambda p: {"$path": str(p)}))
        check(got[key]["value"] == plain, "decoded: %s is %s, not %s" % (key, got[key], plain))


def harmless_travel(home):
    want = {**harmless(), **config(), **omega()}
    source = os.path.join(home, "harmless.pt")
    torch.save(dict(want, w=torch.ones(4)), source)
    for command in ("check", "verify"):
        r = run(command, source)
        check(r.returncode == 0 and "harmless" not in r.stdout.replace("harmless.pt", ""), "harmless: %s: %s" % (command, r))
    steps = [("h.h5", ""), ("h_dcp", "dcp"), ("h.safetensors", ""), ("h.pt", "")]
    for name, to in steps:
        target = os.path.join(home, name)
        r = run("convert", source, "-o", target, *(("--to", to) if to else ()))
        check(r.returncode == 0, "harmless: to %s: %s" % (name, r))
        source = target
    got = torch.load(source, weights_only=False)
    for key, value in want.items():
        check(same(value, got[key]), "harmless: %s was %r, is %r" % (key, value, got.get(key)))
    loaded = {key: None for key in want if not isinstance(want[key], (dict, list))}
    dcp.load(loaded, checkpoint_id=os.path.join(home, "h_dcp"))
    for key in loaded:
        check(same(want[key], loaded[key]), "harmless: DCP: %s was %r, is %r" % (key, want[key], loaded[key]))


def of_trainers():
    """What trainers save, with the real packages."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LSTM(2, 2), torch.nn.TransformerEncoderLayer(2, 1), torch.nn.BatchNorm1d(2),
                                torch.nn.ModuleDict({"a": torch.nn.ReLU()}), torch.nn.Conv1d(1, 1, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model[0](torch.ones(2)).sum().backward()
    optimizer.step()
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10),
                  torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)]
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.label = "x"
    values = {
        "optimizer": optimizer.state_dict(), "schedulers": [s.state_dict() for s in schedulers[:2]],
        "lambda": [{k: v for k, v in schedulers[2].state_dict().items() if k != "lr_lambdas"}], "model": model, "parameter": [parameter],
        "sparse": [torch.ones(2, 2).to_sparse()], "objects": np.array([1, "a", None], dtype=object), "strings": [np.array(["abc", "d"])],
        "dates": [np.array(["2020-01-01"], "M8[s]")], "random": [np.random.default_rng(1), np.random.RandomState(1), random.getstate()],
        "factory": collections.defaultdict(functools.partial(collections.defaultdict, int)),
        "hparams": {"optimizer": torch.optim.AdamW, "activation": torch.nn.GELU, "loss": torch.nn.functional.mse_loss, "dtype": np.float32,
                    "function": torch.tanh},
        "policies": [fsdp.MixedPrecisionPolicy(torch.bfloat16), fsdp.CPUOffloadPolicy(), fsdp.MixedPrecision(torch.bfloat16)],
        "megatron": argparse.Namespace(params_dtype=torch.bfloat16, activation_func=torch.nn.functional.gelu, rank=0, data_path=["a"])}
    try:
        import transformers
        values["training_args"] = transformers.TrainingArguments(output_dir="x", use_cpu=True)
        values["training_args"].device  # which stores the state of accelerate
        values["trainer_state"] = transformers.trainer_callback.TrainerState()
    except ImportError:
        pass
    try:
        from lightning.fabric.utilities.data import AttributeDict
        values["hyper_parameters"] = AttributeDict(lr=0.1, layers=[1, 2], cls=torch.nn.Linear)
    except ImportError:
        pass
    return values


def trainers(home):
    """None of it is reported, and it can be converted."""
    for name, value in of_trainers().items():
        source = os.path.join(home, name + ".pt")
        torch.save({"w": torch.ones(4), "of_" + name: value}, source)
        for command in ("check", "inspect", "verify"):
            r = run(command, source)
            check(r.returncode == 0 and "known to be" not in r.stdout and "Unsafe" not in r.stdout, "trainers: %s: %s: %s" % (command, name, r))
        r = run("inspect", source, "--json")
        check(not [o for o in json.loads(r.stdout)["objects"] if "risk" in o], "trainers: inspect --json: %s: %s" % (name, r.stdout))
        if name not in ("sparse",):  # which no target can hold
            r = run("convert", source, "-o", os.path.join(home, name + "_dcp"), "--to", "dcp")
            check(r.returncode == 0, "trainers: to dcp: %s: %s" % (name, r))


with tempfile.TemporaryDirectory(prefix="fc-objects-") as home:
    for test in (look_alikes, decoded, harmless_travel, trainers):
        test(home)
sys.exit(finish("harmless_objects"))
