"""Byte budget of a tier: what is removed to make room for the next checkpoint, and what is not."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from typing import Protocol

from dcp_hooks import CheckpointEvent, installed
from dcp_io import CheckpointRecord, Entry, LocalStore, Store, by_creation, newest_protected
from dcp_manifest import library_logger
from dcp_tiers.arrivals import was_refused
from dcp_tiers.waiting import TieredRoot, steps_to_send

__all__ = ["make_room"]

_log = library_logger(__name__)

# As many times the largest checkpoint must be free for the disk to be no matter, without listing what is there.
_PLENTY = 3


class BudgetedRoot(TieredRoot, Protocol):
    """Protocol of what `make_room` needs of `Tiers`."""

    largest_bytes: int
    """Size of the largest checkpoint in the first tier when it was listed last; 0 if it was not."""


def make_room(tiers: BudgetedRoot, number: int, step: int, *, needed: int | None = None, drop: bool = False) -> bool:
    """Remove checkpoints of a tier until the next one is within the budget; returns False if the caller should wait.

    The first tier without a budget of its own has that of its disk, if it is a folder.

    Removed are, as far as it takes: what neither the tier's policy nor a further tier needs, then what no further tier
    needs, then what a further tier has refused, the oldest first. What a further tier must still get goes only if
    `when_full` is `drop`. The newest complete checkpoint, the newest that copies on other hosts protect, and any that a
    process reads or saves, are never removed; if those alone are over the budget, the result is True: to wait would not
    help.

    Args:
        tiers: The tiers.
        number: Number of the tier.
        step: The step that is about to be written, whose own folder is not counted.
        needed: Bytes that it takes; None for as much as the largest checkpoint in the tier.
        drop: Whether to remove as with `drop`, whatever `when_full` is.

    Raises:
        OSError: The storage of the tier failed.

    Ranks: one process.
    """
    tier, catalogue = tiers.tiers[number], tiers.catalogues[number]
    free = _free_bytes(catalogue.store) if tier.max_bytes is None and number == 0 else None
    if tier.max_bytes is None and (free is None or free > _PLENTY * tiers.largest_bytes > 0):
        return True
    folders = {folder.step: folder for folder in catalogue.folders() if folder.step != step}
    sizes = {each: sum(entry.bytes for entry in folder.entries) for each, folder in folders.items()}
    tiers.largest_bytes = largest = max(sizes.values(), default=0)
    # Without a budget, the disk is the limit.
    limit = sum(sizes.values()) + (free or 0) if tier.max_bytes is None else tier.max_bytes
    limit -= largest if needed is None else needed
    good = by_creation([each for each in catalogue.records(folders.values()) if each.quarantined is None])
    over = sum(sizes.values()) - limit
    waiting = _waiting(tiers, number) if over > 0 else set()
    spared = newest_protected(folders.values(), good) if over > 0 else None
    for candidate in _candidates(tiers, number, good, folders.keys() - {spared}, waiting):
        if over <= 0:
            break
        may_drop = drop or tier.when_full == "drop" or _is_refused(tiers, number, folders[candidate].entries)
        if candidate in waiting and not may_drop:
            return False
        if catalogue.remove(candidate):
            over -= sizes[candidate]
            _report(tiers, number, candidate, sizes[candidate], lost=candidate in waiting)
    return True


def _free_bytes(store: Store) -> int | None:
    """Return the free bytes of the file system that a tier is on; None if that is unknown."""
    if not isinstance(store, LocalStore):
        return None
    try:
        found = os.statvfs(store.path)
    except OSError:  # such as a folder that is not there yet
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None  # some network file systems do not know


def _waiting(tiers: TieredRoot, number: int) -> set[int]:
    """Return the steps that further tiers must still get; in the last tier, those that its own policy keeps."""
    further = range(number + 1, len(tiers.tiers))
    if not further:
        return tiers.tiers[number].keep.keep(by_creation(tiers.catalogues[number].records()), time.time())
    return set[int]().union(*(steps_to_send(tiers, each, number) for each in further))


def _candidates(
    tiers: TieredRoot, number: int, good: list[CheckpointRecord], folders: Collection[int], waiting: set[int]
) -> Iterator[int]:
    """Yield the complete checkpoints but the newest, in the order in which they may be removed."""
    kept = tiers.tiers[number].keep.keep(good, time.time())
    steps = [record.step for record in good[:-1] if record.step in folders]
    yield from (step for step in steps if step not in kept and step not in waiting)
    yield from (step for step in steps if step in kept and step not in waiting)
    yield from (step for step in steps if step in waiting)


def _is_refused(tiers: TieredRoot, number: int, entries: Collection[Entry]) -> bool:
    """Whether no further tier will take a checkpoint, so that to wait for it would last for ever."""
    further = tiers.tiers[number + 1 :]
    return any(was_refused(entries, tier.url) for tier in further)


def _report(tiers: TieredRoot, number: int, step: int, size: int, *, lost: bool) -> None:
    place = tiers.catalogues[number].store_of(step).url
    if lost:
        _log.warning("%s is full: step %d was removed before every further tier had it", tiers.tiers[number].url, step)
    phase = "drop" if lost else "remove"
    installed.emit(CheckpointEvent("promote", phase, "finished", 0, place, bytes=size, time=time.time()))
