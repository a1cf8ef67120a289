"""apply: a reader of the format that shares no code with it (weight_sync.py) makes the versions and knows the bytes of each."""

import fcntl
import json
import os
import random
import shutil
import struct
import subprocess
import threading
import time
import unittest

import delta_case
import harness
import weight_sync

SHAPES = delta_case.shapes(300, 401)


class Apply(delta_case.Case):
    def save(self, folder, version, files=2):
        """A model in several files, with an index as transformers writes it."""
        super().save(folder, delta_case.typed(version, self.shapes), files, index=True)

    def contents(self, folder="model"):
        found = super().contents(folder)
        found.pop(".weight_sync/lock", None)
        return found

    def version(self, number, folder="updates", **how):
        """Adds the version to `folder`."""
        how = {"encoding": ("xor", "overwrite")[number % 2], "checksum": ("xxh3-128", "adler32")[number // 2 % 2], "files": 2, **how}
        weight_sync.write_version(self.path(folder, f"weight_v{number:06d}"), self.raw[how.get("base", number - 1)], self.raw[number],
                                  number, **how)

    def has(self, number, folder="model"):
        self.assertEqual(weight_sync.read_model(self.path(folder)), self.raw[number])
        with open(self.path(folder, ".weight_sync/state.json"), encoding="utf-8") as f:
            self.assertEqual(json.load(f), {"version": f"{number:06d}"})
        self.assertEqual(sorted(os.listdir(self.path(folder, ".weight_sync"))), ["lock", "state.json"])

    def setUp(self):
        super().setUp()
        self.shapes = SHAPES
        self.raw = [delta_case.random_model(SHAPES, 1)]
        for seed in range(2, 7):
            self.raw.append(delta_case.changed(self.raw[-1], seed))
        self.save("model", self.raw[0])

    def test_chains_give_the_bytes_of_each_version(self):
        for number in range(1, 6):
            self.version(number)
        self.assertIn("from version 0 to version 2, 2 deltas", self.ok("apply", "updates", "model", "--up-to", 2))
        self.has(2)
        found = json.loads(self.ok("apply", "updates", "model", "--json"))
        self.assertEqual((found["from_version"], found["version"], found["deltas"], found["changed"]), (2, 5, 3, 5))
        self.assertEqual(found["changed_bytes"], sum(a != b for name in self.raw[2] for a, b in zip(self.raw[2][name], self.raw[5][name])))
        self.assertEqual(found["stored_bytes"], sum(len(frame) for number in (3, 4, 5) for frame, _ in weight_sync.read_version(
            self.path(f"updates/weight_v{number:06d}"))[1].values()))
        self.has(5)
        self.assertIn("nothing to do", self.ok("apply", "updates", "model"))

    def test_encodings_and_checksums(self):
        for encoding in ("xor", "overwrite"):
            for checksum in ("xxh3-128", "adler32"):
                with self.subTest(encoding=encoding, checksum=checksum):
                    folder = f"{encoding}-{checksum}"
                    self.save(folder, self.raw[0], files=1)
                    self.version(1, folder + "-updates", encoding=encoding, checksum=checksum)
                    self.ok("apply", folder + "-updates", folder, "-q")
                    self.has(1, folder)

    def test_memory_and_threads_do_not_change_the_result(self):
        for number in range(1, 6):
            self.version(number)
        for k, more in enumerate((("-j", 1), ("-j", 8, "--memory", "1M"), ("-j", 3, "--memory", "64M"))):
            self.save(f"model-{k}", self.raw[0])
            self.ok("apply", "updates", f"model-{k}", "-q", *more)
            self.has(5, f"model-{k}")

    def test_deltas_of_our_own_and_models_of_our_own(self):
        self.ok("consolidate", "model", "-o", "ours", "--to", "safetensors", "--max-shard-size", "100K", "-q")
        self.save("new", self.raw[1])
        os.mkdir(self.path("updates"))
        self.ok("delta", "ours", "new", "-o", "updates/weight_v000001", "-q")
        covered = self.ok("verify", "ours")
        self.assertIn("covered by digests: the data of 8 of 8, the headers of 2 of 3 files", covered)
        self.ok("apply", "updates", "ours", "-q")
        self.has(1, "ours")
        self.assertEqual(self.ok("verify", "ours"), covered)  # the recorded digests are those of the new bytes
        self.ok("diff", "ours", "new", "--data", "-q")

    def test_an_empty_delta_changes_only_the_version(self):
        self.raw[1] = self.raw[0]
        before = self.contents()
        self.version(1)
        self.ok("apply", "updates", "model", "-q")
        self.has(1)
        self.assertEqual({**self.contents(), ".weight_sync/state.json": None}, {**before, ".weight_sync/state.json": None})

    def test_a_journal_that_several_threads_replay(self):
        rng, size = random.Random(3), 5_000_000
        self.shapes = {name: ("U8", [size]) for name in "ab"}
        self.raw = [{name: rng.randbytes(size) for name in "ab"} for _ in range(2)]
        self.save("large", self.raw[0], files=1)
        weight_sync.write_version(self.path("updates/weight_v000001"), *self.raw, 1)
        self.ok("apply", "updates", "large", "-q")
        self.has(1, "large")

    def test_a_full_version_in_the_middle(self):
        for number in (1, 3, 4):
            self.version(number)
        self.save("updates/weight_v000002", self.raw[2], files=3)
        with open(self.path("updates/weight_v000002/config.json"), "w") as f:
            f.write("{}")
        with open(self.path("model/tokenizer.json"), "w") as f:
            f.write("[]")
        found = json.loads(self.ok("apply", "updates", "model", "--dry-run", "--json"))
        self.assertEqual((found["full_version"], found["deltas"], found["version"]), (2, 2, 4))
        self.ok("apply", "updates", "model", "-q")
        self.has(4)
        self.assertEqual(sorted(set(os.listdir(self.path("model"))) - {".weight_sync"}),
                         ["config.json", "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors",
                          "model-00003-of-00003.safetensors", "model.safetensors.index.json", "tokenizer.json"])
        self.assertEqual(weight_sync.read_model(self.path("updates/weight_v000002")), self.raw[2])

    def test_a_model_past_the_full_version_is_changed_in_place(self):
        self.version(3)
        self.save("updates/weight_v000002", self.raw[2])
        shutil.copytree(self.path("updates/weight_v000002"), self.path("two"))
        self.assertNotIn("full", self.ok("apply", "updates", "two", "--base", 2))
        self.has(3, "two")

    def test_a_dry_run_writes_nothing(self):
        self.version(1)
        before, names = self.contents(), os.listdir(self.path("model"))
        told = self.ok("apply", "updates", "model", "--dry-run")
        self.assertIn("would go from version 0 to version 1, 1 delta", told)
        self.assertEqual((self.contents(), os.listdir(self.path("model"))), (before, names))

    def refused(self, status, *args, contains):
        """Nothing but the lock changes."""
        before = self.contents()
        self.fails(status, "apply", "updates", "model", *args, contains=contains)
        self.assertEqual(self.contents(), before)

    def test_gaps_forks_and_other_runs(self):
        for number in (1, 2, 4):
            self.version(number)
        self.refused(3, contains=["version 4 changes version 3, which is not there"])
        self.refused(3, "--up-to", 3, contains=["there is no version 3"])
        self.version(3, base=1)  # a fork: 2 and 3 both change 1
        self.ok("apply", "updates", "model", "-q", "--up-to", 2)
        self.refused(3, contains=["version 3 changes version 1, not version 2", "fork"])
        self.refused(2, "--up-to", 1, contains=["has version 2", "do not lead back to version 1", "copy the base"])
        self.refused(2, "--base", 1, contains=["has version 2, not version 1"])
        os.rename(self.path("updates/weight_v000002"), self.path("updates/weight_v000005"))
        self.refused(3, "--up-to", 5, contains=["the index says version 2, but the folder is version 5"])

    def test_another_base_fails_the_checksum(self):
        self.version(1)
        other = delta_case.changed(self.raw[0], 99, names=["fp8"])
        shutil.rmtree(self.path("model"))
        self.save("model", other)
        self.refused(3, contains=["tensor fp8", "checksum", "another base"])
        self.version(2, encoding="overwrite")
        self.refused(3, contains=["checksum"])

    def test_tensors_that_do_not_fit(self):
        self.version(1)
        missing = dict(self.raw[0])
        missing.pop("fp8")
        shutil.rmtree(self.path("model"))
        self.save("model", missing)
        self.refused(3, contains=["tensor fp8", "has no tensor of this name"])

    def lie(self, change, encoding="xor", raw=None):
        """A version whose frame of fp8 has other content. `change` gets what it decodes to."""
        shutil.rmtree(self.path("updates"), True)
        folder = self.path("updates/weight_v000001")
        weight_sync.write_version(folder, self.raw[0], self.raw[1], 1, encoding=encoding)
        frame = weight_sync.read_version(folder)[1]["fp8"][0]
        self.put_frame(folder, "fp8", raw(frame) if raw else weight_sync.compress(change(weight_sync.decompress(frame))))
        metadata, tensors = weight_sync.read_file(os.path.join(folder, "model-00000-of-00001.safetensors"))
        return metadata, {name: data for name, (_, data) in tensors.items()}

    def test_lying_frames_change_nothing(self):
        size = len(self.raw[0]["fp8"])
        self.lie(lambda data: data + b"\0")
        self.refused(3, contains=["tensor fp8", f"the frame has {size + 1} bytes", f"the model {size}"])
        self.lie(lambda data: data[:-1])
        self.refused(3, contains=["tensor fp8", f"the frame has {size - 1} bytes"])
        self.lie(lambda data: bytes(1 << 28))
        self.refused(3, contains=["tensor fp8", "the frame has 268435456 bytes"])
        self.lie(None, raw=lambda frame: frame[:-3])
        self.refused(3, contains=["tensor fp8", "truncated"])
        self.lie(None, raw=lambda frame: frame + b"more")
        self.refused(3, contains=["tensor fp8", "bytes follow its zstd frame"])
        self.lie(None, raw=lambda frame: b"")
        self.refused(3, contains=["tensor fp8", "no zstd frame"])
        self.lie(None, raw=lambda frame: b"\x28\xb5\x2f\xfd\0\xa0" + frame)
        self.refused(5, contains=["tensor fp8", "a window of 1073741824 bytes"])

    def test_lying_positions_change_nothing(self):
        size = len(self.raw[0]["fp8"])

        def positions(*at, count=None, values=None):
            return lambda _: struct.pack(f"<I{len(at)}I", len(at) if count is None else count, *at) + (values or bytes(len(at)))

        for change, told in ((positions(3, size), f"position {size}, but the tensor has {size}"),
                             (positions(3, 2**32 - 1), "position 4294967295"),
                             (positions(5, 3), "not in ascending order"), (positions(5, 5), "not in ascending order"),
                             (positions(5, count=2**32 - 1), f"changes 4294967295 bytes, but the tensor has {size}"),
                             (positions(5, values=b"12"), "longer"), (positions(5, 6, values=b"1"), "shorter"),
                             (positions(5, count=3), "shorter"), (lambda _: b"\1", "shorter")):
            with self.subTest(told=told):
                self.lie(change, encoding="overwrite")
                self.refused(3, contains=["tensor fp8", told])

    def test_frames_without_a_size_are_read(self):
        """Programs that write a frame as a stream do not say its size in advance."""
        def without_size(frame):
            data = weight_sync.decompress(frame)  # stored blocks of at most 128 KiB, and a window for them
            return b"\x28\xb5\x2f\xfd\0\x38" + (len(data) << 3 | 1).to_bytes(3, "little") + data
        self.lie(None, raw=without_size)
        self.ok("apply", "updates", "model", "-q")
        self.has(1)
        self.tearDown()
        for size in (len(self.raw[0]["fp8"]) - 1, len(self.raw[0]["fp8"]) + 1):
            shutil.rmtree(self.path("model"))
            self.save("model", self.raw[0])
            self.lie(None, raw=lambda frame, size=size: b"\x28\xb5\x2f\xfd\0\x38" + (size << 3 | 1).to_bytes(3, "little") + bytes(size))
            self.refused(3, contains=["tensor fp8", "shorter" if size < len(self.raw[0]["fp8"]) else "longer"])

    def test_lying_indexes_change_nothing(self):
        folder = self.path("updates/weight_v000001")
        file, index = os.path.join(folder, "model-00000-of-00001.safetensors"), os.path.join(folder, "model.safetensors.index.json")
        metadata, frames = self.lie(lambda data: data)
        tensors = {name: ("U8", [len(frame)], frame) for name, frame in frames.items()}
        weight_sync.write_file(file, {name: value for name, value in metadata.items() if name != "fp8"}, tensors)
        self.refused(3, contains=["tensor fp8", "has no checksum"])
        weight_sync.write_file(file, metadata, {name: value for name, value in tensors.items() if name != "fp8"})
        self.refused(3, contains=["maps 5 tensors, but the files have 4"])
        weight_sync.write_file(file, metadata, {**tensors, "fp9": tensors["fp8"]})
        self.refused(3, contains=["tensor fp9", "the index does not say"])
        weight_sync.write_file(file, metadata, tensors)
        shutil.copy(file, os.path.join(folder, "model-00002-of-00002.safetensors"))
        self.refused(3, contains=["model-00002-of-00002.safetensors", "does not name this file"])
        os.remove(os.path.join(folder, "model-00002-of-00002.safetensors"))
        names = dict.fromkeys(frames, os.path.basename(file))
        for more, status, told in (({"delta_encoding": "rle"}, 5, "delta_encoding rle is unknown"),
                                   ({"compression_format": "lz4"}, 5, "compression_format lz4 is unknown"),
                                   ({"checksum_format": "md5"}, 5, "checksum_format md5 is unknown"),
                                   ({"checksum_format": "blake3"}, 5, "blake3"),
                                   ({"base_version": 0}, 3, "base_version of the delta"),
                                   ({"base_version": "000001"}, 3, "a base is earlier"),
                                   ({"version": "x"}, 3, "version of the delta")):
            weight_sync.write_index(folder, names, 1, **more)
            self.refused(status, contains=[told])
        os.remove(index)
        self.refused(3, contains=["neither model.safetensors.index.json nor model.safetensors"])

    def test_links_are_not_followed_in_silence(self):
        self.version(1)
        first = self.path("model/model-00001-of-00002.safetensors")
        os.rename(first, self.path("blob"))
        os.symlink(self.path("blob"), first)
        self.refused(2, contains=["this is a link", "copy the model first"])
        self.fails(2, "apply", "updates", "model", "--dry-run", contains=["this is a link"])
        os.remove(first)
        os.link(self.path("blob"), first)
        self.refused(2, contains=["has 2 names", "copy the model first"])

    @unittest.skipIf(os.geteuid() == 0, "root may write to files that are read-only")
    def test_read_only_files(self):
        self.version(1)
        os.chmod(self.path("model/model-00002-of-00002.safetensors"), 0o444)
        self.refused(4, contains=["model-00002-of-00002.safetensors", "cannot be changed in place"])

    def test_states_and_folders(self):
        self.version(1)
        os.mkdir(self.path("model/.weight_sync"))
        with open(self.path("model/.weight_sync/state.json"), "w") as f:
            f.write('{"version": 1}')
        self.refused(3, contains=["does not say which version the model has"])
        self.fails(2, "apply", "updates/weight_v000001/model.safetensors.index.json", "model", contains=["not the folder of versions"])
        self.fails(3, "apply", "model", "model", contains=["there are no versions"])
        self.fails(2, "apply", "updates", "updates/weight_v000001/model.safetensors.index.json", contains=["not the folder of a model"])

    def test_it_waits_for_the_lock_that_sglang_takes(self):
        self.version(1)
        os.mkdir(self.path("model/.weight_sync"))
        with open(self.path("model/.weight_sync/lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            p = subprocess.Popen([harness.BINARY, "apply", "updates", "model", "-q"], cwd=self.dir, stderr=subprocess.PIPE, text=True)
            self.assertIn("another process changes this model", p.stderr.readline())
            self.assertEqual(weight_sync.read_model(self.path("model")), self.raw[0])
            fcntl.flock(lock, fcntl.LOCK_UN)
            self.assertEqual((p.communicate()[1], p.returncode), ("", 0))
        self.has(1)

    def test_journals_that_are_not_complete_are_dropped(self):
        self.version(1)
        os.mkdir(self.path("model/.weight_sync"))
        with open(self.path("model/.weight_sync/journal"), "wb") as f:
            f.write(b"fcjrnl01" + bytes(100))
        self.ok("apply", "updates", "model", "-q")
        self.has(1)

    def test_a_tensor_above_4_gib(self):
        """Sparse files: xor reaches every byte, and the positions of overwrite do not wrap."""
        size = 2**32 + 4096
        os.mkdir(self.path("large"))
        text = json.dumps({"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
        text += b" " * (-len(text) % 8)
        with open(self.path("large/model.safetensors"), "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + size)
        shutil.copytree(self.path("large"), self.path("next"), copy_function=lambda a, b: subprocess.run(
            ["cp", "--sparse=always", a, b], check=True))
        with open(self.path("next/model.safetensors"), "r+b") as f:
            for at in (7, size - 1):
                f.seek(8 + len(text) + at)
                f.write(b"x")
        os.mkdir(self.path("updates"))
        self.ok("delta", "large", "next", "-o", "updates/weight_v000001", "-q")
        self.ok("apply", "updates", "large", "-q")
        with open(self.path("large/model.safetensors"), "rb") as f:
            for at, byte in ((6, b"\0"), (7, b"x"), (size - 2, b"\0"), (size - 1, b"x")):
                f.seek(8 + len(text) + at)
                self.assertEqual(f.read(1), byte)


if __name__ == "__main__":
    unittest.main()
