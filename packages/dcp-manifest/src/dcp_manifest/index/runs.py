"""Runs of bytes on a regular grid, such as a box in a row-major chunk."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_manifest.types import I64


@dataclass(frozen=True, slots=True)
class Runs:
    """Regular grid of runs of `run_bytes` bytes; the first begins at byte `start`.

    Along dimension d, outermost first, there are `counts[d]` runs at distances of `strides[d]` bytes. A stride is at
    least the span of the inner dimensions, so runs are ascending and never overlap. No dimensions: a single run.
    """

    start: int
    run_bytes: int
    counts: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def stop(self) -> int:
        """End of the last run."""
        return self.start + _span(self.counts, self.strides, self.run_bytes)

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(self.counts)

    def starts(self, first: int, last: int) -> I64:
        """Return the starts of the runs [first, last), counted from 0."""
        numbers, found = np.arange(first, last, dtype=np.int64), np.full(last - first, self.start, np.int64)
        for count, stride in zip(reversed(self.counts), reversed(self.strides), strict=True):
            numbers, index = np.divmod(numbers, count)
            found += index * stride
        return found

    def spans(self, position: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Yield (start, offset, size) of each part of `length` of the runs' bytes, from number `position` on."""
        first, within = divmod(position, self.run_bytes)
        offset = 0
        for start in self.starts(first, -(-(position + length) // self.run_bytes)).tolist():
            size = min(self.run_bytes - within, length - offset)
            yield start + within, offset, size
            offset += size
            within = 0

    def joined(self, gap_bytes: int) -> Runs:
        """Close inner gaps below `gap_bytes`."""
        run, depth = self.run_bytes, len(self.counts)
        while depth and self.strides[depth - 1] - run < gap_bytes:
            depth -= 1
            run += (self.counts[depth] - 1) * self.strides[depth]
        return Runs(self.start, run, self.counts[:depth], self.strides[:depth])

    def within(self, start: int, stop: int) -> tuple[I64, I64]:
        """Return starts and ends of runs in [start, stop), clipped to it."""
        first = _starts(self, start, stop, self.start, 0)
        last = first + self.run_bytes
        inside = (first < stop) & (last > start)
        return np.maximum(first[inside], start), np.minimum(last[inside], stop)


def box_runs(sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], item_bytes: int) -> Runs:
    """Return a box's byte runs in a row-major chunk; ValueError if the box is not inside."""
    if not len(sizes) == len(offsets) == len(lengths):
        raise ValueError(f"box {tuple(offsets)}+{tuple(lengths)} and chunk {tuple(sizes)} differ in dimensions")
    start, run, step = 0, item_bytes, item_bytes
    counts: list[int] = []
    strides: list[int] = []
    empty = False
    for size, offset, length in zip(reversed(sizes), reversed(offsets), reversed(lengths), strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            raise ValueError(f"box {tuple(offsets)}+{tuple(lengths)} is not inside a chunk of sizes {tuple(sizes)}")
        start += offset * step
        empty = empty or length == 0
        if length > 1:
            if not counts and run == step:
                run = step * length
            elif counts and counts[-1] * strides[-1] == step:
                counts[-1] *= length
            else:
                counts.append(length)
                strides.append(step)
        step *= size
    return Runs(0, 0) if empty else Runs(start, run, tuple(reversed(counts)), tuple(reversed(strides)))


def _span(counts: Sequence[int], strides: Sequence[int], run_bytes: int) -> int:
    return sum([(count - 1) * stride for count, stride in zip(counts, strides, strict=True)]) + run_bytes


def _starts(runs: Runs, start: int, stop: int, base: int, depth: int) -> I64:
    if depth == len(runs.counts):
        return np.array([base], np.int64)
    stride = runs.strides[depth]
    inner = _span(runs.counts[depth + 1 :], runs.strides[depth + 1 :], runs.run_bytes)
    first = max(0, (start - base - inner) // stride + 1)
    last = min(runs.counts[depth], -(-(stop - base) // stride))
    if last <= first:
        return np.zeros(0, np.int64)
    if last - first <= 2:  # at the edges, inner grids may be far larger than their wanted part
        edges = [_starts(runs, start, stop, base + index * stride, depth + 1) for index in range(first, last)]
        return np.concatenate(edges)
    found = base + np.arange(first, last, dtype=np.int64) * stride
    for count, step in zip(runs.counts[depth + 1 :], runs.strides[depth + 1 :], strict=True):
        found = (found[:, None] + np.arange(count, dtype=np.int64) * step).reshape(-1)
    return found
