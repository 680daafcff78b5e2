"""Copy one checkpoint, or one host's part, to another tier: verified, resumable, index last, published like a save.

Of parts, the first host that sees all files publishes the index. Each host has a lease, a save marker, and a journal
of its copied files in the target. It copies its replicas of another host's part only if that host is gone.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dcp_base import DcpError
from dcp_base.progress import report_operation
from dcp_io import CheckpointExistsError, Entry, HostStore, SaveInProgressError, Store, verify_checkpoint
from dcp_io.checkpoints.list_checkpoints import running_saves
from dcp_io.checkpoints.remove_checkpoint import clear_dead_saves
from dcp_io.checkpoints.verify_checkpoint import PassingCrcs
from dcp_io.roots.copy_notes import CopyNote, JobHosts
from dcp_io.saves.cleanup import read_current
from dcp_io.saves.save_files import temporary_of, this_process
from dcp_io.saves.save_session import RankSaveSession, SaveSession
from dcp_manifest import (
    CheckpointIndex,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    read_index,
)
from dcp_manifest.folders.find_checkpoints import check_files
from dcp_manifest.folders.folder import METADATA_NAME, NOTE, SAVE_MARKER_PREFIX
from dcp_manifest.index.columns import needed_bytes

JOURNAL = ".dcp-promoting.json"
"""Lists the verified, durable data files in the target."""
_PIECE_BYTES = 4 << 20


def send_file(source: Store, target: Store, name: str, crcs: PassingCrcs, passed: Callable[[int], object]) -> None:
    """Copy one data file; its last byte is written only after all bytes have passed their CRCs."""
    target.delete(name)  # remains of an interrupted copy
    memory = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.closing(source.open(name)) as opened:
        size = opened.size()
        with target.create(name) as sink:
            for position in range(0, size, _PIECE_BYTES):
                piece = memory[: min(_PIECE_BYTES, size - position)]
                opened.read_into(position, [piece])
                crcs.take(position, piece)
                sink.write([piece])
                passed(len(piece))


def read_journal(target: Store, save_id: str, name: str = JOURNAL) -> dict[str, int]:
    """Return a journal's files of a save, with bytes."""
    try:
        values = json.loads(target.read(name))
        files = values["files"].items() if values["save_id"] == save_id else ()
    except (CheckpointNotFoundError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    return {file: size for file, size in files if isinstance(size, int)}


def size_of(store: Store, name: str) -> int | None:
    """Return a file's size, if it exists."""
    try:
        return store.size(name)
    except CheckpointNotFoundError:
        return None


# Directories that this process is copying to, with the save ids.
_running: set[tuple[str, str]] = set()


class SupersededError(CheckpointExistsError):
    """The tier has a later save of the same step. Do not retry."""


def copy_checkpoint(source: Store, target: Store, *, stale_after_seconds: float, pace: Callable[[int], object]) -> str:
    """Copy a checkpoint byte for byte, and return its save id. One process; the caller protects `source` from removal.

    Files that an earlier copy of the same save completed are not sent again. Until the index is published, the target
    has its old checkpoint or none. A file reaches its full size only after its bytes have passed all CRCs. `pace` is
    called with each number of bytes that has passed.

    Raises:
        UnsupportedFormatError: Checkpoints of this kind are not copied.
        SupersededError: The target has a later save of the step.
        CorruptCheckpointError: The source is damaged.
        SaveInProgressError: A save or another copy is running in the target.
        CheckpointNotFoundError: The source was removed or replaced meanwhile.
    """
    save = _Save(*read_source(source))
    if is_there(target, save.index):
        clear_dead_saves(target, stale_after_seconds=stale_after_seconds)
    else:
        with _counting(target, save.bytes, pace) as passed:
            report = verify_checkpoint(source)
            if not report.ok:
                raise CorruptCheckpointError(f"{source.url} is damaged and not promoted: {report.problems[0]}")
            _send(source, target, save, stale_after_seconds, passed)
    copy_note(source, target)
    target.delete(JOURNAL)
    return save.save_id


@dataclass(frozen=True, slots=True)
class _Save:
    data: bytes
    index: CheckpointIndex
    save_id: str

    @property
    def bytes(self) -> int:
        return sum(needed_bytes(self.index).values())


@contextlib.contextmanager
def _counting(target: Store, expected: int, pace: Callable[[int], object]) -> Iterator[Callable[[int], None]]:
    with report_operation("promote", target.url) as progress:
        progress.expect(expected)

        def passed(count: int) -> None:
            progress(count)
            pace(count)

        yield passed


def read_source(source: Store) -> tuple[bytes, CheckpointIndex, str]:
    """Return the index, encoded and decoded, and the save id."""
    try:
        data = source.read(METADATA_NAME)
    except CheckpointNotFoundError as error:
        if read_current(source).exists:
            raise UnsupportedFormatError(
                f"{source.url} has an index of each rank and no common one, as saves without a coordinator leave it; "
                "such checkpoints are not promoted: save with a coordinator"
            ) from error
        raise
    index = read_index(data, file=METADATA_NAME)
    if index.info is None:
        raise UnsupportedFormatError(
            f"{source.url} was saved by torch.distributed.checkpoint, which writes no save id; copy it by hand"
        )
    return data, index, index.info.save_id


def is_there(target: Store, index: CheckpointIndex) -> bool:
    """Return whether the target has this save, or parts of it that its policy keeps. Raises SupersededError."""
    there = read_current(target).index
    if there is None or there.info is None or index.info is None:
        return False
    if there.info.origin != index.info.origin:
        if there.info.created_ns > index.info.created_ns:
            raise SupersededError(f"{target.url} has a later save of this step; it is not replaced by an earlier one")
        return False
    return _has_files(target, there)


def _has_files(target: Store, index: CheckpointIndex) -> bool:
    try:
        check_files(target, index)
    except DcpError as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        return False
    return True


def _send(
    source: Store, target: Store, save: _Save, stale_after_seconds: float, passed: Callable[[int], object]
) -> None:
    save_id = save.save_id
    _remove_own_marker(target, save_id)
    if alive := running_saves(target, stale_after_seconds=stale_after_seconds):
        raise SaveInProgressError(f"{target.url} is being written by {alive[0]}; it is tried again later")
    _remove_temporaries(target, target.list(), save_id)
    session = SaveSession.begin(target, save_id=save_id, stale_after_seconds=stale_after_seconds)
    copy = (target.url, save_id)
    _running.add(copy)
    try:
        sizes = {name: source.size(name) for name in sorted(save.index.files)}
        done = read_journal(target, save_id)
        _send_files(source, target, save, _missing(target, sizes, done), done, JOURNAL, passed)
        check_files(target, save.index)
        session.publish(METADATA_NAME, save.data)
    finally:
        # If the index was not published, this keeps the files for the next promoter.
        _running.discard(copy)
        session.finish(save.index.files)


def _missing(target: Store, sizes: Mapping[str, int], done: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if not done.get(name) == size == size_of(target, name)}


def _send_files(
    source: Store,
    target: Store,
    save: _Save,
    missing: Mapping[str, int],
    done: dict[str, int],
    journal: str,
    passed: Callable[[int], object],
) -> None:
    """Send files; each is durable before the journal names it."""
    spans, whole = PassingCrcs.spans_by_file(save.index), save.bytes
    for name, size in missing.items():
        send_file(source, target, name, PassingCrcs(name, spans.get(name, [])), passed)
        done[name] = size
        target.sync_folder()
        target.publish(journal, encode_journal(save.save_id, done, source, whole))
    if source.read(METADATA_NAME) != save.data:
        raise CheckpointNotFoundError(f"{source.url} was replaced while it was copied; it is copied anew")


def encode_journal(save_id: str, files: Mapping[str, int], source: Store, whole: int) -> bytes:
    """Return a journal: durable files, their `whole` size, and the original for reports."""
    place = f"{source.url} on {socket.gethostname()}"
    return json.dumps({"save_id": save_id, "files": dict(files), "from": place, "bytes": whole}).encode()


def _remove_own_marker(target: Store, save_id: str) -> None:
    name = f"{SAVE_MARKER_PREFIX}{save_id}"
    if (target.url, save_id) in _running:
        return
    with contextlib.suppress(CheckpointNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        if json.loads(target.read(name))["process"] == this_process().to_dict():
            target.delete(name)


def _remove_temporaries(target: Store, entries: list[Entry], save_id: str) -> None:
    for entry in entries:
        becomes = temporary_of(entry.name)
        if becomes is not None and becomes[1] == save_id:
            target.delete(entry.name)


def copy_note(source: Store, target: Store) -> None:
    """Copy the manager's note, if any."""
    with contextlib.suppress(CheckpointNotFoundError):
        note = source.read(NOTE)
        if size_of(target, NOTE) != len(note) or target.read(NOTE) != note:
            target.publish(NOTE, note, sync=False)


_FIRST_LEASE = 10**8  # above all ranks, whose numbers are in the same position of a marker's name
_JOURNALS = JOURNAL.removesuffix(".json") + "-"


def copy_part(
    source: HostStore, target: Store, host: str, *, stale_after_seconds: float, pace: Callable[[int], object]
) -> str | None:
    """Copy this host's files; publish the index once the files of all hosts are there. One process per host.

    Return the save id, or None if files of other hosts are missing. `host` is the id of this host's directory: 16
    hexadecimal digits. Otherwise as `copy_checkpoint`.
    """
    save = _Save(*read_source(source))
    if is_there(target, save.index):
        clear_dead_saves(target, stale_after_seconds=stale_after_seconds)
        return _end(source, target, save.save_id)
    files = _files_to_bring(source, target, save.index, host, stale_after_seconds)
    _send_part(source, target, save, files, host, stale_after_seconds, pace)
    if not _all_brought(target, save):
        return None
    session = SaveSession.begin(target, save_id=save.save_id, stale_after_seconds=stale_after_seconds)
    try:
        session.publish(METADATA_NAME, save.data)  # the catalogue's sweep removes the remains of a killed publisher
    finally:
        session.finish(save.index.files)
    return _end(source, target, save.save_id)


def _files_to_bring(
    source: HostStore, target: Store, index: CheckpointIndex, host: str, stale_after_seconds: float
) -> tuple[str, ...]:
    entries = source.list()
    sizes = {entry.name: entry.bytes for entry in entries}
    copies = CopyNote.read(source, entries).copies
    if copies:
        gone = _hosts_gone(source, target, host, copies, stale_after_seconds)
        others = {name for owner, names in copies.items() if owner not in gone for name in names}
        sizes = {name: size for name, size in sizes.items() if name not in others}
    return tuple(name for name, size in sorted(needed_bytes(index).items()) if sizes.get(name, -1) >= size)


def _hosts_gone(
    source: HostStore, target: Store, host: str, owners: Collection[str], stale_after_seconds: float
) -> set[str]:
    """Return hosts that left the job, or sent nothing long after this host."""
    present = JobHosts(source.parent()).noted()
    gone = set() if present is None else {*owners} - present
    journals = {entry.name: entry.mtime for entry in target.list() if entry.name.startswith(_JOURNALS)}
    brought = journals.get(f"{_JOURNALS}{host}.json")
    if brought is not None and time.time() - brought > stale_after_seconds:
        gone |= {owner for owner in owners if f"{_JOURNALS}{owner}.json" not in journals}
    return gone


def _send_part(
    source: HostStore,
    target: Store,
    save: _Save,
    files: Sequence[str],
    host: str,
    stale_after_seconds: float,
    pace: Callable[[int], object],
) -> None:
    journal = f"{_JOURNALS}{host}.json"
    done = read_journal(target, save.save_id, journal)
    missing = _missing(target, {name: source.size(name) for name in files}, done)
    if not missing:
        return
    number = _FIRST_LEASE + int(host, 16) % (9 * _FIRST_LEASE)
    target.make()
    # A killed promoter of this host may have left it; there is one promoter at a time.
    target.delete(f"{SAVE_MARKER_PREFIX}{save.save_id}.r{number}")
    lease = RankSaveSession.begin_rank(target, save.save_id, number, stale_after_seconds=stale_after_seconds)
    try:
        with _counting(target, sum(missing.values()), pace) as passed:
            _send_files(source, target, save, missing, done, journal, passed)
    finally:
        lease.abort()  # only the lease is removed: no file of the save has its number


def _all_brought(target: Store, save: _Save) -> bool:
    brought: set[str] = set()
    for entry in target.list():
        if entry.name.startswith(_JOURNALS):
            brought.update(read_journal(target, save.save_id, entry.name))
    return brought.issuperset(save.index.files) and _has_files(target, save.index)


def _end(source: Store, target: Store, save_id: str) -> str:
    copy_note(source, target)
    for entry in target.list():
        if entry.name.startswith(_JOURNALS):
            with contextlib.suppress(OSError):
                target.delete(entry.name)
    return save_id
