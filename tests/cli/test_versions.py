"""inspect, check and verify for a delta and a directory of versions. weight_sync.py, which shares no code with fsdpckpt, writes them
and knows the bytes of each version."""

import json
import os
import shutil
import unittest

import delta_case
import weight_sync

SHAPES = delta_case.shapes(300, 401)


def elements(name, model):
    return len(model[name]) // delta_case.SIZES[SHAPES[name][0]]


def changed_elements(name, a, b):
    size = delta_case.SIZES[SHAPES[name][0]]
    return sum(a[name][i:i + size] != b[name][i:i + size] for i in range(0, len(a[name]), size))


class Versions(delta_case.Case):
    def setUp(self):
        super().setUp()
        self.raw = [delta_case.random_model(SHAPES, 1)]
        for seed in range(2, 8):
            self.raw.append(delta_case.changed(self.raw[-1], seed, names=delta_case.CHANGED[:seed]))

    def delta(self, number, folder="updates", **how):
        """Adds a delta to a directory of versions. Those with an odd number have positions."""
        how = {"encoding": ("xor", "overwrite")[number % 2], "checksum": ("xxh3-128", "adler32")[number // 2 % 2], "files": 2, **how}
        weight_sync.write_version(self.path(folder, f"weight_v{number:06d}"), self.raw[how.get("base", number - 1)], self.raw[number],
                                  number, **how)

    def full(self, number, folder="updates"):
        self.save(f"{folder}/weight_v{number:06d}", delta_case.typed(self.raw[number], SHAPES), files=2, index=True)

    def frames(self, number, folder="updates"):
        return {name: frame for name, (frame, _) in weight_sync.read_version(self.path(folder, f"weight_v{number:06d}"))[1].items()}

    # ---- inspect ----

    def expected(self, number, sized=True, typed=True, stats=True):
        """{name: amounts} of a delta, as the bytes of the two versions tell them."""
        old, new = self.raw[number - 1], self.raw[number]
        return {name: {"bytes": len(new[name]) if sized else None, "elements": elements(name, new) if typed else None,
                       "stored_bytes": len(frame),
                       "changed_bytes": sum(a != b for a, b in zip(old[name], new[name], strict=True)) if stats else None,
                       "changed_elements": changed_elements(name, old, new) if stats and typed else None}
                for name, frame in self.frames(number).items()}

    def inspected(self, *args):
        document = json.loads(self.ok("inspect", *args, "--json"))
        for version in document["versions"]:
            if version["kind"] == "delta":  # the numbers of a version are the sums of those of its tensors
                for key in ("bytes", "elements", "stored_bytes", "changed_bytes", "changed_elements"):
                    amounts = [change[key] for change in version["changes"]]
                    self.assertEqual(version[key], None if None in amounts else sum(amounts), key)
        return document, {version["version"]: {change.pop("name"): change for change in version["changes"]}
                          for version in document["versions"]}

    def test_what_each_version_changes(self):
        for number in (1, 2, 4, 5):
            self.delta(number)
        self.full(3)
        document, changes = self.inspected("updates", "--stats")
        for number in (1, 2, 4, 5):
            self.assertEqual(changes[number], self.expected(number))
        self.assertEqual(document["faults"], [])
        self.assertEqual([(v["version"], v["kind"], v["base_version"], v["delta_encoding"], v["checksum_format"], v["files"])
                          for v in document["versions"]],
                         [(1, "delta", 0, "overwrite", "xxh3-128", 2), (2, "delta", 1, "xor", "adler32", 2), (3, "full", None, None, None, 2),
                          (4, "delta", 3, "xor", "xxh3-128", 2), (5, "delta", 4, "overwrite", "xxh3-128", 2)])
        whole = sum(map(len, self.raw[3].values()))
        self.assertEqual((document["versions"][2]["tensors"], document["versions"][2]["bytes"]), (len(SHAPES), whole))
        _, changes = self.inspected("updates")
        self.assertEqual(changes[5], self.expected(5, stats=False))

    def test_without_a_full_version(self):
        """Frames of xor say how large a tensor is, those of overwrite do not. Neither knows its dtype."""
        self.delta(1)
        _, changes = self.inspected("updates", "--stats")
        self.assertEqual(changes[1], self.expected(1, sized=False, typed=False))
        self.delta(2)
        _, changes = self.inspected("updates", "--stats")
        self.assertEqual(changes[1], self.expected(1, typed=False))
        self.assertEqual(changes[2], self.expected(2, typed=False))

    def test_one_version_and_one_tensor(self):
        for number in (2, 3):
            self.delta(number)
        self.full(1)
        _, changes = self.inspected("updates/weight_v000002", "--stats")
        self.assertEqual(changes, {2: self.expected(2, typed=False)})
        _, changes = self.inspected("updates", "--stats", "--tensor", "fp8")
        self.assertEqual(changes, {1: {}, 2: {"fp8": self.expected(2)["fp8"]}, 3: {"fp8": self.expected(3)["fp8"]}})
        self.fails(2, "inspect", "updates", "--tensor", "fp9", contains=["no tensor or object 'fp9'", "did you mean 'fp8'"])

    def test_text(self):
        for number in (1, 2):
            self.delta(number)
        self.full(3)
        lines = self.ok("inspect", "updates", "--stats").splitlines()
        self.assertEqual(lines[0].split("  ")[0], "VERSION")
        stored = [sum(map(len, self.frames(number).values())) for number in (1, 2)]
        size = sum(len(self.raw[1][name]) for name in self.frames(1))
        self.assertEqual(lines[1].split()[:4], ["1", "0", "overwrite", str(len(self.frames(1)))])
        self.assertIn(f"{size / stored[0]:.1f}", lines[1].split())
        amounts = self.expected(1).values()
        for part, whole in (("changed_bytes", "bytes"), ("changed_elements", "elements")):
            self.assertIn(f"{100 * sum(a[part] for a in amounts) / sum(a[whole] for a in amounts):.3g} %", lines[1])
        self.assertEqual(lines[3].split()[:4], ["3", "-", "full", str(len(SHAPES))])
        self.assertIn("updates: 2 deltas, ", lines[-1])
        self.assertIn("; 1 full version, ", lines[-1])
        alone = self.ok("inspect", "updates/weight_v000002")
        for name in self.frames(2):
            self.assertIn(f"  {name}\n", alone)
        self.assertEqual(self.ok("inspect", "updates", "-q"), "")
        self.assertNotIn("delta", self.ok("inspect", "updates/weight_v000003"))  # an ordinary checkpoint

    def test_an_empty_delta(self):
        self.raw[1] = self.raw[0]
        self.delta(1)
        document, changes = self.inspected("updates", "--stats")
        self.assertEqual((changes, document["versions"][0]["stored_bytes"]), ({1: {}}, 0))
        self.assertIn("1 delta, 0 bytes", self.ok("inspect", "updates/weight_v000001"))

    def test_inspect_shows_what_is_wrong(self):
        for number in (1, 2, 4):
            self.delta(number)
        shown = self.ok("inspect", "updates")
        self.assertIn("weight_v000004: version 4 changes version 3, which is not there", shown)
        os.mkdir(self.path("updates/weight_v000003"))
        run = self.run_tool("inspect", "updates")
        self.assertEqual((run.returncode, run.stdout.splitlines()[3].split()), (3, ["3", "-", "damaged", *["-"] * 4]))
        self.assertIn("weight_v000003: the version has neither", run.stderr)

    # ---- check ----

    def found(self, status=1):
        """[(kind, name)] of the errors that check reports."""
        run = self.run_tool("check", "updates", "--json")
        self.assertEqual((run.returncode, run.stderr), (status, ""))
        document = json.loads(run.stdout)
        errors = [f for f in document["findings"] if f["severity"] == "error"]
        self.assertEqual((document["ok"], document["errors"]), (not errors, len(errors)))
        return [(f["kind"], os.path.relpath(f["name"], "updates"), f["message"]) for f in errors]

    def kinds(self, status=1):
        return [(kind, name) for kind, name, _ in self.found(status)]

    def test_check_of_a_chain(self):
        for number in (1, 2, 4, 5):
            self.delta(number)
        self.full(3)
        self.assertEqual(self.kinds(0), [])
        tensors = sum(len(self.frames(number)) for number in (1, 2, 4, 5)) + len(SHAPES)
        self.assertIn(f"headers are valid: 0 errors, 1 warning; {tensors} tensors", self.ok("check", "updates"))
        self.assertIn("headers are valid: 0 errors", self.ok("check", "updates/weight_v000004"))

    def test_check_finds_gaps(self):
        for number in (4, 5):
            self.delta(number)
        self.assertEqual(self.kinds(0), [])  # version 3 is that of the model
        for number in (1, 2):
            self.delta(number)
        self.assertEqual([(kind, name) for kind, name, _ in self.found()], [("version-gap", "weight_v000004")])
        self.assertIn("version 4 changes version 3, which is not there; publish it, or a full version above it", self.found()[0][2])
        self.full(3)
        self.assertEqual(self.kinds(0), [])

    def test_check_finds_forks(self):
        """Two runs: 1, 2, 3 and 1, 4, 5. And version 2 and 3 that both change 1, without a version 1."""
        for number, base in ((1, 0), (2, 1), (3, 2), (4, 1), (5, 4)):
            self.delta(number, base=base)
        self.assertEqual(self.kinds(), [("version-fork", "weight_v000002"), ("version-fork", "weight_v000003")])
        self.assertIn("version 3 does not lead to version 5: the versions fork there; keep the versions of one run", self.found()[1][2])
        for number in (1, 4, 5):
            shutil.rmtree(self.path(f"updates/weight_v{number:06d}"))
        shutil.rmtree(self.path("updates/weight_v000003"))
        self.delta(3, base=1)
        self.assertEqual(self.kinds(), [("version-fork", "weight_v000002")])
        self.fails(2, "fold", "updates", "-o", "x", contains=["version 2 does not lead to version 3: the versions fork there"])

    def test_check_finds_damage(self):
        for number in (1, 2, 4):
            self.delta(number)
        self.full(3)
        file = "model-00001-of-00002.safetensors"
        cases = (("weight_v000001/" + file, None, "maps 2 tensors, but"), ("weight_v000002/model.safetensors.index.json", "{", "index.json"),
                 ("weight_v000003/" + file, None, "missing"), ("weight_v000004/" + file, "", file))
        for name, content, text in cases:
            with self.subTest(name):
                path = self.path("updates", name)
                with open(path, "rb") as f:
                    before = f.read()
                os.remove(path)
                if content is not None:
                    with open(path, "w") as f:
                        f.write(content)
                found = self.found()
                self.assertEqual([name.split("/")[0] for _, name, _ in found], [name.split("/")[0]], found)
                self.assertIn(name.split("/")[0], found[0][2])
                with open(path, "wb") as f:
                    f.write(before)
        os.mkdir(self.path("updates/weight_v000005"))
        shutil.copytree(self.path("updates/weight_v000001"), self.path("updates/weight_v0000001"))
        self.assertEqual([(name, message.split(": ", 1)[1]) for _, name, message in self.found()],
                         [("weight_v000001", "version 1 is there twice, as weight_v0000001 and as weight_v000001"),
                          ("weight_v000005", "the version has neither model.safetensors.index.json nor model.safetensors: it is being "
                           "written, or incomplete")])

    def test_check_of_what_is_unsupported(self):
        self.delta(1)
        folder = self.path("updates/weight_v000001")
        names = dict.fromkeys(self.frames(1), "model-00000-of-00002.safetensors")
        for more in ({"delta_encoding": "rle"}, {"compression_format": "lz4"}, {"base_version": "000001"}):
            weight_sync.write_index(folder, names, 1, **more)
            self.assertEqual([(kind, name) for kind, name, _ in self.found()], [("version-damaged", "weight_v000001")], more)

    def test_check_writes_junit_and_annotations(self):
        for number in (1, 3):
            self.delta(number)
        run = self.run_tool("check", "updates", "--junit", "report.xml", "--github")
        self.assertEqual(run.returncode, 1)
        self.assertIn("::error title=fsdpckpt check%3A version-gap::updates/weight_v000003: version 3 changes", run.stdout)
        with open(self.path("report.xml"), encoding="utf-8") as f:
            self.assertIn('<failure type="version-gap"', f.read())
        self.save("model", delta_case.typed(self.raw[0], SHAPES))
        self.ok("check", "model", "--junit", "model.xml", "-q")
        with open(self.path("model.xml"), encoding="utf-8") as f:
            self.assertNotIn("version-gap", f.read())

    # ---- verify ----

    def verified(self, path="updates", *args, status=0):
        run = self.run_tool("verify", path, "--json", *args)
        self.assertEqual((run.returncode, run.stderr), (status, ""))
        return json.loads(run.stdout)

    def chain(self):
        for number in (1, 2, 4, 5):
            self.delta(number)
        self.full(3)
        return {number: len(self.frames(number)) for number in (1, 2, 4, 5)}

    def test_verify_says_what_it_could_not_check(self):
        """The deltas 4 and 5 follow the full version 3, so their checksums are compared. Those of 1 and 2 need the model."""
        count = self.chain()
        report = self.verified()
        self.assertEqual(report["defects"], [])
        self.assertEqual(report["tensors"], sum(count.values()) + len(SHAPES))
        whole = json.loads(self.ok("verify", "updates/weight_v000003", "--json"))
        self.assertEqual((report["with_digest"], report["without_digest"]),
                         (count[4] + count[5] + whole["with_digest"], count[1] + count[2] + whole["without_digest"]))
        unread = sum(len(self.raw[0][name]) for number in (1, 2) for name in self.frames(number))
        self.assertEqual(report["bytes_without_digest"], unread + whole["bytes_without_digest"])
        self.assertIn(f"the checksums of {count[1] + count[2]} frames need the model: verify MODEL --delta updates --up-to 2",
                      report["unverified"])
        text = self.ok("verify", "updates")
        self.assertIn(f"decoded: {sum(count.values())} of {sum(count.values())} frames\n", text)
        self.assertIn(f"covered by checksums: what {count[4] + count[5]} of {sum(count.values())} frames make\n", text)
        self.assertTrue(text.endswith("no defects\n"))
        alone = self.ok("verify", "updates/weight_v000005")
        self.assertIn(f"the checksums of {count[5]} frames need the model: verify MODEL --delta updates/weight_v000005 ", alone)
        for more in (("-j", 1), ("-j", 8, "--memory", "64M")):
            self.assertEqual(self.verified("updates", *more), report)

    def test_verify_compares_checksums(self):
        """A frame that is good, but makes other bytes: only those who have the bytes of the base can tell."""
        self.chain()
        for number in (2, 4, 5):
            with self.subTest(number=number):
                folder = self.path(f"updates/weight_v{number:06d}")
                frame, checksum = weight_sync.read_version(folder)[1]["codes.qweight"]
                self.put_frame(folder, "codes.qweight", frame, "0" * len(checksum))
                report = self.verified(status=0 if number == 2 else 1)
                defects = [(d["file"].split("/")[0], d["tensor"]) for d in report["defects"]]
                self.assertEqual(defects, [] if number == 2 else [(f"weight_v{number:06d}", "codes.qweight")])
                self.assertTrue(all("the checksum of the new bytes is" in d["message"] for d in report["defects"]))
                self.put_frame(folder, "codes.qweight", frame, checksum)
        other = bytearray(self.raw[3]["fp8"])
        other[3] ^= 1
        self.raw[3] = {**self.raw[3], "fp8": bytes(other)}
        shutil.rmtree(self.path("updates/weight_v000003"))
        self.full(3)  # that of another run: one defect for the tensor, not one for each delta
        report = self.verified(status=1)
        self.assertEqual([(d["file"].split("/")[0], d["tensor"]) for d in report["defects"]], [("weight_v000004", "fp8")])

    def test_verify_finds_lying_frames(self):
        """With and without a full version, which says how large the tensor is."""
        size = len(self.raw[0]["fp8"])
        for known in (True, False):
            if known:
                self.full(3)
            for what, frame, encoding, text in delta_case.lying_frames(size):
                if not known and (encoding == "overwrite" and text.startswith(("position", "changes")) or text.startswith("the frame has")):
                    continue
                with self.subTest(what, known=known):
                    for number in (4, 5):
                        self.delta(number, encoding=encoding)
                    self.put_frame(self.path("updates/weight_v000004"), "fp8", frame)
                    report = self.verified(status=1)
                    told = {(d["file"].split("/")[0], d["tensor"]): d for d in report["defects"]}
                    self.assertEqual(list(told), [("weight_v000004", "fp8")])
                    defect = told["weight_v000004", "fp8"]
                    self.assertIn(text, defect["message"])
                    with open(self.path("updates", defect["file"]), "rb") as f:
                        f.seek(defect["offset"])
                        self.assertEqual(f.read(len(frame)), frame)
                    frames = len(self.frames(4)) + len(self.frames(5))
                    whole = json.loads(self.ok("verify", "updates/weight_v000003", "--json"))["with_digest"] if known else 0
                    self.assertEqual(report["with_digest"], frames - 2 + whole if known else 0)  # fp8 of version 5 cannot be compared
                    for number in (4, 5):
                        shutil.rmtree(self.path(f"updates/weight_v{number:06d}"))
            shutil.rmtree(self.path("updates"))

    def test_sizes_of_one_encoding_limit_the_positions_of_the_other(self):
        size = len(self.raw[0]["fp8"])
        self.delta(2, encoding="overwrite")
        self.delta(3, encoding="xor")
        self.put_frame(self.path("updates/weight_v000002"), "fp8", weight_sync.compress(b"\1\0\0\0" + size.to_bytes(4, "little") + b"x"))
        defects = self.verified(status=1)["defects"]
        self.assertEqual([(d["file"].split("/")[0], d["tensor"]) for d in defects], [("weight_v000002", "fp8")])
        self.assertIn(f"position {size}, but the tensor has {size}", defects[0]["message"])
        self.delta(4, encoding="xor")
        self.put_frame(self.path("updates/weight_v000004"), "fp8", weight_sync.compress(bytes(size + 4)))
        defects = self.verified(status=1)["defects"]
        self.assertIn(f"the frame has {size + 4} bytes, but the tensor has {size} in updates/weight_v000003/", defects[1]["message"])

    def test_frames_without_a_size(self):
        """Programs that write a frame as a stream do not say its size. A full version does."""
        self.delta(4, encoding="xor")
        data = weight_sync.decompress(self.frames(4)["fp8"])
        self.put_frame(self.path("updates/weight_v000004"), "fp8", b"\x28\xb5\x2f\xfd\0\x38" + (len(data) << 3 | 1).to_bytes(3, "little") + data)
        self.assertIn("1 frame does not say how many bytes the tensor has", self.ok("verify", "updates"))
        self.full(3)
        text = self.ok("verify", "updates")
        self.assertNotIn("how many bytes", text)
        self.assertIn("covered by checksums: what 5 of 5 frames make", text)

    def test_verify_finds_gaps_and_damage(self):
        for number in (1, 2, 4):
            self.delta(number)
        self.full(3)
        os.truncate(self.path("updates/weight_v000003/model-00002-of-00002.safetensors"), 3000)
        os.mkdir(self.path("updates/weight_v000005"))
        self.delta(6, base=5)
        defects = self.verified(status=1)["defects"]
        self.assertEqual([d["file"] for d in defects], ["weight_v000003", "weight_v000005"])
        for number in (3, 5):
            shutil.rmtree(self.path(f"updates/weight_v{number:06d}"))
        self.assertEqual([(d["file"], d["message"].split(": ", 1)[1]) for d in self.verified(status=1)["defects"]],
                         [("weight_v000004", "version 4 changes version 3, which is not there"),
                          ("weight_v000006", "version 6 changes version 5, which is not there")])

    def test_verify_reads_full_versions(self):
        """A full version that fsdpckpt wrote has digests."""
        self.save("model", delta_case.typed(self.raw[3], SHAPES))
        os.mkdir(self.path("updates"))
        self.ok("consolidate", "model", "-o", "updates/weight_v000003", "--to", "safetensors", "--max-shard-size", "1M", "-q")
        self.delta(4)
        self.assertEqual(self.verified()["without_digest"], 0)
        path = self.path("updates/weight_v000003/model.safetensors")
        path = path if os.path.exists(path) else self.path("updates/weight_v000003/model-00001-of-00001.safetensors")
        with open(path, "rb") as f:
            at = f.read().index(self.raw[3]["layers.1.w"])
        with self.flipped(path, at):
            defects = self.verified(status=1)["defects"]
            self.assertEqual([(d["file"], d["tensor"]) for d in defects], [(os.path.relpath(path, self.path("updates")), "layers.1.w")])

    def test_a_long_chain_after_a_full_version(self):
        """What does not fit into memory at once is decoded, and not compared."""
        for number in (4, 5):
            self.delta(number)
        self.full(3)
        count = len(self.frames(4)) + len(self.frames(5))
        text = self.ok("verify", "updates", "--memory", "1M")
        self.assertIn(f"decoded: {count} of {count} frames", text)
        self.assertIn("because too many deltas follow a full version: raise --memory", text)

    def test_blake3(self):
        self.delta(4, checksum="adler32")
        self.full(3)
        names = {name: file for file in os.listdir(self.path("updates/weight_v000004")) if file.endswith(".safetensors")
                 for name in weight_sync.read_file(self.path("updates/weight_v000004", file))[1]}
        weight_sync.write_index(self.path("updates/weight_v000004"), names, 4, checksum="blake3")
        self.assertIn(f"the checksums of {len(names)} frames: this build cannot compute blake3", self.ok("verify", "updates"))
        self.ok("inspect", "updates", "--stats")
        self.ok("check", "updates")

    # ---- all of them ----

    def refused(self, contains, status=3):
        """What reads the versions says one line, what reports on them has it as a finding, and nothing is written."""
        shutil.rmtree(self.path("model"), ignore_errors=True)
        self.save("model", delta_case.typed(self.raw[0], SHAPES))
        before = self.contents("model")
        for command in (["fold", "updates", "-o", "x"], ["apply", "updates", "model"], ["convert", "model", "-o", "x", "--to", "pt", "--delta", "updates"],
                        ["inspect", "model", "--delta", "updates"], ["delta", "model", "model", "--delta", "updates", "-o", "x", "--number", 9]):
            self.fails(status, *command, contains=contains)
        run = self.run_tool("inspect", "updates")
        self.assertEqual((run.returncode, run.stderr.count("\n")), (status, 1))
        for command in ("check", "verify"):
            shown = self.run_tool(command, "updates")
            self.assertEqual((shown.returncode, shown.stderr), (1, ""))
            for text in contains:
                self.assertIn(text, shown.stdout)
        self.assertFalse(os.path.exists(self.path("x")))
        after = self.contents("model")
        after.pop(".weight_sync/lock", None)
        self.assertEqual(after, before)

    def test_lying_indexes(self):
        self.delta(1, files=1)
        folder = self.path("updates/weight_v000001")
        index, file = os.path.join(folder, "model.safetensors.index.json"), os.path.join(folder, "model-00000-of-00001.safetensors")
        with open(index, encoding="utf-8") as f:
            text = f.read()
        for old, new, says, status in (('"000001"', "NaN", ["model.safetensors.index.json"], 3), ('"000001"', "1", ["version of the delta"], 3),
                                       ('"000000"', '"NaN"', ["base_version of the delta"], 3), ('"000000"', '"-00001"', ["base_version"], 3),
                                       ('"000000"', '"9999999999"', ["base_version", "up to 9 digits"], 3),
                                       ('"000000"', '"000001"', ["a base is earlier"], 3), ('"000001"', '"000002"', ["says version 2"], 3),
                                       ("overwrite", "rle", ["delta_encoding rle is unknown"], 5),
                                       ('"zstd"', '"lz4"', ["compression_format lz4 is unknown"], 5),
                                       ("model-00000", "../model-0", ["weight_v000001"], 3)):
            with self.subTest(new):
                self.assertIn(old, text)
                with open(index, "w", encoding="utf-8") as f:
                    f.write(text.replace(old, new))
                self.refused(says, status)
        with open(index, "w", encoding="utf-8") as f:
            f.write(text)
        metadata, tensors = weight_sync.read_file(file)
        stored = {name: ("U8", [len(data)], data) for name, (_, data) in tensors.items()}
        name = sorted(stored)[0]
        for says, sums, frames in ((["has no checksum"], {}, stored), (["of dtype U8"], metadata, {**stored, name: ("I8", *stored[name][1:])}),
                                   (["of dtype U8"], metadata, {**stored, name: ("U8", [1, *stored[name][1]], stored[name][2])}),
                                   (["the index does not say"], metadata, {**stored, "more": stored[name]}),
                                   (["maps 2 tensors, but the files have 1"], metadata, {name: stored[name]})):
            with self.subTest(says):
                weight_sync.write_file(file, sums, frames)
                self.refused([*says, "weight_v000001"])

    def test_inspect_of_lying_frames(self):
        """The headers are good, so check has no finding; --stats reads the frames."""
        size = len(self.raw[0]["fp8"])
        self.full(3)
        for what, frame, encoding, text in delta_case.lying_frames(size):
            with self.subTest(what):
                self.delta(4, encoding=encoding)
                self.put_frame(self.path("updates/weight_v000004"), "fp8", frame)
                self.ok("check", "updates")
                run = self.run_tool("inspect", "updates", "--stats", "--json")
                self.assertEqual((run.returncode, run.stderr.count("\n")), (3, 1))
                document = json.loads(run.stdout)
                self.assertEqual([(f["kind"], f["version"]) for f in document["faults"]], [("frame", 4)])
                self.assertIn(text, document["faults"][0]["message"])
                self.assertIsNone({c["name"]: c for c in document["versions"][1]["changes"]}["fp8"]["changed_bytes"])
                shutil.rmtree(self.path("updates/weight_v000004"))

    def test_numbers_of_seven_digits(self):
        self.save("model", delta_case.typed(self.raw[0], SHAPES))
        for number in (1, 2):
            weight_sync.write_version(self.path("updates", f"weight_v{999998 + number:06d}"), self.raw[number - 1], self.raw[number],
                                      999998 + number)
        self.assertEqual([v["version"] for v in self.inspected("updates")[0]["versions"]], [999999, 1000000])
        self.ok("check", "updates")
        self.ok("verify", "updates")
        self.ok("fold", "updates", "-o", "weight_v1000000", "-q")
        self.ok("apply", "updates", "model", "--base", 999998, "-q")
        self.assertEqual(weight_sync.read_model(self.path("model")), self.raw[2])
        found = dict(self.raw[0])
        self.assertEqual(weight_sync.apply(found, self.path("weight_v1000000"))["version"], "1000000")
        self.assertEqual(found, self.raw[2])

    def test_empty_deltas_and_several_full_versions(self):
        self.raw[2] = self.raw[1]
        self.raw[5] = self.raw[4]
        for number in (1, 2, 4, 5):
            self.delta(number)
        self.raw[3] = delta_case.changed(self.raw[2], 33)
        shutil.rmtree(self.path("updates/weight_v000004"))
        self.delta(4)
        for number in (0, 3):
            self.full(number)
        document, changes = self.inspected("updates", "--stats")
        self.assertEqual((changes[2], changes[5], document["faults"]), ({}, {}, []))
        self.assertEqual(changes[4], self.expected(4))
        self.ok("check", "updates")
        whole = json.loads(self.ok("verify", "updates/weight_v000003", "--json"))["with_digest"]
        report = self.verified()  # version 1 follows the full version 0, and 4 follows 3
        self.assertEqual((report["defects"], report["with_digest"]), ([], len(self.frames(1)) + len(self.frames(4)) + 2 * whole))
        self.assertNotIn("need the model", report["unverified"])

    def test_options_of_checkpoints(self):
        self.delta(1)
        for folder, what in (("updates", "directory of versions"), ("updates/weight_v000001", "delta")):
            self.fails(2, "verify", folder, "--seal", contains=[f"this is a {what}", "--seal does not apply"])
            self.fails(2, "check", folder, "--against", "x", contains=[f"this is a {what}", "--against does not apply"])
            for option in (["--tree"], ["--model-only"], ["--recipe", "auto"], ["--include", "x"]):
                self.fails(2, "inspect", folder, *option, contains=[f"this is a {what}", f"{option[0]} does not apply", "--delta"])


if __name__ == "__main__":
    unittest.main()
