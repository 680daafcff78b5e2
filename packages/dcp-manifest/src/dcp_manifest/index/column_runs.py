"""Columns of numbers as runs, as even cuts of tensors make them: pieces of even steps, at even distances.

Decision: docs/decisions/0030-even-columns-are-runs.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.columns import CHUNKS_AT_ONCE, starts
from dcp_manifest.types import I64, U64, Bool


@dataclass(frozen=True, slots=True)
class ColumnRuns:
    """A column as runs. Number i of piece p of a run is `first + p * jump + i * step`, modulo 2⁶⁴.

    Example:
        ```python
        import numpy as np

        from dcp_manifest.index.column_runs import ColumnRuns

        runs = ColumnRuns.of(np.tile(np.arange(8, dtype=np.uint64) * 64, 1000))
        assert runs is not None and runs.repeats.tolist() == [1000] and runs.length.tolist() == [8]
        assert runs.numbers()[8:10].tolist() == [0, 64]
        ```
    """

    repeats: U64
    """Pieces of each run."""
    length: U64
    """Numbers in each piece."""
    first: U64
    step: U64
    jump: U64
    names: ClassVar[tuple[str, ...]] = ("repeats", "length", "first", "step", "jump")

    @classmethod
    def of(cls, numbers: npt.NDArray[np.unsignedinteger] | npt.NDArray[np.signedinteger]) -> ColumnRuns | None:
        """Find the runs of a column; None if it has many, so that they would save little."""
        begins, steps = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
        for start in range(0, len(numbers), CHUNKS_AT_ONCE):  # pieces end there, which saves memory
            part = numbers[start : start + CHUNKS_AT_ONCE].astype(np.uint64)
            begin, step = _pieces(part, np.zeros(len(part), np.bool_))
            begins.append(begin + start)
            steps.append(step)
        begin, step = np.concatenate(begins), np.concatenate(steps)
        if len(begin) * 4 > len(numbers):
            return None
        length, first = np.diff(np.append(begin, len(numbers))).astype(np.uint64), numbers[begin].astype(np.uint64)
        other = np.ones(len(begin), np.bool_)
        other[1:] = (length[1:] != length[:-1]) | (step[1:] != step[:-1])
        begin, jump = _pieces(first, other)
        repeats = np.diff(np.append(begin, len(first))).astype(np.uint64)
        return cls(repeats, length[begin], first[begin], step[begin], jump)

    def check(self, total: int) -> None:
        """Raise ValueError unless the runs have `total` numbers. Memory is at most that of the runs."""
        counts = self.repeats.astype(np.float64) @ self.length.astype(np.float64)
        if len(self.length) and (not self.repeats.all() or not self.length.all()):
            raise ValueError("a run is empty")
        if counts >= 2.0**62 or int((self.repeats * self.length).sum()) != total:
            raise ValueError(f"the runs have {counts:.0f} numbers, not {total}")

    def piece_starts(self) -> I64:
        """Return each piece's first place in the column."""
        return starts(np.repeat(self.length, self.repeats.astype(np.int64)).astype(np.int64))[:-1]

    def at(self, places: I64) -> tuple[U64, U64]:
        """Return the numbers at these places, and the steps of their pieces."""
        begin = starts((self.repeats * self.length).astype(np.int64))
        run = np.searchsorted(begin, places, "right") - 1
        piece, number = np.divmod((places - begin[run]).astype(np.uint64), self.length[run])
        numbers = self.first[run] + piece * self.jump[run] + number * self.step[run]
        return numbers.astype(np.uint64), self.step[run]

    def numbers(self) -> U64:
        """Return the numbers of the column."""
        repeats = self.repeats.astype(np.int64)
        first = np.repeat(self.first, repeats)
        first += _count_up(repeats) * np.repeat(self.jump, repeats)
        lengths = np.repeat(self.length, repeats).astype(np.int64)
        numbers = np.repeat(first, lengths)
        numbers += _count_up(lengths) * np.repeat(np.repeat(self.step, repeats), lengths)
        return numbers


def _count_up(counts: npt.NDArray[np.int64]) -> U64:
    ends = starts(counts)
    return (np.arange(ends[-1]) - np.repeat(ends[:-1], counts)).astype(np.uint64)


def _pieces(values: U64, forced: Bool) -> tuple[npt.NDArray[np.int64], U64]:
    """Return the beginnings of pieces with even steps, and the steps; a piece begins wherever `forced` says."""
    differences = np.diff(values)
    bends = forced
    bends[:1] = True
    border = bends.copy()
    bends[2:] |= differences[1:] != differences[:-1]
    # A piece's second number sets its step: of consecutive bends, every other one begins a piece.
    rows = np.arange(len(values))
    reset = np.maximum.accumulate(np.where(border, rows, np.where(bends, 0, rows + 1)))
    begin = np.flatnonzero(bends & ((rows - reset) % 2 == 0))
    alone = np.diff(np.append(begin, len(values))) == 1
    step = np.append(differences, np.uint64(0))[begin]
    step[alone] = 0
    return begin, step
