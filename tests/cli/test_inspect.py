"""inspect: what it shows of checkpoints that torch wrote, in all its ways."""

import hashlib
import json
import os
import shutil
import xml.dom.minidom
import zipfile

import harness

FSDP2 = "dcp-torch2.15.0-fsdp2"
MESH = "dcp-torch2.15.0-2d-dp4tp2"


def expected(name):
    with open(os.path.join(harness.corpus(name), "expected.json")) as f:
        return json.load(f)


class Inspect(harness.Case):
    def test_slashes_of_completion_are_not_shown(self):
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

    def test_json_says_what_torch_said(self):
        for name in sorted(os.listdir(harness.CORPUS)):
            if not os.path.isdir(os.path.join(harness.CORPUS, name)) or name.startswith("ds-"):
                continue  # the truth of DeepSpeed's is what its zero_to_fp32 gives, a part: oracle.deepspeed compares
            with self.subTest(name=name):
                want = expected(name)
                p = self.run_tool("inspect", harness.corpus(name), "--json")
                if p.returncode == 5:  # said clearly to be unsupported
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
        self.assertIn("8 ranks, 4 × 2 mesh (FSDP × TP)", text)
        self.assertRegex(text, r"attention\.wq\.weight +float32 +8×8 +8×1 +\[_StridedShard\(0, 2\), Shard\(0\)\]\n")
        self.assertRegex(text, r"attention\.wo\.weight +float32 +8×8 +4×2 +\[Shard\(0\), Shard\(1\)\]\n")
        self.assertRegex(self.ok("inspect", harness.corpus(FSDP2)), r"Layout +\d ranks, Shard\(0\)\n")

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
        """The offset that --tensor --json names is where torch put the elements."""
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

    def test_unknown_tensor_is_helped(self):
        error = self.fails(2, "inspect", harness.corpus(MESH), "--tensor", "model.norm.wieght")
        self.assertIn("did you mean 'model.norm.weight'", error)
        error = self.fails(2, "inspect", harness.corpus(MESH), "--tensor", "wq.weight")
        self.assertIn("'model.layers.0.attention.wq.weight'", error)
        self.fails(2, "inspect", harness.corpus(MESH), "--tensor", "zzzz", contains=["no tensor or object 'zzzz'"])

    def test_tree(self):
        text = self.ok("inspect", harness.corpus("dcp-torch2.15.0-train"), "--tree")
        self.assertIn("├─ model  (", text)
        self.assertIn("tok_embeddings.weight  float32  11×6", text)
        names = self.ok("inspect", harness.corpus("dcp-torch2.15.0-names"), "--tree")
        self.assertNotIn("\t", names)
        self.assertNotIn("\x1b", names)

    def test_objects(self):
        values = {o["name"]: o for o in json.loads(
            self.ok("inspect", harness.corpus("dcp-torch2.15.0-train"), "--json"))["objects"]}
        self.assertTrue(values)
        self.assertIn("step", values)
        self.assertIn("VALUE", self.ok("inspect", harness.corpus("dcp-torch2.15.0-train")))

    def test_large_pickle_is_not_read(self):
        """An object of 200 MB that a deflated archive of 200 kB claims: no memory for it, and its bytes stay whole."""
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
        self.assertIn("<svg", page)
        self.assertNotIn("<script", page)
        self.assertNotIn("http://", page)
        body = page[page.index("<body>"):page.index("</html>")]
        xml.dom.minidom.parseString(body.replace("<br>", "<br/>"))
        self.fails(2, "inspect", harness.corpus(MESH), "--html", "page.html", contains=["--force"])
        self.ok("inspect", harness.corpus(MESH), "--html", "page.html", "--force")
        self.ok("inspect", harness.corpus("dcp-torch2.15.0-names"), "--html", "names.html")
        self.assertEqual(self.listing(), ["names.html", "page.html"])

    def test_quiet_only_answers(self):
        self.assertEqual(self.ok("inspect", "-q", harness.corpus(FSDP2)), "")


if __name__ == "__main__":
    harness.main()
