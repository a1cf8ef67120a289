"""What the tests of the package share: they skip (77) where a package is missing."""

import os
import sys
import unittest
from pathlib import Path

CORPUS = Path(os.environ["FSDPCKPT_CORPUS"])
GOOD = CORPUS / "good"


def main(*modules):
    """Runs the tests of the calling file if `modules` can be imported."""
    for module in modules:
        try:
            __import__(module)
        except ImportError as error:
            print(f"skipped: {error}")
            sys.exit(77)
    unittest.main(verbosity=1)
