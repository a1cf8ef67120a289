"""scripts/abi --installed: what it accepts and what it refuses, with small libraries in the place of ours."""

import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ABI = Path(__file__).resolve().parents[2] / "scripts" / "abi"
HEADER = "struct fc_pair {{ int a; {more} }}; int fc_first({pair} *pair); {also}\n"
SOURCE = '#include "fc.h"\nint fc_first({pair} *pair) {{ return pair != 0; }}\n{also_body}\n'


class Abi(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        self.old = self.install("old")

    def install(self, name, soname="libfsdpckpt.so.0.1", **given):
        """Installs a library of one function. `given` changes its sources."""
        given = {"more": "", "pair": "struct fc_pair", "also": "", "also_body": "", **given}
        prefix = self.folder / name
        for part in ("include", "lib/pkgconfig", "lib/cmake/fsdpckpt"):
            (prefix / part).mkdir(parents=True)
        (prefix / "include/fc.h").write_text(HEADER.format(**given))
        (self.folder / "fc.c").write_text(SOURCE.format(**given))
        (prefix / "lib/pkgconfig/fsdpckpt.pc").write_text("Name: fsdpckpt\n")
        (prefix / "lib/cmake/fsdpckpt/fsdpckptTargets.cmake").write_text("add_library(fsdpckpt::fsdpckpt SHARED IMPORTED)\n")
        subprocess.run(["cc", "-g", "-shared", "-fPIC", f"-I{prefix}/include", str(self.folder / "fc.c"), f"-Wl,-soname,{soname}",
                        "-o", str(prefix / f"lib/{soname}.0")], check=True)
        return prefix

    def compare(self, new):
        p = subprocess.run([str(ABI), "--installed", str(self.old), str(new)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           text=True)
        return p.returncode, p.stdout

    def test_the_same_and_more_functions_are_compatible(self):
        self.assertEqual(self.compare(self.install("same"))[0], 0)
        self.assertEqual(self.compare(self.install("more", also="int fc_two(void);", also_body="int fc_two(void) { return 2; }"))[0], 0)

    def test_a_change_needs_a_new_soname(self):
        for name, change in {"larger": {"more": "long b;"}, "other": {"pair": "const char"}}.items():
            status, output = self.compare(self.install(name, **change))
            self.assertEqual(status, 1, output)
            self.assertIn("libfsdpckpt.so.0.1: the ABI changed; raise the version", output)
            self.assertEqual(self.compare(self.install(name + "2", soname="libfsdpckpt.so.0.2", **change))[0], 0)

    def test_what_programs_find_must_stay(self):
        for path in ("include/fc.h", "lib/pkgconfig/fsdpckpt.pc", "lib/cmake/fsdpckpt/fsdpckptTargets.cmake", "lib/libfsdpckpt.so.0.1.0"):
            new = self.install(Path(path).name)
            (new / path).unlink()
            status, output = self.compare(new)
            self.assertEqual((status, "gone: " in output), (1, True), output)


if __name__ == "__main__":
    if not shutil.which("abidiff"):
        print("skipped: abidiff is not installed")
        sys.exit(77)
    unittest.main(argv=sys.argv[:1])
