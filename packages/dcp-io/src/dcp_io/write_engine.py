"""Writing the items of one rank: who writes what into which file, and the errors of its threads."""

from __future__ import annotations

import contextlib
import functools
import heapq
from collections.abc import Sequence
from typing import Literal, get_args

from dcp_io.data_file import DataFile
from dcp_io.store import Store
from dcp_io.workers import StopSignal, run_together
from dcp_manifest.items import StoredItem
from dcp_manifest.requests import WriteRequest

__all__ = ["DATA_SUFFIX", "Layout", "write_items"]

Layout = Literal["torch", "raw"]
"""`torch`: tensors are archives that `torch.load` opens. `raw`: aligned bytes only, small items side by side."""

DATA_SUFFIX = ".distcp"
# Below this much data per file, the cost of another file (and its fsync) exceeds what a thread wins.
FILE_MIN_BYTES = 4 << 20


def write_items(
    store: Store,
    requests: Sequence[WriteRequest],
    *,
    prefix: str,
    save_id: str,
    layout: Layout = "torch",
    threads: int = 1,
    single_file: bool = True,
    sync: bool = True,
) -> list[StoredItem]:
    """Write every item, or none: once this returns all are stored (durably with `sync`), on an error all are gone.

    Each thread writes files of its own, balanced by `cost_bytes`, largest items first; it resolves an item when its
    turn has come, so one item per thread is in memory beside the trainer's. Tensors' bytes go from their memory to
    the storage without a copy; a tensor that changes meanwhile is found damaged when it is loaded.

    Args:
        store: Where to; its folder must exist.
        requests: Items; their `resolve` is called once each, in any thread.
        prefix: Beginning of the files' names, e.g. `__3_` for rank 3.
        save_id: Id of the running save; part of the files' names.
        layout: How tensors are framed.
        threads: At most so many writer threads, at least 1; fewer are used for little data.
        single_file: One file per thread; otherwise one per item.
        sync: Whether files and folder are durable on return.

    Returns:
        Where each item lies, in the order of `requests`. No request, no file.

    Raises:
        ValueError: A request's payload contradicts its dtype and sizes; an argument is not allowed.
        OSError: The storage refused; names the file.
        BaseException: Whatever a `resolve` raised. The first error of all threads is raised, as it is.

    Ranks: one; not collective.
    """
    _check_choices(layout, threads)
    if not requests:
        return []
    batch = _Batch(store, requests, prefix=prefix, save_id=save_id, layout=layout, single_file=single_file, sync=sync)
    buckets = _buckets(requests, threads)
    try:
        run_together([functools.partial(batch.write_bucket, n, bucket) for n, bucket in enumerate(buckets)])
        if sync:
            store.sync_folder()
    except BaseException:
        batch.remove_files()
        raise
    return batch.items()


class _Batch:
    """What the writer threads of one call share."""

    def __init__(
        self,
        store: Store,
        requests: Sequence[WriteRequest],
        *,
        prefix: str,
        save_id: str,
        layout: Layout,
        single_file: bool,
        sync: bool,
    ) -> None:
        self._store = store
        self._requests = requests
        self._name = f"{prefix}{{}}.{save_id}{DATA_SUFFIX}"
        self._layout = layout
        self._single_file = single_file
        self._sync = sync
        self._found: list[StoredItem | None] = [None] * len(requests)
        self._made: list[str] = []

    def items(self) -> list[StoredItem]:
        """Where the items lie, in the order of the requests."""
        return [item for item in self._found if item is not None]

    def remove_files(self) -> None:
        """Delete every file that was made."""
        for name in self._made:
            with contextlib.suppress(OSError):
                self._store.delete(name)

    def write_bucket(self, number: int, positions: Sequence[int], stop: StopSignal) -> None:
        """Write the items of one thread."""
        if self._single_file:
            self._write_file(number, positions, stop)
            return
        for position in positions:
            self._write_file(position, [position], stop)

    def _write_file(self, number: int, positions: Sequence[int], stop: StopSignal) -> None:
        stop.check()
        sink = self._store.create(self._name.format(number))
        self._made.append(sink.name)
        file = DataFile(sink, layout=self._layout)
        try:
            for position in positions:
                stop.check()
                request = self._requests[position]
                self._found[position] = file.add(request.key, request.resolve())
            stop.check()
            file.close(sync=self._sync)
        except BaseException:
            file.abort()
            raise


def _check_choices(layout: Layout, threads: int) -> None:
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    if layout not in get_args(Layout):
        raise ValueError(f"layout={layout!r} is not known; choose one of {', '.join(map(repr, get_args(Layout)))}")


def _buckets(requests: Sequence[WriteRequest], threads: int) -> list[list[int]]:
    """Positions of the requests for each thread: the largest first, each to the thread with the least to do."""
    total = sum(request.cost_bytes for request in requests)
    count = max(1, min(threads, len(requests), -(-total // FILE_MIN_BYTES)))
    order = sorted(range(len(requests)), key=lambda position: -requests[position].cost_bytes)
    if count == 1:
        return [order]
    buckets: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, number) for number in range(count)]
    for position in order:
        load, number = loads[0]
        buckets[number].append(position)
        heapq.heapreplace(loads, (load + requests[position].cost_bytes, number))
    return [bucket for bucket in buckets if bucket]
