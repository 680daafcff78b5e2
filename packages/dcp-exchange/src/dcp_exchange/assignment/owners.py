"""Owners: the rank that reads each piece, so that the ranks come as near to their levels as whole pieces allow."""

from __future__ import annotations

import numpy as np

from dcp_exchange.assignment.columns import Positions
from dcp_exchange.assignment.kinds import Kinds
from dcp_exchange.assignment.levels import IMPOSSIBLE, level

__all__ = ["choose_owners"]


def choose_owners(kinds: Kinds, sizes: Positions, own_bytes: Positions) -> Positions:
    """Choose the rank that reads each piece.

    The pieces of one kind that a rank gets are neighbours, so that it reads forwards.

    Args:
        kinds: Kinds of the pieces.
        sizes: int64[pieces], bytes.
        own_bytes: int64[ranks], bytes that each rank reads in any case.

    Returns:
        int64[pieces], ranks.
    """
    kind_bytes = np.zeros(len(kinds.tiers), np.int64)
    np.add.at(kind_bytes, kinds.of_pieces, sizes)
    shares = level(kind_bytes, kinds.tiers, own_bytes)
    owners = np.empty(len(sizes), np.int64)
    order = np.argsort(kinds.of_pieces, kind="stable")
    borders = np.searchsorted(kinds.of_pieces[order], np.arange(len(kind_bytes) + 1))
    owed = np.zeros(len(own_bytes), np.int64)  # what whole pieces gave a rank too little so far
    for kind in range(len(kind_bytes)):
        pieces = order[borders[kind] : borders[kind + 1]]
        chosen = _split(sizes[pieces], shares[kind], owed)
        owners[pieces] = chosen
        owed += shares[kind]
        np.subtract.at(owed, chosen, sizes[pieces])
    _relieve(owners, sizes, kinds, own_bytes, own_bytes + shares.sum(axis=0))
    return owners


def _split(sizes: Positions, shares: Positions, owed: Positions) -> Positions:
    """Split a sequence of pieces between ranks, each a run of it, of about its share and what it is owed."""
    wanted = np.maximum(shares + owed, 0)
    wanted[shares == 0] = 0
    if not wanted.any():
        wanted = shares
    ranks = np.flatnonzero(wanted)
    if len(ranks) > len(sizes):
        ranks = np.sort(ranks[np.argsort(-wanted[ranks], kind="stable")[: len(sizes)]])
    ends = np.cumsum(wanted[ranks])
    middles = np.cumsum(sizes) - sizes / 2
    # Each quotient and product is rounded by itself, so that no machine has another result.
    found = np.searchsorted(ends * (sizes.sum() / ends[-1]), middles, "left")
    return ranks[np.minimum(found, len(ranks) - 1)]


def _relieve(owners: Positions, sizes: Positions, kinds: Kinds, own_bytes: Positions, targets: Positions) -> None:
    """Move pieces away from ranks that have more than one piece above their target."""
    loads = own_bytes.copy()
    np.add.at(loads, owners, sizes)
    largest = int(sizes.max(initial=0))
    for rank in np.flatnonzero(loads > targets + largest).tolist():
        for piece in np.flatnonzero(owners == rank).tolist():
            if loads[rank] <= targets[rank] + largest:
                break
            able = np.flatnonzero(kinds.tiers[kinds.of_pieces[piece]] < IMPOSSIBLE)
            other = int(able[np.argmin((loads - targets)[able])])
            if loads[other] - targets[other] + sizes[piece] < loads[rank] - targets[rank]:
                owners[piece] = other
                loads[other] += sizes[piece]
                loads[rank] -= sizes[piece]
