"""--resume: a conversion that failed or was killed goes on. tests/fault/resume.py interrupts it at every system call."""

import fcntl
import json
import os
import random
import resource
import shutil
import struct
import subprocess

import harness
import safetensors_file

LIMIT = 150_000  # bytes of a file: the third file of the target is larger
SIZES = {"a.w": 100_000, "b.w": 100_000, "c.w": 200_000, "d.w": 100_000}
OPTIONS = ("--to", "safetensors", "--max-shard-size", "100kB")
STAGING = ".out.fsdpckpt-resume"


def tree(path):
    found = {}
    for name in sorted(os.listdir(path)):
        with open(os.path.join(path, name), "rb") as f:
            found[name] = f.read()
    return found


class Resume(harness.Case):
    def setUp(self):
        super().setUp()
        rng = random.Random(1)
        self.tensors = {name: ("U8", [size], rng.randbytes(size)) for name, size in SIZES.items()}
        safetensors_file.write(self.path("m.safetensors"), self.tensors)
        self.ok("consolidate", "m.safetensors", "-o", "m.pt", "-q")
        self.ok("consolidate", "m.pt", "-o", "whole/", *OPTIONS, "-q")
        self.whole = tree(self.path("whole"))
        self.assertEqual(len(self.whole), 5)
        self.start = self.listing()

    def interrupt(self, *options):
        """Runs the command, which cannot write the third file."""
        p = subprocess.run([harness.BINARY, "consolidate", "m.pt", "-o", "out/", *OPTIONS, "-q", "-j1", "--resume", *options],
                           cwd=self.dir, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)),
                           capture_output=True, text=True, timeout=harness.HANG)
        self.assertEqual((p.returncode, p.stdout), (4, ""), p.stderr)
        return p.stderr

    def resume(self, *options):
        return self.run_tool("consolidate", "m.pt", "-o", "out/", *OPTIONS, "-q", "--resume", *options)

    def goes_on(self, *options, percent=r"\d+"):
        p = self.resume(*options)
        self.assertEqual((p.returncode, p.stdout), (0, ""), p.stderr)
        self.assertRegex(p.stderr, rf"\Afsdpckpt: out/: goes on with a conversion of which {percent} % is written\n\Z")
        self.assertEqual(tree(self.path("out")), self.whole)
        self.assertEqual(self.listing(), sorted([*self.start, "out"]))

    def refused(self, status, *options, contains=()):
        """The command is refused, and nothing that is kept is lost."""
        p = self.resume(*options)
        self.assertEqual((p.returncode, p.stdout, p.stderr.count("\n")), (status, "", 1), p.stderr)
        for text in contains:
            self.assertIn(text, p.stderr)

    def test_without_an_interruption_it_changes_nothing(self):
        self.assertEqual(self.resume().stderr, "")
        self.assertEqual(tree(self.path("out")), self.whole)
        self.assertEqual(self.listing(), sorted([*self.start, "out"]))
        self.refused(2, contains=["--force replaces it"])
        self.assertEqual(self.resume("--force").stderr, "")
        self.assertEqual(self.listing(), sorted([*self.start, "out"]))

    def test_a_plan_makes_nothing(self):
        self.ok("consolidate", "m.pt", "-o", "out/", *OPTIONS, "-q", "--resume", "--dry-run")
        self.assertEqual(self.listing(), self.start)

    def test_failed_run_goes_on(self):
        told = self.interrupt().splitlines()
        self.assertEqual(len(told), 2, told)
        self.assertIn(f"{STAGING}: repeat the command that wrote it to go on", told[0])
        self.assertIn("File too large", told[1])
        self.assertEqual(self.listing(), sorted([*self.start, STAGING]))
        self.interrupt()  # a second time
        self.goes_on("-j", "3", percent="40")

    def test_replaced_target_stays_until_the_end(self):
        self.ok("consolidate", "m.pt", "-o", "out/", *OPTIONS, "-q", "--include", "a.w")
        before = tree(self.path("out"))
        self.interrupt("--force")
        self.assertEqual(tree(self.path("out")), before)
        self.goes_on("--force")

    def change(self, name, number):
        """Changes a file in one of the ways that keep its size and the time of its last write."""
        path = self.path(name)
        stat = os.stat(path)
        with open(path, "rb") as f:
            data = f.read()
        if number == 0:  # the file itself
            with open(path, "r+b") as f:
                f.seek(len(data) // 2)
                f.write(bytes([data[len(data) // 2] ^ 1]))
        else:  # another file
            with open(path + ".new", "wb") as f:
                f.write(data)
            os.rename(path + ".new", path)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def test_changed_source_is_refused(self):
        for number in range(3):
            self.interrupt()
            if number < 2:
                self.change("m.pt", number)
            else:
                os.utime(self.path("m.pt"))
            self.refused(3, contains=["m.pt: was changed since the unfinished conversion was begun", f"remove ./{STAGING} to begin again"])
            shutil.rmtree(self.path(STAGING))

    def test_changed_file_that_decides_on_values_is_refused(self):
        def write(name, content):
            with open(self.path(name), "w") as f:
                json.dump(content, f)

        os.mkdir(self.path("model"))
        rng = random.Random(2)
        floats = lambda rows, columns: ("F32", [rows, columns], struct.pack(f"<{rows * columns}f", *(rng.random() for _ in range(rows * columns))))
        codes = ("F8_E4M3", [128, 256], bytes(rng.randrange(64) for _ in range(128 * 256)))
        weights = {"a.weight": floats(100, 250), "b.weight": floats(100, 250), "c.weight": floats(200, 250),
                   "0.weight": codes, "0.weight_scale_inv": floats(1, 2)}
        safetensors_file.write(self.path("model/model.safetensors"), weights)
        safetensors_file.write(self.path("next.safetensors"), {**weights, "b.weight": floats(100, 250)})
        write("model/config.json", {"heads": 10, "quantization_config": {"weight_block_size": [128, 128]}})
        os.mkdir(self.path("adapter"))
        write("adapter/adapter_config.json", {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["b"]})
        safetensors_file.write(self.path("adapter/adapter_model.safetensors"), {
            "base_model.model.b.lora_A.weight": floats(1, 250), "base_model.model.b.lora_B.weight": floats(100, 1)})
        write("recipe.json", {"fsdpckpt": "recipe", "schema": 1, "others": "keep", "sizes": {"h": "heads"}, "rules": [
            {"from": "b.weight", "to": "b.weight", "operations": {"rearrange": "(h d) c -> (d h) c"}}]})
        self.ok("delta", "model", "next.safetensors", "-o", "delta", "-q", "--number=1")
        recipe, dequantized = ["--recipe", "recipe.json"], ["--dequantize", "bf16"]
        cases = [(recipe, "recipe.json"), (recipe, "model/config.json"), ([*recipe, "--config", "other.json"], "other.json"),
                 (dequantized, "model/config.json"), (["--adapter", "adapter"], "adapter/adapter_config.json"),
                 (["--adapter", "adapter"], "adapter/adapter_model.safetensors"),
                 (["--delta", "delta"], f"delta/{sorted(n for n in os.listdir(self.path('delta')) if n.endswith('.safetensors'))[0]}")]
        write("other.json", {"heads": 5})
        for options, name in cases:
            with self.subTest(options=options, name=name):
                argv = ["consolidate", "model", "-o", "out/", *OPTIONS, "-q", "-j1", "--resume", *options]
                p = subprocess.run([harness.BINARY, *argv], cwd=self.dir, capture_output=True, text=True, timeout=harness.HANG,
                                   preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT)))
                self.assertEqual(p.returncode, 4, p.stderr)
                self.assertIn("is kept in", p.stderr)
                self.change(name, 1)
                p = self.run_tool(*argv)
                self.assertEqual(p.returncode, 3, p.stderr)
                self.assertIn(f"{name}: was changed since the unfinished conversion was begun", p.stderr)
                shutil.rmtree(self.path(STAGING))

    def test_other_source_is_refused(self):
        self.interrupt()
        shutil.copy2(self.path("m.pt"), self.path("n.pt"))
        p = self.run_tool("consolidate", "n.pt", "-o", "out/", *OPTIONS, "-q", "--resume")
        self.assertEqual(p.returncode, 2)
        self.assertRegex(p.stderr, r"has the file \S*/m\.pt, not \S*/n\.pt; remove the directory to begin again\n\Z")

    def test_other_options_are_refused(self):
        self.interrupt()
        self.refused(2, "--exclude", "d.*", contains=[STAGING, "was begun without '--exclude d.*'; give the same options"])
        self.refused(2, "--max-shard-size", "99kB", contains=["with '--max-shard-size 100000B', not with '--max-shard-size 99000B'"])
        p = self.run_tool("consolidate", "m.pt", "-o", "out/", *OPTIONS[:2], "-q", "--resume")
        self.assertEqual(p.returncode, 2)
        self.assertIn("was begun with '--max-shard-size 100000B'; give the same options", p.stderr)
        shutil.rmtree(self.path(STAGING))
        self.assertEqual(self.resume("--max-shard-size", "99kB").returncode, 0)

    def test_option_of_the_begun_run_is_missed(self):
        self.interrupt("--exclude", "d.*")
        self.refused(2, contains=["was begun with '--exclude d.*'; give the same options"])

    def test_options_without_influence_may_differ(self):
        self.interrupt("--memory", "64M")
        self.goes_on("--memory", "128M", "-j", "2", "--progress", "never")

    def test_run_without_the_option_leaves_it_alone(self):
        self.interrupt()
        p = self.run_tool("consolidate", "m.pt", "-o", "out/", *OPTIONS, "-q")
        self.assertEqual(p.returncode, 0)
        self.assertRegex(p.stderr, rf"\Afsdpckpt: \S*out: an unfinished conversion to this is kept in {STAGING}: resume it, or "
                                   r"remove that directory\n\Z")
        self.assertEqual(tree(self.path("out")), self.whole)
        self.assertEqual(self.listing(), sorted([*self.start, STAGING, "out"]))
        self.goes_on("--force")

    def test_torn_journal_is_used_up_to_its_last_whole_record(self):
        for change, percent in ((lambda d: d[:-1], 20), (lambda d: d + bytes(100), 40), (lambda d: d + d[-200:], 40),
                                (lambda d: d[:-9] + bytes([d[-9] ^ 1]) + d[-8:], 20), (lambda d: d[:20], None)):
            self.interrupt()
            journal = self.path(STAGING, "journal")
            with open(journal, "rb") as f:
                whole = f.read()
            with open(journal, "wb") as f:
                f.write(change(whole))
            if percent:
                self.goes_on(percent=percent)
            else:
                self.assertEqual(self.resume().stderr, "")
                self.assertEqual(tree(self.path("out")), self.whole)
            shutil.rmtree(self.path("out"))

    def test_files_that_are_not_those_of_the_journal_are_written_again(self):
        self.interrupt()
        for name in os.listdir(self.path(STAGING, "tiles")):
            path = self.path(STAGING, "tiles", name)
            size = os.path.getsize(path)
            os.rename(path, self.path("old" + name))
            with open(path, "wb") as f:
                f.write(bytes(size))
        self.start = self.listing()[1:]
        self.goes_on()

    def test_files_with_other_names_are_not_written_to(self):
        self.interrupt()
        os.mkdir(self.path("kept"))
        for name in os.listdir(self.path(STAGING, "tiles")):
            os.link(self.path(STAGING, "tiles", name), self.path("kept", name))
        before = {name: (content, os.stat(self.path("kept", name)).st_mtime_ns) for name, content in tree(self.path("kept")).items()}
        self.start = self.listing()[1:]
        self.goes_on()
        self.assertEqual({name: (content, os.stat(self.path("kept", name)).st_mtime_ns) for name, content in tree(self.path("kept")).items()}, before)

    def test_what_is_no_file_is_not_waited_for(self):
        with open(self.path("precious"), "wb") as f:
            f.write(b"x")
        self.start = self.listing()
        for make in (os.mkfifo, lambda path: os.symlink(self.path("precious"), path), os.mkdir):
            self.interrupt()
            name = self.path(STAGING, "tiles", "0")
            os.unlink(name)
            make(name)
            p = self.resume()
            if make is os.mkdir:  # this is no work of the command
                self.assertEqual(p.returncode, 4, p.stderr)
                shutil.rmtree(self.path(STAGING))
            else:
                self.assertEqual((p.returncode, tree(self.path("out"))), (0, self.whole), p.stderr)
                shutil.rmtree(self.path("out"))
        with open(self.path("precious"), "rb") as f:
            self.assertEqual(f.read(), b"x")

    def test_directories_of_others_are_left_alone(self):
        os.mkdir(self.path("elsewhere"))
        os.symlink("elsewhere", self.path(STAGING))
        self.refused(4, contains=[STAGING])
        self.assertEqual(os.listdir(self.path("elsewhere")), [])
        os.unlink(self.path(STAGING))
        for name in ("tiles", "new", "journal", "lock", "complete"):
            self.interrupt()
            path = self.path(STAGING, name)
            shutil.rmtree(path) if os.path.isdir(path) else os.path.lexists(path) and os.unlink(path)
            os.symlink(self.path("elsewhere"), path)
            p = self.resume()
            if p.returncode == 0:
                self.assertEqual(tree(self.path("out")), self.whole)
                shutil.rmtree(self.path("out"))
            else:
                self.assertEqual((p.returncode, len(p.stderr.splitlines()[name == "lock":])), (4, 1), p.stderr)
                shutil.rmtree(self.path(STAGING))
            self.assertEqual(os.listdir(self.path("elsewhere")), [], name)
        if os.geteuid() == 0:
            self.interrupt()
            os.chown(self.path(STAGING), 1, 1)
            self.refused(2, contains=[STAGING, "belongs to another user"])

    def test_damage_of_a_source_is_found_although_its_tiles_are_finished(self):
        with open(self.path("m.pt"), "r+b") as f:
            data = f.read()
            at = data.index(self.tensors["a.w"][2])
            f.seek(at + 5)
            f.write(bytes([data[at + 5] ^ 1]))
        self.interrupt()
        p = self.resume()
        self.assertEqual(p.returncode, 3)
        self.assertRegex(p.stderr, r"goes on with .*\n.*m\.pt: offset \d+: .*damaged: .*\n\Z")
        self.assertEqual(self.listing(), self.start)  # what is written is wrong

    def test_second_run_waits_for_nobody(self):
        self.interrupt()
        with open(self.path(STAGING, "lock"), "r+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            self.refused(2, contains=[STAGING, "another run is writing this target"])
        self.goes_on()

    def test_what_cannot_be_resumed_is_refused(self):
        self.fails(5, "consolidate", "m.pt", "-o", "m.h5", "--compress", "1", "--resume", contains=["compresses cannot be resumed"])
        self.fails(5, "reshard", "m.pt", "-o", "m", "--dp", "2", "--local", "--resume", contains=["--resume", "--local"])
        self.assertEqual(self.listing(), self.start)


if __name__ == "__main__":
    harness.main()
