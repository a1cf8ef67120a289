"""fsdpckpt.open against PyTorch: every value of every checkpoint of the corpus, and what indexing reads."""

import unittest

import harness

import fsdpckpt


class Corpus(unittest.TestCase):
    def test_every_tensor_is_what_pytorch_loads(self):
        import torch
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
        from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

        seen = 0
        for path in sorted(harness.GOOD.glob("dcp-torch2.*")):
            state = {}
            try:
                _load_state_dict(
                    state, storage_reader=FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
                )
            except Exception:  # needs the classes of another version
                continue
            with fsdpckpt.open(path) as checkpoint:
                for name, tensor in checkpoint.items():
                    value = _find(state, name)
                    with self.subTest(path=path.name, name=name):
                        got = tensor.torch()
                        self.assertEqual((got.dtype, got.shape), (value.dtype, value.shape))
                        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (got, value) if t.numel()]
                        self.assertTrue(not as_bytes or torch.equal(*as_bytes))
                        seen += 1
        self.assertGreater(seen, 300)


def _find(state, name):
    """The value called `name`, whose keys may contain dots; None if there is none."""
    if isinstance(state, dict) and name in state:
        return state[name]
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        if name == str(key):
            return value
        if name.startswith(f"{key}.") and isinstance(value, (dict, list, tuple)):
            found = _find(value, name[len(str(key)) + 1 :])
            if found is not None:
                return found
    return None


if __name__ == "__main__":
    harness.main("numpy", "ml_dtypes", "torch")
