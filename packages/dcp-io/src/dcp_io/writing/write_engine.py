"""Write engine for the items of one rank: distributes them over threads and files, and handles errors."""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, get_args

import numpy as np
import numpy.typing as npt

from dcp_hooks import find_progress
from dcp_io.layout_choices import Layout, check_layout
from dcp_io.requests import Alike, RateGauge, Writable
from dcp_io.stores.store import Sink, Store
from dcp_io.workers import StopSignal, run_together
from dcp_io.writing.data_file import DataFile, Place
from dcp_io.writing.measured_writes import MeasuredFile, MeasuringStore
from dcp_manifest.folders.file_names import data_file_name
from dcp_manifest.index.columns import ItemColumns
from dcp_manifest.index.items import EncodedBlocks
from dcp_manifest.index.stored_items import StoredItems, block_columns

__all__ = ["MAX_INFLIGHT_BYTES", "assign_to_threads", "write_items"]

# With less data per file, another file (and its fsync) costs more than another thread gains.
FILE_MIN_BYTES = 4 << 20
MAX_INFLIGHT_BYTES = 64 << 20
# Consecutive alike requests are written as a group: at least and at most this many of them.
_MIN_ALIKE, _MAX_ALIKE = 16, 1024
_NO_BORDERS: Final = np.zeros(0, np.uint32)


def write_items(
    store: Store,
    requests: Sequence[Writable],
    *,
    prefix: str,
    save_id: str,
    layout: Layout = "torch",
    threads: int = 1,
    single_file: bool = True,
    sync: bool = True,
    max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    gauge: RateGauge | None = None,
) -> StoredItems:
    """Write all items or none: on return all are stored (durably with `sync`); after an error no file is left.

    Each thread writes its own files. Items are balanced by `cost_bytes`, largest first, and resolved just before they
    are written. The bytes of tensors go from their memory to the storage without a copy, or, where that is impossible,
    piece by piece through a buffer. A tensor that is changed during the write fails its CRC check when it is loaded.

    Args:
        store: The checkpoint's folder; it must exist.
        requests: The items to write; each `resolve` is called once, in any thread.
        prefix: Prefix of the file names, e.g. `__3_` for rank 3.
        save_id: Id of the running save; part of the file names.
        layout: Framing of tensors, see `Layout`.
        threads: Limit of the number of writer threads, at least 1; fewer are used for little data.
        single_file: Whether each thread writes one file for all its items; otherwise one file per item.
        sync: Whether files and folder are durable on return (fsync).
        max_inflight_bytes: Limit of the memory for buffers of all threads together, for payloads in pieces.
        gauge: Observer of the storage's rate, for the first and last bytes of each file; without `single_file` it
            learns only the number of threads.

    Returns:
        The location of each item, in the order of `requests`. Without requests no file is made.

    Raises:
        ValueError: A payload contradicts its dtype and sizes, or an argument is invalid.
        OSError: A write to the storage failed; the message names the file.
        BaseException: Any error of a `resolve`. If several threads fail, the first error is raised, unchanged.

    Ranks: one; not collective.
    """
    _check_choices(layout, threads, max_inflight_bytes)
    if not requests:
        return StoredItems.of([])
    buckets = assign_to_threads(requests, threads)
    progress = find_progress()
    if progress.wanted:
        progress.expect(sum(request.cost_bytes for request in requests))
    if gauge is not None:
        gauge.begin(len(buckets))
    batch = _Batch(
        store,
        requests,
        name_of=lambda number: data_file_name(prefix, number, save_id),
        single_file=single_file,
        open_file=functools.partial(
            MeasuredFile if isinstance(store, MeasuringStore) else DataFile,
            save_id=save_id,
            layout=layout,
            sync=sync,
            max_piece_bytes=max(1, max_inflight_bytes // len(buckets)),
            count=progress,
            gauge=gauge if single_file else None,
        ),
    )
    try:
        run_together([functools.partial(batch.write_bucket, n, bucket) for n, bucket in enumerate(buckets)])
        if sync:
            store.sync_folder()
    except BaseException:
        batch.remove_files()
        raise
    return batch.items()


@dataclass(frozen=True, slots=True)
class _Written:
    """A completed data file, and the locations of its items."""

    name: str
    positions: Sequence[int]
    """Positions of its items in the requests."""
    places: list[int]
    """The numbers of their `Place`s, concatenated."""
    running_crcs: list[npt.NDArray[np.uint32]]
    chains: tuple[tuple[str, ...], ...]
    """Chains of transforms, by their number in `Place`."""
    blocks: dict[int, EncodedBlocks]
    """Encoded blocks, by offset of the item in the file."""


def _stored_items(file: _Written) -> StoredItems:
    """Return the items of one file, in the order in which they were written."""
    rows = np.array(file.places, np.int64).reshape(-1, len(get_args(Place)))
    # An empty item may share its offset with the one after it, but it has no bytes that could be encoded.
    blocks = [file.blocks.get(row[0]) if row[1] else None for row in rows.tolist()] if file.blocks else []
    columns = ItemColumns(
        file=np.zeros(len(rows), np.uint32),
        offset=rows[:, 0].astype(np.uint64),
        length=rows[:, 1].astype(np.uint64),
        lead=rows[:, 2].astype(np.uint32),
        stored_bytes=rows[:, 3].astype(np.uint64),
        framing=rows[:, 4].astype(np.uint8),
        chain=rows[:, 6].astype(np.uint8),
        checked=np.ones(len(rows), np.uint8),
        crc32=rows[:, 5].astype(np.uint32),
        running_crcs=np.concatenate([_NO_BORDERS, *file.running_crcs]),
        blocks=block_columns(blocks),
    )
    return StoredItems(columns, [file.name], file.chains[1:])


class _Batch:
    """State shared by the writer threads of one `write_items`."""

    def __init__(
        self,
        store: Store,
        requests: Sequence[Writable],
        *,
        name_of: Callable[[int], str],
        single_file: bool,
        open_file: Callable[[Sink], DataFile],
    ) -> None:
        self._store = store
        self._requests = requests
        self._name_of = name_of
        self._single_file = single_file
        self._open_file = open_file
        self._made: list[str] = []
        self._written: list[_Written] = []

    def items(self) -> StoredItems:
        """Return the locations of all items, in the order of the requests."""
        written = sorted(self._written, key=lambda file: file.name)
        order = np.argsort(np.concatenate([file.positions for file in written]), kind="stable")
        return StoredItems.joined([*map(_stored_items, written)]).take(order)

    def remove_files(self) -> None:
        """Delete every file of this call."""
        for name in self._made:
            with contextlib.suppress(OSError):
                self._store.delete(name)

    def _abandon(self) -> None:
        """Stop the other threads' wait for bytes that may never come."""
        for request in self._requests:
            abandon = getattr(request, "abandon", None)
            if abandon is not None:
                abandon()

    def write_bucket(self, number: int, positions: Sequence[int], stop: StopSignal) -> None:
        """Write the items of one thread."""
        if self._single_file:
            self._write_file(number, positions, stop)
            return
        for position in positions:
            self._write_file(position, [position], stop)

    def _write_file(self, number: int, positions: Sequence[int], stop: StopSignal) -> None:
        stop.check()
        sink = self._store.create(self._name_of(number))
        self._made.append(sink.name)
        file = self._open_file(sink)
        places: list[int] = []
        try:
            for alike, requests in _runs([self._requests[position] for position in positions]):
                stop.check()
                if alike is not None:
                    places += file.add_alike(requests[0].key, alike, alike.resolve(requests), len(requests))
                    continue
                for request in requests:
                    places += file.add(request.key, request.resolve())
                    stop.check()
            stop.check()
            file.close()
        except BaseException:
            file.abort()
            self._abandon()
            raise
        self._written.append(_Written(sink.name, positions, places, file.running_crcs, tuple(file.chains), file.blocks))


def _runs(requests: Sequence[Writable]) -> Iterator[tuple[Alike | None, Sequence[Writable]]]:
    """Yield the requests in order, grouping runs of alike ones."""
    start = 0
    for alike, run in itertools.groupby(requests, lambda request: getattr(request, "alike", None)):
        stop = start + sum(1 for _ in run)
        worth = alike is not None and stop - start >= _MIN_ALIKE
        for first in range(start, stop, _MAX_ALIKE):
            yield alike if worth else None, requests[first : min(stop, first + _MAX_ALIKE)]
        start = stop


def _check_choices(layout: Layout, threads: int, max_inflight_bytes: int) -> None:
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    if max_inflight_bytes < 1:
        raise ValueError(f"max_inflight_bytes={max_inflight_bytes} must be at least 1")
    check_layout(layout)


def assign_to_threads(requests: Sequence[Writable], threads: int) -> list[list[int]]:
    """Assign write requests to threads: the largest first, each to the thread with the fewest bytes.

    Urgent requests come before all others. Requests that share an `Alike` and a size are kept together.

    Returns:
        For each thread, the positions of its requests in `requests`.
    """
    total = sum(request.cost_bytes for request in requests)
    count = max(1, min(threads, len(requests), -(-total // FILE_MIN_BYTES)))
    kinds: dict[Alike | None, int] = {}
    ranks = [
        (
            not getattr(request, "urgent", False),
            -request.cost_bytes,
            kinds.setdefault(getattr(request, "alike", None), len(kinds)),
        )
        for request in requests
    ]
    order = sorted(range(len(requests)), key=ranks.__getitem__)
    if count == 1:
        return [order]
    buckets: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for position in order:
        load, number = loads[0]
        buckets[number].append(position)
        heapq.heapreplace(loads, (load + requests[position].cost_bytes, number))
    return [bucket for bucket in buckets if bucket]
