"""SIGINT, SIGTERM and SIGHUP during a conversion: one line, exit status 130, no partial output, no progress line left."""

import os
import pty
import resource
import signal
import subprocess
import time

import harness


class Interrupt(harness.Case):
    def start(self, *args):
        return subprocess.Popen([harness.BINARY, *args], cwd=self.dir, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for_staging(self, p, names):
        """Waits for a new file next to the source, which shows that the job is writing."""
        end = time.monotonic() + harness.HANG
        while p.poll() is None and time.monotonic() < end:
            if self.listing() != names:
                return True
        return False

    def test_signals_leave_nothing(self):
        harness.make_large(self.path("big"), 1 << 28)  # 1 GiB, sparse
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for args in (("consolidate", "big", "-o", "m.h5", "-j1"), ("reshard", "big", "-o", "out", "--dp", "4")):
                with self.subTest(signal=number, command=args[0]):
                    p = self.start(*args)
                    self.assertTrue(self.wait_for_staging(p, ["big"]), "finished before the signal")
                    p.send_signal(number)
                    out, err = p.communicate(timeout=harness.HANG)
                    self.assertEqual(p.returncode, 130, err)
                    self.assertEqual(err, "fsdpckpt: interrupted\n")
                    self.assertEqual(out, "")
                    self.assertEqual(self.listing(), ["big"])

    def test_ignored_sighup_stays_ignored(self):
        harness.make_large(self.path("big"), 1 << 26)
        p = subprocess.Popen([harness.BINARY, "consolidate", "big", "-o", "m.h5", "-j1", "-q"], cwd=self.dir,
                             preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.wait_for_staging(p, ["big"])
        p.send_signal(signal.SIGHUP)
        self.assertEqual(p.wait(timeout=harness.HANG), 0)
        self.assertEqual(self.listing(), ["big", "m.h5"])

    def test_file_size_limit_is_an_error(self):
        harness.make_large(self.path("big"), 1 << 22)
        limit = (1 << 20, 1 << 20)
        p = subprocess.run([harness.BINARY, "consolidate", "big", "-o", "m.h5"], cwd=self.dir, stderr=subprocess.PIPE,
                           text=True, timeout=harness.HANG, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        self.assertEqual(p.returncode, 4, p.stderr)
        self.assertEqual(p.stderr.count("\n"), 1, p.stderr)
        self.assertIn("File too large", p.stderr)
        self.assertEqual(self.listing(), ["big"])

    def test_interrupted_run_with_force_keeps_the_old_target(self):
        harness.make_large(self.path("big"), 1 << 28)
        self.ok("consolidate", harness.corpus("dcp-torch2.15.0-fsdp2"), "-o", "m.h5")
        with open(self.path("m.h5"), "rb") as f:
            before = f.read()
        p = self.start("consolidate", "big", "-o", "m.h5", "--force", "-j1")
        self.assertTrue(self.wait_for_staging(p, ["big", "m.h5"]))
        p.send_signal(signal.SIGINT)
        p.communicate(timeout=harness.HANG)
        self.assertEqual(p.returncode, 130)
        with open(self.path("m.h5"), "rb") as f:
            self.assertEqual(f.read(), before)
        self.assertEqual(self.listing(), ["big", "m.h5"])

    def test_progress_on_a_terminal_leaves_no_trace(self):
        harness.make_large(self.path("small"), 1 << 16)
        master, slave = pty.openpty()
        p = subprocess.Popen([harness.BINARY, "consolidate", "small", "-o", "m.h5"], cwd=self.dir, stdout=subprocess.PIPE,
                             stderr=slave)
        os.close(slave)
        p.communicate(timeout=harness.HANG)
        try:
            shown = os.read(master, 4096)
        except OSError:
            shown = b""
        os.close(master)
        self.assertEqual(p.returncode, 0)
        # Nothing is shown in the first second; a busy machine may need longer.
        self.assertTrue(shown == b"" or shown.endswith(b"\r\x1b[K"), shown)


if __name__ == "__main__":
    harness.main()
