"""Byte-range arithmetic of reads: merging neighbours, widening to CRC blocks, the runs of a box. Reads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dcp_manifest.items import StoredItem, block_bytes

__all__ = ["align_to_blocks", "box_runs", "merge_ranges", "split_range"]

Range = tuple[int, int]


def merge_ranges(ranges: Sequence[Range], *, gap_bytes: int, limit_bytes: int) -> list[tuple[Range, list[int]]]:
    """Group ranges so that one read serves each group.

    Ranges that overlap always share a group, so that no byte is read twice; neighbours at most `gap_bytes` apart
    share one as long as it stays within `limit_bytes`.

    Args:
        ranges: Half-open, in any order, empty ones allowed.
        gap_bytes: How many unwanted bytes between two ranges are read rather than skipped.
        limit_bytes: Size up to which groups grow across gaps and touching borders.

    Returns:
        In ascending order, each group's covering range and the positions of its members in `ranges`.
    """
    groups: list[tuple[Range, list[int]]] = []
    for position in sorted(range(len(ranges)), key=ranges.__getitem__):
        start, stop = ranges[position]
        if groups:
            (first, last), members = groups[-1]
            end = max(last, stop)
            if start < last or (start - last <= gap_bytes and end - first <= limit_bytes):
                members.append(position)
                groups[-1] = ((first, end), members)
                continue
        groups.append(((start, stop), [position]))
    return groups


def align_to_blocks(item: StoredItem, start: int, stop: int) -> Range:
    """The smallest range around [start, stop) of a stored range whose bytes the item's CRCs can vouch for.

    Without running CRCs that is the whole stored range. An empty range stays as it is.
    """
    if start == stop:
        return start, stop
    if item.running_crcs is None:
        return 0, item.stored_bytes
    block = block_bytes(item.stored_bytes)
    return start // block * block, min(item.stored_bytes, -(-stop // block) * block)


def split_range(start: int, stop: int, *, step_bytes: int, align_bytes: int) -> Iterator[Range]:
    """[start, stop) in pieces of about `step_bytes` whose inner borders are multiples of `align_bytes`."""
    step = max(1, step_bytes // align_bytes) * align_bytes
    while start < stop:
        border = min(stop, (start // align_bytes) * align_bytes + step)
        yield start, border
        start = border


def box_runs(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int) -> list[Range]:
    """The contiguous byte runs of a box within a row-major chunk, ascending.

    Args:
        sizes: Sizes of the chunk, elements.
        offsets: Start of the box within the chunk, elements.
        lengths: Sizes of the box, elements.
        item_bytes: Bytes per element.

    Returns:
        Half-open byte ranges; one of them if the box is contiguous, none if it is empty.

    Raises:
        ValueError: The box is not inside the chunk.
    """
    if not len(sizes) == len(offsets) == len(lengths):
        raise ValueError(f"box {tuple(offsets)}+{tuple(lengths)} and chunk {tuple(sizes)} differ in dimensions")
    if any(o < 0 or n < 0 or o + n > s for s, o, n in zip(sizes, offsets, lengths, strict=True)):
        raise ValueError(f"box {tuple(offsets)}+{tuple(lengths)} is not inside a chunk of sizes {tuple(sizes)}")
    if 0 in lengths:
        return []
    # Trailing dimensions that the box covers whole belong to one run, and so does the first that it cuts.
    inner = len(sizes)
    while inner and offsets[inner - 1] == 0 and lengths[inner - 1] == sizes[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    run_bytes = math.prod(lengths[inner:]) * item_bytes
    starts = [sum(o * s for o, s in zip(offsets, strides, strict=True)) * item_bytes]
    for dim in range(inner):
        step = strides[dim] * item_bytes
        starts = [start + index * step for start in starts for index in range(lengths[dim])]
    return [(start, start + run_bytes) for start in starts]
