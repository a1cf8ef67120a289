"""schema: its output, reading it again, the plan of one rank for a schema, refused inputs."""

import json
import os

import harness

MESH = "dcp-torch2.15.0-2d-dp4tp2"
STATE = "dcp-torch2.15.0-fsdp1-optim"


class Schema(harness.Case):
    def schema(self, source, to="model.json"):
        text = self.ok("schema", source)
        with open(self.path(to), "w") as f:
            f.write(text)
        return json.loads(text)

    def test_schema_agrees_with_inspect(self):
        schema = self.schema(harness.corpus(STATE))
        self.assertEqual((schema["fsdpckpt"], schema["schema"]), ("schema", 1))
        seen = json.loads(self.ok("inspect", harness.corpus(STATE), "--json"))
        want = [(t["name"], t["dtype"], t["shape"], t["path"]) for t in seen["tensors"]]
        got = [(t["name"], t["dtype"], t["shape"], t.get("path", [t["name"]])) for t in schema["tensors"]]
        self.assertEqual(got, want)
        self.assertEqual([o["name"] for o in schema["objects"]], [o["name"] for o in seen["objects"]])
        self.assertGreater(len(schema["objects"]), 0)

    def test_schema_of_a_schema_is_the_same(self):
        self.schema(harness.corpus(STATE))
        self.schema("model.json", "again.json")
        with open(self.path("model.json")) as a, open(self.path("again.json")) as b:
            self.assertEqual(a.read(), b.read())

    def test_reads_schemas_of_earlier_builds(self):
        """They have "version" instead of "schema"."""
        schema = self.schema(harness.corpus(STATE))
        old = dict(schema, version=schema["schema"])
        del old["schema"]
        with open(self.path("old.json"), "w") as f:
            json.dump(old, f)
        self.ok("check", harness.corpus(STATE), "--schema", "old.json")
        for version, message in ((2, "version 2"), ("1", '"version" should be a number')):
            with open(self.path("old.json"), "w") as f:
                json.dump(dict(old, version=version), f)
            self.assertIn(message, self.run_tool("inspect", "old.json").stderr)

    def test_is_the_same_for_every_layout(self):
        self.ok("reshard", harness.corpus(MESH), "-o", "a", "--dp", "3")
        self.ok("reshard", harness.corpus(MESH), "-o", "b", "--dp", "2", "--tp", "2", "--replicas", "2")
        self.assertEqual(self.ok("schema", "a"), self.ok("schema", "b"))

    def test_schema_needs_no_data_files(self):
        copy = self.copy(MESH)
        want = self.ok("schema", copy)
        for name in os.listdir(copy):
            if name.endswith(".distcp"):
                os.unlink(os.path.join(copy, name))
        self.assertEqual(self.ok("schema", copy), want)

    def test_selects_and_writes_a_file(self):
        source = harness.corpus(STATE)
        whole = json.loads(self.ok("schema", source))
        self.assertEqual(self.ok("schema", source, "-o", "all.json"), "")
        with open(self.path("all.json")) as f:
            self.assertEqual(f.read(), self.ok("schema", source, "-o", "-"))
        self.ok("schema", source, "-o", "model.json", "--include", "model.*", "--exclude", "*.bias", "--strip-prefix", "model.")
        with open(self.path("model.json")) as f:
            model = json.load(f)
        want = [t["name"][6:] for t in whole["tensors"] if t["name"].startswith("model.") and not t["name"].endswith(".bias")]
        self.assertEqual([t["name"] for t in model["tensors"]], want)
        self.assertLess(0, len(want))
        self.assertLess(len(want), len(whole["tensors"]))
        self.assertEqual(model["objects"], [])
        self.ok("check", source, "--schema", "model.json", "--include", "model.*", "--exclude", "*.bias",
                "--strip-prefix", "model.", "-q")
        self.fails(2, "schema", source, "--include", "nothing.*", contains=["the glob 'nothing.*' to include matches none"])

    def test_failed_run_writes_no_file(self):
        self.schema(harness.corpus(STATE))
        self.fails(2, "schema", harness.corpus(MESH), "-o", "model.json", contains=["model.json: exists; --force"])
        self.ok("schema", harness.corpus(MESH), "-o", "model.json", "--force")
        with open(self.path("model.json")) as f:
            self.assertEqual(f.read(), self.ok("schema", harness.corpus(MESH)))
        copy = self.copy(MESH)
        self.fails(2, "schema", copy, "-o", os.path.join(copy, ".metadata"), "-f", contains=["is a file of the check"])
        self.ok("inspect", copy)
        self.assertEqual(self.listing(), ["ckpt", "model.json"])

    def test_inspect_reads_a_schema(self):
        self.schema(harness.corpus(STATE))
        text = self.ok("inspect", "model.json")
        self.assertIn("schema", text)
        self.assertIn("no data", text)
        got = json.loads(self.ok("inspect", "model.json", "--json"))
        self.assertEqual(got["format"], "schema")
        self.assertEqual(got["totals"]["chunks"], 0)
        self.ok("inspect", "model.json", "--tree")
        self.ok("inspect", "model.json", "--tensor", got["tensors"][0]["name"])
        self.ok("inspect", "model.json", "--html", "page.html")

    def test_schema_cannot_be_converted(self):
        self.schema(harness.corpus(MESH))
        for args in (["consolidate", "model.json", "-o", "m.h5"], ["reshard", "model.json", "-o", "out", "--dp", "2"]):
            self.fails(2, *args, contains=["model.json: a schema", "--dry-run"])
        self.assertEqual(self.listing(), ["model.json"])

    def test_wrong_schemas_are_explained(self):
        with open(self.path("bad.json"), "w") as f:
            f.write('{"fsdpckpt": "schema", "schema": 1,\n "tensors": [{"name": "w", "dtype": "f32"}]}')
        self.fails(3, "inspect", "bad.json", contains=["bad.json: tensor 'w' has no \"shape\""])
        with open(self.path("cut.json"), "w") as f:
            f.write('{"fsdpckpt": "schema", "schema": 1,\n "tensors": [{"name": "w"')
        self.fails(3, "inspect", "cut.json", contains=["cut.json:2:25: '}' expected near end of file"])
        with open(self.path("other.json"), "w") as f:
            f.write('{"model": 1}')
        self.fails(3, "inspect", "other.json", contains=["not a checkpoint"])


class Plan(harness.Case):
    def setUp(self):
        super().setUp()
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", harness.corpus(MESH)))

    def plan(self, source, rank, *mesh):
        return json.loads(self.ok("reshard", source, *mesh, "--dry-run", "--rank", rank, "--json"))

    def test_dry_run_needs_no_target(self):
        a = json.loads(self.ok("reshard", "model.json", "--dp", "4", "--tp", "2", "--dry-run", "--json"))
        b = json.loads(self.ok("reshard", harness.corpus(MESH), "--dp", "4", "--tp", "2", "--dry-run", "--json"))
        for key in ("tensors", "files", "data_bytes", "largest_file", "smallest_file", "header_bytes"):
            self.assertEqual(a[key], b[key], key)
        self.assertEqual(self.listing(), ["model.json"])
        self.fails(2, "reshard", "model.json", "--dp", "4", contains=["--output"])

    def test_ranks_hold_what_reshard_writes(self):
        mesh = ["--replicas", "2", "--dp", "2", "--tp", "2"]
        self.ok("reshard", harness.corpus(MESH), "-o", "out", *mesh)
        written = {}
        for t in json.loads(self.ok("inspect", "out", "--json"))["tensors"]:
            for c in t["chunks"]:
                written[t["name"], c["rank"]] = (c["offsets"], c["sizes"])
        planned, total = {}, 0
        for rank in range(8):
            plan = self.plan("model.json", rank, *mesh)
            self.assertEqual((plan["rank"], plan["ranks"]), (rank, 8))
            self.assertEqual(plan["coordinate"], {"replicate": rank // 4, "dp": rank // 2 % 2, "tp": rank % 2})
            self.assertEqual(plan["reads"], 0)
            self.assertEqual(plan["held_bytes"], sum(v["bytes"] for v in plan["values"]))
            total += plan["stored_bytes"]
            for v in plan["values"]:
                if v["stored_by"] == rank and v["bytes"]:
                    planned[v["name"], rank] = (v["offsets"], v["sizes"])
        self.assertEqual(planned, written)
        whole = json.loads(self.ok("inspect", harness.corpus(MESH), "--json"))["totals"]["bytes"]
        self.assertEqual(total, whole)

    def test_reads_cover_what_is_stored(self):
        for rank in range(6):
            plan = self.plan(harness.corpus(MESH), rank, "--dp", "3", "--tp", "2")
            for v in plan["values"]:
                read = sum(r["bytes"] for r in v["reads"])
                self.assertEqual(read, v["bytes"] if v["stored_by"] == rank else 0, v)
                for r in v["reads"]:
                    self.assertTrue(r["file"].endswith(".distcp"))
                    for o, s, low, size in zip(r["offsets"], r["sizes"], v["offsets"], v["sizes"]):
                        self.assertTrue(low <= o and o + s <= low + size)
            self.assertEqual(plan["read_bytes"], plan["stored_bytes"])

    def test_plan_as_text(self):
        text = self.ok("reshard", harness.corpus(MESH), "--dp", "3", "--dry-run", "--rank", "2")
        lines = text.splitlines()
        self.assertEqual(lines[0], "rank 2 of 3: dp 2")
        self.assertRegex(lines[1], r"^ *\d+ bytes  float32   model\.freqs \[6:8\]$")
        self.assertRegex(lines[2], r"^ +\d+ bytes  from __\d_0\.distcp \[6:8\]$")
        self.assertRegex(lines[-1], r"^holds 11 tensors, 0 objects, .*; stores 11 boxes, .*, from \d+ reads, ")

    def test_wrong_ranks_and_meshes_are_refused(self):
        self.fails(2, "reshard", "model.json", "--dp", "4", "--dry-run", "--rank", "4", contains=["--rank 4", "0 to 3"])
        self.fails(2, "reshard", "model.json", "--dp", "4", "--rank", "1", "-o", "x", contains=["--dry-run"])
        self.fails(2, "reshard", "model.json", "--dp", "4", "--rank", "-1", "--dry-run", contains=["--rank", "from 0 to"])
        self.fails(2, "reshard", harness.corpus(MESH), "--dp", "2", "-o", "x", "--memory", "100K", contains=["at least 1 MiB is needed; raise --memory"])
        self.assertEqual(self.listing(), ["model.json"])

    def test_plan_for_a_large_mesh(self):
        plan = self.plan("model.json", (1 << 20) - 1, "--dp", "131072", "--tp", "8")
        self.assertEqual(plan["ranks"], 1 << 20)
        whole = json.loads(self.ok("reshard", "model.json", "--dp", "131072", "--tp", "8", "--dry-run", "--json"))
        self.assertEqual(whole["files"], (1 << 20) + 1)
        self.assertEqual(whole["smallest_file"], 0)


if __name__ == "__main__":
    harness.main()
