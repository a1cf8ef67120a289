"""consolidate and reshard: targets, options, summaries. tests/oracle compares the bytes."""

import json
import os
import shutil
import stat

import harness

FSDP2 = "dcp-torch2.15.0-fsdp2"
MESH = "dcp-torch2.15.0-2d-dp4tp2"


class Convert(harness.Case):
    def names(self, target):
        return {t["name"] for t in json.loads(self.ok("inspect", target, "--json"))["tensors"]}

    def test_consolidate_prints_a_summary(self):
        text = self.ok("consolidate", harness.corpus(MESH), "-o", "m.h5")
        self.assertRegex(text, r"^m\.h5: 11 tensors, 0 objects, [\d.]+ kB in 1 h5 file, [\d.]+ s, .*/s\n$")
        self.assertEqual(self.listing(), ["m.h5"])
        self.assertIn("full: no tensor is sharded", self.ok("inspect", "m.h5"))
        self.assertEqual(self.names("m.h5"), self.names(harness.corpus(MESH)))

    def test_reshard_counts_the_tensors_that_tp_shards(self):
        text = self.ok("reshard", harness.corpus(FSDP2), "-o", "out", "--dp", "4", "--tp", "2")
        self.assertRegex(text, r"^out: \d+ tensors, .* in 8 h5 files and index.h5, ")
        self.assertRegex(text, r"\nTP shards [1-9]\d* of \d+ tensors \(plan auto\)\n$")
        self.assertEqual(self.listing(), ["out"])
        files = sorted(os.listdir(self.path("out")))
        self.assertEqual(files, ["index.h5"] + [f"shard-{i:05d}-of-00008.h5" for i in range(8)])
        self.assertRegex(self.ok("inspect", "out"), r"8 ranks")

    def test_reshard_without_tp_names_no_plan(self):
        self.assertNotIn("TP shards", self.ok("reshard", harness.corpus(FSDP2), "-o", "out", "--dp", "3"))

    def test_json_summary(self):
        got = json.loads(self.ok("reshard", harness.corpus(FSDP2), "-o", "out", "--tp", "2", "--json"))
        self.assertEqual((got["target"], got["dry_run"], got["files"]), ("out", False, 3))
        self.assertGreater(got["tp_sharded"], 0)
        self.assertGreater(got["data_bytes"], 0)

    def test_types_that_safetensors_lacks_are_named(self):
        """complex128, complex32 and a float4 without dimensions get another dtype and shape there, and come back."""
        source = harness.corpus("dcp-torch2.15.0-dtypes")
        tensors = json.loads(self.ok("inspect", source, "--json"))["tensors"]
        count = sum(t["dtype"] in ("complex128", "complex32") or (t["dtype"] == "float4_e2m1fn_x2" and not t["shape"]) for t in tensors)
        self.assertGreater(count, 1)
        p = self.run_tool("consolidate", source, "-o", "m.safetensors")
        self.assertEqual(p.returncode, 0)
        self.assertIn(f"fsdpckpt: {count} tensors are stored with a last dimension of 2 added, which only fsdpckpt removes again: "
                      "safetensors has no complex128, complex32 or 0-dim float4\n", p.stderr)
        self.ok("diff", "m.safetensors", source, "--include", "*", "--data")
        back = self.run_tool("consolidate", "m.safetensors", "-o", "m.pt")
        self.assertEqual((back.returncode, back.stderr), (0, ""))
        self.ok("consolidate", source, "-o", "n.safetensors", "-q")
        p = self.run_tool("consolidate", source, "-o", "one.safetensors", "--include",
                          next(t["name"] for t in tensors if t["dtype"] == "complex64"), "-q")
        self.assertEqual((p.returncode, p.stderr), (0, ""))

    def test_quiet_prints_nothing(self):
        self.assertEqual(self.ok("consolidate", harness.corpus(FSDP2), "-o", "m.h5", "-q"), "")

    def test_verbose_goes_to_stderr(self):
        p = self.run_tool("reshard", harness.corpus(FSDP2), "-o", "out", "--dp", "2", "-v")
        self.assertEqual(p.returncode, 0)
        self.assertIn("fsdpckpt: mesh dimension 0: dp 2\n", p.stderr)
        source = harness.corpus(FSDP2)
        for command in (("inspect",), ("check",), ("verify",), ("schema",), ("units",), ("view", "-o", "v.h5"),
                        ("extract", "model.tok_embeddings.weight")):
            with self.subTest(command=command):
                p = self.run_tool(command[0], source, *command[1:], "-v")
                told = f"fsdpckpt: {source}: PyTorch distributed checkpoint (DCP), "
                self.assertEqual((p.returncode, p.stderr[:len(told)], p.stderr.count("\n")), (0, told, 1))

    def test_compress_prints_the_ratio(self):
        packed = os.path.join(harness.CORPUS, "h5-packed.h5")
        text = self.ok("consolidate", packed, "-o", "m.h5", "--compress", "1")
        self.assertRegex(text, r"^m\.h5: 3 tensors, .* in 1 h5 file, compressed to [\d.]+ kB \([\d.]+ %\), ")
        got = json.loads(self.ok("reshard", packed, "-o", "out", "--dp", "2", "--compress", "9", "--json"))
        self.assertLess(got["stored_bytes"], got["data_bytes"] / 5)
        self.ok("consolidate", packed, "-o", "plain.h5", "--compress", "0")
        self.assertGreater(os.path.getsize(self.path("plain.h5")), 3 * os.path.getsize(self.path("m.h5")))
        dry = self.ok("consolidate", packed, "-o", "n.h5", "--compress", "1", "-n")
        self.assertIn("before compression", dry)
        self.assertNotIn("n.h5", self.listing())

    def test_compress_is_refused_for_formats_without_it(self):
        for target in ("m.pt", "m.safetensors"):
            self.fails(5, "consolidate", harness.corpus(FSDP2), "-o", target, "--compress", "1",
                       contains=["the format '", "has no compression; these have: h5"])

    def test_dry_run_writes_nothing(self):
        text = self.ok("consolidate", harness.corpus(FSDP2), "-o", "m.h5", "--dry-run")
        self.assertRegex(text, r"^m\.h5 would hold 11 tensors, .* in 1 h5 file\n")
        self.assertIn("memory for buffers", text)
        got = json.loads(self.ok("reshard", harness.corpus(FSDP2), "-o", "out", "--dp", "4", "-n", "--json"))
        self.assertTrue(got["dry_run"])
        self.assertEqual(got["files"], 5)
        self.assertGreater(got["memory"], 0)
        self.assertGreater(got["header_bytes"], 0)
        self.assertGreaterEqual(got["largest_file"], got["smallest_file"])
        # Without -o the summary still describes the target, not the source.
        for command, files in ((["consolidate"], "1 h5 file"), (["convert", "--to", "dcp"], "2 dcp files and .metadata"),
                               (["reshard", "--dp", "3"], "3 h5 files and index.h5")):
            text = self.ok(*command, harness.corpus("dcp-torch2.15.0-fsdp1-optim"), "--dry-run")
            self.assertRegex(text, rf"^the target would hold 24 tensors, 12 objects, .* in {files}\n")
            self.assertNotIn("fsdp1-optim", text)
        self.assertEqual(self.listing(), [])

    def test_the_summary_names_the_format(self):
        source = harness.corpus(FSDP2)
        for target, name in (("m.h5", "h5"), ("m.hdf5", "h5"), ("m.pt", "pt"), ("m.pth", "pt"), ("m.bin", "pt"),
                             ("m.ckpt", "pt"), ("m.safetensors", "safetensors"), ("m.PT", "pt"), ("M.H5", "h5")):
            with self.subTest(target=target):
                self.assertIn(f" in 1 {name} file, ", self.ok("consolidate", source, "-o", target))
                self.assertEqual(json.loads(self.ok("inspect", target, "--json"))["format"], name)
        got = json.loads(self.ok("convert", source, "-o", "d", "--to", "dcp", "--json"))
        self.assertEqual(got["format"], "dcp")

    def test_a_misleading_target_name_is_reported(self):
        source = harness.corpus(FSDP2)
        p = self.run_tool("consolidate", source, "-o", "out.h5", "--to", "pt")
        self.assertEqual(p.stderr, "fsdpckpt: out.h5 is of the format pt, despite its name\n")

    def test_only_several_files_get_an_index(self):
        source = harness.corpus(FSDP2)
        self.ok("consolidate", source, "-o", "one", "--to", "safetensors", "--max-shard-size", "1GB")
        self.assertEqual(os.listdir(self.path("one")), ["model.safetensors"])
        self.ok("consolidate", source, "-o", "two", "--to", "safetensors", "--max-shard-size", "2KB")
        self.assertIn("model.safetensors.index.json", os.listdir(self.path("two")))

    def test_only_force_replaces_a_target(self):
        self.ok("consolidate", harness.corpus(FSDP2), "-o", "m.h5")
        with open(self.path("m.h5"), "rb") as f:
            before = f.read()
        self.fails(2, "consolidate", harness.corpus(MESH), "-o", "m.h5", contains=["m.h5", "--force"])
        self.fails(2, "consolidate", harness.corpus(MESH), "-o", "m.h5", "--dry-run", contains=["m.h5", "--force"])
        with open(self.path("m.h5"), "rb") as f:
            self.assertEqual(f.read(), before)
        self.ok("consolidate", harness.corpus(MESH), "-o", "m.h5", "--force")
        self.assertEqual(self.names("m.h5"), self.names(harness.corpus(MESH)))
        self.ok("reshard", "m.h5", "-o", "out", "--dp", "2")
        self.fails(2, "reshard", "m.h5", "-o", "out", "--dp", "4", contains=["out", "--force"])
        self.ok("reshard", "m.h5", "-o", "out", "--dp", "4", "--force")
        self.assertEqual(len(os.listdir(self.path("out"))), 5)
        os.mkdir(self.path("precious"))
        with open(self.path("precious", "thesis.tex"), "w") as f:
            f.write("x")
        self.fails(2, "reshard", "m.h5", "-o", "precious", "--dp", "2", "--force", contains=["thesis.tex"])
        self.assertEqual(os.listdir(self.path("precious")), ["thesis.tex"])
        self.assertEqual(self.listing(), ["m.h5", "out", "precious"])

    def test_force_does_not_replace_a_file_of_the_source(self):
        """Replacing one file of several would destroy the rest of the checkpoint."""
        ckpt = self.copy(FSDP2)
        self.ok("reshard", ckpt, "-o", "out", "--dp", "2")
        for source, target in ((ckpt, "ckpt/.metadata"), (ckpt, "ckpt/__0_0.distcp"), ("ckpt/.metadata", "ckpt/.metadata"),
                               ("out", "out/index.h5"), ("out", "out/shard-00000-of-00002.h5"),
                               ("out/index.h5", "out/index.h5")):
            with self.subTest(source=source, target=target):
                with open(self.path(target), "rb") as f:
                    old = f.read()
                self.fails(2, "consolidate", source, "-o", target, "--to", "h5", "--force",
                           contains=[target, "name another target"])
                with open(self.path(target), "rb") as f:
                    self.assertEqual(f.read(), old)
        self.ok("consolidate", ckpt, "-o", "one.h5")
        self.ok("consolidate", "one.h5", "-o", "one.h5", "--force")

    def test_failed_run_with_force_keeps_the_old_target(self):
        self.ok("consolidate", harness.corpus(FSDP2), "-o", "m.h5")
        with open(self.path("m.h5"), "rb") as f:
            before = f.read()
        bad = self.copy(FSDP2)
        os.truncate(harness.largest_shard(bad), 100)
        self.fails(3, "consolidate", bad, "-o", "m.h5", "--force")
        with open(self.path("m.h5"), "rb") as f:
            self.assertEqual(f.read(), before)
        self.assertEqual(self.listing(), ["ckpt", "m.h5"])

    def test_output_is_the_same_every_time(self):
        contents = []
        for i in range(2):
            self.ok("consolidate", harness.corpus("dcp-torch2.15.0-train"), "-o", f"m{i}.h5", "-j", str(1 + 3 * i))
            with open(self.path(f"m{i}.h5"), "rb") as f:
                contents.append(f.read())
        self.assertEqual(contents[0], contents[1])

    def test_names_and_dtype_are_chosen(self):
        all_names = self.names(harness.corpus(MESH))
        self.ok("consolidate", harness.corpus(MESH), "-o", "a.h5", "--include", "*.weight", "--exclude", "*norm*",
                "--strip-prefix", "model.", "--dtype", "bf16")
        got = json.loads(self.ok("inspect", "a.h5", "--json"))
        want = {n.removeprefix("model.") for n in all_names if n.endswith(".weight") and "norm" not in n}
        self.assertEqual({t["name"] for t in got["tensors"]}, want)
        self.assertEqual({t["dtype"] for t in got["tensors"]}, {"bfloat16"})
        self.fails(2, "consolidate", harness.corpus(MESH), "-o", "b.h5", "--include", "nothing*", contains=["nothing*"])
        self.assertEqual(self.listing(), ["a.h5"])

    def test_left_out_values_are_counted(self):
        self.assertRegex(self.ok("consolidate", harness.corpus(MESH), "-o", "a.h5", "--exclude", "model.norm.*"),
                         r"\n2 left out by --include and --exclude\n")

    def test_any_layout_to_any_layout(self):
        self.ok("reshard", harness.corpus(FSDP2), "-o", "a", "--dp", "3")
        self.ok("reshard", "a", "-o", "b", "--replicas", "2", "--dp", "2", "--tp", "2")
        self.ok("consolidate", "b", "-o", "c.h5")
        self.ok("consolidate", harness.corpus(FSDP2), "-o", "d.h5")
        self.assertEqual(self.names("c.h5"), self.names("d.h5"))

    def test_memory_and_threads_do_not_change_the_output(self):
        self.ok("consolidate", harness.corpus(MESH), "-o", "a.h5", "-j16", "--memory", "1M")
        self.ok("consolidate", harness.corpus(MESH), "-o", "b.h5", "-j", "1", "--memory=1G")
        with open(self.path("a.h5"), "rb") as a, open(self.path("b.h5"), "rb") as b:
            self.assertEqual(a.read(), b.read())

    def test_tp_plan_from_a_file(self):
        with open(self.path("plan.json"), "w") as f:
            json.dump({"layers.*.feed_forward.w1": "colwise"}, f)
        text = self.ok("reshard", harness.corpus(MESH), "-o", "out", "--tp", "2", "--tp-plan", "plan.json")
        self.assertIn("TP shards 2 of 11 tensors (plan plan.json)", text)
        for command in (["reshard", "-o", "x"], ["check"], ["average", harness.corpus(MESH), "-o", "x"]):
            self.fails(2, command[0], harness.corpus(MESH), *command[1:], "--tp", "2", "--tp-plan", "atuo",
                       contains=["TP plan 'atuo': neither a file nor a known plan; known is 'auto'"])
        os.mkdir(self.path("plans"))
        self.fails(4, "check", harness.corpus(MESH), "--tp", "2", "--tp-plan", "plans", contains=["plans: Is a directory"])

    def test_uneven_tp_is_reported(self):
        """reshard prints on stderr what check prints. An uneven split over dp is normal and is not reported."""
        with open(self.path("plan.json"), "w") as f:
            json.dump({"layers.*.feed_forward.w1": "colwise"}, f)
        source, mesh = harness.corpus(MESH), ("--dp", "5", "--tp", "3", "--tp-plan", "plan.json")
        told = self.run_tool("check", source, *mesh)
        told = [line for line in told.stdout.splitlines() if "does not divide evenly by tp 3" in line]
        self.assertIn("layers.0.feed_forward.w1.weight", told[0])
        p = self.run_tool("reshard", source, "-o", "out", *mesh)
        self.assertEqual((p.returncode, p.stderr), (0, "".join(f"fsdpckpt: {t}\n" for t in told)))
        self.assertEqual(self.run_tool("reshard", source, "-o", "quiet", *mesh, "-q").stderr, "")
        self.assertIn(told[0], self.run_tool("reshard", source, *mesh, "--dry-run").stderr)
        p = self.run_tool("reshard", source, "-o", "even", "--dp", "5", "--tp", "2", "--tp-plan", "plan.json")
        self.assertEqual(p.stderr, "")

    def test_target_follows_the_umask(self):
        self.ok("consolidate", harness.corpus(FSDP2), "-o", "m.h5")
        umask = os.umask(0)
        os.umask(umask)
        self.assertEqual(stat.S_IMODE(os.stat(self.path("m.h5")).st_mode), 0o666 & ~umask)

    def modes(self, *names):
        """The permissions of all files that these paths are or contain."""
        found = set()
        for path in map(self.path, names):
            files = [os.path.join(folder, f) for folder, _, files in os.walk(path) for f in files] if os.path.isdir(path) else [path]
            self.assertTrue(files, path)
            found |= {stat.S_IMODE(os.stat(file).st_mode) for file in files}
        return found

    def private(self, mode, only_one=False):
        """A copy of a checkpoint of several files. All of them, or one, have this mode."""
        shutil.rmtree(self.path("run"), ignore_errors=True)
        shutil.copytree(harness.corpus(FSDP2), self.path("run"))
        os.chmod(self.path("run"), 0o755)
        files = sorted(os.listdir(self.path("run")))
        for file in files:
            os.chmod(self.path("run", file), 0o644)
        for file in [f for f in files if f.endswith(".distcp")][:1] if only_one else files:
            os.chmod(self.path("run", file), mode)

    def test_target_has_no_permission_that_the_source_lacks(self):
        self.addCleanup(os.umask, os.umask(0o022))
        for mode, only_one in ((0o600, False), (0o600, True), (0o640, False), (0o400, False), (0o644, False), (0o666, False)):
            self.private(mode, only_one)
            want = {0o644 & mode}
            for kind in ("h5", "pt", "safetensors"):
                self.ok("consolidate", "run", "-o", f"one.{kind}", "--force", "-q")
                self.assertEqual(self.modes(f"one.{kind}"), want, (kind, oct(mode)))
                os.unlink(self.path(f"one.{kind}"))
            for kind in ("h5", "dcp", "pt", "safetensors"):
                self.ok("reshard", "run", "-o", "shards", "--to", kind, "--dp", "2", "-q")
                self.assertEqual(self.modes("shards"), want, (kind, oct(mode)))
                folder = stat.S_IMODE(os.stat(self.path("shards")).st_mode)
                self.assertEqual(folder, {0o600: 0o700, 0o400: 0o700, 0o640: 0o750}.get(mode, 0o755), oct(mode))
                shutil.rmtree(self.path("shards"))

    def test_other_files_have_no_permission_that_the_source_lacks(self):
        self.addCleanup(os.umask, os.umask(0o022))
        self.private(0o600, only_one=True)
        name = "model.tok_embeddings.weight"
        self.ok("extract", "run", name, "-o", "one.npy")
        self.ok("inspect", "run", "--html", "page.html")
        self.ok("schema", "run", "-o", "schema.json")
        self.run_tool("check", "run", "--junit", "report.xml")
        self.assertEqual(self.modes("one.npy", "page.html", "schema.json", "report.xml"), {0o600})
        before = set(os.listdir(self.path("run"))) | set(os.listdir(self.dir))
        self.run_tool("verify", "run", "--seal", "-q")
        seal = (set(os.listdir(self.path("run"))) | set(os.listdir(self.dir))) - before
        self.assertEqual(len(seal), 1)
        self.assertEqual(self.modes(*("run/" + f if os.path.exists(self.path("run", f)) else f for f in seal)), {0o600})
        self.ok("consolidate", "run", "-o", "full.h5", "-q")
        self.ok("view", "full.h5", "-o", "view.h5", "-q")
        self.assertEqual(self.modes("view.h5"), {0o600})

    def test_a_folder_that_others_cannot_enter_is_private(self):
        self.addCleanup(os.umask, os.umask(0o022))
        self.private(0o644)
        os.chmod(self.path("run"), 0o700)
        self.ok("consolidate", "run", "-o", "one.h5", "-q")
        self.assertEqual(self.modes("one.h5"), {0o600})
        os.chmod(self.path("one.h5"), 0o644)
        self.ok("consolidate", "run", "-o", "one.h5", "--force", "-q")
        self.assertEqual(self.modes("one.h5"), {0o600})

    def test_target_in_a_missing_directory_is_refused(self):
        self.fails(2, "consolidate", harness.corpus(FSDP2), "-o", "no/such/m.h5", contains=["no/such"])

    def test_target_in_a_read_only_directory_is_refused(self):
        if os.geteuid() == 0:
            self.skipTest("root can write everywhere")
        os.mkdir(self.path("locked"), 0o500)
        self.fails(4, "consolidate", harness.corpus(FSDP2), "-o", "locked/m.h5", contains=["locked"])


if __name__ == "__main__":
    harness.main()
