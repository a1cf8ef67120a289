"""The command, as `fsdpckpt` and as `python -m fsdpckpt`."""

import os
import sys

from ._run import binary


def main() -> None:
    """Becomes the command."""
    os.execv(binary(), ["fsdpckpt", *sys.argv[1:]])


if __name__ == "__main__":
    main()
