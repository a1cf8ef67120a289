"""delta of several ranks: gloo processes, forked from this one, publish DTensors and plain tensors. The reader of the tests
(weight_sync.py) must get the new values bit for bit."""

import os
import shutil
import sys
import tempfile
import unittest
import warnings
from pathlib import Path

import harness
from torch_ranks import run_ranks, two_d_model

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "cli"))
import weight_sync  # noqa: E402

SHAPES = {"cut": (10, 6), "columns": (5, 8), "few": (3,), "none": (0, 5), "copy": (7,), "large": (900, 500), "last": (64, 33)}


def versions():
    """Two whole state dicts, equal on all ranks."""
    import torch

    torch.manual_seed(0)
    old = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in SHAPES.items()}
    old["fp8"] = torch.randint(0, 256, (12, 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    old["scalar"] = torch.tensor(1.5)
    old["same"] = torch.arange(40).reshape(8, 5)
    new = {name: value.clone() for name, value in old.items()}
    for name in ("cut", "columns", "few", "copy", "scalar"):
        new[name] += 1
    new["large"][torch.rand(900, 500) < 0.02] += 0.5
    new["last"][63, 32] = 9
    new["fp8"].view(torch.uint8)[11, 3] ^= 1
    return old, new


def cut(state, mesh):
    """What this rank has of a state dict: DTensors of one mesh, replicas, and plain tensors of one rank each."""
    import torch
    from torch.distributed.tensor import DTensor, Replicate, Shard

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = {}
    for name, value in state.items():
        placement = Replicate() if name in ("copy", "scalar") else Shard(1 if name == "columns" else 0)
        local = value
        if placement.is_shard():
            parts = value.chunk(ranks, placement.dim)
            local = parts[rank] if rank < len(parts) else value.narrow(placement.dim, 0, 0)
        whole = {"shape": value.shape, "stride": value.stride()}
        found[name] = DTensor.from_local(local.clone(), mesh, [placement], run_check=False, **whole)
    if rank == ranks - 1:
        found["last"] = state["last"].clone()
    else:
        del found["last"]
    found["tied"] = found["cut"]
    return found


def raw(state):
    return {name: harness.torch_bytes(value) for name, value in state.items()}


def raised(call, *args, **options):
    """The type and the text of what every rank raises."""
    try:
        call(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def publish(folder):
    import torch
    from safetensors.torch import save_file
    from torch.distributed.device_mesh import init_device_mesh

    import fsdpckpt
    from fsdpckpt import _delta_ranks
    from fsdpckpt.torch import delta

    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    old, new = versions()
    parts = [cut(state, mesh) for state in (old, new)]
    if rank == 0:
        save_file(old, folder / "old.safetensors")
        save_file(new, folder / "new.safetensors")
    torch.distributed.barrier()
    del parts[0]["tied"]  # as in a folder of the Hugging Face hub
    reports = [delta(*parts, folder / "weight_v000001")]
    _delta_ranks._GATHERED_AT_ONCE = 1 << 10  # several turns
    reports.append(
        fsdpckpt.delta(folder / "old.safetensors", {"step": 3, **parts[1]}, folder / "weight_v000002", encoding="auto", base=0)
    )
    reports.append(delta(*parts, folder / "weight_v000003", base=0, encoding="overwrite", checksum="adler32", shared=False))
    reports.append(delta(parts[1], parts[1], folder / "weight_v000004", base=0))
    errors = [raised(delta, *parts, folder / "weight_v000001")]
    without = {name: value for name, value in parts[1].items() if name != "columns" or rank != ranks - 1}
    errors.append(raised(delta, parts[0], without, folder / "weight_v000005"))
    more = {**parts[1], "extra": torch.zeros(4)} if rank == ranks - 1 else parts[1]
    errors.append(raised(delta, parts[0], more, folder / "weight_v000005"))
    wide = {**parts[1], "last": new["last"].float()} if rank == ranks - 1 else parts[1]
    errors.append(raised(delta, parts[0], wide, folder / "weight_v000005"))
    errors.append(raised(delta, parts[0], {"a": object()} if rank else parts[1], folder / "no" / "weight_v000005"))
    errors.append(raised(delta, *parts, "s3://bucket/weight_v000005"))
    return [dict(report) for report in reports], errors, raw(old), raw(new)


def publish_two_d(folder):
    """FSDP2 over tensor parallelism, one step of AdamW in bf16."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    import fsdpckpt

    def whole():
        options = StateDictOptions(full_state_dict=True)
        return {name: harness.torch_bytes(value) for name, value in get_model_state_dict(model, options=options).items()}

    model, optimizer = two_d_model(module=True)
    sent = {name: value.clone() for name, value in model.state_dict().items()}
    before = whole()
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    report = fsdpckpt.delta(sent, model.state_dict(), folder / "weight_v000001")
    return before, whole(), report.changed, torch.distributed.get_rank()


class Ranks(unittest.TestCase):
    def setUp(self):
        import torch

        torch.set_num_threads(1)  # a forked process must not wait for threads that only its parent has
        warnings.simplefilter("ignore")
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)

    def test_every_kind_of_tensor(self):
        for ranks in (2, 4):
            folder = self.folder / str(ranks)
            folder.mkdir()
            results = run_ranks(publish, folder, ranks=ranks)
            old, new = results[0][2:]
            for number in (1, 2, 3):
                model = dict(old)
                metadata = weight_sync.apply(model, folder / f"weight_v{number:06d}")
                self.assertEqual(model, new, number)
                self.assertEqual((metadata["version"], metadata["base_version"]), (f"{number:06d}", "000000"))
            files = sorted(os.listdir(folder / "weight_v000001"))
            self.assertGreater(len(files), 2)
            self.assertEqual(files[:-1], [f"model-{n:05d}-of-{len(files) - 1:05d}.safetensors" for n in range(1, len(files))])
            self.assertEqual(os.listdir(folder / "weight_v000004"), ["model.safetensors.index.json"])
            self.assertFalse(weight_sync.read_version(folder / "weight_v000004")[1])
            self.assertEqual(sorted(os.listdir(folder)), ["new.safetensors", "old.safetensors", *(f"weight_v00000{n}" for n in range(1, 5))])
            self.compare_with_the_command(folder, results)
            self.check_errors([errors for _, errors, *_ in results])

    def compare_with_the_command(self, folder, results):
        """The frames are those that the command makes, and so are the numbers of the report."""
        import fsdpckpt

        report = fsdpckpt.delta(
            folder / "old.safetensors", folder / "new.safetensors", folder / "weight_v000009", base=0, progress=None
        )
        frames = weight_sync.read_version(folder / "weight_v000009")[1]
        self.assertEqual(weight_sync.read_version(folder / "weight_v000001")[1], frames)
        for reports, *_ in results:
            for name in ("tensors", "changed", "bytes", "changed_bytes", "stored_bytes", "only_old"):
                self.assertEqual(reports[0][name], report[name], name)
            self.assertEqual([report["objects"] for report in reports], [0, 1, 0, 0])
            self.assertEqual(reports[3]["changed"], 0)

    def check_errors(self, rows):
        """Every rank raises the error of the one that failed."""
        wanted = (
            ("UsageError", "exists; force=True replaces it"),
            ("", "columns"),
            ("UsageError", "the old state dict: it has no tensor extra, which"),
            ("UsageError", "last: it is bfloat16 in the old state dict and float32 in"),
            ("", "no"),
            ("UnsupportedError", "write it to a directory that all see"),
        )
        for errors in rows:
            for error, (kind, text) in zip(errors, wanted, strict=True):
                self.assertIsNotNone(error, text)
                self.assertIn(kind, error[0])
                self.assertIn(text, error[1])

    def test_fsdp2_over_tensor_parallelism(self):
        results = run_ranks(publish_two_d, self.folder)
        before, after, changed, _ = results[0]
        self.assertGreater(changed, 3)
        weight_sync.apply(before, self.folder / "weight_v000001")
        self.assertEqual(before, after)


if __name__ == "__main__":
    harness.main("torch", "safetensors")
