"""Copy of one host's part of a checkpoint to a tier that all hosts share; who sees that all parts are there publishes.

Each host has a lease in the target, a save marker of its own, and a journal of the files that it has brought. Copies of
another host's part that this host has (see `dcp_io.CopyNote`) are brought only if that host is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from dcp_hooks import report_operation
from dcp_io import (
    HostStore,
    PassingCrcs,
    SaveSession,
    Store,
    check_files,
    clear_dead_saves,
    hosts_of_job,
    read_copy_note,
    spans_by_file,
)
from dcp_manifest import METADATA_NAME, CheckpointIndex, CheckpointNotFoundError, DcpError, needed_bytes
from dcp_tiers.copying.copy_checkpoint import copy_note, encode_journal, is_there, read_source
from dcp_tiers.copying.send_file import JOURNAL, read_journal, send_file, size_of

__all__ = ["copy_part"]

_FIRST_LEASE = 10**8  # above all ranks, whose numbers are in the same place of a marker's name
_JOURNALS = JOURNAL.removesuffix(".json") + "-"


@dataclass(frozen=True, slots=True)
class _Part:
    """One host's part of a save."""

    data: bytes
    index: CheckpointIndex
    save_id: str
    files: tuple[str, ...]
    """Data files that this host has in full length."""
    host: str
    """Id of the host's place, hexadecimal."""


def copy_part(
    source: HostStore, target: Store, host: str, *, stale_after_seconds: float, pace: Callable[[int], object]
) -> str | None:
    """Copy this host's files of a checkpoint; publish the index if the files of all hosts are there.

    A file that is there and in a journal is verified and durable, and not sent again.

    Args:
        source: This host's folder of the checkpoint.
        target: The checkpoint's folder in the shared tier.
        host: Id of this host's place: 16 hexadecimal digits.
        stale_after_seconds: See `copy_checkpoint`.
        pace: Function that is called with each number of bytes that has passed, such as a `Pace`.

    Returns:
        The save id; None if files of other hosts are lacking.

    Raises:
        PromotionError, CorruptCheckpointError, SaveInProgressError, CheckpointNotFoundError, OSError: See
            `copy_checkpoint`.

    Ranks: one process of each host.
    """
    data, index, save_id = read_source(source)
    if is_there(target, index, save_id):
        clear_dead_saves(target, stale_after_seconds=stale_after_seconds)
        return _end(source, target, save_id)
    files = _files_to_bring(source, target, index, host, stale_after_seconds)
    part = _Part(data, index, save_id, files, host)
    _send_part(source, target, part, stale_after_seconds, pace)
    if not _all_brought(target, part):
        return None
    session = SaveSession.begin(target, save_id=save_id, stale_after_seconds=stale_after_seconds)
    try:
        session.publish(METADATA_NAME, data)  # what a killed publisher has left is removed by the catalogue's sweep
    finally:
        session.finish(index.files)
    return _end(source, target, save_id)


def _files_to_bring(
    source: HostStore, target: Store, index: CheckpointIndex, host: str, stale_after_seconds: float
) -> tuple[str, ...]:
    """Return the data files that this host has in full length, but for copies of parts that other hosts bring."""
    entries = source.list()
    sizes = {entry.name: entry.bytes for entry in entries}
    copies = read_copy_note(source, entries).copies
    if copies:
        gone = _hosts_gone(source, target, host, copies, stale_after_seconds)
        others = {name for owner, names in copies.items() if owner not in gone for name in names}
        sizes = {name: size for name, size in sizes.items() if name not in others}
    return tuple(name for name, size in sorted(needed_bytes(index).items()) if sizes.get(name, -1) >= size)


def _hosts_gone(
    source: HostStore, target: Store, host: str, owners: Collection[str], stale_after_seconds: float
) -> set[str]:
    """Return which hosts will not bring their parts: no hosts of the job, or silent since this one has brought its own.

    A host is silent if the target has nothing of it, `stale_after_seconds` after this host has brought its part.
    """
    present = hosts_of_job(source.parent())
    gone = set() if present is None else {*owners} - present
    journals = {entry.name: entry.mtime for entry in target.list() if entry.name.startswith(_JOURNALS)}
    brought = journals.get(f"{_JOURNALS}{host}.json")
    if brought is not None and time.time() - brought > stale_after_seconds:
        gone |= {owner for owner in owners if f"{_JOURNALS}{owner}.json" not in journals}
    return gone


def _send_part(
    source: HostStore, target: Store, part: _Part, stale_after_seconds: float, pace: Callable[[int], object]
) -> None:
    journal = f"{_JOURNALS}{part.host}.json"
    done = read_journal(target, part.save_id, journal)
    sizes = {name: source.size(name) for name in part.files}
    missing = [name for name in part.files if not done.get(name) == sizes[name] == size_of(target, name)]
    if not missing:
        return
    spans = spans_by_file(part.index)
    number = _FIRST_LEASE + int(part.host, 16) % (9 * _FIRST_LEASE)
    target.make()
    target.delete(f".dcp-save-{part.save_id}.r{number}")  # of a killed promoter of this host; there is one at a time
    lease = SaveSession.begin(target, save_id=part.save_id, rank=number, stale_after_seconds=stale_after_seconds)
    try:
        with report_operation("promote", target.url) as progress:
            progress.expect(sum(sizes[name] for name in missing))

            def passed(count: int) -> None:
                progress(count)
                pace(count)

            for name in missing:
                send_file(source, target, name, PassingCrcs(name, spans.get(name, [])), passed)
                done[name] = sizes[name]
                target.sync_folder()
                whole = sum(needed_bytes(part.index).values())
                target.publish(journal, encode_journal(part.save_id, done, source, whole))
            if source.read(METADATA_NAME) != part.data:
                raise CheckpointNotFoundError(f"{source.url} was replaced while it was copied; it is copied anew")
    finally:
        lease.abort()  # which removes the lease alone: no file of the save has its number


def _all_brought(target: Store, part: _Part) -> bool:
    """Whether all files of the save are in journals, and there in full length."""
    brought: set[str] = set()
    for entry in target.list():
        if entry.name.startswith(_JOURNALS):
            brought.update(read_journal(target, part.save_id, entry.name))
    if not brought.issuperset(part.index.files):
        return False
    try:
        check_files(target, part.index)
    except DcpError as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        return False
    return True


def _end(source: Store, target: Store, save_id: str) -> str:
    copy_note(source, target)
    for entry in target.list():
        if entry.name.startswith(_JOURNALS):
            with contextlib.suppress(OSError):
                target.delete(entry.name)
    return save_id
