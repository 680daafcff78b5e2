"""Verification of a whole checkpoint: its index, every data file, and the coverage of tensors by chunks. Read-only."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dcp_hooks import report_operation
from dcp_io.checkpoints.verify_file import FileReport, IndexedItem, verify_file
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError, DcpError
from dcp_manifest.file.index_problems import Examined, Problem, examine
from dcp_manifest.folders.file_names import is_index_name, rank_index_name
from dcp_manifest.folders.find_checkpoints import needed_bytes
from dcp_manifest.folders.index_choice import choose_index
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.coverage import coverage_problems
from dcp_manifest.index.stored_tensors import stored_objects, stored_tensors

__all__ = ["Problem", "VerifyReport", "verify_checkpoint"]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of verifying a whole checkpoint: the problems found, and the amount checked."""

    problems: tuple[Problem, ...]
    """Every problem found; empty for a sound checkpoint."""
    items: int
    """Number of items that the index lists."""
    bytes: int
    """Number of bytes read from data files."""
    unverified_keys: frozenset[str] = frozenset()
    """Keys of items without a CRC, whose bytes cannot be verified."""

    @property
    def ok(self) -> bool:
        """Whether the checkpoint has no problem."""
        return not self.problems


def verify_checkpoint(
    checkpoint: Store | str | os.PathLike[str],
    *,
    threads: int = 1,
    on_read: Callable[[int], None] | None = None,
    on_total: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Verify the current checkpoint in a folder: read all of its files, and report every problem.

    The checks cover the index, the coverage of tensors by chunks, every item's CRCs (in checkpoints of stock, the CRCs
    inside the archives), every byte of the archive frames, gaps between items (short, and zero), the ends of files,
    missing files, and overlapping items.

    Args:
        checkpoint: The folder, as a path or as a store; for a URI pass `open_store(uri)`.
        threads: Number of files to read at the same time, at least 1.
        on_read: Progress callback or None, called with the number of bytes just read, by one thread at a time.
        on_total: Callback or None, called once before `on_read` with the number of bytes to read from data files.

    Returns:
        A report with all problems, none for a sound checkpoint. Damage of the checkpoint is not raised as an error.

    Returns:
        A report with all problems, none for a sound checkpoint. Damage of the checkpoint is not raised as an error.

    Raises:
        OSError: The storage failed.

    Ranks: one; not collective.
    """
    if threads < 1:
        raise ValueError(f"threads={threads} must be at least 1")
    store = checkpoint if isinstance(checkpoint, Store) else LocalStore(checkpoint)
    with report_operation("verify", store.url) as progress:

        def read(count: int) -> None:
            progress(count)
            if on_read is not None:
                on_read(count)

        def expect(total: int) -> None:
            progress.expect(total)
            if on_total is not None:
                on_total(total)

        return _verify(store, threads, read, expect)


def _verify(
    store: Store, threads: int, on_read: Callable[[int], None], on_total: Callable[[int], None]
) -> VerifyReport:
    times, examined = _examine_indexes(store)
    problems = [one for found in examined.values() for one in found.problems]
    try:
        index = choose_index(times, examined.__getitem__, decode=_decoded)
    except DcpError as error:
        if not problems:
            missing = isinstance(error, CheckpointNotFoundError)
            message = f"there is no checkpoint in {store.url}" if missing else str(error)
            problems.append(Problem(message, file=getattr(error, "file", None)))
        return VerifyReport(tuple(problems), 0, 0)
    on_total(sum(needed_bytes(index).values()))
    problems += [Problem(message, key=name) for name, message in coverage_problems(index)]
    files = _items_by_file([index] if index.info is None else _rank_indexes(examined, index.info.save_id) or [index])
    reports = _verify_files(store, files, threads, exact=index.info is not None, on_read=on_read)
    for report in reports:
        problems += report.problems
    return VerifyReport(
        problems=tuple(problems),
        items=sum(len(items) for items in files.values()),
        bytes=sum(report.bytes for report in reports),
        unverified_keys=frozenset().union(*(report.unverified_keys for report in reports)),
    )


def _verify_files(
    store: Store,
    files: dict[str, list[IndexedItem]],
    threads: int,
    *,
    exact: bool,
    on_read: Callable[[int], None],
) -> list[FileReport]:
    """Return the report of each file, in the order of their names."""
    telling = threading.Lock()

    def report(count: int) -> None:
        with telling:
            on_read(count)

    def verify(name: str) -> FileReport:
        return verify_file(store, name, files[name], exact=exact, on_read=report)

    if min(threads, len(files)) < 2:  # in the caller's thread, which an interrupt ends at once
        return [*map(verify, sorted(files))]
    with ThreadPoolExecutor(threads, thread_name_prefix="dcp-io") as pool:
        return [*pool.map(verify, sorted(files))]


def _examine_indexes(store: Store) -> tuple[dict[str, float], dict[str, Examined]]:
    """Return, by name, the modification times of the index files in a folder, and their decoded contents."""
    times: dict[str, float] = {}
    examined: dict[str, Examined] = {}
    for entry in sorted(store.list(), key=lambda entry: entry.name):
        if is_index_name(entry.name):
            with contextlib.suppress(CheckpointNotFoundError):
                examined[entry.name] = examine(store.read(entry.name), file=entry.name)
                times[entry.name] = entry.mtime
    return times, examined


def _decoded(one: Examined, *, file: str) -> CheckpointIndex:
    del file
    return one.decoded()


def _rank_indexes(examined: Mapping[str, Examined], save_id: str) -> list[CheckpointIndex]:
    """Return each rank's index of a save without a coordinator: the merged index lacks replicas that ranks wrote."""
    found: dict[int, CheckpointIndex] = {}
    for name, one in examined.items():
        if rank_index_name(name) is not None and isinstance(one.index, CheckpointIndex):
            info = one.index.info
            if info is not None and info.save_id == save_id and info.rank is not None:
                found[info.rank] = one.index
    return list(found.values())


def _items_by_file(indexes: list[CheckpointIndex]) -> dict[str, list[IndexedItem]]:
    files: dict[str, list[IndexedItem]] = defaultdict(list)
    for index in indexes:
        for tensor in stored_tensors(index):
            for chunk in tensor.chunks:
                files[chunk.item.file].append(IndexedItem(tensor.name, chunk.item, tensor.dtype, chunk.sizes))
        for name, item in stored_objects(index):
            files[item.file].append(IndexedItem(name, item))
    return files
