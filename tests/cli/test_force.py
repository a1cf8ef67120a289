"""--force: what it refuses to replace, by content and by identity, and how a later run cleans up after a killed one."""

import json
import os
import shutil
import signal
import stat
import subprocess

import harness

TRAIN = "dcp-torch2.15.0-train"


def snapshot(path):
    """{path: content} of every file under a directory."""
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                found[os.path.relpath(os.path.join(folder, name), path)] = f.read()
    return found


class Force(harness.Case):
    def refused(self, *args, contains=()):
        """Expects exit status 2 and that no file has changed."""
        before = snapshot(self.dir)
        self.fails(2, *args, "--force", contains=contains)
        self.assertEqual(snapshot(self.dir), before)

    def test_target_that_contains_the_source_is_refused(self):
        self.ok("reshard", harness.corpus(TRAIN), "-o", "run", "--dp", "2", "-q")
        self.refused("reshard", "run/index.h5", "-o", "run", "--dp", "3", contains=["run: is or contains run/index.h5"])
        os.symlink("run", self.path("link"))
        self.refused("reshard", "link/index.h5", "-o", "run", "--dp", "3", contains=["is or contains"])
        self.refused("reshard", "run/index.h5", "-o", "link/../run", "--dp", "3", contains=["is or contains"])

    def test_source_is_replaced_only_by_an_unmodified_copy(self):
        self.ok("reshard", harness.corpus(TRAIN), "-o", "run", "--dp", "2", "-q")
        name = "model.*"
        self.refused("reshard", "run", "-o", "run", "--dp", "3", "--include", name, contains=["is or contains"])
        self.refused("reshard", "run", "-o", "run", "--dp", "3", "--dtype", "bf16", contains=["is or contains"])
        self.ok("consolidate", "run", "-o", "whole.h5", "-q")
        self.ok("reshard", "run", "-o", "run", "--dp", "3", "-q", "--force")
        self.ok("diff", "run", "whole.h5", "-q")
        self.refused("consolidate", "whole.h5", "-o", "whole.h5", "--include", name, contains=["is a file of the check"])
        self.ok("consolidate", "whole.h5", "-o", "whole.h5", "--force", "-q")
        self.ok("diff", "run", "whole.h5", "-q")

    def test_sources_of_an_average_are_not_replaced(self):
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "a.h5", "-q")
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "b.h5", "-q")
        for target in ("a.h5", "b.h5"):
            self.refused("average", "a.h5", "b.h5", "-o", target, contains=["that is read"])

    def test_files_that_a_view_shows_are_not_replaced(self):
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "a.h5", "-q")
        self.ok("reshard", harness.corpus(TRAIN), "-o", "run", "--dp", "2", "-q")
        for source, name in (("a.h5", "v.h5"), ("run", "w.h5")):
            self.ok("view", source, "-o", name, "-q")
            for more in ((), ("--include", "model.*")):
                self.refused("consolidate" if source == "a.h5" else "reshard", name, "-o", source, "--follow-external", *more,
                             *(() if source == "a.h5" else ("--dp", "3")), contains=[source])
            self.refused("average", name, name, "-o", source, "--to", "h5", "--follow-external", contains=[source])
        with open(self.path("r.json"), "w") as f:
            json.dump({"fsdpckpt": "recipe", "schema": 1, "rules": [], "others": "keep"}, f)
        self.refused("consolidate", "v.h5", "-o", "a.h5", "--follow-external", "--recipe", "r.json", contains=["is a file"])

    def test_other_inputs_are_not_replaced(self):
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "a.h5", "-q")
        self.ok("schema", "a.h5", "-o", "model.json")
        self.ok("check", "a.h5", "--schema", "model.json", "--junit", "report.xml", "-q")
        os.rename(self.path("model.json"), self.path("model.xml"))
        self.refused("check", "a.h5", "--schema", "model.xml", "--junit", "model.xml", contains=["that is read"])
        for name in ("hard.bin", "hard.xml"):
            os.link(self.path("a.h5"), self.path(name))
        tensor = json.loads(self.ok("inspect", "a.h5", "--json"))["tensors"][0]["name"]
        self.refused("extract", "a.h5", tensor, "-o", "hard.bin", contains=["that is read"])
        self.refused("check", "a.h5", "--against", "hard.xml", "--junit", "hard.xml", contains=["that is read"])

    def test_foreign_files_are_not_replaced(self):
        os.makedirs(self.path("out", "shard-00000-of-00001.h5"))
        with open(self.path("out", "shard-00000-of-00001.h5", "thesis.tex"), "w") as f:
            f.write("years")
        self.refused("reshard", harness.corpus(TRAIN), "-o", "out", "--dp", "1", contains=["shard-00000-of-00001.h5"])
        shutil.rmtree(self.path("out"))
        os.makedirs(self.path("out"))  # somebody else's HDF5 file, with a name like ours
        shutil.copy(os.path.join(harness.CORPUS, "h5-packed.h5"), self.path("out", "shard-00000-of-00001.h5"))
        self.refused("reshard", harness.corpus(TRAIN), "-o", "out", "--dp", "1", contains=["shard-00000-of-00001.h5"])
        with open(self.path("letter.h5"), "w") as f:
            f.write("Dear reader")
        self.refused("consolidate", harness.corpus(TRAIN), "-o", "letter.h5", contains=["not a checkpoint"])

    def test_compressed_target_is_replaced(self):
        source = os.path.join(harness.CORPUS, "h5-packed.h5")
        for command, target in ((("consolidate",), "a.h5"), (("reshard", "--dp", "2"), "run")):
            for level in ("1", "6"):
                self.ok(command[0], source, "-o", target, *command[1:], "--compress", level, "--force", "-q")
                self.ok("diff", source, target, "--data", "-q")
                self.ok("verify", target, "-q")
        self.ok("consolidate", "run", "-o", "a.h5", "--force", "-q")  # not compressed any more
        self.ok("diff", source, "a.h5", "--data", "-q")

    def test_permissions_are_kept(self):
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "a.h5", "-q")
        os.chmod(self.path("a.h5"), 0o600)
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "a.h5", "-q", "--force")
        self.assertEqual(stat.S_IMODE(os.stat(self.path("a.h5")).st_mode), 0o600)

    def test_mount_point_is_refused_at_once(self):
        self.ok("reshard", harness.corpus(TRAIN), "-o", "run", "--dp", "2", "-q")
        mount = ["unshare", "-rm", "sh", "-c", 'mount --bind run run && exec "$@"', "sh"]
        if subprocess.run([*mount, "true"], cwd=self.dir, capture_output=True).returncode != 0:
            self.skipTest("mount namespaces are not available")
        p = subprocess.run([*mount, harness.BINARY, "reshard", harness.corpus(TRAIN), "-o", "run", "--dp", "3", "--force",
                            "--dry-run"], cwd=self.dir, capture_output=True, text=True)
        self.assertEqual(p.returncode, 2, p.stderr)
        self.assertIn("a file system is mounted there", p.stderr)


class Leftovers(harness.Case):
    def setUp(self):
        super().setUp()
        harness.make_large(self.path("big"), 1 << 28)

    def staging(self):
        return [n for n in self.listing() if n.startswith(".m.h5.fsdpckpt-")]

    def writes(self):
        """Whether a run has begun to write the new target."""
        return any(os.path.exists(self.path(n, "new", "m.h5")) for n in self.staging())

    def stopped(self, *args):
        """A run that stands still in the middle of its work. On a busy machine, one may finish before it is noticed."""
        for _ in range(100):
            p = subprocess.Popen([harness.BINARY, "consolidate", "big", "-o", "m.h5", "-j1", *args], cwd=self.dir,
                                 stderr=subprocess.DEVNULL)
            while p.poll() is None and not self.writes():
                pass
            if p.returncode is None:
                p.send_signal(signal.SIGSTOP)
                state = os.waitid(os.P_PID, p.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if state.si_code == os.CLD_STOPPED and self.writes():
                    return p
                p.kill()
                p.wait()
            if "--force" not in args and os.path.exists(self.path("m.h5")):
                os.remove(self.path("m.h5"))
        self.fail("every run finished before it was stopped")

    def test_files_of_a_killed_run_are_removed(self):
        for force in ((), ("--force",)):
            p = self.stopped(*force)
            p.kill()
            p.wait()
            self.assertEqual(len(self.staging()), 1)
            run = self.run_tool("consolidate", harness.corpus(TRAIN), "-o", "m.h5", "-q", *force)
            self.assertEqual(run.returncode, 0, run.stderr)
            self.assertRegex(run.stderr, r"\Afsdpckpt: .*m\.h5: an earlier run died while writing this; its leftover "
                                         r"\.m\.h5\.fsdpckpt-...... is removed\n\Z")
            self.assertEqual(self.listing(), ["big", "m.h5"])

    def test_live_run_is_left_alone(self):
        p = self.stopped()
        self.ok("consolidate", harness.corpus(TRAIN), "-o", "m.h5", "-q")
        self.assertEqual(len(self.staging()), 1)
        p.send_signal(signal.SIGINT)
        p.send_signal(signal.SIGCONT)
        self.assertEqual(p.wait(timeout=harness.HANG), 130)
        self.assertEqual(self.listing(), ["big", "m.h5"])


if __name__ == "__main__":
    harness.main()
