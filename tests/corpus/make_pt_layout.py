"""Makes pt/layout.pt and pt/layout-zip64.bin, archives in PyTorch's layout for test_zip_write.c, and pt/legacy.pt, the same values
in the format from before torch 1.6, for test_pt.c.

layout.pt is a small torch.save file. layout-zip64.bin is a file of 4.4 GB without the bytes of its large record (all zeros, from
a sparse file): the 832 bytes before them, then the bytes after them.

    python tests/corpus/make_pt_layout.py
"""

import pathlib
import tempfile

import torch

OUT = pathlib.Path(__file__).parent / "pt"
LARGE = 4_400_000_000


class Sink:
    """A file that drops the large write and keeps the others."""

    def __init__(self):
        self.kept = []

    def write(self, data):
        if len(data) < 100_000:
            self.kept.append(bytes(data))
        return len(data)

    def flush(self):
        pass


def main():
    OUT.mkdir(exist_ok=True)
    small = {"a": torch.arange(10.0), "e": torch.zeros(0), "b": torch.zeros(3, dtype=torch.bfloat16), "o": 3.5}
    torch.save(small, OUT / "layout.pt")
    torch.save(small, OUT / "legacy.pt", _use_new_zipfile_serialization=False)
    with tempfile.NamedTemporaryFile() as f:
        f.truncate(LARGE)
        storage = torch.UntypedStorage.from_file(f.name, False, LARGE)
        large = torch.tensor([], dtype=torch.uint8).set_(storage)
        torch.serialization.set_crc32_options(False)  # the CRC of the large record would take long
        sink = Sink()
        torch.save({"a": large, "b": torch.arange(4.0), "c": torch.zeros(0)}, sink)
        (OUT / "layout-zip64.bin").write_bytes(b"".join(sink.kept))


if __name__ == "__main__":
    main()
