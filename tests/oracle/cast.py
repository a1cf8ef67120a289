"""fc_cast against torch: every pair of floating-point types, bit for bit.

usage: cast.py PATH_OF_CAST_TOOL

All values of the 8- and 16-bit types; for float32 and float64 every sign and exponent with edge and random mantissas,
the neighbourhood of every value and rounding tie of the narrower types, and millions of random bit patterns.
Exit status 77 without torch.
"""

import subprocess
import sys

try:
    import numpy as np
    import torch
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

NAMES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]
TYPES = [n for n in NAMES if hasattr(torch, n)]
UINT = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def from_bits(bits, name):
    return torch.from_numpy(bits.view(np.uint8).copy()).view(getattr(torch, name))


def to_bits(tensor):
    size = tensor.element_size()
    return tensor.contiguous().view(torch.uint8).numpy().view(UINT[size])


def every_exponent(exponent_bits, mantissa_bits, rng, per_exponent):
    """Each sign and exponent with mantissas at the limits, with single bits, runs of ones, and random bits."""
    one = 1
    edges = {0, (one << mantissa_bits) - 1, one << (mantissa_bits - 1)}
    for i in range(mantissa_bits):
        edges |= {one << i, (one << i) - 1, (one << mantissa_bits) - (one << i)}
        edges |= {(one << i) | 1, (one << (mantissa_bits - 1)) | (one << i)}
    dtype = UINT[(1 + exponent_bits + mantissa_bits) // 8]
    edges = np.array(sorted(edges), dtype=dtype)
    heads = np.arange(one << (exponent_bits + 1), dtype=dtype) << dtype(mantissa_bits)
    random = rng.integers(0, one << mantissa_bits, (heads.size, per_exponent), dtype=dtype)
    return np.concatenate([(heads[:, None] | edges[None, :]).ravel(), (heads[:, None] | random).ravel()])


def near_narrow_values(name, dtype):
    """Every value of a narrow type, the midpoints between them, and the neighbours of all of these."""
    size = torch.empty(0, dtype=getattr(torch, name)).element_size()
    bits = np.arange(1 << (8 * size), dtype=np.uint32).astype(UINT[size])
    values = np.unique(from_bits(bits, name).to(torch.float64).numpy())
    values = values[np.isfinite(values)]
    middles = (values[1:] + values[:-1]) / 2
    beyond = np.concatenate([values[-2:] * 1.5, values[:2] * 1.5, values[-1:] * 2, values[:1] * 2])
    with np.errstate(all="ignore"):
        base = np.concatenate([values, middles, beyond]).astype(dtype)
        up, down = np.nextafter(base, dtype(np.inf)), np.nextafter(base, dtype(-np.inf))
    return np.concatenate([base, up, down]).view(UINT[base.itemsize])


def inputs(name, rng):
    size = torch.empty(0, dtype=getattr(torch, name)).element_size()
    if size <= 2:
        return np.arange(1 << (8 * size), dtype=np.uint32).astype(UINT[size])
    dtype = {4: np.float32, 8: np.float64}[size]
    exponents, mantissas = {4: (8, 23), 8: (11, 52)}[size]
    parts = [every_exponent(exponents, mantissas, rng, 600 if size == 4 else 80)]
    parts += [near_narrow_values(n, dtype) for n in TYPES if n not in ("float32", "float64")]
    parts.append(rng.integers(0, 1 << 8 * size, 2_000_000, dtype=UINT[size]))
    if size == 8:
        # Most random doubles overflow a float, so add millions within its range, including subnormal results.
        with np.errstate(all="ignore"):
            narrow = rng.integers(0, 1 << 32, 1_000_000, dtype=np.uint32).view(np.float32).astype(np.float64)
        parts.append(narrow.view(np.uint64) ^ rng.integers(0, 1 << 30, narrow.size, dtype=np.uint64))
    return np.concatenate(parts)


def expected(tensor, name):
    """torch's scalar conversion. A strided source avoids its AVX loop, whose bfloat16 NaN differs."""
    strided = torch.stack([tensor, tensor], 1)[:, 0]
    return to_bits(strided.to(getattr(torch, name)))


def main(tool):
    torch.set_num_threads(1)
    rng = np.random.default_rng(20)
    failures = checked = 0
    for source in TYPES:
        bits = inputs(source, rng)
        tensor = from_bits(bits, source)
        for target in TYPES:
            if source == target:
                continue
            out = subprocess.run([tool, source, target], input=bits.tobytes(), stdout=subprocess.PIPE, check=True).stdout
            want = expected(tensor, target)
            got = np.frombuffer(out, dtype=want.dtype)
            assert got.size == want.size, f"{source} -> {target}: {got.size} elements, expected {want.size}"
            # The contiguous loop must agree wherever the result is not a NaN.
            plain = tensor.to(getattr(torch, target))
            differs = (to_bits(plain) != got) & ~torch.isnan(plain.to(torch.float32)).numpy()
            wrong = np.flatnonzero((got != want) | differs)
            checked += want.size
            for i in wrong[:3]:
                print(f"{source} {bits[i]:#x} -> {target}: fc_cast {got[i]:#x}, torch {want[i]:#x}")
            failures += wrong.size
    print(f"{checked} conversions of {len(TYPES) * (len(TYPES) - 1)} pairs compared, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
