"""Levelling: how many bytes of each kind of piece each rank should read, so that all ranks read about the same.

Only whole numbers are used, so that the result is the same on every machine.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.columns import Positions

__all__ = ["IMPOSSIBLE", "Tiers", "level"]

Tiers = npt.NDArray[np.int8]

IMPOSSIBLE = 4
"""Tier of a rank that cannot read the kind."""

# A rank of the next tier is taken if it has fewer bytes by this part of the mean.
TIER_PARTS = 100
ROUNDS = 4


def level(kind_bytes: Positions, tiers: Tiers, own_bytes: Positions) -> Positions:
    """Distribute the bytes of each kind over the ranks that can read it.

    Each kind in turn is poured over its best ranks like water, which raises the lowest levels first; kinds with the
    fewest such ranks come first. Further rounds take each kind out and pour it again over all ranks that can read it,
    until hardly anything moves: then the levels differ as little as possible, but for some parts in a hundred that a
    better tier is worth.

    Args:
        kind_bytes: int64[kinds].
        tiers: int8[kinds, ranks], preference: 0 is best, `IMPOSSIBLE` if the rank cannot read the kind.
        own_bytes: int64[ranks], bytes that each rank reads in any case.

    Returns:
        int64[kinds, ranks], bytes; each row has the sum that `kind_bytes` says.
    """
    shares = np.zeros(tiers.shape, np.int64)
    loads = own_bytes.copy()
    mean = int(kind_bytes.sum() + own_bytes.sum()) // tiers.shape[1]
    handicaps = np.arange(IMPOSSIBLE, dtype=np.int64) * (mean // TIER_PARTS)
    order = np.lexsort((np.arange(len(kind_bytes)), (tiers == 0).sum(axis=1)))
    for turn in range(ROUNDS):
        before = loads.copy()
        for kind in order.tolist():
            loads -= shares[kind]
            # At first over the best ranks alone, so that kinds do not fill the places that are best for others.
            of_kind = tiers[kind]
            able = np.flatnonzero(of_kind < IMPOSSIBLE if turn else of_kind == of_kind.min())
            poured = _pour(int(kind_bytes[kind]), loads[able] + handicaps[of_kind[able]])
            shares[kind, able] = poured
            loads[able] += poured
        if turn and np.abs(loads - before).max() <= mean // 1000:
            break
    return shares


def _pour(amount: int, levels: Positions) -> Positions:
    """Distribute an amount so that the lowest levels rise to the same height, as water would."""
    order = np.argsort(levels, kind="stable")
    ascending = levels[order]
    below = np.cumsum(ascending)
    # What it takes to raise all levels before each to this one; those at which it is less than the amount get some.
    needed = ascending * np.arange(1, len(ascending) + 1) - below
    wet = max(1, int(np.searchsorted(needed, amount, "left")))
    height, rest = divmod(amount + int(below[wet - 1]), wet)
    poured = np.zeros(len(levels), np.int64)
    poured[order[:wet]] = height - ascending[:wet]
    poured[order[:rest]] += 1
    return poured
