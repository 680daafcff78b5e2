"""Byte-range arithmetic for reads: merging of neighbours, alignment to CRC blocks, splitting. No file is read here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.items import ItemKind, StoredItem, block_bytes, border_count

__all__ = ["align_to_blocks", "merge_ranges", "merge_runs", "range_of_values", "split_range"]

Range = tuple[int, int]
Positions = npt.NDArray[np.int64]


def merge_ranges(ranges: Sequence[Range], *, gap_bytes: int, limit_bytes: int) -> list[tuple[Range, list[int]]]:
    """Group byte ranges; each group is served by one read.

    Ranges that overlap or are at most `gap_bytes` apart share a group, as long as the group stays within `limit_bytes`.
    Only a single range that is longer than the limit makes a longer group.

    Args:
        ranges: Half-open ranges in any order; empty ones are allowed.
        gap_bytes: Largest gap between two ranges that is read rather than skipped.
        limit_bytes: Limit of the size of a group.

    Returns:
        For each group, in ascending order: its range, and the positions of its members in `ranges`.
    """
    groups: list[tuple[Range, list[int]]] = []
    wanted = 0  # end of the wanted bytes of the last group
    for position in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, stop = ranges[position]
        if groups:
            (first, last), members = groups[-1]
            end = max(last, stop)
            if start - wanted <= gap_bytes and end - first <= limit_bytes:
                members.append(position)
                groups[-1] = ((first, end), members)
                wanted = max(wanted, stop) if start < stop else wanted
                continue
        groups.append(((start, stop), [position]))
        wanted = stop
    return groups


def align_to_blocks(item: StoredItem, start: int, stop: int) -> Range:
    """Return the smallest half-open range, within an item's stored range and around [start, stop), that CRCs verify.

    For an item without running CRCs, the result is the whole stored range. An empty range is returned unchanged.
    """
    if start == stop:
        return start, stop
    if item.running_crcs is None and border_count(item.stored_bytes):
        return 0, item.stored_bytes
    block = block_bytes(item.stored_bytes)
    return start // block * block, min(item.stored_bytes, -(-stop // block) * block)


def range_of_values(item: StoredItem, start: int, stop: int) -> Range:
    """Return the half-open part of an item's stored range to read for bytes [start, stop) of its decoded data."""
    if item.blocks is not None:
        first, last = start // item.blocks.block_bytes, -(-stop // item.blocks.block_bytes)
        before = int(item.blocks.lengths[:first].sum())
        return before, before + int(item.blocks.lengths[first:last].sum())
    if item.kind is not ItemKind.RAW:
        return 0, item.stored_bytes
    return (start, stop) if item.crc32 is None else align_to_blocks(item, start, stop)


def split_range(start: int, stop: int, *, step_bytes: int, align_bytes: int) -> Iterator[Range]:
    """Split [start, stop) into half-open ranges of about `step_bytes`; inner borders are multiples of `align_bytes`."""
    step = max(1, step_bytes // align_bytes) * align_bytes
    while start < stop:
        border = min(stop, (start // align_bytes) * align_bytes + step)
        yield start, border
        start = border


def merge_runs(starts: Positions, stops: Positions, *, gap_bytes: int) -> tuple[Positions, Positions]:
    """Merge byte runs that overlap or are less than `gap_bytes` apart.

    Args:
        starts: Start of each run, in any order.
        stops: End of each run; no run is empty.
        gap_bytes: Gap between two runs from which on they stay separate.

    Returns:
        Starts and ends of the merged runs, ascending.
    """
    if len(starts) < 2:
        return starts, stops
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    breaks = np.flatnonzero(starts[1:] - stops[:-1] >= gap_bytes) + 1
    return starts[np.concatenate(([0], breaks))], stops[np.concatenate((breaks - 1, [len(stops) - 1]))]
