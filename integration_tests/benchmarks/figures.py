"""The arithmetic of the tables: medians, spreads, ratios paired within a round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Spread", "faster", "paired", "spread"]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, and the ends."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """Median, least and largest; None of nothing."""
    found = list(values)
    if not found:
        return None
    return Spread(statistics.median(found), min(found), max(found), len(found))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Spread | None:
    """Ours ÷ theirs, each round's two measurements with each other; rounds that one of them lacks do not count."""
    return spread(mine / other for mine, other in zip(ours, theirs, strict=False) if other > 0)


def faster(ratio: float) -> str:
    """How many times as fast, in words: of seconds of ours ÷ seconds of another."""
    return f"{_digits(1 / ratio)} × faster" if ratio < 1 else f"{_digits(ratio)} × slower"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
