"""Lossless casts: conversions between dtypes that preserve every number. Loads need no permission for them."""

from __future__ import annotations

import torch

__all__ = ["is_lossless_cast"]

_UNSIGNED = {torch.uint8: 8, torch.uint16: 16, torch.uint32: 32, torch.uint64: 64}
_SIGNED = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}
# (exponent bits, significand bits with the hidden one)
_FLOATS = {
    torch.float64: (11, 53),
    torch.float32: (8, 24),
    torch.bfloat16: (8, 8),
    torch.float16: (5, 11),
    torch.float8_e5m2: (5, 3),
    torch.float8_e4m3fn: (4, 4),
}
_COMPLEX = {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}


def is_lossless_cast(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether the dtype `target` can represent every number that the dtype `source` can represent."""
    if source == target:
        return True
    if target in _COMPLEX:
        return is_lossless_cast(_COMPLEX.get(source, source), _COMPLEX[target])
    if source is torch.bool:
        return target in _UNSIGNED or target in _SIGNED or target in _FLOATS
    if target in _FLOATS:
        return _fits_float(source, *_FLOATS[target])
    if source in _UNSIGNED:
        return _UNSIGNED[source] <= _UNSIGNED.get(target, 0) or _UNSIGNED[source] < _SIGNED.get(target, 0)
    return source in _SIGNED and _SIGNED[source] <= _SIGNED.get(target, 0)


def _fits_float(source: torch.dtype, exponent_bits: int, significand_bits: int) -> bool:
    if source in _FLOATS:
        return _FLOATS[source][0] <= exponent_bits and _FLOATS[source][1] <= significand_bits
    magnitude_bits = _UNSIGNED.get(source) or (_SIGNED[source] - 1 if source in _SIGNED else None)
    # An integer of n magnitude bits also needs an exponent that reaches 2**n.
    return (
        magnitude_bits is not None
        and magnitude_bits <= significand_bits
        and magnitude_bits < 2 ** (exponent_bits - 1) - 1
    )
