"""Lightning saves its checkpoints as HDF5: pass `plugins=[HDF5CheckpointIO()]` to the Trainer.

    python examples/python/lightning_checkpoint.py RUN [STEPS]

The class is all that a project needs. Run the program again with more steps, and it goes on from the last checkpoint.
"""

import os
import sys
import tempfile
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from torch import nn

import fsdpckpt


class HDF5CheckpointIO(CheckpointIO):
    """Reads every format that fsdpckpt reads, and so a .ckpt of Lightning too."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fsdpckpt.save(checkpoint, path, to="h5", force=True)

    def load_checkpoint(self, path, map_location=None, weights_only=None):
        with tempfile.TemporaryDirectory(dir=os.path.dirname(path)) as folder:
            fsdpckpt.consolidate(path, os.path.join(folder, "checkpoint.pt"))
            checkpoint = torch.load(os.path.join(folder, "checkpoint.pt"), map_location, weights_only=weights_only)
        for optimizer in checkpoint.get("optimizer_states", []):  # names are text; the optimizer counts its parameters
            optimizer["state"] = {int(key): value for key, value in optimizer["state"].items()}
        return checkpoint

    def remove_checkpoint(self, path):
        os.remove(path)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(101, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 101))

    def training_step(self, batch, index):
        torch.manual_seed(self.global_step)  # in a real program: the batch
        words = torch.randint(101, (8, 16), device=self.device)
        loss = nn.functional.cross_entropy(self.layers(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        print(f"step {self.global_step + 1} loss {loss.item():.9f}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.zeros(1000, 1))


def main():
    run, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    torch.manual_seed(0)
    saves = ModelCheckpoint(run, "{step}", every_n_train_steps=2, save_top_k=-1)
    saves.FILE_EXTENSION = ".h5"
    trainer = lightning.Trainer(
        max_steps=steps, callbacks=[saves], plugins=[HDF5CheckpointIO()], logger=False, enable_progress_bar=False
    )
    found = sorted(run.glob("step=*.h5"), key=lambda path: int(path.stem[5:]))
    trainer.fit(Model(), ckpt_path=found[-1] if found else None)
    fsdpckpt.export(saves.best_model_path, run / "hub", force=True)


if __name__ == "__main__":
    main()
