"""`Assignment`: which rank reads which piece of a checkpoint, and which ranks want the piece, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_exchange.assignment.columns import Numbers, Positions, expand
from dcp_io import Demands

__all__ = ["Assignment", "count_crossing_bytes", "subtract_pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """Pieces of objects that are read once for several ranks, as columns with a row per piece: ascending, no overlaps.

    A byte that one rank alone wants, and can read, is in no piece: that rank reads it directly. Many pieces are wanted
    by the same ranks; such a set of ranks is a class.

    Attributes:
        names: Names of the objects, ascending.
        objects: int32[n], position of each piece's object in `names`.
        starts: int64[n], first byte of each piece in its object.
        stops: int64[n], end of each piece, exclusive.
        owners: int32[n], rank that reads each piece and passes it on.
        classes: int32[n], class of each piece: the position of its set of ranks.
        borders: int64[number of classes + 1]: the ranks of class c are `readers[borders[c] : borders[c + 1]]`.
        readers: int32, ranks that want the pieces of each class, ascending within a class.
    """

    names: tuple[str, ...]
    objects: Numbers
    starts: Positions
    stops: Positions
    owners: Numbers
    classes: Numbers
    borders: Positions
    readers: Numbers

    @property
    def total_bytes(self) -> int:
        """Number of bytes of all pieces."""
        return int((self.stops - self.starts).sum())

    def readers_of(self, piece: int) -> Numbers:
        """Return the ranks that want a piece, ascending."""
        of = self.classes[piece]
        return self.readers[self.borders[of] : self.borders[of + 1]]

    def owned_by(self, rank: int) -> Positions:
        """Return the pieces that a rank reads, ascending."""
        return np.flatnonzero(self.owners == rank)

    def wanted_by(self, rank: int) -> Positions:
        """Return the pieces that a rank wants, ascending."""
        wanted = np.zeros(len(self.borders) - 1, bool)
        wanted[np.searchsorted(self.borders, np.flatnonzero(self.readers == rank), "right") - 1] = True
        return np.flatnonzero(wanted[self.classes])


def subtract_pieces(demands: Demands, assignment: Assignment) -> Demands:
    """Return the part of a rank's demands that is in no piece: what the rank reads itself, for itself alone.

    Args:
        demands: Demands of a rank, as they were assigned.
        assignment: The assignment.
    """
    names = {name: place for place, name in enumerate(assignment.names)}
    places = np.array([names[name] for name in demands.names], np.int64)[demands.objects]
    span = int(max(demands.stops.max(initial=0), assignment.stops.max(initial=0))) + 1
    starts, stops = demands.starts + places * span, demands.stops + places * span
    first = np.append(assignment.starts + assignment.objects * span, np.iinfo(np.int64).max)
    behind = np.append(0, assignment.stops + assignment.objects * span)
    # Gap g is before piece g; each row reaches over the gaps from `low` to `high`.
    low = np.searchsorted(behind[1:], starts, "right")
    high = np.searchsorted(first[:-1], stops, "left")
    rows = np.repeat(np.arange(len(starts)), high - low + 1)
    gaps = expand(low, high - low + 1)
    starts, stops = np.maximum(starts[rows], behind[gaps]), np.minimum(stops[rows], first[gaps])
    left = starts < stops
    rows = rows[left]
    base = places[rows] * span
    return Demands.of(
        demands.names, demands.objects[rows], starts[left] - base, stops[left] - base, demands.grains[rows]
    )


def count_crossing_bytes(assignment: Assignment, hosts: Sequence[int]) -> int:
    """Return the bytes that cross borders of hosts if each piece is sent once to each host that wants it.

    Args:
        assignment: The assignment.
        hosts: Host of each rank.
    """
    numbers = np.unique(np.asarray(hosts, np.int64), return_inverse=True)[1].reshape(-1)
    count = int(numbers.max(initial=0)) + 1
    class_of = np.repeat(np.arange(len(assignment.borders) - 1), np.diff(assignment.borders))
    pairs = np.unique(class_of * count + numbers[assignment.readers])
    receiving = np.bincount(pairs // count, minlength=len(assignment.borders) - 1)[assignment.classes]
    at_home = np.isin(assignment.classes.astype(np.int64) * count + numbers[assignment.owners], pairs)
    return int(((receiving - at_home) * (assignment.stops - assignment.starts)).sum())
