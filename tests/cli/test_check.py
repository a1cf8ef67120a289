"""check: exit status, JSON, JUnit and GitHub output, options. tests/oracle/check_messages.py tests each finding."""

import json
import os
import re
import shutil
import xml.etree.ElementTree as xml

import harness

STATE = "dcp-torch2.15.0-fsdp1-optim"
MESH = "dcp-torch2.15.0-2d-dp4tp2"
JUNIT_TAGS = {"testsuites", "testsuite", "testcase", "failure", "skipped", "system-out", "properties", "property"}


class Check(harness.Case):
    def schema(self, source=MESH, edit=None, to="model.json"):
        schema = json.loads(self.ok("schema", harness.corpus(source)))
        if edit:
            edit(schema)
        with open(self.path(to), "w") as f:
            json.dump(schema, f)

    def found(self, *args, status=1):
        """Runs check, expects this exit status and nothing on stderr, and returns stdout."""
        p = self.run_tool("check", *args)
        self.assertEqual((p.returncode, p.stderr), (status, ""), p.stdout)
        return p.stdout

    def test_what_is_beside_the_model_is_one_line(self):
        """A training checkpoint against its model: one line for each group that --model-only leaves out; JSON has every value."""
        source = harness.corpus("dcp-torch2.15.0-train")
        self.ok("consolidate", source, "-o", "m.safetensors", "--model-only", "-q")
        names = {v["name"] for v in json.loads(self.ok("inspect", source, "--json"))["tensors"]}
        optimizer = [n for n in names if n.startswith("optim.")]
        self.assertEqual(len(optimizer), 18)
        args = ("--against", "m.safetensors", "--strip-prefix", "model.")
        p = self.run_tool("check", source, *args)
        lines = [line for line in p.stdout.splitlines() if "optim" in line]
        self.assertEqual(lines, ["error: optim.*: unexpected: 18 tensors and 12 objects, not in m.safetensors; add --model-only (-v lists them)"])
        self.assertLess(len(p.stdout.splitlines()), 11)
        found = json.loads(self.run_tool("check", source, *args, "--json").stdout)
        self.assertLessEqual(set(optimizer), {f["name"] for f in found["findings"]})
        self.assertEqual(found["errors"], 58)
        self.assertIn(": does not fit m.safetensors: 58 errors,", p.stdout)
        self.assertGreater(len(self.run_tool("check", source, *args, "-v").stdout.splitlines()), 58)
        self.assertEqual(self.run_tool("check", source, "--against", "m.safetensors", "--model-only").returncode, 0)
        back = self.run_tool("check", "m.safetensors", "--against", source).stdout
        self.assertEqual([line for line in back.splitlines() if "optim" in line],
                         [f"error: optim.*: missing: 18 tensors and 12 objects beside the model of {source}; add --model-only (-v lists them)"])
        rows = [line for line in self.run_tool("diff", source, "m.safetensors").stdout.splitlines() if "optim" in line]
        self.assertEqual(rows, [f"optim.*  18 tensors and 12 objects  only in {source}; --model-only leaves them out (-v lists them)"])
        # Where both have an optimizer, each of its values counts.
        self.ok("convert", source, "-o", "less", "--to", "dcp", "--exclude", "optim.state.norm.*", "-q")
        text = self.run_tool("check", source, "--against", "less").stdout
        self.assertIn("error: optim.state.norm.weight.exp_avg: unexpected: ", text)
        self.assertNotIn("--model-only", text)

    def test_intact_checkpoints_have_no_findings(self):
        for name in sorted(n for n in os.listdir(harness.CORPUS) if n.startswith(("dcp-", "h5-"))):
            path = os.path.join(harness.CORPUS, name)
            text = self.ok("check", path)
            self.assertEqual(text.count("\n"), 1, text)
            self.assertIn(": headers are valid: 0 errors, 0 warnings; ", text)
            self.assertEqual(self.ok("check", path, "--against", path, "-q"), "")

    def test_layout_and_format_do_not_matter(self):
        source = harness.corpus(MESH)
        self.schema()
        self.ok("reshard", source, "-o", "sharded", "--dp", "3", "-q")
        self.ok("consolidate", source, "-o", "full.h5", "-q")
        for a in (source, "sharded", "full.h5", "model.json"):
            for b in (source, "sharded", "full.h5", "model.json"):
                self.assertIn(": fits ", self.ok("check", a, "--against", b))
            self.assertIn(f"{a}: fits model.json: 0 errors, 0 warnings; 11 tensors, 0 objects\n",
                          self.ok("check", a, "--schema", "model.json"))

    def test_reference_needs_no_data_files(self):
        copy = self.copy(MESH)
        for name in os.listdir(copy):
            if name.endswith(".distcp"):
                os.unlink(os.path.join(copy, name))
        self.ok("check", harness.corpus(MESH), "--against", "ckpt")
        text = self.found("ckpt", "--against", harness.corpus(MESH))
        self.assertEqual(text.count("file is missing"), len([n for n in os.listdir(harness.corpus(MESH)) if "distcp" in n]))

    def test_one_run_lists_all_findings(self):
        def edit(schema):
            schema["tensors"][0]["dtype"] = "int64"
            schema["tensors"][1]["shape"] = [3, 3]
            schema["tensors"].append({"name": "absent", "dtype": "float32", "shape": [2]})
            schema["objects"].append({"name": "lr"})

        self.schema(edit=edit)
        copy = self.copy(MESH)
        os.unlink(harness.largest_shard(copy))
        told = json.loads(self.found("ckpt", "--schema", "model.json", "--json"))
        self.assertEqual([f["kind"] for f in told["findings"]],
                         ["file-missing", "missing", "missing-object", "shape", "dtype-other"])
        self.assertEqual((told["ok"], told["errors"], told["warnings"]), (False, 5, 0))
        self.assertEqual((told["schema"], told["checkpoint"], told["reference"]), (1, "ckpt", "model.json"))
        for f in told["findings"]:
            self.assertEqual(f["severity"], "error")
            self.assertGreaterEqual(f["count"], 1)
            self.assertIn(f["name"] if f["kind"] != "file-missing" else "ckpt/", f["message"])
        missing = told["findings"][1]
        self.assertEqual((missing["name"], missing["expected"]), ("absent", "float32[2]"))
        self.assertEqual(self.found("ckpt", "--schema", "model.json", "-q"), "")

    def test_warnings_alone_exit_with_0(self):
        text = self.ok("check", harness.corpus(MESH), "--dp", "3")
        self.assertIn("warning: ", text)
        self.assertIn(": headers are valid: 0 errors, ", text)

    def test_damage_is_a_finding_and_a_missing_path_is_an_error(self):
        copy = self.copy(MESH)
        os.truncate(os.path.join(copy, ".metadata"), 100)
        self.assertIn("error: ckpt/.metadata: ", self.found("ckpt"))
        self.found("ckpt", "--junit", "r.xml", "--json")
        self.assertEqual(xml.parse(self.path("r.xml")).getroot().get("failures"), "1")
        self.fails(3, "check", "nowhere", contains=["nowhere: no such file"])
        self.fails(3, "check", harness.corpus(MESH), "--against", "ckpt", contains=[".metadata"])

    def test_a_file_that_is_no_checkpoint_is_one_finding(self):
        """Objects in a Git LFS pointer, or behind the end of a file, are not reported one by one."""
        copy = self.copy("dcp-torch2.15.0-train")
        names = sorted(n for n in os.listdir(copy) if n.endswith(".distcp"))
        sizes = {n: os.path.getsize(os.path.join(copy, n)) for n in names}
        for n in names:
            os.truncate(os.path.join(copy, n), sizes[n] // 2)
        self.assertEqual([line for line in self.found("ckpt").splitlines() if line.startswith("error")],
                         [line for line in self.found("ckpt").splitlines() if ".distcp: truncated: it has " in line])
        for n in names:
            with open(os.path.join(copy, n), "w") as f:
                f.write("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + f"\nsize {sizes[n]}\n")
        errors = [line for line in self.found("ckpt").splitlines() if line.startswith("error")]
        self.assertEqual([line.split(":")[1].strip() for line in errors], [f"ckpt/{n}" for n in names])
        for line in errors:
            self.assertIn("it is a Git LFS pointer: fetch the file with git lfs pull", line)

    def test_junit_report(self):
        def edit(schema):
            schema["tensors"].append({"name": "a<b>&\"c'\u0001\ufffe", "dtype": "float32", "shape": [2]})

        self.schema(edit=edit)
        self.found(harness.corpus(MESH), "--schema", "model.json", "--junit", "r.xml", "--dp", "3")
        root = xml.parse(self.path("r.xml")).getroot()
        suite = root.find("testsuite")
        cases = suite.findall("testcase")
        self.assertEqual(int(suite.get("tests")), len(cases))
        failed = [c for c in cases if c.find("failure") is not None]
        self.assertEqual([c.get("name") for c in failed], ["missing"])
        self.assertEqual(suite.get("failures"), "1")
        self.assertIn("a<b>&\"c'\ufffd\ufffd: missing", failed[0].find("failure").get("message"))
        self.assertIn("a<b>&\"c'", failed[0].find("failure").text)
        told = [c.get("name") for c in cases if c.find("system-out") is not None]
        self.assertIn("uneven", told)
        # A new report replaces the old one. Without a reference and a mesh it has fewer cases, and all of them pass.
        self.ok("check", harness.corpus(MESH), "--junit", "r.xml")
        again = xml.parse(self.path("r.xml")).getroot()
        self.assertEqual(again.get("failures"), "0")
        self.assertLess(int(again.get("tests")), len(cases))
        self.assertEqual(sorted(self.listing()), ["model.json", "r.xml"])

    def test_junit_replaces_only_a_junit_report(self):
        self.schema()
        shutil.copy(self.path("model.json"), self.path("model"))
        with open(self.path("model")) as f:
            before = f.read()
        self.fails(2, "check", harness.corpus(MESH), "--junit", "model", contains=["model", "--force"])
        with open(self.path("model")) as f:
            self.assertEqual(f.read(), before)
        self.fails(2, "check", harness.corpus(MESH), "--junit", "no/dir/r.xml", contains=["no/dir"])
        self.ok("check", harness.corpus(MESH), "--junit", "model", "--force")
        xml.parse(self.path("model"))

    def test_github_annotations(self):
        names = ["50%", "two\nlines\r", "a:b,c", "esc\u001b[31m"]

        def edit(schema):
            schema["tensors"] += [{"name": n, "dtype": "float32", "shape": [2]} for n in names]

        self.schema(edit=edit, to="a,b:c%.json")
        text = self.found(harness.corpus(MESH), "--schema", "a,b:c%.json", "--github")
        lines = text.splitlines()
        self.assertEqual(len(lines), len(names) + 1)  # one more line for the summary
        for line in lines[:-1]:
            properties, message = line[2:].split("::", 1)
            command, properties = properties.split(" ", 1)
            self.assertEqual(command, "error")
            self.assertEqual(dict(p.split("=", 1) for p in properties.split(",")),
                             {"file": "a%2Cb%3Ac%25.json", "title": "fsdpckpt check%3A missing"})
        self.assertTrue(lines[0].endswith("::50%25: missing: a,b:c%25.json has it as float32[2]"))
        self.assertIn("::two%0Alines%0D: missing", lines[1])
        self.assertIn("::a:b,c: missing", lines[2])
        self.assertIn("::esc\\x1b[31m: missing", lines[3])
        warned = self.ok("check", harness.corpus(MESH), "--dp", "3", "--github")
        self.assertTrue(warned.startswith("::warning title=fsdpckpt check%3A uneven::"))

    def test_hostile_names_stay_on_their_line(self):
        self.schema(edit=lambda s: s["tensors"].append({"name": "a\u001b[2J\nb", "dtype": "float32", "shape": [2]}))
        text = self.found(harness.corpus(MESH), "--schema", "model.json")
        self.assertEqual(text.count("\n"), 2)
        self.assertNotIn("\u001b", text)
        told = json.loads(self.found(harness.corpus(MESH), "--schema", "model.json", "--json"))
        self.assertEqual(told["findings"][0]["name"], "a\u001b[2J\nb")

    def test_names_cannot_break_out_of_any_output(self):
        names = ["x\n::error::owned", "x%0A::error::owned", "a]]></failure><x y='1'>&amp;\"", "bidi\u202egpj", "c1\u009b31m",
                 "esc\u001b]0;title\u0007", "tag\U000e0041", "\r::set-output name=a::b"]
        self.schema(edit=lambda s: s["tensors"].extend({"name": n, "dtype": "float32", "shape": [2]} for n in names))
        bad = re.compile("[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")
        for options in ((), ("--github",), ("--json",)):
            text = self.found(harness.corpus(MESH), "--schema", "model.json", "--junit", "r.xml", "--force", *options)
            self.assertIsNone(bad.search(text), options)
            if "--github" in options:  # one command for each finding; only its first characters are ours
                self.assertEqual([line for line in text.splitlines()[:-1] if not line.startswith("::error file=")], [])
                self.assertEqual(len(text.splitlines()), len(names) + 1)
            elif not options:
                self.assertEqual(len(text.splitlines()), len(names) + 1)
            else:
                self.assertEqual(sorted(f["name"] for f in json.loads(text)["findings"]), sorted(names))
            with open(self.path("r.xml"), encoding="utf-8") as f:
                self.assertIsNone(bad.search(f.read()))
            self.assertEqual({e.tag for e in xml.parse(self.path("r.xml")).iter()} - JUNIT_TAGS, set())

    def test_wrong_arguments_are_refused(self):
        self.schema()
        source = harness.corpus(MESH)
        self.fails(2, "check", source, "--schema", source, contains=["--schema", "--against"])
        self.fails(2, "check", source, "--schema", "model.json", "--against", source, contains=["give only one"])
        self.fails(2, "check", source, "--allow-missing", "x", contains=["--against or --schema"])
        self.fails(2, "check", source, "--tp-plan", "auto", contains=["--tp N"])
        self.fails(2, "check", source, "--json", "--github", contains=["one of --json and --github"])
        self.fails(2, "check", source, "--strip-prefix", "nothing.", contains=["no name has the prefix"])
        self.fails(2, "check", source, source, contains=["one argument too many"])

    def test_suggested_options_repair_the_findings(self):
        """A conversion with the options that check suggests gives a checkpoint that fits the schema."""
        def edit(schema):
            for t in schema["tensors"]:
                t["name"] = t["name"].removeprefix("model.")
                del t["path"]
                t["dtype"] = "bfloat16"

        self.schema(edit=edit)
        told = json.loads(self.found(harness.corpus(MESH), "--schema", "model.json", "--json"))
        options = " ".join(f["option"] for f in told["findings"]).split()
        self.assertEqual(options, ["--strip-prefix", "model.", "--dtype", "bf16"])
        self.ok("consolidate", harness.corpus(MESH), "-o", "new.h5", "-q", *options)
        self.ok("check", "new.h5", "--schema", "model.json")
        # With --strip-prefix, check reports what that option alone would not repair.
        told = json.loads(self.found(harness.corpus(MESH), "--schema", "model.json", "--json", *options[:2]))
        self.assertEqual([f["kind"] for f in told["findings"]], ["dtype"])
        self.assertEqual(len(told["findings"][0]["names"]), told["findings"][0]["count"])

    def test_allowed_and_excluded_names_are_not_reported(self):
        self.schema(STATE)
        source = harness.corpus(STATE)
        self.ok("consolidate", source, "-o", "m.h5", "-q", "--exclude", "optim.*")
        self.found("m.h5", "--schema", "model.json")
        self.assertIn(" allowed\n", self.ok("check", "m.h5", "--schema", "model.json", "--allow-missing", "optim.*"))
        self.ok("check", "m.h5", "--schema", "model.json", "--exclude", "optim.*")
        self.ok("check", source, "--against", "m.h5", "--allow-unexpected", "optim.*")
        self.ok("check", source, "--against", "m.h5", "--include", "model.*")

    def test_missing_and_truncated_shard_files_are_found(self):
        self.ok("reshard", harness.corpus(MESH), "-o", "s", "--dp", "4", "-q")
        shutil.copytree(self.path("s"), self.path("t"))
        os.unlink(self.path("t", "shard-00001-of-00004.h5"))
        os.truncate(self.path("t", "shard-00002-of-00004.h5"), 700)
        os.truncate(self.path("t", "shard-00003-of-00004.h5"), 10)
        told = json.loads(self.found("t", "--json"))
        self.assertEqual([f["kind"] for f in told["findings"]], ["file-missing", "file-truncated", "file-truncated"])


if __name__ == "__main__":
    harness.main()
