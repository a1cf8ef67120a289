"""Makes trainers/<package>/: the folder that the package itself saved on a CPU, and expected.safetensors with the model's weights.

    litgpt      pretrain/step-00000002 with the optimizer, as save_checkpoint of its pretrain.py, and finetune/final with its adapters
    olmo-core   run/step2 of two gloo ranks with FSDP2, by its Checkpointer
    composer    run of its Trainer, which saves one file and the link to the last one
    ray         run of TorchTrainer of Ray Train with one worker

Made with torch 2.15, litgpt 0.5.13, ai2-olmo-core 3.0.0, mosaicml 0.32.1 and ray 2.60.0, each in an environment of its own.

usage: make_trainers.py litgpt|olmo-core|composer|ray
"""

import os
import pathlib
import shutil
import sys
import tempfile

import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).resolve().parent / "trainers"
GPT = {"name": "tiny", "block_size": 8, "n_layer": 2, "n_embd": 4, "n_head": 2, "n_query_groups": 1, "padded_vocab_size": 8, "bias": False,
       "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 6}


def expect(root, state):
    save_file({name: t.detach().clone().contiguous() for name, t in state.items()}, str(root / "expected.safetensors"))


def litgpt(root):
    import lightning
    from litgpt import GPT as Model, Config, adapter, adapter_v2, lora
    from litgpt.utils import save_config

    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model = fabric.setup(Model(Config(**GPT)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))
    fabric.backward(model(torch.arange(4).reshape(1, 4)).sum())
    optimizer.step()
    step, final = root / "pretrain" / "step-00000002", root / "finetune" / "final"
    step.mkdir(parents=True)
    final.mkdir(parents=True)
    fabric.save(step / "lit_model.pth", {"model": model, "optimizer": optimizer, "iter_num": 4, "step_count": 2})
    save_config(Config(**GPT), step)
    expect(root, model.module.state_dict())
    with_lora = lora.GPT(lora.Config(**GPT, lora_r=2, lora_alpha=4, lora_dropout=0.0, lora_query=True, lora_value=True))
    for end, made, chosen in (("lora", with_lora, lora.lora_filter),
                              ("adapter", adapter.GPT(adapter.Config(**GPT, adapter_start_layer=0)), adapter.adapter_filter),
                              ("adapter_v2", adapter_v2.GPT(adapter_v2.Config(**GPT, adapter_start_layer=0)), adapter_v2.adapter_filter)):
        fabric.save(final / ("lit_model.pth." + end), {"model": fabric.setup(made)}, filter={"model": chosen})


def olmo_rank(rank, root):
    import torch.distributed as dist
    import torch.distributed.checkpoint.state_dict as sd
    from torch.distributed.fsdp import fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29539", RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank),
                      FS_LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", NUM_NODES="1")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train.checkpoint import Checkpointer

    torch.manual_seed(1)
    model = TransformerConfig.llama_like(d_model=4, vocab_size=9, n_layers=1, n_heads=2, hidden_size_multiple_of=2).build(init_device="cpu")
    for block in model.blocks.values():
        fully_shard(block, mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    optimizer = AdamWConfig(lr=1e-3).build(model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    options = sd.StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=True)  # as TransformerTrainModule has them

    class Module:
        def state_dict_to_save(self):
            return {"model": sd.get_model_state_dict(model, options=options),
                    "optim": sd.get_optimizer_state_dict(model, optimizer, options=options)}

    os.chdir(root)  # .metadata has the path of the folder
    Checkpointer(work_dir="work").save("run/step2", Module(), {"global_step": 2, "epoch": 1})
    whole = sd.get_model_state_dict(model, options=sd.StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        expect(root, whole)
        shutil.rmtree(root / "work")
    dist.barrier()
    dist.destroy_process_group()


def olmo_core(root):
    torch.multiprocessing.spawn(olmo_rank, (root,), 2)


def composer(root):
    from composer import Trainer
    from composer.models import ComposerClassifier
    from torch.utils.data import DataLoader, TensorDataset

    model = ComposerClassifier(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)), num_classes=3)
    os.chdir(root)  # the file has the path of the folder
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,))), batch_size=4)
    Trainer(model=model, train_dataloader=data, optimizers=torch.optim.AdamW(model.parameters()), max_duration="1ep", device="cpu",
            save_folder="run", save_interval="1ep", run_name="run", seed=1).fit()
    expect(root, model.state_dict())


def ray_worker(_):
    import ray.train

    torch.manual_seed(1)
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
        torch.save({"epoch": 1, "optimizer": optimizer.state_dict()}, os.path.join(folder, "extra_state.pt"))
        ray.train.report({"loss": 1.0}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def ray_train(root):
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    done = TorchTrainer(ray_worker, scaling_config=ScalingConfig(num_workers=1),
                        run_config=RunConfig(storage_path=str(root), name="run")).fit()
    expect(root, torch.load(os.path.join(done.checkpoint.path, "model.pt")))


if __name__ == "__main__":
    made = OUT / sys.argv[1]
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    torch.manual_seed(1)
    {"litgpt": litgpt, "olmo-core": olmo_core, "composer": composer, "ray": ray_train}[sys.argv[1]](made)
