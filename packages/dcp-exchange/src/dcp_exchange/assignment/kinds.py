"""Kinds of pieces: pieces that the same ranks want and can read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.rows import Numbers, Positions, expand

# Kinds that are levelled one by one; the many small ones beyond are gathered by a rank that wants them.
MOST_KINDS = 512


_Tiers = npt.NDArray[np.int8]

IMPOSSIBLE = 4
"""Tier of a rank that cannot read the kind."""

# A rank of the next tier is taken if it has fewer bytes by this part of the mean.
TIER_PARTS = 100
ROUNDS = 4


def level(kind_bytes: Positions, tiers: _Tiers, own_bytes: Positions) -> Positions:
    """Distribute the bytes per kind over the ranks that can read it; return int64[kinds, ranks].

    Each kind, beginning with kinds of the fewest best ranks, is poured over its best ranks like water. Further rounds
    pour it over all ranks that can read it, until hardly anything moves. A better tier gets a few percent more.
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


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Objects, and the ranks that can read them.

    Attributes:
        hosts: int64[ranks], number of the rank's host, from 0.
        sets: int64[objects], set of the object's holders.
        can_read: bool[sets, ranks].
    """

    hosts: Positions
    sets: Positions
    can_read: npt.NDArray[np.bool_]


def places_of(names: Sequence[str], hosts: Sequence[int], holders: Mapping[str, Collection[int]] | None) -> Places:
    """Return which ranks can read which objects; raise ValueError if no rank can read an object."""
    numbers = np.unique(np.asarray(hosts, np.int64), return_inverse=True)[1].reshape(-1)
    if holders is None:
        return Places(numbers, np.zeros(len(names), np.int64), np.ones((1, len(hosts)), bool))
    here = frozenset(hosts)
    found: dict[frozenset[int], int] = {}
    sets = np.zeros(len(names), np.int64)
    for place, name in enumerate(names):
        holding = here.intersection(holders.get(name, ()))
        if not holding:
            raise ValueError(f"no host of this job has {name!r}: {sorted(holders.get(name, ())) or 'no host'} has it")
        sets[place] = found.setdefault(holding, len(found))
    can_read = [[host in holding for host in hosts] for holding in found]
    return Places(numbers, sets, np.array(can_read, bool).reshape(len(found), len(hosts)))


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Kinds of pieces.

    Attributes:
        of_pieces: Kind per piece, of the smallest unsigned type, which sorts fastest.
        tiers: int8[kinds, ranks]: 0 ranks that want the kind, on the hosts where most ranks want it; 1 other ranks that
            want it; 2 other ranks on a host where a rank wants it; 3 the rest; or `IMPOSSIBLE`.
    """

    of_pieces: npt.NDArray[Any]
    tiers: _Tiers


def kinds_of(
    classes: Numbers, sizes: Positions, sets: Positions, borders: Positions, readers: Numbers, places: Places
) -> Kinds:
    """Sort pieces by the ranks that want them and the ranks that can read them.

    `classes`, `sizes` and `sets` (of holders) are per piece, `borders` and `readers` as in `Assignment`.
    """
    set_count = len(places.can_read)
    codes, of_pieces = np.arange(len(borders) - 1), classes
    if set_count > 1:
        codes, of_pieces = np.unique(classes.astype(np.int64) * set_count + sets, return_inverse=True)
        of_pieces = of_pieces.reshape(-1)
    kind_bytes = np.zeros(len(codes), np.int64)
    np.add.at(kind_bytes, of_pieces, sizes)
    by_size = np.argsort(-kind_bytes, kind="stable")
    large, small = np.sort(by_size[:MOST_KINDS]), by_size[MOST_KINDS:]
    counts = borders[codes // set_count + 1] - borders[codes // set_count]
    members = expand(borders[codes[large] // set_count], counts[large])
    wanting = np.zeros((len(large), len(places.hosts)), bool)
    wanting[np.repeat(np.arange(len(large)), counts[large]), readers[members]] = True
    tiers = _tiers(wanting, places.can_read[codes[large] % set_count], places.hosts)
    numbers = np.empty(len(codes), np.int64)
    numbers[large] = np.arange(len(large))
    if len(small):
        # One of the ranks that want it stands for all of them; in turn, so that their number levels out.
        turns = np.arange(len(small)) % counts[small]
        chosen = readers[borders[codes[small] // set_count] + turns]
        again, numbers[small] = np.unique(chosen * np.int64(set_count) + codes[small] % set_count, return_inverse=True)
        numbers[small] += len(large)
        wanting = np.arange(len(places.hosts)) == (again // set_count)[:, None]
        tiers = np.concatenate((tiers, _tiers(wanting, places.can_read[again % set_count], places.hosts)))
    return Kinds(numbers.astype(np.min_scalar_type(len(tiers)))[of_pieces], tiers)


def _tiers(wanting: npt.NDArray[Any], able: npt.NDArray[Any], hosts: Positions) -> _Tiers:
    by_host = np.argsort(hosts, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(hosts[by_host]) != 0))
    counts = np.add.reduceat((wanting & able)[:, by_host].astype(np.int32), begins, axis=1)[:, hosts]
    most = counts.max(axis=1, keepdims=True)
    tiers = np.where(wanting, np.where(counts == most, 0, 1), np.where(counts > 0, 2, 3))
    return np.where(able, tiers, IMPOSSIBLE).astype(np.int8)
