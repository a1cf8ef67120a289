"""What scripts/test prints: the tests that run now, in the width of the terminal, and the time that it takes."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What ninja and ctest write; the failed test wrote lines that only look like theirs.
LOG = """[844/845] Linking C executable tests/fuzz/fuzz_ranks
[845/845] Linking C executable tests/fuzz/fuzz_plan
Test project /x/build/test
        Start 373: fault.sources
        Start   2: unit.base
  1/432 Test   #2: unit.base ........................   Passed    0.01 sec
        Start  12: oracle.boxes
  2/432 Test #373: fault.sources ....................***Failed    1.01 sec
it wrote: 9/10 Test
Start 7: nothing\xff
        Start 125: mpi.convert
"""
RUNNING = "test 2 of 432 (running: oracle.boxes, mpi.convert)"


class Progress(unittest.TestCase):
    def setUp(self):
        log = tempfile.NamedTemporaryFile()
        self.addCleanup(log.close)
        self.log = log.name

    def script(self, commands):
        return ["bash", "-euc", f'. "{ROOT}/scripts/progress.sh"; log="{self.log}"; {commands}']

    def progress(self, text):
        Path(self.log).write_text(text, encoding="latin-1")
        return subprocess.check_output(self.script('progress "$log"'), text=True).rstrip("\n")

    def test_names_what_runs(self):
        self.assertEqual(self.progress(LOG), RUNNING)

    def test_before_the_first_test_ends(self):
        self.assertEqual(self.progress("        Start  1: unit.base\n"), "(running: unit.base)")

    def test_of_a_build_and_of_the_last_test(self):
        self.assertEqual(self.progress("".join(LOG.splitlines(True)[:2])), "845 of 845")
        self.assertEqual(self.progress(" Start 1: unit.base\n1/1 Test #1: unit.base ... Passed 0.01 sec\n"), "test 1 of 1")
        self.assertEqual(self.progress(""), "")

    def test_one_line_of_a_terminal(self):
        Path(self.log).write_text(LOG, encoding="latin-1")
        main, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 40, 0, 0))
        # One turn of the loop: the second sleep fails.
        turns = 'turn=0; sleep() { turn=$((turn + 1)); [ $turn -eq 1 ]; }; watch_log "$log"'
        subprocess.run(self.script(turns), stdout=terminal, check=True)
        shown = os.read(main, 4096).decode()
        os.close(main)
        os.close(terminal)
        self.assertEqual(shown, "\r\033[K" + f"   0:00  {RUNNING}"[:39])


class Times(unittest.TestCase):
    def test_the_readme_has_those_of_the_script(self):
        minutes = dict(re.findall(r"^(all|quick|packages)\) minutes=(\d+)", (ROOT / "scripts/test").read_text(), re.M))
        readme = " ".join((ROOT / "README.md").read_text().split())
        said = re.search(r"`scripts/test` runs .*? about (\d+) .*?`scripts/test quick` .*? about (\d+), "
                         r".*?`scripts/test packages` .*? about (\d+): on two processors", readme)
        self.assertIsNotNone(said)
        self.assertEqual(dict(zip(("all", "quick", "packages"), said.groups())), minutes)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
