"""Numbers that a hash derives from a seed and labels, equal with every version of torch and Python."""

from __future__ import annotations

import hashlib

import torch

_MASK = 0xFFFFFFFF
# Odd and below 2^31: a product with 32 bits stays below 2^63, so that nothing overflows. From Thomas Mueller's hash.
_MULTIPLIER = 0x45D9F3B


def derive_seed(*labels: int | str) -> int:
    """Return a 63-bit seed."""
    text = "/".join(map(str, labels)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def derive_keys(count: int, *labels: int | str) -> list[int]:
    """Return `count` 32-bit numbers."""
    keys = [derive_seed(*labels, f"key {number}") for number in range(count)]
    return [key & _MASK for key in keys]


def mixed_bits(values: torch.Tensor, first_key: int, second_key: int) -> torch.Tensor:
    """Return a 32-bit hash of each value (int64, from 0 to 2^32 − 1), as int64."""
    bits = values ^ first_key
    bits ^= bits >> 16
    bits *= _MULTIPLIER
    bits &= _MASK
    bits ^= second_key
    bits ^= bits >> 16
    bits *= _MULTIPLIER
    bits &= _MASK
    bits ^= bits >> 16
    return bits
