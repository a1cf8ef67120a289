"""Training checkpoints of any format and layout: open, convert, check and save them.

>>> import fsdpckpt
>>> with fsdpckpt.open(checkpoint) as ckpt:
...     weight = ckpt["model.tok_embeddings.weight"]
...     print(weight.shape, weight.torch_dtype, weight[3:9, ::2].shape)
(11, 6) float32 (6, 3)

Jobs have the options of the command as keyword arguments:

>>> report = fsdpckpt.consolidate(checkpoint, folder / "model.safetensors", model_only=True)
>>> report.tensors == len(fsdpckpt.open(folder / "model.safetensors"))
True
"""

from ._checkpoint import Checkpoint, Chunk, Objects, Tensor, load, open, recipes
from ._commands import *  # noqa: F403
from ._commands import __all__ as _command_names
from ._errors import (
    ArgumentError,
    CorruptError,
    Error,
    FsdpckptWarning,
    NotFoundError,
    SystemFailure,
    UnsupportedError,
    UsageError,
)
from ._native import version as __version__
from ._objects import Foreign
from ._placements import Mesh, Partial, Placement, Replicate, Shard, StridedShard
from ._run import Report, Update
from ._save import save

__all__ = [
    "ArgumentError",
    "Checkpoint",
    "Chunk",
    "CorruptError",
    "Error",
    "Foreign",
    "FsdpckptWarning",
    "Mesh",
    "NotFoundError",
    "Objects",
    "Partial",
    "Placement",
    "Replicate",
    "Report",
    "Shard",
    "StridedShard",
    "SystemFailure",
    "Tensor",
    "UnsupportedError",
    "Update",
    "UsageError",
    "__version__",
    "load",
    "open",
    "recipes",
    "save",
]
__all__ += _command_names
