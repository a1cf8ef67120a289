"""Runs an example of examples/python as a person would: it trains, goes on from a checkpoint with the same losses as without the
interruption, and what it exports has the bits that h5py reads from the checkpoint.
Usage: test_examples.py fsdp2|accelerate_loop|lightning_checkpoint|transformers_callback"""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import harness

FOLDER = harness.CORPUS.parents[1] / "examples" / "python"
NEEDS = {
    "fsdp2": ["torch"],
    "accelerate_loop": ["torch", "accelerate"],
    "lightning_checkpoint": ["torch", "lightning"],
    "transformers_callback": ["torch", "transformers", "accelerate"],
}
LINE = re.compile(r"^step (\d+) loss (\S+)$", re.M)


class Example(unittest.TestCase):
    def setUp(self):
        self.run_folder = Path(tempfile.mkdtemp()) / "run"
        self.addCleanup(shutil.rmtree, self.run_folder.parent)

    def train(self, ranks=None):
        """Runs the example for four steps and returns its output."""
        ranks_line = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
        line = [sys.executable, *(ranks_line if ranks else []), __file__, "--process", NAME, str(self.run_folder), "4"]
        quiet = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HOME": str(self.run_folder.parent)}
        done = subprocess.run(
            line, env={**os.environ, **quiet}, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def exported(self):
        from safetensors.numpy import load_file

        return load_file(self.run_folder / "hub" / "model.safetensors")

    def assert_exported(self, file, group):
        """What was exported is what h5py reads in the group of the file."""
        import h5py

        with h5py.File(self.run_folder / file) as stored:
            expected = {name: stored[group][name][()] for name in stored[group]}
        found = self.exported()
        self.assertEqual(set(found), set(expected))
        for name, values in expected.items():
            self.assertEqual((found[name].dtype, found[name].tobytes()), (values.dtype, values.tobytes()), name)

    def assert_resumes(self, last, first_ranks=None, other_ranks=None):
        """Runs the example, removes the last checkpoint and runs it again."""
        losses = dict(LINE.findall(self.train(first_ranks)))
        self.assertEqual(sorted(losses), ["1", "2", "3", "4"])
        self.assertEqual(len(set(losses.values())), 4)
        path = self.run_folder / last
        before = self.exported()
        (shutil.rmtree if path.is_dir() else os.remove)(path)
        again = dict(LINE.findall(self.train(other_ranks)))
        self.assertEqual(again, {step: losses[step] for step in ("3", "4")})
        self.assertEqual({name: v.tobytes() for name, v in self.exported().items()}, {n: v.tobytes() for n, v in before.items()})

    def test_it(self):
        getattr(self, NAME)()

    def fsdp2(self):
        self.assert_resumes("step-4", first_ranks=2, other_ranks=1)  # sums of equal parts are exact
        self.assert_exported("step-4/index.h5", "model")

    def accelerate_loop(self):
        self.assert_resumes("step-4")
        self.assert_exported("step-4/index.h5", "model")

    def lightning_checkpoint(self):
        self.assert_resumes("step=4.h5")
        self.assert_exported("step=4.h5", "state_dict")

    def transformers_callback(self):
        self.train()
        self.assert_exported("hdf5-4/index.h5", "model")
        from safetensors.numpy import load_file
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.run_folder / "hub")
        theirs = load_file(self.run_folder / "checkpoint-4" / "model.safetensors")
        state = model.state_dict()
        self.assertEqual(set(state), set(theirs))
        for name, values in theirs.items():
            self.assertEqual(state[name].numpy().tobytes(), values.tobytes(), name)


def run_process(name, *arguments):
    """Runs the example in this process. Then it ends without Python's finalization, in which a thread of torch that waits for
    the GIL can abort the process (seen with torch 2.15)."""
    sys.argv = [str(FOLDER / f"{name}.py"), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--process":
        run_process(*sys.argv[2:])
    NAME = sys.argv.pop()
    for needed in [*NEEDS[NAME], "h5py", "safetensors"]:
        if not importlib.util.find_spec(needed):
            harness.skip(f"{needed} is not installed")
    harness.main("fsdpckpt.torch")
