#!/usr/bin/env python3
"""Makes orbax/*: checkpoints that orbax-checkpoint 0.12.8 (tensorstore 0.1.86, jax 0.10.2) wrote on a processor, and orbax/restored.msgpack, what
fsdpckpt advises to make of one.

    make_orbax.py CORPUS     a Python with orbax-checkpoint, flax and jax
"""
import os
import pathlib
import shutil
import sys

os.environ["JAX_PLATFORMS"] = "cpu"
import flax.serialization
import jax.numpy as jnp
import orbax.checkpoint


def main():
    out = pathlib.Path(sys.argv[1], "orbax").resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    tree = {"params": {"dense": {"kernel": jnp.arange(12, dtype=jnp.float32).reshape(3, 4), "bias": jnp.ones(4, jnp.bfloat16)}}, "step": 3}
    with orbax.checkpoint.StandardCheckpointer() as c:
        c.save(out / "standard", tree)
    orbax.checkpoint.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True).save(out / "zarr3", tree)
    with orbax.checkpoint.CheckpointManager(out / "manager") as m:
        m.save(0, args=orbax.checkpoint.args.StandardSave(tree))
        m.wait_until_finished()
    restored = flax.serialization.msgpack_serialize(orbax.checkpoint.PyTreeCheckpointer().restore(out / "standard"))
    (out / "restored.msgpack").write_bytes(restored)


if __name__ == "__main__":
    main()
