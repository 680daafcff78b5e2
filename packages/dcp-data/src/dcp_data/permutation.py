"""Pseudo-random permutations that are computed, not stored."""

from __future__ import annotations

import math

import torch

from dcp_data.keys import derive_keys, mixed_bits

_ROUNDS = 6
_MAX_LENGTH = 1 << 62
# Up to this length, a table of 512 KiB is quicker, and every permutation of few numbers is equally likely.
_MAX_TABLE_LENGTH = 1 << 16


class Permutation:
    """Pseudo-random permutation of the numbers from 0 to `length` − 1 (at most 2^62) by `labels`, in O(1) memory.

    Up to 65,536 numbers are sorted by a hash of 62 bits. More go through a Feistel network over pairs of digits, with
    cycle walking for the few numbers beyond `length`.

    Source: J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), section 5.
    """

    def __init__(self, length: int, *labels: int | str) -> None:
        if not 0 <= length <= _MAX_LENGTH:
            raise ValueError(f"a permutation of {length} numbers cannot be made; the length must be from 0 to 2^62")
        self.length = length
        self._keys = derive_keys(2 * _ROUNDS, *labels)
        self._table = self._sorted() if length <= _MAX_TABLE_LENGTH else None
        self._high = math.isqrt(max(length - 1, 0)) + 1  # its square is at least `length`
        self._low = max(1, -(-length // self._high))

    def __len__(self) -> int:
        return self.length

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers at `positions` (int64 on the CPU) as a new tensor."""
        if self._table is not None:
            return self._table[positions]
        numbers = self._walk(positions)
        beyond = numbers >= self.length
        while bool(beyond.any()):  # of all pairs of digits, at most one row is beyond `length`
            numbers[beyond] = self._walk(numbers[beyond])
            beyond = numbers >= self.length
        return numbers

    def _sorted(self) -> torch.Tensor:
        numbers = torch.arange(self.length, device="cpu")
        upper = mixed_bits(mixed_bits(numbers, *self._keys[0:2]), *self._keys[2:4]) >> 1
        lower = mixed_bits(mixed_bits(numbers, *self._keys[4:6]), *self._keys[6:8])
        return torch.sort((upper << 31) ^ lower, stable=True).indices

    def _walk(self, numbers: torch.Tensor) -> torch.Tensor:
        high = torch.div(numbers, self._low, rounding_mode="floor")
        low = numbers - high * self._low
        for number in range(0, 2 * _ROUNDS, 4):
            _add(high, mixed_bits(low, *self._keys[number : number + 2]), self._high)
            _add(low, mixed_bits(high, *self._keys[number + 2 : number + 4]), self._low)
        return high.mul_(self._low).add_(low)


def _add(digits: torch.Tensor, bits: torch.Tensor, base: int) -> None:
    """Add a digit from 32 random bits, modulo `base`, in place."""
    bits *= base
    bits >>= 32
    digits += bits
    digits -= (digits >= base) * base
