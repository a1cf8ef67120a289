"""Limits of the system and of formats: each gives the whole result or one line, and never half a target."""

import json
import os
import resource
import struct
import subprocess

import harness
import safetensors_file

KIB = 1024


def write_safetensors(path, shapes):
    """shapes: {name: shape} of float32 tensors. The first element of each is its number, the others are zeros."""
    head, offsets, size = safetensors_file.head({name: ("F32", shape) for name, shape in shapes.items()})
    with open(path, "wb") as f:
        f.write(head)
        f.truncate(len(head) + size)
        for number, offset in enumerate(offsets):
            f.seek(len(head) + offset)
            f.write(struct.pack("<f", number))


class Limits(harness.Case):
    def under(self, limit, value, *args):
        """Runs the command with a lower limit of the system."""
        return subprocess.run([harness.BINARY, *args], cwd=self.dir, capture_output=True, text=True, timeout=harness.HANG,
                              preexec_fn=lambda: resource.setrlimit(limit, (value, value)))

    def test_ten_thousand_compressed_tensors(self):
        write_safetensors(self.path("many.safetensors"), {"t.%05d" % i: [64, 64] for i in range(10000)})
        for _ in range(2):
            self.ok("consolidate", "many.safetensors", "-o", "many.h5", "--compress", "1", "--force", "-q")
        self.assertLess(os.path.getsize(self.path("many.h5")), 10 << 20)
        self.ok("diff", "many.safetensors", "many.h5", "--data", "-q")

    def test_least_memory(self):
        write_safetensors(self.path("a.safetensors"), {"t.%d" % i: [300, 1000] for i in range(8)})
        self.ok("consolidate", "a.safetensors", "-o", "a.h5", "--memory", "1M", "-q")
        self.ok("reshard", "a.h5", "-o", "run", "--dp", "3", "--memory", "1M", "-q")
        self.ok("diff", "a.safetensors", "run", "--data", "--memory", "1M", "-q")

    def test_long_names(self):
        name = "layers." + "n" * (64 * KIB - 16) + ".w"
        write_safetensors(self.path("long.safetensors"), {name: [2, 3], "short": [1]})
        self.assertEqual([t["name"] for t in json.loads(self.ok("inspect", "long.safetensors", "--json"))["tensors"]],
                         [name, "short"])
        for target in ("long.pt", "new.safetensors", "long.h5"):
            p = self.run_tool("consolidate", "long.safetensors", "-o", target, "-q")
            if p.returncode == 0:
                self.ok("diff", "long.safetensors", target, "--data", "-q")
            else:
                self.assertEqual((p.returncode, p.stderr.count("\n")), (5, 1), p.stderr)
                self.assertNotIn(target, self.listing())

    def test_largest_file(self):
        write_safetensors(self.path("a.safetensors"), {"t": [1000, 1000]})
        for target in ("a.h5", "a.pt", "b.safetensors"):
            p = self.under(resource.RLIMIT_FSIZE, 100 * KIB, "consolidate", "a.safetensors", "-o", target, "-q")
            self.assertEqual((p.returncode, p.stderr.count("\n")), (4, 1), p.stderr)
            self.assertEqual(self.listing(), ["a.safetensors"])

    def test_few_descriptors(self):
        write_safetensors(self.path("a.safetensors"), {"t.%d" % i: [512] for i in range(4)})
        for form in ("hdf5", "dcp", "safetensors", "pt"):
            self.ok("reshard", "a.safetensors", "-o", form, "--to", form, "--dp", "512", "-q")
            p = self.under(resource.RLIMIT_NOFILE, 128, "consolidate", form, "-o", form + ".h5", "-q")
            self.assertEqual((p.returncode, p.stderr), (0, ""))
            self.ok("diff", "a.safetensors", form + ".h5", "--data", "-q")

    def test_two_runs_on_one_target(self):
        write_safetensors(self.path("a.safetensors"), {"t": [1000, 1000]})
        write_safetensors(self.path("b.safetensors"), {"u": [1000, 1000]})
        for force in ((), ("--force",)):
            runs = [subprocess.Popen([harness.BINARY, "consolidate", name + ".safetensors", "-o", "m.h5", "-q", *force],
                                     cwd=self.dir, stderr=subprocess.PIPE, text=True) for name in "ab"]
            lines = [p.communicate(timeout=harness.HANG)[1] for p in runs]
            codes = [p.returncode for p in runs]
            self.assertIn(0, codes, lines)
            for code, line in zip(codes, lines):
                self.assertTrue(code == 0 or (code == 2 and not force and line.count("\n") == 1), (codes, lines))
            same = [self.run_tool("diff", name + ".safetensors", "m.h5", "--data", "-q").returncode for name in "ab"]
            self.assertEqual(sorted(same), [0, 1])
            self.assertEqual(self.listing(), ["a.safetensors", "b.safetensors", "m.h5"])


if __name__ == "__main__":
    harness.main()
