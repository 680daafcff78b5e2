"""Orders of a data set by weights: with replacement, and without. The same on every machine: no rounding decides."""

from __future__ import annotations

import math

import torch

from dcp_data.keys import derive_keys, mixed_bits
from dcp_data.orders import Listed

__all__ = ["Drawn", "checked_weights", "draw_without_replacement"]

_FRACTION_BITS = 52


def checked_weights(weights: torch.Tensor, length: int) -> torch.Tensor:
    """Return the weights as float64 on the CPU.

    Raises:
        ValueError: There is not one for each element, one is negative or not finite, or all are 0.
    """
    weights = weights.detach().to("cpu", torch.float64)
    if weights.shape != (length,):
        raise ValueError(f"weights has shape {tuple(weights.shape)}, but the data set has {length} elements")
    if not bool((torch.isfinite(weights) & (weights >= 0)).all()) or not bool((weights > 0).any()):
        raise ValueError("weights must be finite numbers from 0 on, and not all 0")
    return weights


class Drawn:
    """Elements drawn with replacement: each position by itself, with probabilities proportional to the weights.

    Args:
        weights: Result of `checked_weights`.
        length: Number of draws.
        labels: What the draws depend on, such as seed and epoch.
    """

    def __init__(self, weights: torch.Tensor, length: int, *labels: int | str) -> None:
        self.length = length
        # Whole numbers, because sums of fractions depend on the machine: probabilities are exact to 2^-52.
        _, exponent = math.frexp(float(weights.sum()))
        self._sums = torch.cumsum(torch.round(weights * 2.0 ** (_FRACTION_BITS - exponent)).long(), 0)
        self._keys = derive_keys(8, *labels)

    def take(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the elements that are drawn at `positions`, as int64."""
        total = int(self._sums[-1])
        points = (uniform(positions, self._keys) * float(total)).long().clamp_(max=total - 1)
        return torch.searchsorted(self._sums, points, right=True)


def draw_without_replacement(weights: torch.Tensor, length: int, *labels: int | str) -> Listed:
    """Return elements drawn one after the other without replacement: 16 bytes for each element of the data set.

    Args:
        weights: Result of `checked_weights`; elements of weight 0 are never drawn.
        length: Number of draws, at most the number of elements whose weight is not 0.
        labels: What the draws depend on, such as seed and epoch.

    Source: P. Efraimidis, P. Spirakis, "Weighted random sampling with a reservoir" (2006), algorithm A.
    """
    numbers = torch.arange(len(weights), device="cpu")
    waits = -_logarithm(uniform(numbers, derive_keys(8, *labels))) / weights  # of 0: infinite
    return Listed(torch.sort(waits, stable=True).indices[:length])


def uniform(numbers: torch.Tensor, keys: list[int]) -> torch.Tensor:
    """Return a pseudo-random fraction above 0 and below 1 for each number, from 8 keys of 32 bits, as float64."""
    # Numbers of more than 32 bits count with both halves.
    upper = mixed_bits((numbers & 0xFFFFFFFF) ^ mixed_bits(numbers >> 32, *keys[0:2]), *keys[2:4])
    lower = mixed_bits(upper ^ keys[4], keys[5], keys[6]) ^ mixed_bits(numbers & 0xFFFFFFFF, keys[7], keys[0])
    bits = ((upper << 20) ^ (lower & 0xFFFFF)).double()
    return (bits + 0.5) / (1 << 52)


def _logarithm(fractions: torch.Tensor) -> torch.Tensor:
    """Return the natural logarithm, by operations that every CPU rounds alike."""
    mantissas, exponents = torch.frexp(fractions)  # from 0.5 to 1
    ratio = (mantissas - 1) / (mantissas + 1)
    square = ratio * ratio
    series = torch.zeros_like(ratio)
    for odd in range(25, 0, -2):
        series = series * square + 1 / odd
    return 2 * ratio * series + exponents * math.log(2)
