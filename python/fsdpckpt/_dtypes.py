"""The dtypes of PyTorch in NumPy. NumPy and ml_dtypes are imported when the first array is made."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ._errors import ArgumentError

if TYPE_CHECKING:
    import numpy as np

_NUMPY = {
    "float64": "<f8",
    "float32": "<f4",
    "float16": "<f2",
    "int64": "<i8",
    "int32": "<i4",
    "int16": "<i2",
    "int8": "i1",
    "uint64": "<u8",
    "uint32": "<u4",
    "uint16": "<u2",
    "uint8": "u1",
    "bool": "?",
    "complex64": "<c8",
    "complex128": "<c16",
}
# float8_e4m3fn and the like have the same names in ml_dtypes.
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
# Types that NumPy does not have, as what their bytes are.
_BYTES = {"float4_e2m1fn_x2": "u1"}


@lru_cache(maxsize=None)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of PyTorch's dtype `name`.

    complex32 becomes a structure of two float16, float4_e2m1fn_x2 its bytes.
    """
    import numpy as np

    if name in _NUMPY:
        return np.dtype(_NUMPY[name])
    if name == "complex32":
        return np.dtype([("real", "<f2"), ("imag", "<f2")])
    if name in _BYTES:
        return np.dtype(_BYTES[name])
    import ml_dtypes

    made: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return made


def torch_name(dtype: np.dtype[Any]) -> str:
    """The name of PyTorch's dtype for a NumPy dtype."""
    name = str(dtype.name)
    if name in _NUMPY or name in _ML_DTYPES:
        return name
    if dtype == numpy_dtype("complex32"):
        return "complex32"
    raise ArgumentError(f"PyTorch has no dtype for NumPy's {dtype}")
