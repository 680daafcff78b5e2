"""Copy of one checkpoint from one tier to another: verified, resumable, index last, published like a save."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Mapping

from dcp_hooks import report_operation
from dcp_io import (
    Entry,
    PassingCrcs,
    SaveInProgressError,
    SaveSession,
    Store,
    check_files,
    clear_dead_saves,
    read_current,
    running_saves,
    spans_by_file,
    temporary_of,
    this_process,
    verify_checkpoint,
)
from dcp_manifest import (
    METADATA_NAME,
    NOTE,
    SAVE_MARKER_PREFIX,
    CheckpointIndex,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpError,
    needed_bytes,
    read_index,
)
from dcp_tiers.copying.send_file import JOURNAL, read_journal, send_file, size_of
from dcp_tiers.errors import PromotionError, SupersededError

__all__ = [
    "copy_checkpoint",
    "copy_note",
    "encode_journal",
    "is_there",
    "read_source",
]

# Folders that this process copies to now, with the save ids.
_running: set[tuple[str, str]] = set()


def copy_checkpoint(source: Store, target: Store, *, stale_after_seconds: float, pace: Callable[[int], object]) -> str:
    """Copy the checkpoint in a folder to a folder of another storage, and return its save id.

    The copy is byte for byte the same. Nothing is sent if it is there already. A data file that an interrupted copy of
    the same save has completed is not sent again. Until the index is published, the target has its old checkpoint or
    none. A file has its full size in the target only after its bytes have passed all CRCs.

    Args:
        source: Folder with a complete checkpoint; the caller keeps it from being removed.
        target: Folder of the copy.
        stale_after_seconds: A save or copy of another host counts as dead when its marker has not been renewed for
            this long.
        pace: Function that is called with each number of bytes that has passed, such as a `Pace`.

    Raises:
        PromotionError: The checkpoint is of a kind that is not copied.
        SupersededError: The target has a later save of the step.
        CorruptCheckpointError: The source is damaged.
        SaveInProgressError: A save or another copy is alive in the target.
        CheckpointNotFoundError: The source has gone or was replaced meanwhile.
        OSError: One of the storages failed.

    Ranks: one process.
    """
    data, index, save_id = read_source(source)
    if is_there(target, index, save_id):
        clear_dead_saves(target, stale_after_seconds=stale_after_seconds)
    else:
        with report_operation("promote", target.url) as progress:

            def passed(count: int) -> None:
                progress(count)
                pace(count)

            report = verify_checkpoint(source)
            if not report.ok:
                raise CorruptCheckpointError(f"{source.url} is damaged and not promoted: {report.problems[0]}")
            progress.expect(sum(needed_bytes(index).values()))
            _send(source, target, (data, index, save_id), stale_after_seconds, passed)
    copy_note(source, target)
    target.delete(JOURNAL)
    return save_id


def read_source(source: Store) -> tuple[bytes, CheckpointIndex, str]:
    """Return the index of a checkpoint as bytes and decoded, and its save id. Errors: see `copy_checkpoint`."""
    try:
        data = source.read(METADATA_NAME)
    except CheckpointNotFoundError as error:
        if read_current(source).exists:
            raise PromotionError(
                f"{source.url} has an index of each rank and no common one, as saves without a coordinator leave it; "
                "such checkpoints are not promoted: save with a coordinator"
            ) from error
        raise
    index = read_index(data, file=METADATA_NAME)
    if index.info is None:
        raise PromotionError(
            f"{source.url} was saved by torch.distributed.checkpoint, which writes no save id; copy it by hand"
        )
    return data, index, index.info.save_id


def is_there(target: Store, index: CheckpointIndex, save_id: str) -> bool:
    """Whether the target has this save. Raises SupersededError if it has a later one."""
    current = read_current(target)
    if current.index is None or current.index.info is None or index.info is None:
        return False
    if current.save_id != save_id:
        if current.index.info.created_ns > index.info.created_ns:
            raise SupersededError(f"{target.url} has a later save of this step; it is not replaced by an earlier one")
        return False
    try:
        check_files(target, index)
    except DcpError as error:
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        return False
    return True


def _send(
    source: Store,
    target: Store,
    save: tuple[bytes, CheckpointIndex, str],
    stale_after_seconds: float,
    passed: Callable[[int], object],
) -> None:
    data, index, save_id = save
    _remove_own_marker(target, save_id)
    if alive := running_saves(target, stale_after_seconds=stale_after_seconds):
        raise SaveInProgressError(f"{target.url} is being written by {alive[0]}; it is tried again later")
    _remove_temporaries(target, target.list(), save_id)
    session = SaveSession.begin(target, save_id=save_id, stale_after_seconds=stale_after_seconds)
    copy = (target.url, save_id)
    _running.add(copy)
    try:
        spans = spans_by_file(index)
        done = read_journal(target, save_id)
        whole = sum(needed_bytes(index).values())
        for name in sorted(index.files):
            size = source.size(name)
            if done.get(name) == size and size_of(target, name) == size:
                continue
            send_file(source, target, name, PassingCrcs(name, spans.get(name, [])), passed)
            done[name] = size
            target.sync_folder()
            target.publish(JOURNAL, encode_journal(save_id, done, source, whole))
        if source.read(METADATA_NAME) != data:
            raise CheckpointNotFoundError(f"{source.url} was replaced while it was copied; it is copied anew")
        check_files(target, index)
        session.publish(METADATA_NAME, data)
    finally:
        # Unless the index was published, this leaves the files, for the next promoter to go on with.
        _running.discard(copy)
        session.finish(index.files)


def encode_journal(save_id: str, files: Mapping[str, int], source: Store, whole: int) -> bytes:
    """Return a journal: the files that are there and, for later reports, the original's place and its size.

    Args:
        save_id: The save.
        files: Name → size in bytes of each file that is verified and durable.
        source: Folder of the original.
        whole: Size of all files that the index names, bytes.
    """
    place = f"{source.url} on {socket.gethostname()}"
    return json.dumps({"save_id": save_id, "files": dict(files), "from": place, "bytes": whole}).encode()


def _remove_own_marker(target: Store, save_id: str) -> None:
    """Remove the marker that an earlier attempt of this process has left, because the storage failed at its end."""
    name = f"{SAVE_MARKER_PREFIX}{save_id}"
    if (target.url, save_id) in _running:
        return
    with contextlib.suppress(CheckpointNotFoundError, ValueError, KeyError, TypeError):
        if json.loads(target.read(name))["process"] == this_process().to_dict():
            target.delete(name)


def _remove_temporaries(target: Store, entries: list[Entry], save_id: str) -> None:
    """Remove what a killed promoter of this save has left of its marker or index; none is alive."""
    for entry in entries:
        becomes = temporary_of(entry.name)
        if becomes is not None and becomes[1] == save_id:
            target.delete(entry.name)


def copy_note(source: Store, target: Store) -> None:
    """Copy the manager's note, with metrics and time of creation, by which policies select; there may be none."""
    with contextlib.suppress(CheckpointNotFoundError):
        note = source.read(NOTE)
        if size_of(target, NOTE) != len(note) or target.read(NOTE) != note:
            target.publish(NOTE, note, sync=False)
