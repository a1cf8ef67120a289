"""The Trainer of transformers also saves what it trains as HDF5, with a callback, and at the end exports the model for the Hub.

    python examples/python/transformers_callback.py RUN [STEPS]

The class is all that a project needs.
"""

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

import fsdpckpt
from fsdpckpt.torch import HDF5Writer


class HDF5Callback(TrainerCallback):
    """Next to each checkpoint-N of the Trainer, writes hdf5-N: weights, optimizer and step, from every rank its own part."""

    def on_save(self, args, state, control, model, optimizer, **others):
        inner = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        weights, moments = get_state_dict(model, inner)
        saved = {"model": weights, "optim": moments, "step": state.global_step}
        dcp.save(saved, storage_writer=HDF5Writer(Path(args.output_dir, f"hdf5-{state.global_step}"), force=True))

    def on_train_end(self, args, state, control, model, **others):
        if state.is_world_process_zero:
            run = Path(args.output_dir)
            fsdpckpt.export(run / f"hdf5-{state.global_step}", run / "hub", force=True)
            model.config.save_pretrained(run / "hub")


def main():
    run, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, vocab_size=101, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    words = torch.randint(101, (64, 16))
    arguments = TrainingArguments(output_dir=str(run), max_steps=steps, save_steps=2, per_device_train_batch_size=4,
                                  report_to=[], disable_tqdm=True, logging_steps=1)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in words],
                      callbacks=[HDF5Callback()])
    trainer.train()


if __name__ == "__main__":
    main()
