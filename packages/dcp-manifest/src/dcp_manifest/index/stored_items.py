"""Sequence of stored items: columns inside, records on access."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from dcp_manifest.index.columns import (
    CHUNKS_AT_ONCE,
    OF_AN_ITEM,
    BlockColumns,
    CheckpointIndex,
    EncodedBlocks,
    ItemColumns,
    RaggedStarts,
    StoredItem,
    ranges,
    starts,
)
from dcp_manifest.types import I64

_NONE = np.zeros(0, np.uint32)
_Rows = npt.NDArray[np.integer[Any]]


class StoredItems(Sequence[StoredItem]):
    """Locations of items, in the order of their write requests.

    `chains[n - 1]` is the chain of transforms with the number n in the column `chain`; 0 means none.

    Example:
        ```python
        from dcp_manifest import StoredItem
        from dcp_manifest.index.columns import Framing
        from dcp_manifest.index.stored_items import StoredItems

        item = StoredItem("a.bin", offset=64, length=400, lead=0, stored_bytes=400, framing=Framing.RAW)
        items = StoredItems.of([item])
        assert items.files == ("a.bin",) and items[0].offset == 64
        ```
    """

    def __init__(self, columns: ItemColumns, files: Sequence[str], chains: Sequence[tuple[str, ...]] = ()) -> None:
        self.columns = columns
        self.files = tuple(files)
        self.chains = tuple(chains)

    @classmethod
    def of(cls, items: Iterable[StoredItem]) -> StoredItems:
        """Build a sequence from records."""
        items = list(items)
        files: dict[str, int] = {}
        chains: dict[tuple[str, ...], int] = {(): 0}
        running = [item.running_crcs for item in items if item.crc32 is not None and item.running_crcs is not None]
        columns = ItemColumns(
            file=np.array([files.setdefault(item.file, len(files)) for item in items], np.uint32),
            offset=np.array([item.offset for item in items], np.uint64),
            length=np.array([item.length for item in items], np.uint64),
            lead=np.array([item.lead for item in items], np.uint32),
            stored_bytes=np.array([item.stored_bytes for item in items], np.uint64),
            framing=np.array([item.framing for item in items], np.uint8),
            chain=np.array([chains.setdefault(item.chain, len(chains)) for item in items], np.uint8),
            checked=np.array([item.crc32 is not None for item in items], np.uint8),
            crc32=np.array([item.crc32 or 0 for item in items], np.uint32),
            running_crcs=np.concatenate(running) if running else _NONE,
            blocks=block_columns([item.blocks for item in items]),
        )
        return cls(columns, tuple(files), tuple(chains)[1:])

    @classmethod
    def joined(cls, parts: Sequence[StoredItems], rows: _Rows | None = None) -> StoredItems:
        """Concatenate; equal files and equal chains are stored once. Many rows get the narrowest dtypes."""
        narrow = rows is not None and len(rows) > CHUNKS_AT_ONCE
        if rows is None and len(parts) == 1:
            return parts[0]
        files: dict[str, int] = {}
        chains: dict[tuple[str, ...], int] = {(): 0}
        pieces: list[ItemColumns] = []
        for part in parts:
            file_rows = np.array([files.setdefault(name, len(files)) for name in part.files] or [0], np.uint32)
            chain_rows = np.array([chains.setdefault(links, len(chains)) for links in ((), *part.chains)], np.uint8)
            # Many ranks write one file each: a view needs no memory.
            is_one = narrow and len(file_rows) == 1
            file = np.broadcast_to(file_rows, len(part)) if is_one else file_rows[part.columns.file]
            pieces.append(replace(part.columns, file=file, chain=chain_rows[part.columns.chain]))
        return cls(join_items(pieces, rows, narrow=narrow), tuple(files), tuple(chains)[1:]) if pieces else cls.of([])

    def take(self, rows: I64) -> StoredItems:
        """Return the items in these rows, in order."""
        return StoredItems(join_items([self.columns], rows), self.files, self.chains)

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, position: int) -> StoredItem: ...
    @overload
    def __getitem__(self, position: slice) -> list[StoredItem]: ...
    def __getitem__(self, position: int | slice) -> StoredItem | list[StoredItem]:
        if isinstance(position, slice):
            return [self[row] for row in range(*position.indices(len(self)))]
        row = range(len(self))[position]
        return self._index.stored_item(self.columns, row, self._starts)

    @cached_property
    def _starts(self) -> RaggedStarts:
        return CheckpointIndex.ragged_starts(self.columns)

    @cached_property
    def _index(self) -> CheckpointIndex:
        return CheckpointIndex(files=self.files, chains=self.chains)


def block_columns(blocks: Sequence[EncodedBlocks | None]) -> BlockColumns | None:
    """Build columns; None without blocks."""
    if not any(blocks):
        return None
    return BlockColumns(
        counts=np.array([len(each.lengths) if each else 0 for each in blocks], np.uint32),
        block_bytes=np.array([each.block_bytes if each else 0 for each in blocks], np.uint32),
        lengths=np.concatenate([each.lengths for each in blocks if each]),
        crcs=np.concatenate([each.crcs for each in blocks if each]),
    )


def join_items(parts: Sequence[ItemColumns], rows: _Rows | None = None, *, narrow: bool = False) -> ItemColumns:
    """Concatenate tables, and take rows; `narrow` says whether in the narrowest dtypes."""
    if rows is None and len(parts) == 1:
        return parts[0]
    running = np.concatenate([part.running_crcs for part in parts])
    if rows is not None and len(running):
        borders = np.zeros(sum(map(len, parts)) + 1, np.min_scalar_type(len(running)))
        np.concatenate([part.running_counts() for part in parts], out=borders[1:], casting="unsafe")
        borders.cumsum(dtype=borders.dtype, out=borders)
        both = ((borders[some].astype(np.int64), borders[some + 1].astype(np.int64)) for _, some in _pieces(rows))
        crcs = [running[ranges(first, last)] for first, last in both]
        running, borders = _NONE, starts(_NONE)  # the next columns need the memory
        running, crcs = np.concatenate([running, *crcs]), []
    columns = {name: [getattr(part, name) for part in parts] for name in OF_AN_ITEM}
    if narrow and rows is not None:
        taken = {name: _take(columns[name], rows) for name in OF_AN_ITEM if name != "length"}
        same = all(map(np.array_equal, columns["length"], columns["stored_bytes"]))
        taken["length"] = taken["stored_bytes"] if same else _take(columns["length"], rows)
    else:
        own = slice(None) if rows is None else rows
        taken = {name: np.concatenate(columns[name])[own] for name in columns}
    joined = ItemColumns(**taken, running_crcs=running, blocks=None)
    if [part for part in parts if part.blocks]:
        none = [np.zeros(len(part), np.uint32) for part in parts]
        tables = [each.blocks or BlockColumns(no, no, _NONE, _NONE) for each, no in zip(parts, none, strict=True)]
        names = ("counts", "block_bytes", "lengths", "crcs")
        blocks = BlockColumns(**{name: np.concatenate([getattr(table, name) for table in tables]) for name in names})
        joined.blocks = blocks if rows is None else _take_blocks(blocks, rows)
    return joined


def _pieces(rows: _Rows) -> Iterator[tuple[slice, I64]]:
    """Fewer rows at a time take less memory: numpy makes 64-bit numbers of indices."""
    for start in range(0, len(rows), CHUNKS_AT_ONCE):
        yield slice(start, start + CHUNKS_AT_ONCE), rows[start : start + CHUNKS_AT_ONCE].astype(np.int64)


def _take(columns: Sequence[npt.NDArray[Any]], rows: _Rows) -> npt.NDArray[Any]:
    top = max(int(column.max(initial=0)) for column in columns)
    taken = np.empty(len(rows), np.min_scalar_type(top))
    if top == min(int(column.min(initial=top)) for column in columns):
        return np.broadcast_to(taken.dtype.type(top), len(rows))
    joined = np.concatenate(columns, dtype=taken.dtype, casting="unsafe")
    for place, some in _pieces(rows):
        taken[place] = joined[some]
    return taken


def _take_blocks(blocks: BlockColumns, rows: _Rows) -> BlockColumns | None:
    counts, ends = blocks.counts[rows], blocks.starts()
    if not counts.any():
        return None
    places = ranges(ends[:-1][rows], ends[1:][rows])
    return BlockColumns(counts, blocks.block_bytes[rows], blocks.lengths[places], blocks.crcs[places])
