#!/usr/bin/env python3
"""Ctrl-C ends a run that writes to a bucket whose server is silent."""

import os
import signal
import time
import unittest

from harness import HANG
from test_net_targets import TARGET, Targets


class Silent(Targets):
    def test_interrupted(self):
        """It usually waits for minutes, here for none."""
        environment = dict(self.environment(), FSDPCKPT_NET_PACE="100")
        self.environment = lambda: environment
        self.addCleanup(self.s3.wake.set)
        convert = ["consolidate", self.large(3), "-o", TARGET, "--to", "safetensors", "--max-shard-size", "8MB", "-q"]
        for silent in (["begin"], ["part"], ["part", "abort"], ["list_uploads"], ["whole", "delete"]):
            self.s3.log.clear()
            self.s3.faults = {name: ["always-silent"] for name in silent}
            run = self.start(*convert, *(["--resume"] if "whole" in silent else []))  # its journal is a whole object
            end = time.monotonic() + HANG
            while silent[0] not in [name for name, _ in self.s3.log] and time.monotonic() < end:
                time.sleep(0.01)
            begun = time.monotonic()
            run.send_signal(signal.SIGINT)
            told = run.communicate(timeout=HANG)[1]
            self.assertEqual((run.returncode, self.objects()), (130, {}), told)
            self.assertLess(time.monotonic() - begun, 12)  # and 2 s are waited for the abort
            if silent == ["part"]:
                self.assertEqual(self.s3.uploads, {})


if __name__ == "__main__":
    unittest.main()
