"""Listing of the checkpoints below a root (path, URI, store, or several places), and of the saves running in a folder.

`dcp_manifest.folders.find_checkpoints` implements the search and the order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from dcp_io.saves.save_markers import find_markers
from dcp_io.stores.root import Root, places_of
from dcp_io.stores.store import Store
from dcp_io.timed_call import TimedCall
from dcp_manifest.errors import CheckpointNotFoundError
from dcp_manifest.folders.find_checkpoints import FoundCheckpoint, check_files, checkpoints_below, merge_places
from dcp_manifest.logs import library_logger

__all__ = ["FoundCheckpoint", "ask_places", "check_files", "find_checkpoints", "running_saves"]

_log = library_logger(__name__)

T = TypeVar("T")


def find_checkpoints(
    root: Root | Store | str | os.PathLike[str], *, unfinished: bool = False
) -> list[FoundCheckpoint[Store]]:
    """Return the checkpoints of a root and its subfolders, newest first; see `dcp_manifest.checkpoints_below`.

    Of several places that hold copies of a checkpoint, the copy in the nearest one comes first. A place that cannot be
    read is passed over with a warning, if another place has checkpoints.

    Args:
        root: A path, a URI that an installed storage handles, a store, or a `Root`. The folder may be missing.
        unfinished: Whether to return also folders with files of a save that has not published an index.

    Raises:
        StorageError, OSError: The storage failed.

    Ranks: one; not collective.
    """
    return merge_places(ask_places(places_of(root), partial(checkpoints_below, unfinished=unfinished)))


def ask_places(
    places: Sequence[Store], ask: Callable[[Store], Sequence[T]], *, optional: bool = False
) -> list[Sequence[T]]:
    """Return each place's answer; an empty one, with a warning, for a place that fails while others have something.

    All are asked at once. A place after the first that does not answer for `SILENT_AFTER_SECONDS` has failed: a slow
    tier that hangs must not stop a restore that a near one can serve.

    Without any other answer the error is raised, and a place that hangs is waited for: a run must not start from
    scratch because its only checkpoints cannot be reached.

    Args:
        places: The places, nearest first.
        ask: Function that asks one place, perhaps in another thread.
        optional: Whether the answers only add detail to messages; failures are not reported then.

    Raises:
        OSError: The error of the first place that failed, if no place has anything.
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
    """Wait for calls that hang, since no place has anything; raises the first failure if these have nothing, either."""
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
    """Return a description of each save in a folder that is running or cannot be proven dead.

    Args:
        store: The checkpoint's folder.
        stale_after_seconds: A save of another host counts as dead when its marker has not been renewed for this long.
    """
    now = time.time()
    try:
        found = find_markers(store, store.list())
    except CheckpointNotFoundError:
        return []
    return [each.describe(now) for each in found if not each.is_dead(now=now, stale_after_seconds=stale_after_seconds)]
