#!/usr/bin/env python3
"""Makes flax/*: msgpack files that flax 0.12.8 (flax.serialization, msgpack 1.2.4, jax 0.10.2) wrote, and flax/expected.json, what flax reads
from them. `sharded` is laid out by transformers 4.57.1, the last major version with Flax: its flax_shard_checkpoint runs here from its
source, because its models cannot be imported with this jax.

    make_flax.py CORPUS TRANSFORMERS     a Python with flax, msgpack, jax; the folder of transformers 4
"""
import ast
import json
import os
import pathlib
import sys

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict


def model():
    return {"params": {"dense": {"kernel": jnp.arange(12, dtype=jnp.float32).reshape(3, 4) / 7, "bias": jnp.ones(4, jnp.bfloat16)},
                       "norm": {"scale": np.arange(3, dtype=np.float16)}}}


def training():
    """A step, an optimizer's state as tuples and lists, and every kind of value."""
    state = {"opt_state": [{"count": np.int32(7), "mu": np.ones((2, 2))}, ()], "step": 1234, "lr": 0.1, "tiny": 1e-320,
             "nothing": None, "flag": True, "name": "zw\u00f6lf", "raw": b"\x00\xff", "z": 1 - 2.5j, "nan": float("nan"), "inf": -float("inf"),
             "big": 2**64 - 1, "negative": -2**63, "zero": -0.0, "whole": 3.0, "rng": np.arange(2, dtype=np.uint32)}
    return {**model(), **serialization.to_state_dict(state)}


def dtypes():
    names = ("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128 bfloat16 float8_e4m3fn "
             "float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu").split()
    tree = {name: np.arange(6).astype(getattr(ml_dtypes, name, None) or np.dtype(name)).reshape(2, 3) for name in names}
    return {**tree, "0-dim": np.array(5, np.int16), "empty": np.zeros((3, 0), np.float32), "fortran": np.asfortranarray(np.arange(6.).reshape(2, 3)),
            "many dimensions": np.arange(2.).reshape((1,) * 7 + (2,))}


def unreadable():
    return {"w": np.ones(2, np.float32), "int4": np.arange(3).astype(ml_dtypes.int4), "when": np.array(["2020-01-01"], "M8[D]")}


def lists():
    """What msgpack_serialize takes besides state dicts: lists, and integer keys."""
    return {"layers": [{"w": np.ones(2, np.float32)}, [np.zeros(1, np.int8), 5]], "sizes": [1, [2, None], "x"], "none": [], "dict": {},
            "by number": {3: np.arange(2, dtype=np.int64)}}


def chunked():
    return {"a": np.arange(30, dtype=np.float32).reshape(2, 3, 5), "b": {"c": np.arange(7, dtype=np.int16)}, "small": np.ones(2, np.float32),
            "rows": np.arange(16, dtype=np.float64).reshape(4, 4)}


def is_nested(value):
    return isinstance(value, (dict, np.ndarray, np.generic)) or (isinstance(value, list) and any(map(is_nested, value)))


def leaves(value, path=()):
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, path + (key,))
    elif isinstance(value, list) and is_nested(value):
        for i, inner in enumerate(value):
            yield from leaves(inner, path + (i,))
    else:
        yield ".".join(map(str, path)), value


def truth(blob):
    """What flax reads, by name."""
    found = {}
    for name, value in leaves(serialization.msgpack_restore(blob)):
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            found[name] = {"dtype": array.dtype.name, "shape": list(array.shape), "bytes": array.tobytes().hex()}
        else:
            found[name] = {"repr": repr(value)}
    return found


def write(out, name, blob, expected):
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_bytes(blob)
    expected[name] = truth(blob)


def shard_function(transformers):
    source = pathlib.Path(transformers, "modeling_flax_utils.py").read_text()
    function = next(f for f in ast.parse(source).body if isinstance(f, ast.FunctionDef) and f.name == "flax_shard_checkpoint")
    scope = {"flatten_dict": flatten_dict, "convert_file_size_to_int": int, "FLAX_WEIGHTS_NAME": "flax_model.msgpack"}
    exec(compile(ast.Module([function], []), "modeling_flax_utils.py", "exec"), scope)
    return scope["flax_shard_checkpoint"]


def sharded(out, transformers, expected):
    shards, index = shard_function(transformers)(model()["params"], 40)
    (out / "sharded").mkdir(exist_ok=True)
    (out / "sharded" / "flax_model.msgpack.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    whole = {}
    for file, shard in shards.items():
        blob = serialization.to_bytes(unflatten_dict(shard, sep="/"))
        (out / "sharded" / file).write_bytes(blob)
        whole.update(truth(blob))
    expected["sharded"] = whole


def main():
    corpus, transformers = sys.argv[1:]
    out, expected = pathlib.Path(corpus, "flax"), {}
    for make in (model, training):
        write(out, make.__name__ + "/flax_model.msgpack", serialization.to_bytes(make()), expected)
    for make in (dtypes, unreadable, lists):
        write(out, make.__name__ + ".msgpack", serialization.msgpack_serialize(make()), expected)
    serialization.MAX_CHUNK_SIZE = 28  # instead of 1 GiB
    write(out, "chunked.msgpack", serialization.msgpack_serialize(chunked()), expected)
    sharded(out, transformers, expected)
    write(out, "alone.msgpack", serialization.msgpack_serialize(np.arange(3, dtype=np.float32)), expected)
    expected["alone.msgpack"]["tensor"] = expected["alone.msgpack"].pop("")
    with open(out / "expected.json", "w", encoding="utf-8") as f:
        json.dump(expected, f, indent=1, sort_keys=True)
        f.write("\n")


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    main()
