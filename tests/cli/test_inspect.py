"""inspect: its text, tree, JSON and HTML for checkpoints that torch wrote."""

import hashlib
import json
import math
import os
import re
import shutil
import xml.dom.minidom
import zipfile

import harness
import safetensors_file

FSDP2 = "dcp-torch2.15.0-fsdp2"
MESH = "dcp-torch2.15.0-2d-dp4tp2"


def expected(name):
    with open(os.path.join(harness.corpus(name), "expected.json")) as f:
        return json.load(f)


class Inspect(harness.Case):
    def test_messages_have_no_trailing_slash_of_the_argument(self):
        self.ok("reshard", harness.corpus("dcp-torch2.15.0-fsdp2"), "-o", "out/", "--dp", "2")
        for args in (["verify", "out//"], ["check", "out/"], ["diff", "out/", "out///"], ["inspect", "out//"]):
            self.assertNotIn("out/", self.ok(*args))
        os.unlink(self.path("out", "shard-00001-of-00002.h5"))
        for args in (["inspect", "out/"], ["inspect", "out//"], ["consolidate", "out/", "-o", "x.h5"], ["verify", "out/"]):
            self.fails(3, *args, contains=["fsdpckpt: out/shard-00001-of-00002.h5: the file is missing"])

    def test_page_does_not_replace_the_checkpoint(self):
        copy = self.copy("dcp-torch2.15.0-fsdp2")
        for name in (".metadata", "__0_0.distcp"):
            self.fails(2, "inspect", copy, "--html", os.path.join(copy, name), "--force", contains=["is a file of"])

    def test_json_agrees_with_torch(self):
        for name in sorted(os.listdir(harness.CORPUS)):
            if not os.path.isdir(os.path.join(harness.CORPUS, name)) or name.startswith("ds-"):
                continue  # for DeepSpeed this has only the result of zero_to_fp32; oracle.deepspeed compares it
            with self.subTest(name=name):
                want = expected(name)
                p = self.run_tool("inspect", harness.corpus(name), "--json")
                if p.returncode == 5:  # reported as unsupported
                    self.assertEqual(p.stderr.count("\n"), 1)
                    continue
                self.assertEqual((p.returncode, p.stderr), (0, ""))
                got = json.loads(p.stdout)
                tensors = {t["name"]: t for t in got["tensors"]}
                self.assertEqual(len(tensors), len(got["tensors"]))
                self.assertEqual(set(tensors), set(want["tensors"]))
                self.assertEqual({o["name"] for o in got["objects"]}, set(want.get("objects", {})))
                self.assertEqual(got["totals"]["tensors"], len(tensors))
                for fqn, t in want["tensors"].items():
                    self.assertEqual(tensors[fqn]["dtype"], t["dtype"], fqn)
                    self.assertEqual(tensors[fqn]["shape"], t["shape"], fqn)
                for o in got["objects"]:
                    self.assertTrue("value" in o or "error" in o, o)
                    self.assertNotIn("error", o)

    def test_layout_is_recognised(self):
        text = self.ok("inspect", harness.corpus(MESH))
        self.assertIn("8 ranks, mesh dp 4 × tp 2, recognised from the chunks", text)
        self.assertRegex(text, r"attention\.wq\.weight +256 bytes +float32 +8×8 +8×1 +\[_StridedShard\(0, 2\), Shard\(0\)\]\n")
        self.assertRegex(text, r"attention\.wo\.weight +256 bytes +float32 +8×8 +4×2 +\[Shard\(0\), Shard\(1\)\]\n")
        self.assertRegex(self.ok("inspect", harness.corpus(FSDP2)), r"Layout +\d ranks, Shard\(0\)\n")

    def schema(self, tensors, name="model.json"):
        """Writes a schema with these names and shapes."""
        with open(self.path(name), "w") as f:
            json.dump({"fsdpckpt": "schema", "version": 1, "tensors": [
                {"name": n, "dtype": "bf16", "shape": shape} for n, shape in tensors]}, f)
        return name

    def layers(self, count=32):
        one = [("attn.wq.weight", [64, 64]), ("mlp.w1.weight", [256, 64]), ("norm.weight", [64])]
        return self.schema([("embed.weight", [1000, 64])] +
                           [(f"layers.{i}.{n}", shape) for i in range(count) for n, shape in one] +
                           [("norm.weight", [64])])

    def test_layers_are_folded(self):
        text = self.ok("inspect", self.layers())
        self.assertRegex(text, r"\nlayers\.\{0\.\.31\}\.mlp\.w1\.weight +32 +1\.05 MB +bfloat16 +256×64 ")
        self.assertEqual(len(re.findall(r"^\S*(?:layers|norm|embed)\S* ", text, re.M)), 5)
        every = self.ok("inspect", "model.json", "--all")
        self.assertEqual(len(re.findall(r"^layers\.\d+\.\S+ ", every, re.M)), 96)
        tree = self.ok("inspect", "model.json", "--tree")
        self.assertIn("layers.{0..31}  (96 tensors, 1.31 MB)", tree)
        self.assertIn("(32 tensors, 1.05 MB)", tree)

    def test_different_tensors_are_not_folded(self):
        shapes = [[8, 8]] * 8
        shapes[3] = [8, 16]
        text = self.ok("inspect", self.schema([(f"h.{i}.w", s) for i, s in enumerate(shapes)]))
        self.assertRegex(text, r"h\.\{0\.\.2,4\.\.7\}\.w +7 .* 8×8 ")
        self.assertRegex(text, r"h\.3\.w +1 .* 8×16 ")

    def test_summary_is_last(self):
        lines = self.ok("inspect", self.layers()).splitlines()
        self.assertGreater(next(i for i, line in enumerate(lines) if line.startswith("Checkpoint ")),
                           next(i for i, line in enumerate(lines) if line.startswith("norm.weight")))

    def test_names_are_selected_and_sorted(self):
        def names(*args):
            return [t["name"] for t in json.loads(self.ok("inspect", "model.json", "--json", *args))["tensors"]]

        self.layers(12)
        every = names()
        self.assertEqual(names("--include", "*.norm.weight"), [f"layers.{i}.norm.weight" for i in range(12)])
        self.assertEqual(names("--exclude", "layers.*"), ["embed.weight", "norm.weight"])
        self.assertEqual(names("--sort", "source"), every)
        self.assertEqual(names("--sort", "name")[:5], ["embed.weight", "layers.0.attn.wq.weight", "layers.0.mlp.w1.weight",
                                                       "layers.0.norm.weight", "layers.1.attn.wq.weight"])
        self.assertEqual(names("--sort", "name")[-2:], ["layers.11.norm.weight", "norm.weight"])
        self.assertEqual(names("--sort", "size")[:2], ["embed.weight", "layers.0.mlp.w1.weight"])
        listed = re.findall(r"^(\S+) +\d+ +[\d.]+ \w+ +bf", self.ok("inspect", "model.json", "--sort", "size"), re.M)
        self.assertEqual(listed, ["layers.{0..11}.mlp.w1.weight", "embed.weight", "layers.{0..11}.attn.wq.weight",
                                  "layers.{0..11}.norm.weight", "norm.weight"])
        part = json.loads(self.ok("inspect", "model.json", "--json", "--include", "*.norm.weight"))
        self.assertEqual((part["totals"]["tensors"], part["totals"]["bytes"]), (12, 12 * 64 * 2))
        self.assertIn("Left out    26 by", self.ok("inspect", "model.json", "--include", "*.norm.weight"))
        self.fails(2, "inspect", "model.json", "--include", "nothing*", contains=["'nothing*' to include matches none of the 38 names"])
        self.fails(2, "inspect", "model.json", "--include", "norm", contains=["'*norm*' matches 'layers.0.norm.weight'"])
        self.fails(2, "inspect", "model.json", "--exclude", "*", contains=["leave out all 38 values"])
        self.fails(2, "inspect", "model.json", "--sort", "color", contains=["--sort"])

    def test_depth_sums_the_values_that_it_hides(self):
        self.layers(12)
        text = self.ok("inspect", "model.json", "--depth", "2")
        self.assertRegex(text, r"\nlayers\.\{0\.\.11\} +36 +493 kB\n")
        self.assertRegex(self.ok("inspect", "model.json", "--depth", "1"), r"\nlayers +36 +493 kB\n")
        self.assertIn("layers  (36 tensors, 493 kB)\n", self.ok("inspect", "model.json", "--depth", "1", "--tree"))
        self.fails(2, "inspect", "model.json", "--depth", "2", "--json", contains=["--depth"])
        hsdp = harness.corpus("dcp-torch2.15.0-hsdp")  # the summary still counts all tensors
        self.assertEqual(*(self.ok("inspect", hsdp, *depth).split("\nCheckpoint ")[1] for depth in ((), ("--depth", "1"))))

    def test_stats_are_columns(self):
        """tests/oracle/stats.py compares the numbers with NumPy's."""
        source = harness.corpus("dcp-torch2.15.0-dtypes")
        text = self.ok("inspect", source, "--stats")
        heading, line = text.splitlines()[0], next(x for x in text.splitlines() if x.startswith("bool "))
        self.assertEqual(heading.split()[-7:], ["MEAN", "STD", "MIN", "MAX", "ZEROS", "NAN", "INF"])
        self.assertEqual(len(heading), len(line))
        self.assertEqual(line.split()[-7:], ["0.3333", "0.4714", "0", "1", "8", "0", "0"])
        self.assertIn("\nValues      11 NaN in 10 tensors, first in float64\n", text)
        self.assertIn("\nValues      all finite\n", self.ok("inspect", harness.corpus(FSDP2), "--stats"))
        one = self.ok("inspect", source, "--stats", "--tensor", "int64")
        self.assertIn("  min         -9223372036854775808\n", one)
        self.assertNotIn("MEAN", self.ok("inspect", source, "--tensor", "int64"))

    def test_stats_need_data(self):
        source = harness.corpus(FSDP2)
        for args in (["--tree"], ["--depth", "1"], ["--headers-only"]):
            self.fails(2, "inspect", source, "--stats", *args, contains=["--stats cannot be combined"])
        self.layers(2)
        self.fails(2, "inspect", "model.json", "--stats", contains=["a schema has no data"])
        shutil.copytree(source, self.path("copy"))
        name = json.loads(self.ok("inspect", "copy", "--json"))["tensors"][0]["name"]
        with self.flipped_chunk("copy", name, 0):
            self.fails(3, "inspect", "copy", "--stats", contains=[name, "CRC-32"])
        self.ok("inspect", "copy", "--stats")

    def test_folded_name_selects_its_first_tensor(self):
        self.layers(4)
        text = self.ok("inspect", "model.json", "--tensor", "layers.{0..3}.norm.weight")
        self.assertTrue(text.startswith("layers.0.norm.weight\n"), text)

    def test_replicas_are_named(self):
        """HSDP 2 × 2 stores each box once. torch numbers ranks in row-major order, so rank r + 2 holds the same as rank r."""
        for source in (harness.corpus("dcp-torch2.15.0-hsdp"),
                       os.path.join(harness.CORPUS, "..", "pt", "hsdp-torch2.15.0")):
            everything = json.loads(self.ok("inspect", source, "--json"))
            self.assertEqual(everything["layout"]["sizes"], [2, 2])
            cut = next(t for t in everything["tensors"] if len(t["shape"]) == 2 and t["grid"] == [2, 1])
            one = json.loads(self.ok("inspect", source, "--json", "--tensor", cut["name"]))
            boxes = {tuple(c["offsets"]): c["held_by"] for c in one["chunks"]}
            self.assertEqual([boxes[at] for at in sorted(boxes)], [[0, 2], [1, 3]])
            text = self.ok("inspect", source, "--tensor", cut["name"])
            self.assertIn("│ ranks 0, 2 │", text)
            self.assertIn("│ ranks 1, 3 │", text)

    def test_sizes_of_ranks(self):
        for name, ranks in ((FSDP2, 4), (MESH, 8), ("dcp-torch2.15.0-hsdp-tp", 8), ("dcp-torch2.15.0-uneven", None)):
            got = json.loads(self.ok("inspect", harness.corpus(name), "--json"))
            stored = {}
            for t in got["tensors"]:
                elements = max(1, math.prod(t["shape"]))
                for c in t["chunks"]:
                    at = stored.setdefault(c["rank"], [set(), 0])
                    at[0].add(t["name"])
                    at[1] += math.prod(c["sizes"]) * t["bytes"] // elements
            if ranks:
                self.assertEqual(len(got["ranks"]), ranks)
            for r in got["ranks"]:
                names, size = stored.get(r["rank"], (set(), 0))
                self.assertEqual((r["stored_tensors"], r["stored_bytes"]), (len(names), size), name)
            self.assertEqual(sum(r["stored_bytes"] for r in got["ranks"]), got["totals"]["bytes"])
        # With HSDP, replicas hold the same, and the two ranks of a replica hold the whole model.
        got = json.loads(self.ok("inspect", harness.corpus("dcp-torch2.15.0-hsdp"), "--json"))
        held = [r["held_bytes"] for r in got["ranks"]]
        freqs = 32  # a buffer of 8 float32 values that is not cut, so each rank has a copy
        self.assertEqual(held[:2], held[2:])
        self.assertEqual(held[0] + held[1] - freqs, got["totals"]["bytes"])

    def test_one_tensor_is_drawn(self):
        text = self.ok("inspect", harness.corpus(MESH), "--tensor", "model.layers.0.attention.wo.weight")
        self.assertIn("│ rank 0 │ rank 1 │", text)
        self.assertIn("│ rank 6 │ rank 7 │", text)
        self.assertIn("__7_0.distcp", text)
        plain = self.ok("inspect", harness.corpus(MESH), "--tensor", "model.layers.0.attention.wo.weight",
                        env={"LC_ALL": "C"})
        self.assertIn("| rank 0 | rank 1 |", plain)
        one = json.loads(self.ok("inspect", harness.corpus(MESH), "--json", "--tensor", "model.layers.0.attention.wo.weight"))
        self.assertEqual(one["grid"], [4, 2])
        self.assertEqual([c["rank"] for c in one["chunks"]], list(range(8)))

    def test_data_offset_finds_the_bytes(self):
        """The offset in `--tensor --json` is where torch wrote the elements."""
        want = expected(FSDP2)
        checked = 0
        for fqn, t in want["tensors"].items():
            one = json.loads(self.ok("inspect", harness.corpus(FSDP2), "--json", "--tensor", fqn))
            if len(one["shape"]) != 1 or not all("data_offset" in c for c in one["chunks"]):
                continue
            files = json.loads(self.ok("inspect", harness.corpus(FSDP2), "--json"))["files"]
            data = b""
            for c in sorted(one["chunks"], key=lambda c: c["offsets"]):
                with open(os.path.join(harness.corpus(FSDP2), files[c["file"]]["name"]), "rb") as f:
                    f.seek(c["data_offset"])
                    data += f.read(c["sizes"][0] * one["bytes"] // one["shape"][0])
            self.assertEqual(hashlib.sha256(data).hexdigest(), t["sha256"], fqn)
            checked += 1
        self.assertGreater(checked, 0)

    def test_unknown_tensor_gets_a_suggestion(self):
        error = self.fails(2, "inspect", harness.corpus(MESH), "--tensor", "model.norm.wieght")
        self.assertIn("did you mean 'model.norm.weight'", error)
        error = self.fails(2, "inspect", harness.corpus(MESH), "--tensor", "wq.weight")
        self.assertIn("'model.layers.0.attention.wq.weight'", error)
        self.fails(2, "inspect", harness.corpus(MESH), "--tensor", "zzzz", contains=["no tensor or object 'zzzz'"])

    def test_tree_shows_modules(self):
        text = self.ok("inspect", harness.corpus("dcp-torch2.15.0-train"), "--tree")
        self.assertIn("├─ model  (", text)
        self.assertIn("tok_embeddings.weight  float32  11×6", text)
        names = self.ok("inspect", harness.corpus("dcp-torch2.15.0-names"), "--tree")
        self.assertNotIn("\t", names)
        self.assertNotIn("\x1b", names)

    def test_objects_are_shown_with_values(self):
        values = {o["name"]: o for o in json.loads(
            self.ok("inspect", harness.corpus("dcp-torch2.15.0-train"), "--json"))["objects"]}
        self.assertTrue(values)
        self.assertIn("step", values)
        self.assertIn("VALUE", self.ok("inspect", harness.corpus("dcp-torch2.15.0-train")))

    def test_large_pickle_is_not_read(self):
        """A deflated archive of 200 kB claims to hold an object of 200 MB. It is not unpacked, and is copied unchanged."""
        ckpt = self.copy("dcp-torch2.15.0-train")
        with zipfile.ZipFile(os.path.join(ckpt, "bomb"), "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/byteorder", b"little")
            archive.writestr("archive/data.pkl", b"\x80\x02" + b"N" * 200_000_000 + b".")
        size = os.path.getsize(os.path.join(ckpt, "bomb"))

        def edit(data):
            key = next(k for k in data.storage_data if k.fqn == "step")
            data.storage_data[key].state.update(relative_path="bomb", offset=0, length=size)

        harness.edit_metadata(ckpt, edit)
        step = next(o for o in json.loads(self.ok("inspect", "--json", ckpt))["objects"] if o["name"] == "step")
        self.assertEqual(step["value"], {"$omitted": "too large"})
        self.ok("consolidate", ckpt, "-o", "m.h5")

    def test_headers_only_needs_no_data(self):
        bare = self.path("bare")
        os.mkdir(bare)
        shutil.copy(os.path.join(harness.corpus("dcp-torch2.15.0-train"), ".metadata"), bare)
        self.fails(3, "inspect", bare)
        for way in ((), ("--json",), ("--tree",)):
            text = self.ok("inspect", bare, "--headers-only", *way)
            self.assertIn("tok_embeddings.weight", text)
        got = json.loads(self.ok("inspect", bare, "--headers-only", "--json"))
        self.assertTrue(got["objects"])
        self.assertFalse(any("value" in o for o in got["objects"]))
        self.ok("inspect", bare, "--headers-only", "--tensor", got["tensors"][0]["name"])

    def test_html_is_one_well_formed_page(self):
        self.assertEqual(self.ok("inspect", harness.corpus(MESH), "--html", "page.html"), "")
        with open(self.path("page.html"), encoding="utf-8") as f:
            page = f.read()
        # Without the script the page has the summary, the tree and the placements.
        plain = re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)
        for text in ("8 ranks, mesh dp 4 × tp 2", "<dt>Tensors</dt><dd>11</dd>", "8×64", "_StridedShard(0, 2)", "__7_0.distcp"):
            self.assertIn(text, plain)
        self.assertNotRegex(page, r"(?:src|href)=.?(?:http|//)|url\(|@import")
        body = plain[plain.index("<body>"):plain.index("</html>")]
        xml.dom.minidom.parseString(re.sub(r"<(input[^>]*)>", r"<\1/>", re.sub(r" (open|hidden)(?=[ >])", r' \1=""', body)))
        self.fails(2, "inspect", harness.corpus(MESH), "--html", "page.html", contains=["--force"])
        self.ok("inspect", harness.corpus(MESH), "--html", "page.html", "--force")
        self.ok("inspect", harness.corpus("dcp-torch2.15.0-names"), "--html", "names.html")
        self.assertEqual(self.listing(), ["names.html", "page.html"])

    def test_page_of_many_layers_is_small(self):
        self.ok("inspect", self.layers(333), "--html", "page.html")
        self.assertLess(os.path.getsize(self.path("page.html")), 60_000)
        self.assertEqual(len(json.loads(self.ok("inspect", "model.json", "--json"))["tensors"]), 1001)

    def test_a_set_without_a_record_of_its_size_says_what_it_assumed(self):
        def write(folder, names):
            os.mkdir(self.path(folder))
            for i, name in enumerate(names):
                head, _, size = safetensors_file.head({"layers.%d.w" % i: ("F32", [2])})
                with open(self.path(folder, name + ".safetensors"), "wb") as f:
                    f.write(head + bytes(size))
        write("unnumbered", ["part0", "part1", "part2"])
        assumed = "3 files, no index: assumed complete"
        self.assertIn(assumed, self.ok("inspect", "unnumbered"))
        self.assertEqual(json.loads(self.ok("inspect", "unnumbered", "--json"))["note"], assumed)
        self.assertIn(assumed, self.ok("check", "unnumbered"))
        for target in ("o.h5", "o.pt", "o.safetensors"):
            p = self.run_tool("consolidate", "unnumbered", "-o", target)
            self.assertEqual((p.returncode, p.stderr.count(assumed)), (0, 1), p.stderr)
        write("unrelated", ["a", "b", "c"])
        self.fails(2, "inspect", "unrelated", contains=["has 3 checkpoints", "a.safetensors", "b.safetensors", "c.safetensors"])
        write("numbered", ["model-00001-of-00002", "model-00002-of-00002"])
        self.assertNotIn("assumed", self.ok("inspect", "numbered"))
        write("one", ["model"])
        self.assertNotIn("assumed", self.ok("inspect", "one"))
        for number, name in ((1, "first"), (2, "last")):
            folder = shutil.copytree(self.path("numbered"), self.path(name))
            os.remove(os.path.join(folder, "model-0000%d-of-00002.safetensors" % number))
            self.fails(3, "inspect", name, contains=["is missing"])

    def test_rank_files_without_a_record_of_their_number_say_what_was_assumed(self):
        assumed = "2 files of ranks, no record of their number: assumed complete"
        head, _, size = safetensors_file.head({"w": ("F32", [2])})
        with open(self.path("a.safetensors"), "wb") as f:
            f.write(head + bytes(size))
        self.ok("consolidate", "a.safetensors", "-o", "a.pt")
        for folder, names in (("named", ["rank_0.pt", "rank_1.pt"]), ("counted", ["m_world_size_2_rank_%d.pt" % r for r in (0, 1)])):
            os.mkdir(self.path(folder))
            for name in names:
                shutil.copy(self.path("a.pt"), self.path(folder, name))
        self.assertIn(assumed, self.ok("inspect", "named"))
        self.assertIn(assumed, self.run_tool("convert", "named", "-o", "o.h5").stderr)
        self.assertNotIn("assumed", self.ok("inspect", "counted"))

    def test_quiet_sets_only_the_exit_status(self):
        self.assertEqual(self.ok("inspect", "-q", harness.corpus(FSDP2)), "")


if __name__ == "__main__":
    harness.main()
