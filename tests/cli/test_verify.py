"""verify: the report on intact checkpoints, and every defect with file, offset and tensor; seals."""

import json
import os
import shutil

import harness

MESH = "dcp-torch2.15.0-2d-dp4tp2"
STATE = "dcp-torch2.15.0-fsdp1-optim"


def flip(path, at, bit=0):
    with open(path, "r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit]))


def at(path, record):
    """The offset of the data of the first zip record with this name."""
    with open(path, "rb") as f:
        data = f.read()
    name = data.find(b"/" + record)
    header = data.rfind(b"PK\x03\x04", 0, name)
    return header + 30 + int.from_bytes(data[header + 26:header + 28], "little") + int.from_bytes(
        data[header + 28:header + 30], "little")


class Verify(harness.Case):
    def report(self, source, status=0):
        p = self.run_tool("verify", source, "--json")
        self.assertEqual((p.returncode, p.stderr), (status, ""), p.stdout)
        return json.loads(p.stdout)

    def extents(self, source):
        """(file, offset, bytes, tensor) of all stored data."""
        seen = json.loads(self.ok("inspect", source, "--json"))
        files = [f["name"] if isinstance(f, dict) else f for f in seen["files"]]
        return [(files[c["file"]] if isinstance(c["file"], int) else c["file"], c["offset"], c["length"], t["name"])
                for t in seen["tensors"] for c in t["chunks"] if c["length"]]

    def test_intact_checkpoints_have_no_defects(self):
        self.ok("reshard", harness.corpus(MESH), "-o", "2d", "--dp", "2", "--tp", "2")
        self.ok("consolidate", "2d", "-o", "full.h5", "--compress", "1")
        for source, files in (("2d", 5), ("full.h5", 1)):
            r = self.report(source)
            self.assertEqual((r["defects"], r["without_digest"], r["files_with_header_digest"]), ([], 0, files))
        text = self.ok("verify", "2d")
        self.assertIn("the headers of 5 of 5 files\n", text)
        self.assertTrue(text.endswith("no defects\n"))
        self.assertEqual(self.ok("verify", "2d", "-q"), "")

    def test_dcp_report_lists_files_without_digests(self):
        text = self.ok("verify", harness.corpus(STATE))
        self.assertIn("not covered: .metadata", text)
        r = self.report(harness.corpus(STATE))
        self.assertEqual((r["defects"], r["without_digest"]), ([], 0))
        self.assertGreater(r["objects"], 0)

    def test_every_defect_is_reported(self):
        """One flipped bit in each stored box gives one defect per box, each with its file and offset."""
        self.ok("reshard", harness.corpus(MESH), "-o", "2d", "--dp", "2", "--tp", "2")
        broken = self.extents("2d")
        self.assertGreater(len(broken), 10)
        for file, offset, length, _ in broken:
            flip(self.path("2d", file), offset + length - 1, 6)
        r = self.report("2d", 1)
        told = {(d["file"], d["offset"], d["tensor"]) for d in r["defects"]}
        self.assertEqual(told, {(f, o, t) for f, o, _, t in broken})
        for d in r["defects"]:
            self.assertIn(f"2d/{d['file']}: offset {d['offset']}: tensor {d['tensor']}, box ", d["message"])
        self.assertIn(f"{len(broken)} defects\n", self.run_tool("verify", "2d").stdout)

    def test_damaged_hdf5_headers(self):
        self.ok("reshard", harness.corpus(MESH), "-o", "2d", "--dp", "2", "--tp", "2")
        with open(self.path("2d", "index.h5"), "rb") as f:
            producer = f.read().find(b"fsdpckpt 0")  # HDF5 has no checksum for this string
        flip(self.path("2d", "index.h5"), producer)
        r = self.report("2d", 1)
        self.assertEqual([(d["file"], d["offset"], d["tensor"]) for d in r["defects"]], [("index.h5", None, None)])
        self.assertIn("its headers are damaged", r["defects"][0]["message"])
        flip(self.path("2d", "index.h5"), producer)
        with open(self.path("2d", "shard-00001-of-00004.h5"), "r+b") as f:  # after the end of the HDF5 data
            f.seek(-1, 2)
            f.truncate()
        self.assertEqual(self.run_tool("verify", "2d").returncode, 3)

    def test_damaged_dcp_records(self):
        shutil.copytree(harness.corpus(STATE), self.path("ckpt"))
        file, _, _, tensor = self.extents("ckpt")[0]
        path = self.path("ckpt", file)
        chunk = json.loads(self.ok("inspect", "ckpt", "--tensor", tensor, "--json"))["chunks"][0]
        flip(path, chunk["data_offset"])
        r = self.report("ckpt", 1)
        self.assertEqual([(d["file"], d["tensor"]) for d in r["defects"]], [(file, tensor)])
        self.assertIn("CRC-32", r["defects"][0]["message"])
        for record in (b"data.pkl", b"byteorder", b".data/serialization_id", b"version"):
            flip(path, chunk["data_offset"])
            flip(path, at(path, record))
            r = self.report("ckpt", 1)
            self.assertEqual([(d["file"], d["tensor"]) for d in r["defects"]], [(file, tensor)], record)
            flip(path, at(path, record))
            flip(path, chunk["data_offset"])

    def test_damaged_torch_save_records(self):
        self.ok("consolidate", harness.corpus(STATE), "-o", "model.pt")
        r = self.report("model.pt")
        self.assertEqual((r["defects"], r["without_digest"]), ([], 0))
        _, offset, length, tensor = self.extents("model.pt")[1]
        flip(self.path("model.pt"), offset + length - 1, 2)
        flip(self.path("model.pt"), at(self.path("model.pt"), b"version"))
        r = self.report("model.pt", 1)
        self.assertEqual({(d["offset"], d["tensor"]) for d in r["defects"]},
                         {(offset, tensor), (at(self.path("model.pt"), b"version"), None)})

    def test_seal_covers_every_byte(self):
        """The seal is a file next to the checkpoint, which stays unchanged. verify then covers every byte."""
        shutil.copytree(harness.corpus(STATE), self.path("ckpt"))
        before = sorted((n, os.stat(self.path("ckpt", n)).st_mtime_ns) for n in os.listdir(self.path("ckpt")))
        counted = self.report("ckpt")
        self.assertIn("ckpt.fsdpckpt-seal.json\n", self.ok("verify", "ckpt/", "--seal"))
        after = self.report("ckpt")
        for count in ("tensors", "objects", "with_digest", "without_digest", "bytes_without_digest"):
            self.assertEqual(after[count], counted[count], count)
        self.assertEqual(sorted(os.listdir(self.dir)), ["ckpt", "ckpt.fsdpckpt-seal.json"])
        self.assertEqual(
            sorted((n, os.stat(self.path("ckpt", n)).st_mtime_ns) for n in os.listdir(self.path("ckpt"))), before)
        self.fails(2, "verify", "ckpt", "--seal", contains=["seal.json: exists", "--force"])
        self.ok("verify", "ckpt", "--seal", "--force")
        self.assertTrue(self.report("ckpt")["sealed"])
        with open(self.path("ckpt.fsdpckpt-seal.json")) as f:
            sealed = json.load(f)
        old = dict(sealed, version=sealed["schema"])  # as earlier versions wrote it
        del old["schema"]
        with open(self.path("ckpt.fsdpckpt-seal.json"), "w") as f:
            json.dump(old, f)
        self.assertTrue(self.report("ckpt")["sealed"])
        self.assertEqual({f["name"] for f in sealed["files"]}, {"__0_0.distcp", "__1_0.distcp", ".metadata"})
        for name in (f["name"] for f in sealed["files"]):
            size = os.path.getsize(self.path("ckpt", name))
            for place in (size // 3, size // 2, size - 20):
                flip(self.path("ckpt", name), place, 3)
                p = self.run_tool("verify", "ckpt", "--json")
                self.assertIn(p.returncode, (1, 3, 5), (name, place))
                if p.returncode == 1:
                    self.assertIn(name, {d["file"] for d in json.loads(p.stdout)["defects"]})
                flip(self.path("ckpt", name), place, 3)
        with open(self.path("ckpt", "__0_0.distcp"), "ab") as f:
            f.write(b"x")
        self.assertIn("when it was sealed", self.run_tool("verify", "ckpt").stdout)

    def test_conversions_compare_with_the_seal(self):
        shutil.copytree(harness.corpus(STATE), self.path("ckpt"))
        self.ok("verify", "ckpt", "--seal")
        self.ok("consolidate", "ckpt", "-o", "good.h5")
        file, _, _, tensor = self.extents("ckpt")[0]
        chunk = json.loads(self.ok("inspect", "ckpt", "--tensor", tensor, "--json"))["chunks"][0]
        flip(self.path("ckpt", file), chunk["data_offset"], 7)
        self.fails(3, "consolidate", "ckpt", "-o", "bad.h5", contains=["tensor " + tensor, "the archive records"])
        self.ok("consolidate", "good.h5", "-o", "plain.safetensors", "-q")  # a format without CRCs
        self.ok("verify", "plain.safetensors", "--seal")
        _, offset, _, tensor = self.extents("plain.safetensors")[0]
        flip(self.path("plain.safetensors"), offset)
        self.fails(3, "consolidate", "plain.safetensors", "-o", "bad.h5",
                   contains=["plain.safetensors: tensor " + tensor, "seal.json"])
        self.assertEqual(self.run_tool("verify", "ckpt", "--seal", "--force").returncode, 1)  # a damaged checkpoint is not sealed
        with open(self.path("ckpt.fsdpckpt-seal.json"), "w") as f:
            f.write('{"fsdpckpt": "seal", "version": 1, "files": []}')
        self.fails(3, "verify", "ckpt", contains=["ckpt.fsdpckpt-seal.json", "remove it"])

    def test_replacing_a_target_removes_its_seal(self):
        self.ok("consolidate", harness.corpus(MESH), "-o", "full.h5")
        self.ok("verify", "full.h5", "--seal")
        self.ok("consolidate", harness.corpus(STATE), "-o", "full.h5", "--force")
        self.assertEqual(os.listdir(self.dir), ["full.h5"])
        self.ok("verify", "full.h5")

    def test_unreadable_checkpoints_are_refused(self):
        self.fails(3, "verify", "nowhere", contains=["nowhere"])
        self.ok("consolidate", harness.corpus(MESH), "-o", "full.h5")
        os.truncate(self.path("full.h5"), 3000)
        self.fails(3, "verify", "full.h5", contains=["full.h5"])
        with open(self.path("model.json"), "w") as f:
            f.write(self.ok("schema", harness.corpus(MESH)))
        self.fails(2, "verify", "model.json", contains=["has no data to verify"])

    def header(self, path):
        with open(self.path(path), "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            return json.loads(f.read(size)), 8 + size

    def rewrite(self, path, change):
        """Rewrites the header of a safetensors file as another program would."""
        header, data = self.header(path)
        change(header)
        with open(self.path(path), "rb") as f:
            rest = f.read()[data:]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path(path), "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text + rest)

    def flat(self):
        """One safetensors file from another program and one that fsdpckpt wrote."""
        self.ok("consolidate", harness.corpus(MESH), "-o", "foreign.safetensors")
        self.rewrite("foreign.safetensors", lambda h: h.update(__metadata__={"who": "me", "format": "np"}))
        self.ok("consolidate", "foreign.safetensors", "-o", "model.safetensors", "-q")

    def test_damaged_safetensors_headers(self):
        """A flipped bit in a name leaves valid JSON but names another tensor."""
        self.flat()
        r = self.report("model.safetensors")
        self.assertEqual((r["defects"], r["without_digest"], r["files_with_header_digest"]), ([], 0, 1))
        with open(self.path("model.safetensors"), "rb") as f:
            place = f.read().find(b'"model.') + 3
        flip(self.path("model.safetensors"), place)
        r = self.report("model.safetensors", 1)
        self.assertEqual([d["file"] for d in r["defects"]], ["model.safetensors"])
        self.assertIn("the header is damaged", r["defects"][0]["message"])
        for args in (("consolidate", "-o", "x.h5"), ("convert", "--to", "safetensors", "-o", "x.safetensors"),
                     ("reshard", "--dp", "2", "-o", "x")):
            self.fails(3, args[0], "model.safetensors", *args[1:], contains=["model.safetensors: the header is damaged"])
        self.assertIn("the header is damaged", self.run_tool("check", "model.safetensors").stdout)
        self.ok("inspect", "model.safetensors")  # inspect still shows what is in it

    def test_safetensors_of_another_program(self):
        """Its metadata is kept, and ours is added once. If it rewrites our header, the digests there no longer count."""
        self.flat()
        r = self.report("foreign.safetensors")
        self.assertEqual((r["defects"], r["files_with_header_digest"]), ([], 0))
        self.ok("consolidate", "model.safetensors", "-o", "b.safetensors", "-q")
        for name in ("model.safetensors", "b.safetensors"):
            metadata = self.header(name)[0]["__metadata__"]
            self.assertEqual((metadata["who"], metadata["format"]), ("me", "np"))
            self.assertEqual(set(metadata), {"who", "format", "fsdpckpt.version", "fsdpckpt.crc64",
                                             "fsdpckpt.header_crc64"})
        self.ok("consolidate", "b.safetensors", "-o", "c.h5", "-q")
        self.ok("consolidate", "c.h5", "-o", "d.safetensors", "-q")
        with open(self.path("b.safetensors"), "rb") as f, open(self.path("d.safetensors"), "rb") as g:
            self.assertEqual(f.read(), g.read())
        self.rewrite("b.safetensors", lambda h: h["__metadata__"].update(who="you"))
        flip(self.path("b.safetensors"), os.path.getsize(self.path("b.safetensors")) - 1)  # new data, our old digests
        note = self.run_tool("consolidate", "b.safetensors", "-o", "x.h5")
        self.assertEqual(note.returncode, 0, note.stderr)
        self.assertIn("the header of b.safetensors has changed since fsdpckpt wrote it", note.stderr)
        self.assertIn("has changed since fsdpckpt wrote it", self.report("b.safetensors", 1)["defects"][0]["message"])
        end = max(h["data_offsets"][1] for n, h in self.header("b.safetensors")[0].items() if n != "__metadata__")
        self.rewrite("b.safetensors", lambda h: h.update(none={"dtype": "F32", "shape": [0], "data_offsets": [end, end]}))
        self.ok("inspect", "b.safetensors")
        self.rewrite("b.safetensors", lambda h: h["__metadata__"].pop("fsdpckpt.header_crc64"))
        flip(self.path("b.safetensors"), os.path.getsize(self.path("b.safetensors")) - 1)
        self.ok("consolidate", "b.safetensors", "-o", "y.h5", "-q")
        self.assertIn("has fsdpckpt.version but no", self.report("b.safetensors", 1)["defects"][0]["message"])

    def test_every_unreadable_file_is_reported(self):
        """Each is reported on its own line."""
        self.ok("reshard", harness.corpus(MESH), "-o", "h5", "--dp", "8")
        shutil.copytree(harness.corpus(MESH), self.path("dcp"))
        for source, names in (("h5", ("shard-00001-of-00008.h5", "shard-00006-of-00008.h5")),
                              ("dcp", ("__1_0.distcp", "__6_0.distcp"))):
            os.unlink(self.path(source, names[0]))
            self.fails(3, "verify", source, contains=[names[0], "missing"])
            os.truncate(self.path(source, names[1]), 100)
            for how in ((), ("--json",)):
                p = self.run_tool("verify", source, *how)
                self.assertEqual((p.returncode, p.stdout), (3, ""))
                lines = p.stderr.splitlines()
                self.assertEqual(len(lines), 2, p.stderr)
                for line, name, what in zip(lines, names, ("missing", "truncated")):
                    self.assertTrue(line.startswith(f"fsdpckpt: {source}/{name}: "), line)
                    self.assertIn(what, line)

    def test_wrong_index_is_reported(self):
        """An index that fsdpckpt wrote is compared with all headers; for other programs' only names and files count."""
        self.ok("consolidate", harness.corpus(MESH), "-o", "hf", "--to", "safetensors", "--max-shard-size", "5000B", "-q")
        path = self.path("hf", "model.safetensors.index.json")
        with open(path, encoding="utf-8") as f:
            good = json.load(f)
        names = sorted(good["weight_map"])
        files = sorted(set(good["weight_map"].values()))
        other = {files[0]: files[1], files[1]: files[0]}
        total = good["metadata"]["total_size"]

        def index(**change):
            with open(path, "w", encoding="utf-8") as f:
                json.dump({**good, **change}, f)

        def mapped(*gone, **more):
            return {**{n: f for n, f in good["weight_map"].items() if n not in gone}, **more}

        for change, told in (
                ({"weight_map": mapped(**{names[0]: other[good["weight_map"][names[0]]]})}, (names[0], "but the weight_map says")),
                ({"weight_map": mapped(names[0])}, (names[0], "not in the weight_map")),
                ({"weight_map": mapped(more=files[0])}, ("more", "but it is not")),
                ({"metadata": {"total_size": total + 4}}, (f"total_size is {total + 4}", f"take {total} bytes: the file is damaged")),
                ({"metadata": {"total_sizf": total}}, ("total_size is missing", "damaged")),
                ({"metadatb": good["metadata"], "metadata": {}}, ("total_size is missing", "damaged"))):
            index(**change)
            with self.subTest(change=change):
                for command in ("verify", "inspect", "check"):
                    p = self.run_tool(command, "hf")
                    self.assertEqual(p.returncode, 1 if command == "check" else 3, p.stderr)
                    for text in ("model.safetensors.index.json: ", *told):
                        self.assertIn(text, p.stdout + p.stderr)
        index(metadata={**good["metadata"], "note": "by hand"})
        self.ok("verify", "hf")
        for name in files:  # remove our metadata, as if another program had written the files
            with open(self.path("hf", name), "rb") as f:
                size = int.from_bytes(f.read(8), "little")
                header, data = json.loads(f.read(size)), f.read()
            del header["__metadata__"]
            text = json.dumps(header).encode()
            with open(self.path("hf", name), "wb") as f:
                f.write(len(text).to_bytes(8, "little") + text + data)
        index()
        self.assertNotIn("total_size", self.ok("inspect", "hf"))
        index(metadata={"total_size": total + 4})
        self.assertIn(f"is {total + 4}, but the tensors take {total} bytes", self.ok("inspect", "hf"))
        self.ok("verify", "hf")

    def test_every_damaged_header_is_reported(self):
        """verify reports each file on its own line. So does check, in formats whose headers it reads."""
        self.ok("reshard", harness.corpus(MESH), "-o", "h5", "--dp", "4", "-q")
        self.ok("reshard", harness.corpus(MESH), "-o", "st", "--to", "safetensors", "--dp", "4", "-q")
        self.ok("reshard", harness.corpus(MESH), "-o", "pt", "--to", "pt", "--dp", "4", "-q")
        shutil.copytree(harness.corpus("../deepspeed/0.19.8-zero2-bf16"), self.path("ds"))
        shutil.copytree(harness.corpus("st-torch2.15.0-index"), self.path("index"))
        pickles = lambda path: at(path, b"data.pkl") + 20
        for source, ending, place, checked in (("h5", ".h5", lambda _: 96, False), ("st", ".safetensors", lambda _: 9, True),
                                               ("pt", ".pt", pickles, True), ("ds", "_states.pt", pickles, True),
                                               ("index", ".safetensors", lambda _: 9, True)):
            names = sorted(os.path.join(folder, name) for folder, _, files in os.walk(self.path(source)) for name in files
                           if name.endswith(ending) and name != "index.h5")[-2:]
            self.assertEqual(len(names), 2, source)
            with self.subTest(source=source):
                for name in names:
                    flip(name, place(name), 1)
                names = [os.path.relpath(name, self.path()) for name in names]
                p = self.run_tool("verify", source)
                if source == "h5":  # index.h5 describes the files, so the checkpoint opens, and each damaged header is one defect
                    self.assertEqual((p.returncode, p.stderr), (1, ""))
                    for name in names:
                        self.assertIn(f"{name}: its headers are damaged", p.stdout)
                    continue
                self.assertEqual((p.returncode, p.stdout), (3, ""))
                self.assertEqual(sorted(line.split(": ")[1] for line in p.stderr.splitlines()), names, p.stderr)
                if checked:
                    p = self.run_tool("check", source, "--json")
                    self.assertEqual((p.returncode, p.stderr), (1, ""))
                    found = [f["message"].split(":")[0] for f in json.loads(p.stdout)["findings"]]
                    self.assertEqual(sorted(found), names, p.stdout)
        os.unlink(self.path("pt", "model_world_size_4_rank_1.pt"))
        lines = self.run_tool("verify", "pt").stderr.splitlines()
        self.assertEqual([line.split(": ")[1][-4:] for line in lines], ["1.pt", "2.pt", "3.pt"], lines)

    def test_many_threads_read_a_view(self):
        """Processes read the chunks of a view. They must not wait for locks of other threads: under AddressSanitizer, one run in
                three hung."""
        self.ok("view", harness.corpus(MESH), "-o", "v.h5", "-q")
        for _ in range(8):
            self.ok("verify", "v.h5", "--follow-external", "-j", "16", "-q")

    def test_view_of_missing_data(self):
        """Each tensor is one defect, and none counts as covered or as read."""
        shutil.copytree(harness.corpus(MESH), self.path("ckpt"))
        self.ok("view", "ckpt", "-o", "v.h5", "-q")
        before = json.loads(self.ok("verify", "v.h5", "--follow-external", "--json"))
        for name in os.listdir(self.path("ckpt")):
            if name.endswith(".distcp"):
                os.unlink(self.path("ckpt", name))
        p = self.run_tool("verify", "v.h5", "--follow-external", "--json")
        self.assertEqual((p.returncode, p.stderr), (1, ""))
        r = json.loads(p.stdout)
        told = [d["tensor"] for d in r["defects"]]
        self.assertEqual(len(set(told)), len(told))
        self.assertEqual(len(told), before["tensors"])
        self.assertEqual((r["with_digest"], r["without_digest"]), (0, 0))

    def test_a_damaged_source_is_not_converted(self):
        self.ok("consolidate", harness.corpus(MESH), "-o", "full.h5")
        file, offset, _, tensor = self.extents("full.h5")[3]
        flip(self.path(file), offset)
        self.fails(3, "reshard", "full.h5", "-o", "out", "--dp", "2", contains=["full.h5: tensor " + tensor, "verify"])
        self.assertFalse(os.path.exists(self.path("out")))


if __name__ == "__main__":
    harness.main()
