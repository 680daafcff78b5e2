"""Reader of a part of a large index: of tensors in many chunks, only those that a rank loads; see `docs/format.md`.

The CRCs of other chunks, which are most of the file, are not read.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dcp_manifest.errors import CorruptCheckpointError, UnsupportedFormatError
from dcp_manifest.file.blob import BLOCK_BYTES, BLOCK_CRCS, FOOTER_BYTES, MAJOR, Blob, Footer, first_blocks, read_footer
from dcp_manifest.file.manifest_read import ManifestReader, add_up
from dcp_manifest.index.column_runs import ColumnRuns
from dcp_manifest.index.columns import BoxLayout, CheckpointIndex, border_counts, distinct, ranges, starts
from dcp_manifest.index.levels import FEW_CHUNKS, level_starts
from dcp_manifest.index.schema import ITEMS_OF, MAX_POSITION, check_index, check_relative_path, derived_bytes
from dcp_manifest.types import I64, U32, Box, Boxes

N = TypeVar("N", bound=np.integer[Any])

Fetch = Callable[[int, int], bytes]
"""Returns the bytes of a file from an offset on: so many, or fewer at its end."""
_FIRST_BYTES = 64 * 1024
# Two ranges of the file with a smaller gap are read as one.
_GAP_BLOCKS = 16
# Chunks of the index per wanted level, below which it is faster to read all of it.
_CHUNKS_PER_LEVEL = 400
_MAX_CUTS = 4_000_000
_ORDERED = ("chunk.crc32", "chunk.running")
_CONSTANTS = {"chunk.framing": 0, "chunk.chain": 0, "chunk.checked": 1}
_OF_CHUNKS = {column.name for column in ITEMS_OF["chunk"]}
_NO_END = MAX_POSITION


def read_near(fetch: Fetch, size: int, boxes: Callable[[], Boxes | None], *, file: str) -> CheckpointIndex | None:
    """Read an index file's entries, and the chunks that overlap `boxes`; None if it must be read whole.

    A tensor in few chunks keeps all of them, others at least those that overlap. Raises errors of `read_index`.
    """
    footer = read_footer(fetch(size - FOOTER_BYTES, FOOTER_BYTES), size=size, file=file)
    if footer is None or footer.major < MAJOR:
        return None
    try:
        index = _NearReader(_BlobInParts(fetch, footer, file=file), boxes).whole()
        check_index(index)
    except UnsupportedFormatError:
        return None
    except (ValueError, TypeError, IndexError, KeyError) as error:
        if isinstance(error, CorruptCheckpointError):
            raise
        raise CorruptCheckpointError(f"the manifest is inconsistent: {error}", file=file) from error
    for path in index.files:
        check_relative_path(path, file=file)
    return index


class _BlobInParts(Blob):
    """A manifest that reads CRCs of chunks when they are needed; every block is checked."""

    def __init__(self, fetch: Fetch, footer: Footer, *, file: str) -> None:
        self._fetch, self._footer, self._file = fetch, footer, file
        begin = fetch(footer.manifest_offset, min(_FIRST_BYTES, footer.manifest_bytes))
        missing = min(8 + int.from_bytes(begin[:8], "little"), footer.manifest_bytes) - len(begin)
        if missing > 0:
            begin += fetch(footer.manifest_offset + len(begin), missing)
        super().__init__(memoryview(begin), file=file, size=footer.manifest_bytes)
        columns = self.header.columns
        self._first, total = first_blocks(self.header)
        crcs = self._bytes(columns[BLOCK_CRCS].start, columns[BLOCK_CRCS].stop) if BLOCK_CRCS in columns else b""
        if zlib.crc32(crcs, zlib.crc32(begin[: self.header.data_start])) != footer.index_crc32:
            raise self._damage("its header or its block CRCs", 0)
        self._crcs = np.frombuffer(crcs, "<u4")
        if len(self._crcs) != total:
            raise self._damage(f"it has {len(self._crcs)} block CRCs, not {total}", 0)
        self._small = dict(self._read_small())

    def _bytes(self, start: int, stop: int) -> bytes:
        return self._fetch(self._footer.manifest_offset + self.header.data_start + start, stop - start)

    def _damage(self, what: str, start: int) -> CorruptCheckpointError:
        place = self._footer.manifest_offset + start
        message = f"the manifest is damaged ({what}); restore the file from a copy"
        return CorruptCheckpointError(message, file=self._file, offset=place)

    def _read_small(self) -> Iterator[tuple[str, bytes]]:
        """Yield the columns that are not in the order of levels; neighbours are read together."""
        columns = self.header.columns
        if sum(stop - start for start, stop in self.header.extents.values()) > self.header.data_bytes:
            raise self._damage("its columns overlap", 0)
        by_place = sorted(columns, key=lambda name: columns[name].start)
        for is_large, group in itertools.groupby(by_place, lambda name: name in (*_ORDERED, BLOCK_CRCS)):
            names = [] if is_large else [*group]
            start = columns[names[0]].start if names else 0
            data = self._bytes(start, columns[names[-1]].stop) if names else b""
            for name in names:
                own = data[columns[name].start - start : columns[name].stop - start]
                self._check(name, 0, own)
                yield name, own

    def _check(self, name: str, block: int, data: bytes) -> None:
        first = self._first[name] + block
        for number, at in enumerate(range(0, len(data), BLOCK_BYTES), first):
            if zlib.crc32(data[at : at + BLOCK_BYTES]) != self._crcs[number]:
                raise self._damage(f"the column {name}", self.header.data_start + self.header.columns[name].start)

    def read(self, name: str) -> npt.NDArray[Any]:
        """Return a column that is not in the order of levels."""
        return np.frombuffer(self._small[name], self.header.columns[name].dtype)

    def pick(self, name: str, places: I64) -> U32:
        """Return numbers of a column in the order of levels."""
        column = self.header.columns[name]
        width = np.dtype(column.dtype).itemsize
        found = np.empty(len(places), np.uint32)
        if not len(places):
            return found
        if int(places.min()) < 0 or int(places.max()) >= column.count:
            raise ValueError(f"the column {name} has no place {places.max()}")
        blocks = distinct(places * width // BLOCK_BYTES)
        apart = np.flatnonzero(np.diff(blocks) > _GAP_BLOCKS) + 1
        for group in np.split(blocks, apart):
            start, stop = int(group[0]) * BLOCK_BYTES, (int(group[-1]) + 1) * BLOCK_BYTES
            data = self._bytes(column.start + start, min(column.start + stop, column.stop))
            self._check(name, int(group[0]), data)
            inside = (places * width >= start) & (places * width < stop)
            found[inside] = np.frombuffer(data, column.dtype)[places[inside] - start // width]
        return found


class _NearReader(ManifestReader):
    """Makes an index of the chunks in `rows`, of `tensors`."""

    blob: _BlobInParts

    def __init__(self, blob: _BlobInParts, boxes: Callable[[], Boxes | None]) -> None:
        super().__init__(blob)
        for name, wanted in _CONSTANTS.items():
            if self.columns[name].count != 1 or int(blob.read(name)[0]) != wanted:
                raise _only_whole()
        if "level" not in self._rows or self._names & {"chunk.stored_bytes", "chunk.blocks"}:
            raise _only_whole()
        self.boxes = boxes

    def _put_boxes(self, index: CheckpointIndex) -> None:
        self.index, self.chunks = index, index.tensor_chunks
        self.chunk_starts = starts(self.chunks)
        deep = [index.tensor_ndim > dim for dim in range(int(index.tensor_ndim.max(initial=0)))]
        self.dim_starts = [starts(np.where(each, self.chunks, 0)) for each in deep]
        self.cuts = [self._cuts(name) for name in ("offset", "size")]
        boxes = self.boxes()
        if boxes is None:
            raise _only_whole()
        aliases = zip(index.alias_names, index.alias_targets.tolist(), strict=True)
        tied = {name: [*boxes.get(name, ())] for name in index.tensor_names}
        for alias, target in aliases:
            tied[index.tensor_names[target]] += boxes.get(alias, ())
        self.tensors, self.rows = self._overlapping(tied)
        self.crcs, self.running = self._places()
        index.tensor_chunks = np.bincount(self.tensors, minlength=len(self.chunks)).astype(np.int64)
        index.is_part = True
        index.chunk_offsets, index.chunk_sizes = (self._boxes_of(cuts, self.tensors, self.rows) for cuts in self.cuts)

    def _ragged(self, name: str, counts: str | None = None) -> Any:
        if name != "chunk.running":
            return super()._ragged(name, counts)
        stored = np.maximum(derived_bytes(self.index, self.column("dtype.item_bytes")), 0)
        borders, most = border_counts(stored.astype(np.uint64)), self.columns[name].count
        if int(borders.max(initial=0)) > most or int(borders.sum()) > most:
            raise ValueError("the chunks have more running CRCs than are stored")
        return self.blob.pick(name, ranges(self.running, self.running + borders))

    def _numbers(self, name: str, dtype: type[N], total: int) -> npt.NDArray[N]:
        if name not in _OF_CHUNKS:
            return super()._numbers(name, dtype, total)
        if name == "chunk.crc32":
            return self.blob.pick(name, self.crcs).astype(dtype)
        return self._column_cuts(name, total).at(self.rows)[0].astype(dtype)

    def _column_cuts(self, name: str, total: int) -> ColumnRuns:
        """Return a column as runs, in whatever form it is stored."""
        if name in self._rows:
            return self._runs(name, total)
        numbers = self.blob.read(name).astype(np.uint64)
        if len(numbers) not in (1, total) or len(numbers) > _MAX_CUTS:
            raise _only_whole()
        ones = np.ones_like(numbers)
        lengths = ones if len(numbers) == total else ones * np.uint64(total)
        return ColumnRuns(ones, lengths, numbers, ones * 0, ones * 0)

    def _cuts(self, name: str) -> list[ColumnRuns]:
        return [self._column_cuts(f"chunk.{name}.{dim}", int(places[-1])) for dim, places in enumerate(self.dim_starts)]

    def _at(self, cuts: list[ColumnRuns], dim: int, tensors: I64, rows: I64) -> tuple[I64, I64]:
        """Return offsets or sizes of chunks in a dimension that their tensors have, and the steps to the next ones."""
        numbers, steps = cuts[dim].at(self.dim_starts[dim][tensors] + rows - self.chunk_starts[tensors])
        return numbers.astype(np.int64), steps.astype(np.int64)

    def _boxes_of(self, cuts: list[ColumnRuns], tensors: I64, rows: I64) -> I64:
        layout = BoxLayout(self.index.tensor_ndim[tensors])
        numbers = np.empty(layout.numbers, np.int64)
        for dim in range(layout.dims):
            own = layout.rows(dim)
            numbers[layout.places(dim)] = self._at(cuts, dim, tensors[own], rows[own])[0]
        return numbers

    def _overlapping(self, boxes: Boxes) -> tuple[I64, I64]:
        """Return the tensors and rows of chunks that overlap `boxes`, or of all chunks of a tensor.

        Rows are cut wherever a column stops to be even. In a piece, each border of the boxes is at one row.
        """
        index = self.index
        is_cut = np.zeros(self.chunk_starts[-1], np.bool_)
        is_cut[self.chunk_starts[:-1][self.chunks > 0]] = True
        for dim, places in enumerate(self.dim_starts):
            for cuts in self.cuts:
                begin = cuts[dim].piece_starts()
                tensor = _parents(begin, places)
                is_cut[begin - places[tensor] + self.chunk_starts[tensor]] = True
        row = np.flatnonzero(is_cut)
        if len(row) > _MAX_CUTS:
            raise _only_whole()
        tensor = _parents(row, self.chunk_starts)
        first, last = np.zeros(len(row), np.int64), np.diff(row, append=self.chunk_starts[-1])
        ends = [_hull(index, number, boxes.get(name, ())) for number, name in enumerate(index.tensor_names)]
        for dim in range(len(self.dim_starts)):
            wanted = [end[dim] if end is not None and dim < len(end) else (0, _NO_END) for end in ends]
            low, high = np.array(wanted, np.int64).T
            own = np.flatnonzero((high < _NO_END)[tensor])
            some = tensor[own]
            (offset, step), (size, growth) = (self._at(cuts, dim, some, row[own]) for cuts in self.cuts)
            for numbers, steps, limit in (
                (offset, step, high[some]),  # a chunk begins before the box ends,
                (-offset - size, -step - growth, -low[some]),  # and ends after the box begins
            ):
                begin, last[own] = _below(numbers, steps, limit, last[own])
                first[own] = np.maximum(first[own], begin)
            left = first < last
            row, tensor, first, last = (each[left] for each in (row, tensor, first, last))
        return tensor.repeat(last - first), ranges(row + first, row + last)

    def _places(self) -> tuple[I64, I64]:
        """Return where the wanted chunks' CRCs are, and where their running CRCs begin."""
        item_bytes = self.column("dtype.item_bytes")[self.index.tensor_dtype]
        borders, most = self.column("level.running"), self.columns["chunk.running"].count
        if not add_up(borders, most):
            raise ValueError(f"the levels do not have {most} running CRCs")
        crcs, running = level_starts(self.chunks), starts(borders)
        levels = self.rows - self.chunk_starts[self.tensors]
        if len(distinct(levels)) * _CHUNKS_PER_LEVEL > self.chunk_starts[-1]:
            raise _only_whole()
        of_crcs, of_running = crcs[levels], running[levels]
        order = np.argsort(levels, kind="stable")
        for own in np.split(order, np.flatnonzero(np.diff(levels[order])) + 1) if len(order) else ():
            level = levels[own[0]]
            members = np.flatnonzero(self.chunks > level)
            sizes = self._boxes_of(self.cuts[1], members, self.chunk_starts[members] + level)
            stored = BoxLayout(self.index.tensor_ndim[members]).volumes(sizes) * item_bytes[members]
            before = np.searchsorted(members, self.tensors[own])
            of_crcs[own] += before
            of_running[own] += starts(border_counts(stored.astype(np.uint64)))[before]
        return of_crcs, of_running


def _hull(index: CheckpointIndex, number: int, boxes: Sequence[Box]) -> list[tuple[int, int]] | None:
    """Return the smallest box around boxes: in each dimension, start and end; None if all of a tensor is wanted."""
    ndim = int(index.tensor_ndim[number])
    if index.tensor_chunks[number] <= FEW_CHUNKS:
        return None
    if not boxes or any(len(offsets) != ndim for offsets, _ in boxes):
        return [(0, 0)] * ndim
    return [
        (min(offsets[dim] for offsets, _ in boxes), max(offsets[dim] + sizes[dim] for offsets, sizes in boxes))
        for dim in range(ndim)
    ]


def _only_whole() -> UnsupportedFormatError:
    return UnsupportedFormatError("the index can only be read whole")


def _parents(places: I64, begins: I64) -> I64:
    """Return in which of consecutive ranges, that start at `begins`, ascending places are."""
    return np.arange(len(begins) - 1).repeat(np.diff(np.searchsorted(places, begins)))


def _below(numbers: I64, steps: I64, limit: I64, count: I64) -> tuple[I64, I64]:
    """Return for which i of range(count) `numbers` + i · `steps` is below `limit`: the first, and the end."""
    spans = [max(abs(int(each.min(initial=0))), int(each.max(initial=0))) for each in (numbers, steps, count)]
    if spans[0] + spans[1] * spans[2] > MAX_POSITION:
        raise _only_whole()
    rises, falls = np.maximum(steps, 1), np.maximum(-steps, 1)
    end = np.where(steps > 0, -((numbers - limit) // rises), count * (numbers < limit))
    first = np.where(steps < 0, (numbers - limit) // falls + 1, 0)
    return np.clip(first, 0, count), np.clip(np.where(steps < 0, count, end), 0, count)
