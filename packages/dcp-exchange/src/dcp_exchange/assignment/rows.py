"""Rows of all ranks on one line, on which objects follow each other: two numbers are a byte range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_io.reading.crc_checks import Demands

Group = tuple[Demands, Sequence[int]]

Positions = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int32]


def expand(starts: Positions | Numbers, counts: Positions | Numbers) -> Positions:
    """Return `counts[0]` numbers from `starts[0]` on, then `counts[1]` from `starts[1]` on, and so on."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    found: Positions = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of all groups of ranks, as ranges of the line: group after group, ascending within a group.

    Attributes:
        bases: int64[objects], position per object. Objects are farther apart than any gap within a piece.
        groups: int32[n].
        starts: int64[n].
        stops: int64[n], exclusive.
        origins: int64[n], the row's original start; allowed cuts are counted from it.
    """

    names: tuple[str, ...]
    bases: Positions
    ranks: tuple[Numbers, ...]
    groups: Numbers
    starts: Positions
    stops: Positions
    origins: Positions
    demands: tuple[Demands, ...]

    @property
    def group_sizes(self) -> Positions:
        """Number of ranks per group."""
        return np.array([len(ranks) for ranks in self.ranks], np.int64)

    def grains(self) -> Positions:
        """Distance of a row's allowed cuts, counted from its origin; 0 for none."""
        return _joined([each.grains for each in self.demands], np.int64)

    def objects_at(self, positions: Positions) -> Positions:
        """Return the object at each position."""
        return np.searchsorted(self.bases, positions, "right") - 1

    def snapped(self, borders: Positions) -> Rows:
        """Return rows with ends moved outwards to `borders`, which enclose every row; rows that become empty stay."""
        starts = borders[np.searchsorted(borders, self.starts, "right") - 1]
        stops = borders[np.searchsorted(borders, self.stops, "left")]
        same = self.groups[1:] == self.groups[:-1]
        starts[1:][same] = np.maximum(starts[1:], stops[:-1])[same]
        return replace(self, starts=starts, stops=np.maximum(starts, stops))


def line_up(groups: Sequence[Group], world_size: int, gap_bytes: int) -> Rows:
    """Lay the rows of all groups on one line, with objects more than `gap_bytes` apart."""
    _check_ranks(groups, world_size)
    ordered = sorted(groups, key=lambda group: min(group[1]))
    demands = tuple(each for each, _ in ordered)
    names = tuple(sorted({name for each in {each.names for each in demands} for name in each}))
    places = {name: place for place, name in enumerate(names)}
    known: dict[tuple[str, ...], Positions] = {}
    ends = np.zeros(len(names) + 1, np.int64)
    for each in demands:
        if each.names not in known:
            known[each.names] = np.array([places[name] for name in each.names], np.int64)
        last = np.append(each.objects[1:] != each.objects[:-1], True)[: len(each.objects)]
        found = known[each.names][each.objects[last]]
        ends[found + 1] = np.maximum(ends[found + 1], each.stops[last] + gap_bytes + 1)
    bases = np.cumsum(ends)[:-1]
    offsets = [bases[known[each.names]] for each in demands]
    counts = [len(each.objects) for each in demands]
    starts = _joined([each.starts + base[each.objects] for each, base in zip(demands, offsets, strict=True)], np.int64)
    return Rows(
        names,
        bases,
        tuple(np.array(sorted(ranks), np.int32) for _, ranks in ordered),
        np.repeat(np.arange(len(ordered), dtype=np.int32), counts),
        starts,
        _joined([each.stops + base[each.objects] for each, base in zip(demands, offsets, strict=True)], np.int64),
        starts,
        demands,
    )


def _check_ranks(groups: Sequence[Group], world_size: int) -> None:
    seen: set[int] = set()
    for _, ranks in groups:
        if not ranks:
            raise ValueError("demands are given that no rank has")
        for rank in ranks:
            if not 0 <= rank < world_size:
                raise ValueError(f"demands are given for rank {rank}; there are the ranks 0 to {world_size - 1}")
            if rank in seen:
                raise ValueError(f"rank {rank} has two demands")
            seen.add(rank)


def _joined(columns: list[npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *columns])
