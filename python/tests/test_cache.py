"""What HDF5Writer and HDF5Reader leave in the page cache: a checkpoint that fits is read from the disk at most once, and a larger one
is saved and read past the cache. Nothing is timed: mincore(2) tells which pages are cached, and /proc/self/io what was read from the disk."""

import ctypes
import fcntl
import mmap
import os
import subprocess
import sys
import tempfile
import unittest
import warnings
from pathlib import Path
from unittest import mock

import harness
from torch_ranks import load, run_ranks, same, save, zeroed

MATRIX = 4 << 20  # bytes
COUNT = 6


def cached_bytes(path):
    """How many bytes of a file are in the page cache."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as view:
            buffer = (ctypes.c_char * size).from_buffer(view)
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = ctypes.CDLL(None, use_errno=True).mincore(buffer, ctypes.c_size_t(size), pages)
            assert failed == 0, os.strerror(ctypes.get_errno())
            del buffer
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def data_files(path):
    return [file for file in Path(path).iterdir() if file.stat().st_size > MATRIX]


def held(path):
    """The part of a checkpoint's data that is cached."""
    return sum(map(cached_bytes, data_files(path))) / sum(file.stat().st_size for file in data_files(path))


def drop(path):
    for file in Path(path).iterdir():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_from_disk():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def replicated_state():
    import torch

    torch.manual_seed(1)
    return {f"layers.{i}": torch.randn(1024, MATRIX // 4096) for i in range(COUNT)}


def load_together(path):
    """Loads what every rank holds, all ranks at once. Returns the bytes that this rank read from the disk."""
    import torch.distributed as dist

    state = zeroed(replicated_state())
    if dist.get_rank() == 0:
        drop(path)
    dist.barrier()
    before = read_from_disk()
    load(state, path)
    assert same(state, replicated_state())
    return read_from_disk() - before


class PageCache(unittest.TestCase):
    def setUp(self):
        # In the build, because /tmp may be a tmpfs, which has nothing but the cache.
        folder = tempfile.TemporaryDirectory(dir=".")
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, "checkpoint")
        self.state = replicated_state()
        save(self.state, self.path)
        drop(self.path)
        if held(self.path) > 0.1:
            self.skipTest("this file system keeps its files in the cache")
        with open(data_files(self.path)[0], "rb") as file:
            flags = fcntl.fcntl(file.fileno(), fcntl.F_GETFL)
            try:
                fcntl.fcntl(file.fileno(), fcntl.F_SETFL, flags | os.O_DIRECT)
            except OSError:
                self.skipTest("this file system refuses O_DIRECT")

    def load(self):
        state = load(zeroed(self.state), self.path)
        self.assertTrue(same(state, self.state))

    def test_what_was_loaded_is_not_read_from_the_disk_again(self):
        self.load()
        self.assertGreater(held(self.path), 0.95)
        before = read_from_disk()
        self.load()
        self.assertLess(read_from_disk() - before, MATRIX)

    def test_what_was_saved_is_not_read_from_the_disk(self):
        save(self.state, self.path, force=True)
        self.assertGreater(held(self.path), 0.95)
        before = read_from_disk()
        self.load()
        self.assertLess(read_from_disk() - before, MATRIX)

    def test_what_does_not_fit_is_saved_past_the_cache(self):
        with mock.patch("fsdpckpt._native.fits_cache", return_value=False) as fits:
            save(self.state, self.path, force=True)
        self.assertEqual([call.args[0] for call in fits.call_args_list], [COUNT * MATRIX])
        self.assertLess(held(self.path), 0.3)

    def test_a_state_dict_is_read_once(self):
        import fsdpckpt

        with fsdpckpt.open(self.path) as checkpoint:
            self.assertTrue(same(checkpoint.state_dict(), self.state))
        self.assertGreater(held(self.path), 0.95)

    def test_what_does_not_fit_is_read_past_the_cache(self):
        with mock.patch("fsdpckpt._native.fits_cache", return_value=False):
            self.load()
        self.assertLess(held(self.path), 0.3)

    def test_the_bytes_of_all_ranks_count_up_to_the_checkpoint(self):
        with mock.patch("fsdpckpt._native.fits_cache", return_value=False) as fits:
            for ranks in (8, 2):
                with mock.patch("fsdpckpt._torch_reader.local_ranks", return_value=ranks):
                    load({"layers.0": zeroed(self.state["layers.0"])}, self.path)
        self.assertEqual([call.args[0] for call in fits.call_args_list], [COUNT * MATRIX, 2 * MATRIX])

    def test_torchrun_tells_how_many_ranks_a_machine_has(self):
        from fsdpckpt._torch_reader import local_ranks

        with mock.patch("torch.distributed.is_initialized", return_value=True):
            with mock.patch("torch.distributed.get_world_size", return_value=8):
                for told, ranks in (("2", 2), ("16", 8), ("", 8), ("0", 8), ("x", 8)):
                    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=told):
                        self.assertEqual(local_ranks(), ranks)
        self.assertEqual(local_ranks(), 1)

    def test_ranks_that_hold_the_same_read_it_from_the_disk_once(self):
        # A process of its own, because this one has threads, which a fork does not copy.
        ranks = [sys.executable, __file__, self.path]
        read = subprocess.run(ranks, stdout=subprocess.PIPE, check=True, text=True, timeout=120).stdout
        self.assertLess(sum(map(int, read.split())), 1.5 * COUNT * MATRIX)

    def test_damage_is_found_in_the_cache_and_past_it(self):
        from torch.distributed.checkpoint.api import CheckpointException

        file = data_files(self.path)[0]
        file.chmod(0o600)
        with open(file, "r+b") as opened:
            opened.seek(file.stat().st_size // 2)
            byte = opened.read(1)
            opened.seek(-1, os.SEEK_CUR)
            opened.write(bytes([byte[0] ^ 1]))
        for fits in (True, False):
            drop(self.path)
            with mock.patch("fsdpckpt._native.fits_cache", return_value=fits):
                with self.assertRaisesRegex(CheckpointException, "CorruptError: .* do not match their recorded CRC-64"):
                    self.load()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*run_ranks(load_together, sys.argv[1]))
        sys.exit()
    warnings.simplefilter("ignore")  # without a process group
    harness.main("torch")
