"""Listing of checkpoints, and of running saves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from dcp_base.logs import library_logger
from dcp_io.checkpoints.verify_checkpoint import verify_checkpoint
from dcp_io.saves.cleanup import read_current
from dcp_io.saves.save_files import find_markers
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.root import Root, places_of
from dcp_io.stores.store import Entry, Store, SupportsFolders, with_folders
from dcp_io.timed_call import TimedCall
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.folders.find_checkpoints import (
    FoundCheckpoint,
    check_files,
    checkpoints_below,
    first_valid,
    merge_places,
)

_log = library_logger(__name__)

T = TypeVar("T")


def find_checkpoints(
    root: Root | Store | str | os.PathLike[str], *, unfinished: bool = False, unreadable: bool = False
) -> list[FoundCheckpoint[SupportsFolders]]:
    """Return the checkpoints of a root and its subfolders, newest first; see `dcp_manifest.checkpoints_below`.

    Of several copies of a checkpoint, the nearest precedes. An unreadable place is skipped with a warning if another
    place has checkpoints. Raises OSError if the storage failed.

    Args:
        root: A path, a URI, a store, or a `Root`. The folder may be missing.
        unfinished: Whether to include folders with files of a save that has not published an index.
        unreadable: Whether to include subfolders that cannot be listed, instead of a warning.

    Ranks: one; not collective.
    """

    def ask(place: Store) -> list[FoundCheckpoint[SupportsFolders]]:
        return checkpoints_below(with_folders(place), unfinished=unfinished, unreadable=unreadable)

    return merge_places(ask_places(places_of(root), ask))


def ask_places(
    places: Sequence[Store], ask: Callable[[Store], Sequence[T]], *, optional: bool = False
) -> list[Sequence[T]]:
    """Return each place's answer; an empty one, with a warning, for a place that fails while others have something.

    A place after the first that is silent for `TimedCall.SILENT_AFTER_SECONDS` has failed. If no place has anything,
    silent places are waited for: a run must not start from scratch because its checkpoints cannot be reached. Then the
    first place's failure is raised, an OSError.

    `ask` may be called in another thread. With `optional`, failures are not reported.
    """
    calls = [TimedCall(place.url, partial(ask, place)) for place in places[1:]]
    answers: list[Sequence[T]] = []
    failed: list[tuple[int, OSError]] = []
    for number, place in enumerate(places):
        try:
            answers.append(calls[number - 1].result() if number else ask(place))
        except OSError as error:
            answers.append(())
            failed.append((number, error))
    if optional:
        return answers
    if failed and not any(answers):
        return [(), *_late_answers(calls, [error for number, error in failed if not number])]
    for number, reason in failed:
        _log.warning("%s cannot be read, its checkpoints are not counted: %s", places[number].url, reason)
    return answers


def _late_answers(calls: Sequence[TimedCall[Sequence[T]]], failed: Sequence[OSError]) -> list[Sequence[T]]:
    answers: list[Sequence[T]] = []
    failed = list(failed)
    for call in calls:
        if not call.is_done:
            _log.warning("%s does not answer, and no other place has a checkpoint: it is waited for", call.place)
        try:
            answers.append(call.result(forever=True))
        except OSError as error:
            answers.append(())
            failed.append(error)
    if failed and not any(answers):
        raise failed[0]
    return answers


def running_saves(store: Store, *, stale_after_seconds: float) -> list[str]:
    """Describe the saves in a folder that are running or cannot be proven dead."""
    now = time.time()
    try:
        found = find_markers(store, store.list())
    except CheckpointNotFoundError:
        return []
    return [each.describe(now) for each in found if not each.is_dead(now=now, stale_after_seconds=stale_after_seconds)]


def check_checkpoint(store: Store, *, deep: bool = False, entries: Sequence[Entry] | None = None) -> None:
    """Check that a checkpoint can be loaded, as far as its index and file lengths show.

    With `deep`, all data files are read, and every CRC is checked. `entries` is the folder's listing, if known.

    Raises:
        CheckpointNotFoundError: The index is incomplete, or a file is missing.
        CorruptCheckpointError: The index or a file is damaged.
        UnsafeCheckpointError, UnsupportedFormatError: The index is hostile, or of an unknown format.
        OSError: The storage failed.
    """
    current = read_current(store, None if entries is None else list(entries))
    if current.damage is not None:
        raise current.damage
    if current.index is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {store.url}: it has no complete index")
    check_files(store, current.index, may_lack=isinstance(store, HostStore))
    if deep:
        problems = verify_checkpoint(store).problems
        if problems:
            first = problems[0]
            places = f"{len(problems)} place{'s' * (len(problems) != 1)}"
            raise CorruptCheckpointError(
                f"the checkpoint in {store.url} is damaged in {places}; the first: {first.message}",
                file=first.file,
                key=first.key,
                offset=first.offset,
            )


def latest_valid(
    root: Root | Store | str | os.PathLike[str], *, deep: bool = False
) -> FoundCheckpoint[SupportsFolders] | None:
    """Return the newest complete checkpoint of a root (see `find_checkpoints`), with `deep` the newest sound one.

    Within a training run, the highest step is the newest. Leftovers of a crash and quarantined checkpoints are skipped,
    and with a warning, damaged checkpoints and folders without permission. `deep` reads the data and checks every CRC,
    which takes as long as loading.

    Raises OSError if the folders cannot be listed.

    Ranks: one; not collective.
    """
    return first_valid(find_checkpoints(root), lambda found: check_checkpoint(found.store, deep=deep))
