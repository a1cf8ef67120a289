"""Systems that withhold a protection from the process that reads HDF5 headers: the file is read, and a note says so."""

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import unittest

import harness

SOURCE = "dcp-torch2.15.0-flat"


def refuse_seccomp():
    """From now on the kernel refuses seccomp filters: a filter answers EINVAL, as a kernel without them does."""
    def op(code, jt, jf, k):
        return struct.pack("<HBBI", code, jt, jf, k)

    load, equal, answer = 0x20, 0x15, 0x06
    einval, allow = 0x00050016, 0x7FFF0000
    program = (op(load, 0, 0, 0) + op(equal, 3, 0, 317)       # seccomp()
               + op(equal, 0, 3, 157) + op(load, 0, 0, 16)    # prctl(PR_SET_SECCOMP)
               + op(equal, 0, 1, 22) + op(answer, 0, 0, einval) + op(answer, 0, 0, allow))
    text = ctypes.create_string_buffer(program)
    head = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(text)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, head, 0, 0) == 0


class Confined(harness.Case):
    def setUp(self):
        super().setUp()
        self.ok("consolidate", harness.corpus(SOURCE), "-o", "full.h5", "-q")
        with open(self.path("full.h5"), "ab") as f:
            f.write(bytes(8))  # as if another program had changed it: its tables are not used

    def test_all_there(self):
        self.assertNotIn("not available", self.ok("inspect", "full.h5"))

    def test_variables_of_libhdf5_change_nothing(self):
        listed = self.ok("inspect", "full.h5", "--json")
        for name in ("EXTFILE_PREFIX", "VDS_PREFIX", "EXT_PREFIX", "USE_FILE_LOCKING", "PLUGIN_PATH", "PLUGIN_PRELOAD", "DEBUG",
                     "DISABLE_VERSION_CHECK", "DRIVER", "DRIVER_CONFIG", "VOL_CONNECTOR", "LIBVER_BOUNDS", "NOCLEANUP"):
            for value in ("${ORIGIN}", "x", ""):
                env = {"HDF5_" + name: value}
                self.assertEqual(self.ok("inspect", "full.h5", "--json", env=env), listed, env)
                p = self.run_tool("consolidate", harness.corpus(SOURCE), "-o", "again.h5", "-q", "--force", env=env)
                self.assertEqual(p.returncode, 0, p.stderr)  # stderr can have a line of HDF5_DEBUG

    @unittest.skipUnless(platform.machine() == "x86_64", "the filter has this processor's numbers of system calls")
    def test_no_seccomp(self):
        p = subprocess.run([harness.BINARY, "inspect", "full.h5"], cwd=self.dir, capture_output=True, text=True,
                           preexec_fn=refuse_seccomp)
        self.assertEqual((p.returncode, p.stderr), (0, ""))
        self.assertIn("seccomp is not available", p.stdout)

    @unittest.skipIf(os.environ.get("SANITIZE"), "sanitizers read /proc themselves")
    def test_no_proc(self):
        hide = "mount -t tmpfs none /proc && exec \"$@\""
        command = ["unshare", "-r", "-m", "sh", "-c", hide, "sh"]
        if not shutil.which("unshare") or subprocess.run(command + ["true"], capture_output=True).returncode != 0:
            self.skipTest("no mount namespaces here")
        p = subprocess.run(command + [os.path.abspath(harness.BINARY), "inspect", "full.h5"], cwd=self.dir,
                           capture_output=True, text=True)
        self.assertEqual((p.returncode, p.stderr), (0, ""))
        self.assertIn("/proc is not available", p.stdout)


if __name__ == "__main__":
    harness.main()
