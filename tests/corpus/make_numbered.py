"""Makes pt/<case>/: files of ranks whose names have only a number, and full.pt with the expected values.

Each case is a model and its optimizer after one step, on gloo and the CPU:

    tc-*             torch_checkpointing's CheckpointManager. tc-default: no resharder. tc-2d: DefaultResharder, DTensors in torch.save
                     files. tc-safetensors: local tensors in safetensors of a folder, a JSON item. tc-boxes: tensors that say their boxes
    experimental     torch.distributed.checkpoint._experimental: checkpoint_0.pt
    loop             torch.save(model.state_dict(), f"model_{rank}.pt")

torch_checkpointing gathers its metadata on a GPU; here gather() does the same on the CPU. Needs pip install torch_checkpointing.

    python tests/corpus/make_numbered.py [CASE ...]
"""

import logging
import random
import shutil
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from make_pt_ranks import OUT, model, shard, whole

CASES = {"tc-default": 2, "tc-2d": 4, "tc-safetensors": 4, "tc-boxes": 2, "experimental": 2, "loop": 3}


class Boxes(torch.Tensor):
    """A local tensor that holds two blocks of rows of a global one, in the opposite order, with a row between them."""

    @staticmethod
    def make(full, rank):
        first, second = (0, 4) if rank == 0 else (2, 6)
        gap = torch.full((1, full.shape[1]), -1.0)
        t = torch.cat([full[second:second + 2], gap, full[first:first + 2]]).as_subclass(Boxes)
        t.global_shape = tuple(full.shape)
        t.global_offsets, t.local_offsets, t.local_sizes = ((second, 0), (first, 0)), ((0, 0), (3, 0)), ((2, full.shape[1]),) * 2
        return t


def gather(self, data, process_group=None):
    everything = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(everything, data, group=process_group)
    return dict(enumerate(everything))


def save_with_manager(case, out, rank, items):
    from torch_checkpointing import CheckpointManager, ItemSpec, SyncCheckpointSaverConfig
    from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    DefaultMetadataManager._all_gather_pickled_data = gather
    how = {}
    if case == "tc-safetensors":
        layout = LayoutInfo("weights/model_{rank}.safetensors", SafetensorsSerialization())
        how = {"model": ItemSpec(layout=layout, resharder=DefaultResharder()),
               "misc_state": ItemSpec(layout=LayoutInfo("misc_state_{rank}.json", JsonSerialization()))}
    elif case != "tc-default":
        how = {name: ItemSpec(resharder=DefaultResharder()) for name in items if name in ("model", "optimizer")}
    storage = LocalFileSystemStorageConfig(use_direct_io=False)  # a container's disk may refuse it
    manager = CheckpointManager(CheckpointManager.Config(save=SyncCheckpointSaverConfig(), items=how, storage_config=storage))
    manager.save(str(out), items)
    manager.close()
    if case in ("tc-2d", "tc-safetensors"):
        assert (out / "metadata.pkl").exists() or rank


def work(rank, world, case, port):
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:%d" % port, rank=rank, world_size=world)
    out = OUT / case
    if rank == 0:
        shutil.rmtree(out, ignore_errors=True)
    dist.barrier()
    m = shard("2d" if case in ("tc-2d", "tc-safetensors") else "fsdp2", model(), world)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)
    m(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank % 2))).sum().backward()
    optimizer.step()
    items = {"model": m.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "dataloader": {"next": 100 + rank}}
    full = {name: whole(value) for name, value in items.items() if name != "dataloader"}
    if case == "tc-boxes":
        torch.manual_seed(1)
        full = {"w": torch.randn(8, 3), "b": torch.ones(4)}
        items = {"model": {"w": Boxes.make(full["w"], rank), "b": full["b"]}}
        import torch_checkpointing.default_resharder as resharder
        from torch_checkpointing.default_metadata import DefaultShardingMetadata

        collect = resharder.DefaultResharder.extract_sharding_metadata

        def extract(self, key, value):  # the default resharder knows DTensors only; a trainer's own writes these
            found = collect(self, key, {"b": value["b"]})
            found[("w",)] = DefaultShardingMetadata.from_tensor(value["w"])
            value["w"] = value["w"].as_subclass(torch.Tensor).clone()
            return found

        resharder.DefaultResharder.extract_sharding_metadata = extract
    if case == "tc-safetensors":
        items = {"model": items["model"], "misc_state": {"lr": 0.5, "epochs": [1, 2], "name": "run", "of": rank}}
        full = {"model": full["model"]}
    if case.startswith("tc-"):
        save_with_manager(case, out, rank, items)
    elif case == "experimental":
        from torch.distributed.checkpoint._experimental.barriers import BarrierConfig
        from torch.distributed.checkpoint._experimental.builder import make_sync_checkpointer
        from torch.distributed.checkpoint._experimental.config import CheckpointerConfig

        del items["dataloader"]
        make_sync_checkpointer(CheckpointerConfig(barrier_config=BarrierConfig(barrier_type=None))).save(str(out), items)
    else:
        out.mkdir(exist_ok=True)
        torch.save(items["model"], out / ("model_%d.pt" % rank))
        full = full["model"]
    dist.barrier()
    if rank == 0:
        torch.save(full, out / "full.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for case in sys.argv[1:] or CASES:
        mp.spawn(work, (CASES[case], case, random.randint(20000, 40000)), nprocs=CASES[case])
        print(case)
