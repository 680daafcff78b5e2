"""Stored bytes of tensors as numpy arrays: dtypes that numpy lacks are widened, packed ones stay bits.

Nothing here reads files, and nothing needs torch.

Source: OCP 8-bit floating point specification 1.0 and OCP microscaling formats 1.0 (values of the 8-bit floats); torch
2.13 `torch/headeronly/util/Float8_*fnuz.h` (the variants without infinities and negative zero).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_manifest import ITEM_BYTES

__all__ = ["array_of", "is_number"]

Array = npt.NDArray[Any]

_INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_NUMPY = frozenset((*_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"))
_WIDENED = ("bfloat16", "complex32")
# Exponent bits, mantissa bits, bias.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}
_SCALES = "float8_e8m0fnu"
"""A format of scales: powers of two, without a sign."""


def is_number(dtype: str) -> bool:
    """Whether `array_of` returns the numbers of this dtype, rather than its bits."""
    return dtype in _NUMPY or dtype in _WIDENED or dtype in _FLOAT8 or dtype == _SCALES


def array_of(data: bytes | bytearray | memoryview, dtype: str, shape: tuple[int, ...] = (-1,)) -> Array:
    """Return the elements in row-major little-endian bytes as an array, without a copy where numpy has the dtype.

    Args:
        data: Bytes of whole elements.
        dtype: Torch's name of the dtype, one of `dcp_manifest.ITEM_BYTES`.
        shape: Shape in elements; by default one dimension.

    Returns:
        An array of the same values: bfloat16 and 8-bit floats as float32, complex32 as complex64, and packed or
        quantized dtypes as unsigned integers with their bits.
    """
    return _elements(data, dtype).reshape(shape)


def _elements(data: bytes | bytearray | memoryview, dtype: str) -> Array:
    if dtype in _NUMPY:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        with np.errstate(invalid="ignore"):  # signalling NaNs
            return np.frombuffer(data, "<f2").astype(np.float32).view(np.complex64)
    if dtype in _FLOAT8 or dtype == _SCALES:
        return _float8_values(dtype)[np.frombuffer(data, np.uint8)]
    size = ITEM_BYTES[dtype]
    return np.frombuffer(data, f"<u{size}" if size <= 8 else f"V{size}")


@functools.cache
def _float8_values(dtype: str) -> npt.NDArray[np.float32]:
    """Return the 256 values of an 8-bit floating-point dtype, by their bits."""
    if dtype == _SCALES:
        return np.array([*(2.0 ** (bits - 127) for bits in range(255)), math.nan], np.float32)
    return np.array([_float8_value(bits, dtype) for bits in range(256)], np.float32)


def _float8_value(bits: int, dtype: str) -> float:
    exponent_bits, mantissa_bits, bias = _FLOAT8[dtype]
    sign = -1.0 if bits & 0x80 else 1.0
    exponent, mantissa = (bits & 0x7F) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if dtype.endswith("fnuz"):
        if bits == 0x80:
            return math.nan
    elif exponent == (1 << exponent_bits) - 1:
        if dtype == "float8_e5m2":
            return math.nan if mantissa else sign * math.inf
        if mantissa == (1 << mantissa_bits) - 1:
            return math.nan
    fraction = mantissa / (1 << mantissa_bits)
    return sign * (math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias))
