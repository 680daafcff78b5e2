"""Kinds of pieces: those that the same ranks want and the same ranks can read, and which of these should read them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_exchange.assignment.columns import Numbers, Positions, expand
from dcp_exchange.assignment.levels import IMPOSSIBLE, Tiers

__all__ = ["Kinds", "Places", "kinds_of", "places_of"]

# Kinds that are levelled one by one; the many small ones beyond are gathered by a rank that wants them.
MOST_KINDS = 512


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Who can read which object.

    Attributes:
        hosts: int64[ranks], number of each rank's host, counted from 0.
        sets: int64[objects], set of holders of each object.
        can_read: bool[sets, ranks].
    """

    hosts: Positions
    sets: Positions
    can_read: npt.NDArray[np.bool_]


def places_of(names: Sequence[str], hosts: Sequence[int], holders: Mapping[str, Collection[int]] | None) -> Places:
    """Return who can read which object.

    Raises:
        ValueError: No rank is on a host that has one of the objects.
    """
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
        of_pieces: Kind of each piece, of the smallest unsigned type: two bytes sort much faster than more.
        tiers: int8[kinds, ranks], which ranks should read the kind: 0 those that want it, on the hosts where most want
            it; 1 others that want it; 2 others on a host where one wants it; 3 the rest; or `IMPOSSIBLE`.
    """

    of_pieces: npt.NDArray[Any]
    tiers: Tiers


def kinds_of(
    classes: Numbers, sizes: Positions, sets: Positions, borders: Positions, readers: Numbers, places: Places
) -> Kinds:
    """Sort pieces by who wants them and who can read them.

    Args:
        classes: int32[pieces], class of ranks that want each piece.
        sizes: int64[pieces], bytes.
        sets: int64[pieces], set of holders of each piece's object.
        borders: int64[classes + 1], where each class begins in `readers`.
        readers: int32, the ranks of each class.
        places: Who can read what.
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


def _tiers(wanting: npt.NDArray[Any], able: npt.NDArray[Any], hosts: Positions) -> Tiers:
    """Return the tier of each rank for each kind.

    Args:
        wanting: bool[kinds, ranks].
        able: bool[kinds, ranks], whether the rank can read the kind.
        hosts: int64[ranks].
    """
    by_host = np.argsort(hosts, kind="stable")
    begins = np.flatnonzero(np.append(True, np.diff(hosts[by_host]) != 0))
    counts = np.add.reduceat((wanting & able)[:, by_host].astype(np.int32), begins, axis=1)[:, hosts]
    most = counts.max(axis=1, keepdims=True)
    tiers = np.where(wanting, np.where(counts == most, 0, 1), np.where(counts > 0, 2, 3))
    return np.where(able, tiers, IMPOSSIBLE).astype(np.int8)
