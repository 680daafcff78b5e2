"""The arithmetic of the tables: medians, spreads, ratios paired within a round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Spread", "paired", "spread"]


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
