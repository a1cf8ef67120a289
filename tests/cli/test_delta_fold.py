"""fold: an independent reader (weight_sync.py) applies the one delta that was made of a chain which it wrote itself."""

import json
import os
import random
import shutil
import struct
import unittest

import delta_case
import weight_sync

SIZES = {"layers.0.w": 300_001, "layers.1.w": 70_000, "fp8": 231, "scalar": 4, "one": 1, "none": 0, "same": 200}


def flat(model):
    return {name: ("U8", [len(data)], data) for name, data in model.items()}


class Fold(delta_case.Case):
    def setUp(self):
        super().setUp()
        rng = random.Random(1)
        first = {name: rng.randbytes(size) for name, size in SIZES.items()}
        os.mkdir(self.path("out"))
        self.models = {2: first}
        self.models[3] = delta_case.changed(first, 3, ["layers.0.w", "layers.1.w", "scalar", "fp8"])
        self.models[4] = delta_case.changed(self.models[3], 4, ["layers.0.w", "one"])
        self.models[5] = dict(self.models[4])
        self.models[6] = delta_case.changed(self.models[5], 6, ["layers.0.w", "layers.1.w", "one"])
        self.models[6]["scalar"] = first["scalar"]  # again as in the base

    def write(self, folder, numbers, encoding="xor", checksum="xxh3-128", **how):
        os.makedirs(self.path(folder), exist_ok=True)
        for number in numbers:
            weight_sync.write_version(self.version(folder, number), self.models[number - 1], self.models[number], number,
                                      encoding=encoding, checksum=checksum, **how)

    def version(self, folder, number):
        return self.path(folder, f"weight_v{number:06d}")

    def test_another_reader_gets_the_last_version(self):
        for encoding in ("xor", "overwrite"):
            for checksum in ("xxh3-128", "adler32"):
                with self.subTest(encoding=encoding, checksum=checksum):
                    folder = f"{encoding}-{checksum}"
                    self.write(folder, range(3, 7), encoding, checksum, files=2)
                    self.ok("fold", *(self.version(folder, n) for n in (4, 3, 6, 5)), "-o", "out/weight_v000006", "-q", "--force")
                    found = dict(self.models[2])
                    metadata = weight_sync.apply(found, self.path("out/weight_v000006"))
                    self.assertEqual(found, self.models[6])
                    self.assertEqual(metadata, {"version": "000006", "base_version": "000002", "delta_encoding": encoding,
                                                "compression_format": "zstd", "checksum_format": checksum})
                    _, tensors = weight_sync.read_version(self.path("out/weight_v000006"))
                    expected = {"layers.0.w", "layers.1.w", "fp8", "one"} | ({"scalar"} if encoding == "overwrite" else set())
                    self.assertEqual(set(tensors), expected)

    def test_frames_are_those_of_the_two_ends(self):
        """xor of a chain is new ^ old. overwrite has each position once, and the value that was written last."""
        for encoding in ("xor", "overwrite"):
            self.write(encoding, range(3, 7), encoding)
            self.ok("fold", encoding, "-o", "folded", "-q", "--force")
            _, tensors = weight_sync.read_version(self.path("folded"))
            for name, (frame, _) in tensors.items():
                data = weight_sync.decompress(frame)
                if encoding == "xor":
                    self.assertEqual(data, weight_sync.xor(self.models[2][name], self.models[6][name]))
                    continue
                touched = {i for n in range(3, 7) for i, (a, b) in enumerate(zip(self.models[n - 1][name], self.models[n][name],
                                                                                 strict=True)) if a != b}
                count, = struct.unpack_from("<I", data)
                self.assertEqual(list(struct.unpack_from(f"<{count}I", data, 4)), sorted(touched))
                self.assertEqual(data[4 + 4 * count:], bytes(self.models[6][name][i] for i in sorted(touched)))

    def test_our_own_deltas(self):
        for n in (2, 4, 6):
            self.save(f"m{n}", flat(self.models[n]))
        for encoding in ("xor", "overwrite"):
            os.mkdir(self.path(encoding))
            self.ok("delta", "m2", "m4", "-o", f"{encoding}/weight_v000004", "--base", "2", "-q", "--encoding", encoding)
            self.ok("delta", "m4", "m6", "-o", f"{encoding}/weight_v000006", "--base", "4", "-q", "--encoding", encoding)
            report = json.loads(self.ok("fold", encoding, "-o", f"{encoding}-all", "--json"))
            self.assertEqual({k: report[k] for k in ("version", "base_version", "deltas", "delta_encoding")},
                             {"version": 6, "base_version": 2, "deltas": 2, "delta_encoding": encoding})
            found = dict(self.models[2])
            weight_sync.apply(found, self.path(f"{encoding}-all"))
            self.assertEqual(found, self.models[6])

    def test_a_directory_of_versions(self):
        self.write("updates", range(3, 7))

        def numbers(target):
            self.ok("fold", "updates", "-o", target, "-q", "--force")
            metadata, _ = weight_sync.read_version(self.path(target))
            return int(metadata["base_version"]), int(metadata["version"])
        self.assertEqual(numbers("mine"), (2, 6))
        self.assertEqual(numbers("out/weight_v000005"), (2, 5))
        shutil.rmtree(self.version("updates", 4))  # a full version in the middle
        os.mkdir(self.version("updates", 4))
        weight_sync.write_file(os.path.join(self.version("updates", 4), "model.safetensors"), None, flat(self.models[4]))
        self.assertEqual(numbers("mine"), (4, 6))
        self.fails(2, "fold", "updates", "-o", "out/weight_v000004", contains=["version 4 is a full version"])
        self.fails(2, "fold", "updates", "-o", "out/weight_v000009", contains=["there is no version 9"])
        self.fails(2, "fold", *(self.version("updates", n) for n in (3, 4, 5)), "-o", "x",
                   contains=["this is a full version", "fold only the versions after it"])
        shutil.rmtree(self.version("updates", 4))
        self.fails(2, "fold", "updates", "-o", "x", contains=["version 5 changes version 4, which is not there", "from 5 on"])
        self.fails(2, "fold", self.version("updates", 3), self.version("updates", 5), "-o", "x",
                   contains=["it changes version 4, but the version before it is 3"])

    def test_what_is_no_chain(self):
        self.write("updates", range(3, 6))
        weight_sync.write_version(self.version("updates", 6), self.models[4], self.models[6], 6, base=4)
        self.fails(2, "fold", "updates", "-o", "x", contains=["version 5 does not lead to version 6", "fork"])
        self.fails(2, "fold", self.version("updates", 5), self.version("updates", 6), "-o", "x", contains=["both change version 4"])
        shutil.copytree(self.version("updates", 4), self.path("again"))
        self.fails(2, "fold", self.version("updates", 4), "again", "-o", "x", contains=["both are version 4"])
        self.write("mixed", [4], "overwrite")
        self.fails(2, "fold", self.version("updates", 3), self.version("mixed", 4), "-o", "x",
                   contains=["its encoding is overwrite", "fold the versions of each encoding"])
        self.write("sums", [4], checksum="adler32")
        self.fails(2, "fold", self.version("updates", 3), self.version("sums", 4), "-o", "x", contains=["its checksums are adler32"])
        self.fails(2, "fold", self.version("updates", 3), "-o", "weight_v000007", contains=["this is the name of version 7"])
        self.fails(2, "fold", self.version("updates", 3), "-o", self.version("updates", 3), "--force", contains=["weight_v000003"])
        self.fails(2, "fold", "nothing", "-o", "x", contains=["nothing"])
        self.assertFalse(os.path.exists(self.path("x")))

    def test_threads_and_memory_do_not_change_a_byte(self):
        for encoding in ("xor", "overwrite"):
            self.write(encoding, range(3, 7), encoding)
            written = []
            for jobs, memory in ((1, "8M"), (8, "64M")):
                self.ok("fold", encoding, "-o", "x", "-q", "--force", "-j", jobs, "--memory", memory)
                written.append(self.contents("x"))
            self.assertEqual(*written)
        self.fails(2, "fold", "xor", "-o", "y", "--memory", "1M", contains=["4 deltas at once need", "--memory"])

    def test_nothing_changed(self):
        self.write("updates", [5])
        self.ok("fold", "updates", "-o", "x", "-q")
        self.assertEqual(os.listdir(self.path("x")), ["model.safetensors.index.json"])
        self.assertEqual(weight_sync.read_version(self.path("x"))[1], {})

    def lying(self, frame, encoding="xor", checksum="00" * 16):
        """A second delta, with this frame of layers.1.w."""
        shutil.rmtree(self.path("lying"), ignore_errors=True)
        self.write("lying", [3], encoding)
        os.mkdir(self.version("lying", 4))
        file = "model-00000-of-00001.safetensors"
        weight_sync.write_file(os.path.join(self.version("lying", 4), file), {"layers.1.w": checksum},
                               {"layers.1.w": ("U8", [len(frame)], frame)})
        weight_sync.write_index(self.version("lying", 4), {"layers.1.w": file}, 4, encoding=encoding)
        return self.path("lying")

    def test_lying_frames(self):
        size = SIZES["layers.1.w"]
        good = weight_sync.compress(bytes(size))
        cases = [("a frame of another size", weight_sync.compress(bytes(size - 1)), "xor", f"the frame has {size - 1} bytes"),
                 ("a truncated frame", good[:-3], "xor", "truncated"), ("no frame", b"not zstd, but long enough", "xor", "no zstd frame"),
                 ("bytes after it", good + b"x", "xor", "bytes follow"), ("an empty tensor", b"", "xor", "no zstd frame"),
                 ("fewer values", weight_sync.compress(struct.pack("<3I", 2, 1, 2) + b"x"), "overwrite", "shorter"),
                 ("more values", weight_sync.compress(struct.pack("<2I", 1, 1) + b"xy"), "overwrite", "longer"),
                 ("positions that go back", weight_sync.compress(struct.pack("<3I", 2, 5, 5) + b"xy"), "overwrite", "ascending order")]
        for what, frame, encoding, text in cases:
            with self.subTest(what):
                self.fails(3, "fold", self.lying(frame, encoding), "-o", "x", contains=["layers.1.w", text])
        self.fails(3, "fold", self.lying(good, checksum='"}{'), "-o", "x", contains=["layers.1.w", "hexadecimal"])
        self.assertFalse(os.path.exists(self.path("x")))


if __name__ == "__main__":
    unittest.main()
