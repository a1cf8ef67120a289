"""mpirun -n N fsdpckpt consolidate|reshard writes the same bytes as one process, prints messages once, and a failed job
leaves nothing.

FSDPCKPT and FSDPCKPT_CORPUS are those of tests/cli. FSDPCKPT_LAUNCH is launch.sh, FSDPCKPT_DYING the library that kills a
rank.
"""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import unittest
import zipfile
import zlib

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "cli"))
import harness  # noqa: E402
import net_server  # noqa: E402
import s3_server  # noqa: E402

LAUNCH = os.environ["FSDPCKPT_LAUNCH"]
ELEMENTS = 3_000_017  # of a float32 tensor: 12 MB, cut unevenly by anything


def snapshot(path):
    found = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with open(os.path.join(folder, name), "rb") as f:
                found[os.path.relpath(os.path.join(folder, name), path)] = f.read()
    return found


class Convert(harness.Case):
    def large(self):
        """A checkpoint of one tensor of random bytes."""
        path = harness.make_large(self.path("ckpt"), ELEMENTS)
        with open(os.path.join(path, "__0_0.distcp"), "r+b") as f:
            f.seek(f.read().find(b"archive/data/0") + len("archive/data/0"))
            f.write(random.Random(1).randbytes(4 * ELEMENTS))
        return path

    def job(self, ranks, *args, env=None):
        p = subprocess.run([LAUNCH, str(ranks), harness.BINARY, *map(str, args)], cwd=self.dir, text=True, timeout=harness.HANG,
                           capture_output=True, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})})
        p.stderr = harness.without_progress(p.stderr)
        return p

    def check_same(self, source, ranks, *args, to="h5"):
        self.ok(args[0], source, "-o", "alone", "--to", to, "-q", *args[1:])
        p = self.job(ranks, args[0], source, "-o", "together", "--to", to, *args[1:])
        lines = harness.unexpected(p.stderr)
        needs = [line for line in lines if line.endswith("copy them there")]
        self.assertEqual((p.returncode, lines, len(needs)), (0, needs, to == "accelerate"))
        self.assertEqual(p.stdout.count("together: "), 1, p.stdout)
        a, b = self.path("alone"), self.path("together")
        if os.path.isdir(a):
            self.assertEqual(snapshot(a), snapshot(b))
            shutil.rmtree(a)
            shutil.rmtree(b)
        else:
            with open(a, "rb") as f, open(b, "rb") as g:
                self.assertEqual(f.read(), g.read())
            os.remove(a)
            os.remove(b)

    def test_large(self):
        source = self.large()
        self.check_same(source, 2, "consolidate")
        self.check_same(source, 4, "consolidate", "--dtype", "bf16", "-j", "1", "--memory", "1M")
        self.check_same(source, 3, "reshard", "--dp", "2")

    def test_compressed(self):
        """The ranks compress each file together, in one round or, with little memory, in many."""
        source = self.large()
        self.check_same(source, 2, "consolidate", "--compress", "1")
        self.check_same(source, 3, "consolidate", "--compress", "1", "-j", "1", "--memory", "8M")
        self.check_same(source, 4, "reshard", "--dp", "2", "--compress", "6", "--dtype", "bf16")
        self.check_same(harness.corpus("dcp-torch2.15.0-2d-dp4tp2"), 3, "reshard", "--dp", "2", "--compress", "1")

    def test_computed_weights(self):
        """Blocks are computed by whichever rank needs them, and what several read is compared by one of them."""
        source = harness.corpus("dcp-torch2.15.0-train")
        self.check_same(source, 3, "reshard", "--dp", "2", "--quantize", "model.*")
        self.ok("consolidate", source, "-o", "codes.pt", "--quantize", "model.*", "-q")
        self.check_same("codes.pt", 4, "consolidate", "--dequantize", "bf16")
        names = [t["name"] for t in json.loads(self.ok("inspect", "codes.pt", "--json"))["tensors"]]
        scale = json.loads(self.ok("inspect", "codes.pt", "--json", "--tensor",
                                   next(n for n in names if n.endswith("_scale_inv"))))["chunks"][0]
        with self.flipped(self.path("codes.pt"), scale["data_offset"]):
            p = self.job(3, "consolidate", "codes.pt", "-o", "none.h5", "--dequantize", "bf16")
            self.assertEqual(p.returncode, 3, p.stderr)
            self.assertIn("_scale_inv", p.stderr)
            self.assertFalse(os.path.exists(self.path("none.h5")))

    def test_auto_recipe_is_said_once(self):
        source = os.path.join(harness.CORPUS, "..", "recipes", "megatron-llama", "from.safetensors")
        p = self.job(3, "consolidate", source, "-o", "m.h5", "--recipe", "auto")
        said = f"fsdpckpt: {source}: the recipe is megatron-llama, the only one with a rule for every tensor\n"
        self.assertEqual((p.returncode, p.stderr), (0, said))

    def test_many_files(self):
        """With many files, each rank writes whole files, and rank 0 the index."""
        source = harness.corpus("dcp-torch2.15.0-train")
        for to in ("h5", "dcp", "pt"):
            self.check_same(source, 3, "reshard", "--dp", "13", to=to)
        self.check_same(source, 3, "reshard", "--dp", "13", "--include", "model.*", to="safetensors")
        self.check_same(harness.corpus("dcp-torch2.15.0-2d-dp4tp2"), 2, "reshard", "--dp", "6", "--tp", "2",
                        "--dtype", "bf16", to="dcp")

    def test_corpus(self):
        self.check_same(harness.corpus("dcp-torch2.15.0-train"), 3, "consolidate")
        self.check_same(harness.corpus("dcp-torch2.15.0-2d-dp4tp2"), 5, "reshard", "--dp", "3", "--tp", "2")
        self.check_same(harness.corpus("dcp-torch2.15.0-train"), 3, "reshard", "--dp", "2", "--include", "model.*", "--include",
                        "optim.*", to="accelerate")

    def test_messages_are_printed_once(self):
        source = harness.corpus("dcp-torch2.15.0-train")
        p = self.job(3, "reshard", source, "--dp", "2", "--dry-run", "--json", "-v", "--progress", "always")
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertTrue(json.loads(p.stdout)["dry_run"])
        self.assertEqual(p.stderr.count("values in"), 1, p.stderr)
        p = self.job(3, "reshard", source, "--dp", "2", "--dry-run", "--rank", "1")
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertEqual(p.stdout, self.ok("reshard", source, "--dp", "2", "--dry-run", "--rank", "1"))

    def test_damaged_record(self):
        """The CRC-32 of a record that every rank reads in part."""
        source = self.large()
        with open(os.path.join(source, "__0_0.distcp"), "r+b") as f:
            data = f.read()
            start, entry = data.find(b"archive/data/0") + len("archive/data/0"), data.rfind(b"PK\1\2")
            crc = struct.pack("<I", zlib.crc32(data[start:start + 4 * ELEMENTS]))
            for at in (entry + 16, start - len("archive/data/0") - 30 + 14):
                f.seek(at)
                f.write(crc)
            f.flush()
            self.check_same(source, 3, "consolidate")
            f.seek(start + 2 * ELEMENTS)
            f.write(bytes([data[start + 2 * ELEMENTS] ^ 1]))
        for args in (("consolidate",), ("reshard", "--dp", "2"), ("consolidate", "--compress", "1")):
            p = self.job(3, args[0], source, "-o", "out", "--to", "h5", *args[1:])
            self.check_fails(3, p, "tensor w", "CRC-32")
            self.assertFalse(os.path.exists(self.path("out")))

    def test_damaged_partition(self):
        """The CRC-32 of a record that holds many tensors."""
        source = self.path("deepspeed")
        shutil.copytree(harness.corpus("../deepspeed/0.19.8-zero2-bf16"), source)
        name = os.path.join(source, "global_step2", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
        self.check_same(source, 3, "consolidate")
        with zipfile.ZipFile(name) as archive:
            largest = max(archive.infolist(), key=lambda record: record.file_size if "/data/" in record.filename else 0)
        with open(name, "r+b") as f:
            at = f.read().index(zipfile.ZipFile(name).read(largest)) + largest.file_size // 2
            f.seek(at)
            byte = f.read(1)[0]
            f.seek(at)
            f.write(bytes([byte ^ 16]))
        for args in (("consolidate",), ("reshard", "--dp", "2")):
            p = self.job(3, args[0], source, "-o", "out", "--to", "h5", *args[1:])
            self.check_fails(3, p, "optim_states.pt", "CRC-32")
            self.assertFalse(os.path.exists(self.path("out")))

    def test_damaged_average(self):
        """Several ranks read parts of the same tensor of both sources, so some records are read again for their CRC-32."""
        sources = [self.large(), self.path("other")]
        shutil.copytree(sources[0], sources[1])
        for source in sources:
            self.ok("consolidate", source, "-o", source + ".h5", "-q")
            self.ok("consolidate", source, "-o", source + ".pt", "-q")
            self.ok("reshard", source, "-o", source + ".st", "--to", "safetensors", "--dp", "2", "-q")
        for kind, what in ((".pt", "CRC-32"), (".h5", "digest"), (".st", "CRC-64")):
            pair = [source + kind for source in sources]
            options = ("-o", "out", "--to", "h5", "--dp", "2", "--quiet")
            p = self.job(3, "average", *pair, *options)
            self.assertEqual((p.returncode, p.stderr), (0, ""))
            shutil.rmtree(self.path("out"))
            with self.flipped_chunk(pair[1], "w", 0):
                self.check_fails(3, self.job(3, "average", *pair, *options), "tensor w", what, pair[1])
            self.assertFalse(os.path.exists(self.path("out")))

    def check_fails(self, status, p, *contains):
        """Checks the status, and that the command printed one line of its own and nothing to stdout."""
        self.assertEqual(p.returncode, status, (p.stdout, p.stderr))
        lines = [x for x in p.stderr.splitlines() if x.startswith("fsdpckpt: ")]
        self.assertEqual(len(lines), 1, p.stderr)
        for text in contains:
            self.assertIn(text, lines[0])
        self.assertEqual(p.stdout, "")

    def test_errors(self):
        source = harness.corpus("dcp-torch2.15.0-train")
        self.check_fails(3, self.job(3, "consolidate", "missing", "-o", "x.h5"), "missing: no such file")
        self.check_fails(2, self.job(2, "consolidate", source, "-o", "no/x.h5"), "rank 0: ", "no: the directory")
        with open(self.path("x.h5"), "w") as f:
            f.write("old")
        self.check_fails(2, self.job(2, "consolidate", source, "-o", "x.h5"), "exists; --force replaces it")
        with open(self.path("x.h5")) as f:
            self.assertEqual(f.read(), "old")
        self.assertEqual(self.listing(), ["x.h5"])

    def test_a_rank_fails(self):
        source = self.large()
        for rank in (0, 2):
            env = {**harness.preload(os.environ["FSDPCKPT_DYING"]), "DYING_RANK": str(rank), "DYING_AT": "3",
                   "DYING_HOW": "eio"}
            for options in (("--memory", "1M"), ("--memory", "8M", "--compress", "1")):
                p = self.job(3, "consolidate", source, "-o", "x.h5", "-j", "1", *options, env=env)
                self.check_fails(4, p, f"rank {rank}: ", "x.h5: writing", "Input/output error")
                self.assertEqual(self.listing(), ["ckpt"])
            p = self.job(3, "reshard", source, "-o", "x", "--dp", "13", "-j", "1", "--memory", "1M", env=env)
            self.check_fails(4, p, f"rank {rank}: ", "Input/output error")
            self.assertEqual(self.listing(), ["ckpt"])

    def test_a_rank_dies(self):
        """kill -9 while writing. If rank 0 dies, its staging directory stays, as it does with one process."""
        source = self.large()
        for rank in (1, 0):
            env = {**harness.preload(os.environ["FSDPCKPT_DYING"]), "DYING_RANK": str(rank), "DYING_AT": "3"}
            p = self.job(3, "consolidate", source, "-o", "x.h5", "-j", "1", "--memory", "1M", env=env)
            self.assertNotEqual(p.returncode, 0)
            self.assertIn("signal 9", p.stderr)
            self.assertEqual(p.stdout, "")
            self.assertEqual([n for n in self.listing() if rank == 1 or not n.startswith(".")], ["ckpt"], rank)

    def test_copies_by_rank(self):
        """Each rank reads its own copy of the checkpoint. Copies of two steps have the same names and sizes."""
        source = self.large()
        for rank in range(2):
            shutil.copytree(source, self.path(f"disk{rank}", "ckpt"))
        p = self.local_job(2, "consolidate", "ckpt", "-o", self.path("x.h5"))
        self.assertEqual((p.returncode, p.stderr), (0, ""))
        self.ok("consolidate", source, "-o", "alone.h5", "-q")
        with open(self.path("x.h5"), "rb") as f, open(self.path("alone.h5"), "rb") as g:
            self.assertEqual(f.read(), g.read())
        os.remove(self.path("x.h5"))
        before = self.listing()
        name = self.path("disk1", "ckpt", "__0_0.distcp")
        with open(name, "rb") as f:
            data = f.read()
        with open(name, "wb") as f:
            start = data.find(b"archive/data/0") + len("archive/data/0")
            f.write(data[:start] + random.Random(2).randbytes(4 * ELEMENTS) + data[start + 4 * ELEMENTS:])
        for args in (("consolidate",), ("consolidate", "--dtype", "bf16"), ("reshard", "--dp", "2", "--to", "dcp")):
            p = self.local_job(2, args[0], "ckpt", "-o", self.path("x.h5" if len(args) < 5 else "x"), *args[1:])
            self.check_fails(2, p, "rank 1: ckpt/__0_0.distcp: this rank does not see the same file as rank 0")
            self.assertEqual(self.listing(), before)

    def split_by_rank(self, source, ranks):
        """Gives each rank a disk with its own data files. Rank 0 also has the headers; notes.txt is on all disks."""
        for rank in range(ranks):
            os.makedirs(self.path(f"disk{rank}", "ckpt"))
        for i, name in enumerate(sorted(os.listdir(source))):
            disk = 0 if not name.endswith((".distcp", ".h5")) or name == "index.h5" else i % ranks
            shutil.copy(os.path.join(source, name), self.path(f"disk{disk}", "ckpt", name))
        for rank in range(ranks):
            with open(self.path(f"disk{rank}", "ckpt", "notes.txt"), "w") as f:
                f.write("the same everywhere")

    def local_job(self, ranks, *args, env=None):
        """Runs every rank in its own directory."""
        line = 'cd "disk$OMPI_COMM_WORLD_RANK" && exec "$0" "$@"'
        return subprocess.run([LAUNCH, str(ranks), "sh", "-c", line, harness.BINARY, *map(str, args)], cwd=self.dir,
                              text=True, timeout=harness.HANG, capture_output=True, stdin=subprocess.DEVNULL,
                              env={**os.environ, **(env or {})})

    def test_local(self):
        source = harness.corpus("dcp-torch2.15.0-2d-dp4tp2")
        self.split_by_rank(source, 3)
        before = snapshot(self.dir)
        p = self.local_job(3, "consolidate", "ckpt", "-o", self.path("out.h5"), "--local")
        self.assertEqual((p.returncode, p.stderr), (0, ""))
        self.ok("consolidate", source, "-o", "alone.h5", "-q")
        with open(self.path("out.h5"), "rb") as f, open(self.path("alone.h5"), "rb") as g:
            self.assertEqual(f.read(), g.read())
        os.remove(self.path("alone.h5"))
        os.remove(self.path("out.h5"))
        self.assertEqual(snapshot(self.dir), before)

    def test_local_refusals(self):
        source = harness.corpus("dcp-torch2.15.0-2d-dp4tp2")
        self.fails(2, "consolidate", source, "-o", "x.h5", "--local", contains=["--local needs mpirun"])
        self.split_by_rank(source, 2)
        with open(self.path("disk1", "ckpt", "notes.txt"), "a") as f:
            f.write(", but here")
        args = ("consolidate", "ckpt", "-o", self.path("x.h5"), "--local")
        self.check_fails(2, self.local_job(2, *args), "rank 1: notes.txt has 29 bytes, but 19 bytes on rank 0")
        os.remove(self.path("disk1", "ckpt", "notes.txt"))
        name = next(n for n in os.listdir(self.path("disk1", "ckpt")))
        os.remove(self.path("disk1", "ckpt", name))
        self.check_fails(3, self.local_job(2, *args), "rank 0: ", name)
        shutil.rmtree(self.path("disk1", "ckpt"))
        self.check_fails(4, self.local_job(2, *args), "rank 1: ckpt: cannot be listed")
        self.assertEqual(self.listing(), ["disk0", "disk1"])

    def test_bucket(self):
        """Each rank sends whole files, and rank 0 makes all of them visible. What a rank sent is aborted if one of them dies."""
        bucket = s3_server.S3({}, least_part=5 << 20)
        server = net_server.start(bucket.files, None, bucket)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        env = {"AWS_ENDPOINT_URL": server.name, "AWS_ACCESS_KEY_ID": s3_server.KEY, "AWS_SECRET_ACCESS_KEY": s3_server.SECRET,
               "AWS_SESSION_TOKEN": s3_server.TOKEN, "AWS_REGION": s3_server.REGION, "FSDPCKPT_NET_PACE": "1"}
        if not os.path.exists(os.path.join(os.path.dirname(harness.BINARY), "libfsdpckpt-net.so")):
            self.skipTest("the build has no libcurl")
        source, train = self.large(), harness.corpus("dcp-torch2.15.0-train")

        def save(ranks, *args, **more):
            return self.job(ranks, args[0], args[1], "-o", "s3://models/t", "-q", *args[2:], env={**env, **more})

        for ranks, args in ((3, ("reshard", source, "--to", "h5", "--dp", "2")), (2, ("reshard", train, "--to", "dcp", "--dp", "5")),
                            (2, ("reshard", source, "--to", "safetensors", "--dp", "2")), (2, ("reshard", train, "--to", "pt", "--dp", "3"))):
            bucket.objects.clear()
            bucket.files.clear()
            p = save(ranks, *args)
            self.assertEqual((p.returncode, harness.unexpected(p.stderr)), (0, []), args)
            self.ok(args[0], args[1], "-o", "alone", "-q", *args[2:])
            self.assertTrue({key[2:]: data for key, data in bucket.objects.items()} == snapshot(self.path("alone")), args)
            self.assertEqual((bucket.uploads, bucket.wrong), ({}, []))
            shutil.rmtree(self.path("alone"))
        self.assertEqual(self.job(2, "consolidate", source, "-o", "s3://models/one.h5", "-q", env=env).returncode, 0)
        self.ok("consolidate", source, "-o", "one.h5", "-q")
        with open(self.path("one.h5"), "rb") as f:
            self.assertTrue(bucket.objects["one.h5"] == f.read())
        self.check_fails(2, save(2, "reshard", source, "--to", "h5", "--dp", "2"), "s3://models/t: exists")
        before = dict(bucket.objects)
        p = save(2, "consolidate", source, "--to", "accelerate", "--rename", "s/^/model./", "--force")
        self.check_fails(5, p, "s3://models/t: 2 processes cannot write accelerate to a bucket: run one process, without mpirun")
        for rank in (1, 0):
            kill = {**harness.preload(os.environ["FSDPCKPT_DYING"]), "DYING_RANK": str(rank), "DYING_AT": "2"}
            self.assertNotEqual(save(2, "reshard", source, "--to", "h5", "--dp", "2", "--force", **kill).returncode, 0)
            self.assertEqual(bucket.objects, before)
        bucket.uploads["lost"] = s3_server.Upload("t/shard-00001-of-00002.h5", None)
        self.assertEqual(save(2, "reshard", source, "--to", "safetensors", "--dp", "2", "--force").returncode, 0)
        self.assertEqual(bucket.uploads, {})

    def test_alone(self):
        """--comm mpi without mpirun is a job of one rank. With --comm none under mpirun, each rank is a job of its own."""
        source = harness.corpus("dcp-torch2.15.0-train")
        self.check_same(source, 1, "consolidate", "--comm", "mpi")
        p = self.job(2, "consolidate", source, "--comm", "none", "--dry-run", "-o", "x.h5")
        self.assertEqual(p.returncode, 0, p.stderr)
        self.assertEqual(p.stdout.count("would hold"), 2)

    def test_no_module(self):
        source = harness.corpus("dcp-torch2.15.0-train")
        p = self.job(2, "consolidate", source, "-o", "x.h5", env={"FSDPCKPT_MODULE_PATH": self.dir})
        self.assertEqual(p.returncode, 5, p.stderr)
        self.assertIn(f"libfsdpckpt-comm-mpi.so was not found in {self.dir}: ", p.stderr)
        self.assertEqual(self.listing(), [])


if __name__ == "__main__":
    if not shutil.which("mpirun"):
        sys.exit(77)
    harness.main()
