"""The bytes of an HDF5 file as parts that are read in order, and the checksum of its metadata. For h5_walk.py."""

import struct

UNDEFINED = 2**64 - 1


class Wrong(Exception):
    pass


def must(holds, text, *values):
    if not holds:
        raise Wrong(text % values)


def lookup3(data):
    """Jenkins' hashlittle, HDF5's checksum of metadata."""
    a = b = c = (0xdeadbeef + len(data)) & 0xffffffff
    mask = 0xffffffff

    def rot(x, k):
        return (x << k | x >> 32 - k) & mask
    at, left = 0, len(data)
    while left > 12:
        x, y, z = struct.unpack_from("<III", data, at)
        a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
        a = (a - c & mask) ^ rot(c, 4)
        c = c + b & mask
        b = (b - a & mask) ^ rot(a, 6)
        a = a + c & mask
        c = (c - b & mask) ^ rot(b, 8)
        b = b + a & mask
        a = (a - c & mask) ^ rot(c, 16)
        c = c + b & mask
        b = (b - a & mask) ^ rot(a, 19)
        a = a + c & mask
        c = (c - b & mask) ^ rot(b, 4)
        b = b + a & mask
        at, left = at + 12, left - 12
    if left == 0:
        return c
    x, y, z = struct.unpack("<III", data[at:] + bytes(12 - left))
    a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
    for p, q, r, k in ((2, 1, 1, 14), (0, 2, 2, 11), (1, 0, 0, 25), (2, 1, 1, 16), (0, 2, 2, 4), (1, 0, 0, 14), (2, 1, 1, 24)):
        v = [a, b, c]
        v[p] = ((v[p] ^ v[q]) - rot(v[r], k)) & mask
        a, b, c = v
    return c


class Part:
    """Bytes that are read in order to their end."""

    def __init__(self, data, at, size):
        must(0 <= at <= len(data) and size <= len(data) - at, "a part of %d bytes at %d is outside of the file", size, at)
        self.data, self.at, self.end = data, at, at + size

    def take(self, size):
        must(size <= self.end - self.at, "a part ends at %d, within a field", self.end)
        self.at += size
        return self.data[self.at - size:self.at]

    def u(self, size):
        return int.from_bytes(self.take(size), "little")

    def fixed(self, wanted):
        must(self.take(len(wanted)) == wanted, "at %d there is no %r", self.at - len(wanted), wanted)

    def done(self):
        must(self.at == self.end, "%d bytes at %d belong to nothing", self.end - self.at, self.at)
