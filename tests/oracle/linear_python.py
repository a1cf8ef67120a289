"""Reads through Python are linear: many small ones of one tensor with many chunks, and of many tensors; steps and empty dimensions.

    linear_python.py PACKAGE

PACKAGE is the directory that holds the built package fsdpckpt. Each case runs in a process of its own, at n and at 4 n. What is read
is compared with the array that was written.
"""
import os
import subprocess
import sys
import tempfile
import time

SMALL, TIMES, MOST_GROWTH = 6000, 4, 8


def h5_chunks(folder, n):
    import h5py
    import numpy as np
    with h5py.File(os.path.join(folder, "x.h5"), "w") as f:
        f.create_dataset("w", data=np.arange(n * 2, dtype="f4").reshape(n, 2), chunks=(1, 2))
    return "x.h5"


def dcp_chunks(folder, n):
    """One tensor of n chunks in one file."""
    import io
    import pickle
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    chunks = [dcp.ChunkStorageMetadata(torch.Size([i, 0]), torch.Size([1, 2])) for i in range(n)]
    t = dcp.TensorStorageMetadata(dcp.TensorProperties(torch.float32), torch.Size([n, 2]), chunks)
    data, places = bytearray(), {}
    for i in range(n):
        item = io.BytesIO()
        torch.save(torch.arange(2 * i, 2 * i + 2, dtype=torch.float32).reshape(1, 2), item)
        places[dcp.MetadataIndex("w", torch.Size([i, 0]), i)] = _StorageInfo("__0_0.distcp", len(data), len(item.getvalue()))
        data += item.getvalue()
    with open(os.path.join(folder, "__0_0.distcp"), "wb") as f:
        f.write(data)
    with open(os.path.join(folder, ".metadata"), "wb") as f:
        pickle.dump(dcp.Metadata({"w": t}, {}, places), f, 4)
    return "."


def many_tensors(folder, n):
    import numpy as np
    from safetensors.numpy import save_file
    save_file({f"layers.{i}.w": np.full((2, 2), i, "f4") for i in range(n)}, os.path.join(folder, "x.safetensors"))
    return "x.safetensors"


def one_row(folder, n):
    import h5py
    import numpy as np
    with h5py.File(os.path.join(folder, "x.h5"), "w") as f:
        f["w"] = np.arange(n * 500, dtype="f4").reshape(n, 500)
        f["empty"] = np.zeros((n, 0, 1 << 20), "f4")
    return "x.h5"


def rows_one_by_one(c, n):
    t = c["w"]
    for i in range(n):
        assert (t[i] == [2 * i, 2 * i + 1]).all()


def rows_at_once(c, n):
    """As a training program loads its shard: one call, one box for each chunk."""
    import numpy as np
    t = c["w"]
    out = np.empty((n, 2), "f4")
    c._opened.handle().read_many([(t._index, (i, 0), (1, 2), out.ctypes.data + 8 * i, 8) for i in range(n)], 1, 1, True)
    assert (out.reshape(-1) == np.arange(2 * n)).all()


def tensors_one_by_one(c, n):
    for i in range(n):
        assert (c[f"layers.{i}.w"][1:, :1] == i).all()


def steps(c, n):
    import numpy as np
    t, whole = c["w"], np.arange(n * 500, dtype="f4").reshape(n, 500)
    for index in ((slice(None, None, 7), slice(None, None, 3)), (slice(None, None, -1), 5), (slice(0, None, n - 1),),
                  (slice(None, None, 1 << 62), slice(None, None, 1 << 61)), (slice(None), slice(None, None, 499)),
                  (slice(3, 3, 5), slice(None))):
        assert np.array_equal(t[index], whole[index]), index


def empty(c, n):
    t = c["empty"]
    for i in range(n):
        assert t[i, :, ::3].shape == (0, (1 << 20) // 3 + 1)
    assert t[::2, ...].shape == (n // 2, 0, 1 << 20) and t[...].shape == (n, 0, 1 << 20)


CASES = [(h5_chunks, rows_one_by_one), (h5_chunks, rows_at_once), (dcp_chunks, rows_one_by_one), (dcp_chunks, rows_at_once),
         (many_tensors, tensors_one_by_one), (one_row, steps), (one_row, empty)]


def peak():
    """KiB."""
    with open("/proc/self/status") as f:
        return int(next(line for line in f if line.startswith("VmHWM:")).split()[1])


def run(case, n, path):
    """Prints the processor seconds and the KiB that the reads of a case need, without those of the start and the opening."""
    import fsdpckpt
    import numpy  # noqa: F401
    with fsdpckpt.open(path) as c:
        next(iter(c.values()))[:0]
        with open("/proc/self/clear_refs", "w") as f:
            f.write("5")  # the peak begins anew
        before, memory = time.process_time(), peak()
        CASES[case][1](c, n)
        print(time.process_time() - before, peak() - memory)


def main():
    try:
        import h5py, numpy, safetensors, torch  # noqa: E401, F401
    except ImportError as e:
        print(f"skipped: {e}")
        return 77
    failed = 0
    for case, (make, read) in enumerate(CASES):
        costs = []
        for n in (SMALL, SMALL * TIMES):
            with tempfile.TemporaryDirectory() as d:
                name = make(d, n)
                out = subprocess.run([sys.executable, __file__, sys.argv[1], str(case), str(n), os.path.join(d, name)], check=True, stdout=subprocess.PIPE,
                                     text=True, env={**os.environ, "PYTHONPATH": sys.argv[1]}).stdout
                costs.append([float(x) for x in out.split()])
        (small, little), (large, much) = costs
        print(f"{make.__name__}, {read.__name__}: {small:.2f} → {large:.2f} s, {little / 1024:.0f} → {much / 1024:.0f} MiB", flush=True)
        if large > MOST_GROWTH * (small + 0.05) or much > MOST_GROWTH * (little + 4096):
            print("FAILED: 4 × the input costs too much")
            failed = 1
    return failed


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
