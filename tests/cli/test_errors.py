"""Damaged and unsuitable inputs: each gives one clear line and the right exit status, and leaves no output."""

import bz2
import gzip
import io
import json
import lzma
import os
import pickle
import random
import shutil
import struct
import subprocess
import unittest
import zipfile

import harness

FSDP2 = "dcp-torch2.15.0-fsdp2"
COMMANDS = (("consolidate", "-o", "out.h5"), ("reshard", "-o", "out", "--dp", "2"))


class Errors(harness.Case):
    def refused(self, status, source, contains, inspect=True):
        """Every command refuses `source` with one line, and the directory stays as it was."""
        before = self.listing()
        for command, *options in COMMANDS:
            with self.subTest(command=command):
                self.fails(status, command, source, *options, contains=contains)
                self.assertEqual(self.listing(), before)
        if inspect:
            self.fails(status, "inspect", source, contains=contains)

    def test_missing_shard(self):
        ckpt = self.copy(FSDP2)
        gone = harness.largest_shard(ckpt)
        os.unlink(gone)
        self.refused(3, ckpt, [os.path.basename(gone)])

    def test_checkpoints_one_level_down_are_listed(self):
        """A trainer's output directory is not a checkpoint; the message lists the checkpoints in it."""
        folder = self.path("run")
        for name in ("step-100", "step-200"):
            shutil.copytree(harness.corpus(FSDP2), os.path.join(folder, name))
        os.mkdir(os.path.join(folder, "logs"))
        shutil.copy(os.path.join(harness.CORPUS, os.pardir, "pt", "legacy.pt"), os.path.join(folder, "rng.pt"))
        shutil.copy(os.path.join(folder, "rng.pt"), os.path.join(folder, "best.pth.tar"))
        shutil.copy(os.path.join(harness.CORPUS, "h5-packed.h5"), os.path.join(folder, "model.weights.h5"))
        shutil.copy(os.path.join(harness.CORPUS, os.pardir, "README.md"), os.path.join(folder, "other.pt"))
        self.refused(3, folder, ["not a checkpoint", ": best.pth.tar, model.weights.h5, rng.pt, step-100, step-200;"])

    def test_what_is_not_a_checkpoint_is_named(self):
        """People give pointers, error pages, archives and files of other programs. The message says what each is."""
        packed = {"lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
                  "page": (b"<!DOCTYPE html>\n<html><title>403</title></html>", "it is a web page"), "empty": (b"", "it is empty"),
                  "gguf": (b"GGUF\3" + bytes(60), "llama.cpp"), "pickle": (pickle.dumps({"w": [1.0]}), "Python's own"),
                  "gzip": (gzip.compress(b"x"), "gzip file"), "bz2": (bz2.compress(b"x"), "bzip2 file"), "xz": (lzma.compress(b"x"), "xz file")}
        names = {"": ("x.pt", "x.safetensors", "x.h5"), "hub": ("model.safetensors",), "bin": ("pytorch_model.bin",)}
        for folder, files in names.items():
            os.makedirs(self.path(folder), exist_ok=True)
            for what, (content, said) in packed.items():
                for name in files:
                    with self.subTest(what=what, folder=folder, name=name):
                        with open(self.path(folder, name), "wb") as f:
                            f.write(content)
                        self.refused(3 if what in ("lfs", "page", "empty") else 5, self.path(folder or name), [name, said])
        import tarfile
        with tarfile.open(self.path("x.tar"), "w") as archive:
            archive.add(self.path("x.pt"), "x.pt")
        self.refused(5, "x.tar", ["tar archive"])

    def test_foreign_files_in_the_directory_are_reported(self):
        """Files that are not part of the checkpoint are not converted, and a note lists them."""
        ckpt = self.copy(FSDP2)
        for name in ("rng_state_1.pt", "rng_state_0.pt", "config.json"):
            with open(os.path.join(ckpt, name), "wb") as f:
                f.write(b"x")
        result = self.run_tool("consolidate", ckpt, "-o", self.path("out.h5"))
        self.assertEqual(result.returncode, 0)
        self.assertIn("2 files in the same directory are not part of the checkpoint and are not read, the first is "
                      "rng_state_0.pt", result.stderr)

    def test_hostile_file_names_are_escaped(self):
        """Notes quote file names too."""
        ckpt = self.copy(FSDP2)
        with open(os.path.join(ckpt, "a\x1b[31mb\nc.pt"), "wb") as f:
            f.write(b"x")
        result = self.run_tool("consolidate", ckpt, "-o", self.path("out.h5"))
        self.assertEqual((result.returncode, result.stderr.count("\n")), (0, 1))
        self.assertIn(": a\\x1b[31mb\\x0ac.pt in the same directory", result.stderr)

    def test_missing_index(self):
        self.ok("convert", harness.corpus(FSDP2), "-o", "shards", "--to", "h5")
        os.unlink(self.path("shards", "index.h5"))
        self.refused(3, "shards", ["index.h5: the file is missing", "copy it again"])

    def test_no_file_is_called_dash(self):
        """A target that cannot go to standard output does not become a file called "-"."""
        source = harness.corpus(FSDP2)
        self.fails(2, "inspect", source, "--html", "-", contains=["./-"])
        self.fails(2, "check", source, "--junit", "-", contains=["./-"])
        self.assertEqual(self.listing(), [])

    def test_truncated_shard(self):
        ckpt = self.copy(FSDP2)
        shard = harness.largest_shard(ckpt)
        os.truncate(shard, os.path.getsize(shard) // 2)
        self.refused(3, ckpt, [os.path.basename(shard)])

    def test_empty_shard(self):
        ckpt = self.copy(FSDP2)
        shard = harness.largest_shard(ckpt)
        os.truncate(shard, 0)
        self.refused(3, ckpt, [os.path.basename(shard)])

    def test_damaged_object_is_reported_with_its_file(self):
        """The message names the source file that the object is in, for every target format."""
        ckpt = self.copy("dcp-torch2.15.0-train")
        with open(os.path.join(ckpt, "expected.json"), encoding="utf-8") as f:
            item = json.load(f)["objects"]["optim.param_groups.0.lr"]
        with open(os.path.join(ckpt, item["file"]), "r+b") as f:
            f.seek(item["offset"])
            f.write(bytes(item["length"]))
        for to in ("h5", "pt", "safetensors", "dcp"):
            with self.subTest(to=to):
                self.fails(3, "convert", ckpt, "-o", self.path("out-" + to), "--to", to,
                           contains=["object optim.param_groups.0.lr: ", item["file"]])

    def records(self, path, offset=0, length=None):
        """(name, offset, size) of every record with a CRC in the archive that occupies a range of a file."""
        with open(path, "rb") as f:
            f.seek(offset)
            data = f.read() if length is None else f.read(length)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for info in archive.infolist():
                name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
                if info.CRC and info.file_size:
                    yield info.filename, offset + info.header_offset + 30 + name + extra, info.file_size

    def test_damaged_records_of_objects(self):
        """A flipped bit in any record of an object, also in that of a tensor inside it, stops the conversion."""
        ckpt = self.copy("dcp-torch2.15.0-objects-torch")
        with open(os.path.join(ckpt, "expected.json"), encoding="utf-8") as f:
            objects = json.load(f)["objects"]
        count = 0
        for name, item in objects.items():
            path = os.path.join(ckpt, item["file"])
            for record, place, size in self.records(path, item["offset"], item["length"]):
                count += record.startswith("archive/data/")
                with self.flipped(path, place + size - 1):
                    for to in ("dcp", "h5", "pt", "safetensors"):
                        with self.subTest(name=name, record=record, to=to):
                            self.fails(3, "convert", ckpt, "-o", self.path("out"), "--to", to,
                                       contains=["object " + name + ": ", item["file"], "CRC"])
        self.assertGreater(count, 0)
        self.ok("consolidate", ckpt, "-o", self.path("back.pt"), "-q")
        for record, place, size in self.records(self.path("back.pt")):
            if "/data/" in record:
                with self.flipped(self.path("back.pt"), place + size - 1), self.subTest(record=record):
                    self.fails(3, "convert", self.path("back.pt"), "-o", self.path("out"), "--to", "dcp",
                               contains=["back.pt", "CRC-32"])

    def test_damaged_data(self):
        """The archive's CRC-32 reveals a flipped bit of a tensor in every conversion."""
        ckpt = self.copy(FSDP2)
        for args in (("consolidate", "--to", "h5"), ("consolidate", "--to", "pt"), ("reshard", "--dp", "3"),
                     ("consolidate", "--to", "h5", "--compress", "1"), ("convert", "--to", "dcp")):
            with self.subTest(args=args), self.flipped_chunk(ckpt, "model.tok_embeddings.weight", 1):
                self.fails(3, args[0], ckpt, "-o", self.path("out"), *args[1:],
                           contains=["model.tok_embeddings.weight", "CRC-32", "verify"])
                self.assertFalse(os.path.exists(self.path("out")))

    def test_damaged_chunk_is_named(self):
        """The message names the chunk, even if chunks are blocks of columns, and if the target casts, cuts or transposes them."""
        cases = (("dcp-torch2.15.0-2d-dp2tp2", "model.layers.0.attention.wo.weight", 4),
                 ("dcp-torch2.15.0-sharded-tensor-2d", "grid", 4), ("dcp-torch2.15.0-shard-shard", "s0s1", 4),
                 ("dcp-torch2.15.0-strided", "t", 1))
        for name, chosen, count in cases:
            ckpt = self.copy(name, name)
            chunks = json.loads(self.ok("inspect", ckpt, "--tensor", chosen, "--json"))["chunks"]
            self.assertEqual(len(chunks), count, (name, chosen))
            for number, args in enumerate((("consolidate",), ("consolidate", "--dtype", "bfloat16"),
                                           ("reshard", "--dp", "3"), ("consolidate", "--compress", "1"))):
                chunk = chunks[number % count]
                with self.subTest(name=name, args=args), self.flipped_chunk(ckpt, chosen, number % count):
                    self.fails(3, args[0], ckpt, "-o", self.path("out"), "--to", "h5", *args[1:],
                               contains=[f"offset {chunk['offset']}: tensor {chosen}, chunk ", "CRC-32"])
            self.ok("consolidate", ckpt, "-o", self.path("out"), "--to", "h5", "-q")
            os.unlink(self.path("out"))

    def cut_tensor(self, data):
        return next(n for n, m in data.state_dict_metadata.items() if len(getattr(m, "chunks", [])) > 1)

    def test_uncovered_elements_are_refused(self):
        ckpt = self.copy(FSDP2)
        name = []

        def edit(data):
            name.append(self.cut_tensor(data))
            del data.storage_data[harness.storage_key(data, name[0], 1)]
            del harness.tensor_of(data, name[0]).chunks[1]

        harness.edit_metadata(ckpt, edit)
        self.refused(3, ckpt, [name[0]], inspect=False)

    def test_overlapping_chunks_are_refused(self):
        ckpt = self.copy(FSDP2)
        name = []

        def edit(data):
            name.append(self.cut_tensor(data))
            chunk = harness.tensor_of(data, name[0]).chunks[1]
            key = harness.storage_key(data, name[0], 1)
            offsets = list(chunk.offsets.args[0])
            offsets[0] -= 1
            chunk.offsets.args = (tuple(offsets),)
            info = data.storage_data.pop(key)
            key.state["offset"] = chunk.offsets
            data.storage_data[key] = info

        harness.edit_metadata(ckpt, edit)
        self.refused(3, ckpt, [name[0]], inspect=False)

    def test_chunk_outside_of_its_tensor_is_refused(self):
        ckpt = self.copy(FSDP2)
        name = []

        def edit(data):
            name.append(self.cut_tensor(data))
            tensor = harness.tensor_of(data, name[0])
            tensor.size.args = (tuple([1] + list(tensor.size.args[0])[1:]),)

        harness.edit_metadata(ckpt, edit)
        self.refused(3, ckpt, [name[0]])

    def test_unknown_pickle_global_is_not_called(self):
        ckpt = self.copy(FSDP2)
        marker = self.path("executed")
        command = f"touch {marker}".encode()
        blob = (b"\x80\x04\x8c\x02os\x8c\x06system\x93" + b"\x8c" + bytes([len(command)]) + command + b"\x85R.")
        with open(os.path.join(ckpt, ".metadata"), "wb") as f:
            f.write(blob)
        self.refused(3, ckpt, ["os.system"])
        self.assertFalse(os.path.exists(marker))

    def test_path_out_of_the_checkpoint_is_refused(self):
        ckpt = self.copy(FSDP2)

        def edit(data):
            for info in data.storage_data.values():
                info.state["relative_path"] = "../" + info.state["relative_path"]

        harness.edit_metadata(ckpt, edit)
        shutil.copy(harness.largest_shard(ckpt), self.dir)
        self.refused(3, ckpt, ["../__"])

    def test_not_a_checkpoint_at_all(self):
        os.mkdir(self.path("empty"))
        self.refused(3, "empty", ["empty", "not a checkpoint"])
        self.refused(3, "missing", ["missing", "no such file"])
        with open(self.path("text.txt"), "w") as f:
            f.write("hello\n")
        self.refused(3, "text.txt", ["text.txt", "not a checkpoint"])
        with open(self.path("nothing"), "w"):
            pass
        self.refused(3, "nothing", ["nothing", "it is empty"])
        with open(self.path("noise"), "wb") as f:
            f.write(random.Random(1).randbytes(100000))
        self.refused(3, "noise", ["noise", "not a checkpoint"])

    def test_devices_and_pipes_do_not_hang(self):
        os.mkfifo(self.path("pipe"))
        self.refused(3, "pipe", ["pipe"])
        self.refused(3, "/dev/null", ["/dev/null"])
        ckpt = self.copy(FSDP2)
        shard = harness.largest_shard(ckpt)
        os.unlink(shard)
        os.mkfifo(shard)
        self.refused(3, ckpt, [os.path.basename(shard)])

    def test_damaged_metadata(self):
        with open(os.path.join(harness.corpus(FSDP2), ".metadata"), "rb") as f:
            good = f.read()
        ckpt = self.copy(FSDP2)
        for size in (0, 1, 2, 100, len(good) // 2, len(good) - 1):
            with self.subTest(size=size):
                with open(os.path.join(ckpt, ".metadata"), "wb") as f:
                    f.write(good[:size])
                self.refused(3, ckpt, [".metadata"])
        with open(os.path.join(ckpt, ".metadata"), "wb") as f:
            f.write(b"\x80\x04N.")  # the pickle of None
        self.refused(3, ckpt, [".metadata"])

    def test_damaged_hdf5(self):
        self.ok("consolidate", harness.corpus(FSDP2), "-o", "good.h5")
        with open(self.path("good.h5"), "rb") as f:
            good = f.read()
        os.unlink(self.path("good.h5"))
        for size in (8, 100, len(good) // 2, len(good) - 1):
            with self.subTest(size=size):
                with open(self.path("bad.h5"), "wb") as f:
                    f.write(good[:size])
                self.refused(3, "bad.h5", ["bad.h5"])

    def test_missing_hdf5_shard(self):
        self.ok("reshard", harness.corpus(FSDP2), "-o", "shards", "--dp", "2")
        os.unlink(self.path("shards", "shard-00001-of-00002.h5"))
        self.refused(3, "shards", ["shard-00001-of-00002.h5"])

    def test_links_out_of_hdf5_shards(self):
        """A link may point into the directory but not out of it. The same rule holds for shards and for index.h5."""
        self.ok("reshard", harness.corpus(FSDP2), "-o", "shards", "--dp", "2")
        os.mkdir(self.path("shards", "sub"))
        for name in ("shard-00001-of-00002.h5", "index.h5"):
            with self.subTest(name=name):
                link = self.path("shards", name)
                os.rename(link, self.path("shards", "sub", "data"))
                os.symlink("sub/data", link)
                self.ok("inspect", "shards")
                os.rename(self.path("shards", "sub", "data"), self.path(name))
                os.unlink(link)
                os.symlink("../" + name, link)
                self.refused(3, "shards", ["shards/" + name, "symbolic link", "--follow-external"])
                self.fails(3, "inspect", "--headers-only", "shards", contains=["symbolic link"])
                self.ok("inspect", "shards", "--follow-external")
                os.unlink(link)
                os.rename(self.path(name), link)

    def test_closed_descriptors(self):
        """When the command starts with stdin, stdout and stderr closed, no file may get their descriptors."""
        self.ok("reshard", harness.corpus(FSDP2), "-o", "shards", "--dp", "2")
        self.ok("consolidate", "shards", "-o", "good.h5")
        close = [lambda fds=fds: [os.close(fd) for fd in fds] for fds in ((0, 1, 2), (2,), (1,), (0,))]
        for i, closing in enumerate(close):
            for source in ("shards", harness.corpus(FSDP2)):
                with self.subTest(case=i, source=source):
                    p = subprocess.run([harness.BINARY, "consolidate", source, "-o", "x.h5", "-q", "--force"], cwd=self.dir,
                                       preexec_fn=closing, timeout=harness.HANG)
                    self.assertEqual(p.returncode, 0)
                    with open(self.path("x.h5"), "rb") as f, open(self.path("good.h5"), "rb") as g:
                        self.assertEqual(f.read(), g.read())

    @unittest.skipIf(os.geteuid() == 0, "root may enter any directory")
    def test_directory_that_cannot_be_entered(self):
        ckpt = self.copy(FSDP2)
        os.chmod(ckpt, 0)
        self.addCleanup(os.chmod, ckpt, 0o700)
        self.refused(4, ckpt, ["ckpt", "Permission denied"])

    def test_empty_checkpoint(self):
        ckpt = self.copy(FSDP2)

        def edit(data):
            data.state_dict_metadata.clear()
            data.planner_data.clear()
            data.storage_data.clear()

        harness.edit_metadata(ckpt, edit)
        self.refused(2, ckpt, ["the checkpoint has no tensors and no objects"], inspect=False)
        self.ok("inspect", ckpt)

    def test_tp_plan_that_matches_nothing_is_refused(self):
        source = harness.corpus("dcp-torch2.15.0-uneven")
        error = self.fails(2, "reshard", source, "-o", "out", "--tp", "2")
        self.assertIn("plan 'auto'", error)
        self.assertIn("'cols'", error)
        self.assertIn("--tp-plan", error)
        with open(self.path("plan.json"), "w") as f:
            f.write('{"no.such.module": "colwise"}')
        self.fails(2, "reshard", harness.corpus(FSDP2), "-o", "out", "--tp", "2", "--tp-plan", "plan.json",
                   contains=["plan.json"])
        self.assertEqual(self.listing(), ["plan.json"])

    def test_wrong_tp_plans_are_refused(self):
        for text in ("", "[1]", '{"a": 1}', '{"a": "sideways"}', "{"):
            with open(self.path("plan.json"), "w") as f:
                f.write(text)
            p = self.run_tool("reshard", harness.corpus(FSDP2), "-o", "out", "--tp", "2", "--tp-plan", "plan.json")
            self.assertIn(p.returncode, (2, 3), text)
            self.assertEqual(p.stderr.count("\n"), 1, p.stderr)
            self.assertIn("plan.json", p.stderr)
        self.assertEqual(self.listing(), ["plan.json"])


if __name__ == "__main__":
    harness.main()
