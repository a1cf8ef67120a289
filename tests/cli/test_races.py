"""If a source changes while it is read, the command prints one line and exits with 3 instead of mixing old and new data."""

import os
import signal
import subprocess

import harness


class Races(harness.Case):
    def changed_meanwhile(self, change, *args):
        """Stops the command while it writes, changes the source, and lets the command continue."""
        p = subprocess.Popen([harness.BINARY, *args], cwd=self.dir, stderr=subprocess.PIPE, text=True)
        while not any(n.startswith(".m.h5.fsdpckpt-") for n in self.listing()):
            self.assertIsNone(p.poll(), "finished too early")
        p.send_signal(signal.SIGSTOP)
        change()
        p.send_signal(signal.SIGCONT)
        err = p.communicate(timeout=harness.HANG)[1]
        self.assertEqual(p.returncode, 3, err)
        self.assertEqual(err.count("\n"), 1, err)
        self.assertNotIn("m.h5", self.listing())
        return err

    def source(self):
        harness.make_large(self.path("big"), 1 << 27)
        return next(self.path("big", n) for n in os.listdir(self.path("big")) if n.endswith(".distcp"))

    def test_rewritten_in_place(self):
        data = self.source()

        def rewrite():
            with open(data, "r+b") as f:
                f.seek(os.path.getsize(data) // 2)
                f.write(b"\1" * 64)

        err = self.changed_meanwhile(rewrite, "consolidate", "big", "-o", "m.h5", "-j1", "-q")
        self.assertIn("was changed while the checkpoint was read", err)

    def test_replaced_by_another_file(self):
        data = self.source()

        def replace():
            subprocess.run(["cp", "--sparse=always", data, data + ".new"], check=True)
            os.rename(data + ".new", data)

        err = self.changed_meanwhile(replace, "consolidate", "big", "-o", "m.h5", "-j1", "-q")
        self.assertIn("was replaced by another file while the checkpoint was read", err)

    def test_data_of_a_view(self):
        data = self.source()
        self.ok("view", "big", "-o", "view.h5", "-q")

        def touch():
            os.utime(data)

        err = self.changed_meanwhile(touch, "consolidate", "view.h5", "-o", "m.h5", "-j1", "-q", "--follow-external")
        self.assertIn("was changed while the checkpoint was read", err)


if __name__ == "__main__":
    harness.main()
