"""Removal of checkpoints in a tier: to keep to its byte budget, and by its policy."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Protocol

from dcp_base import CheckpointEvent, DcpError, installed
from dcp_base.logs import library_logger
from dcp_io import CheckpointRecord, Entry, LocalStore, Store
from dcp_io.roots.catalogue import StepFolder
from dcp_tiers.waiting import TieredRoot, steps_to_send, was_refused

_log = library_logger(__name__)

# If the disk has room for this many times the largest checkpoint, nothing is listed.
_PLENTY = 3


class BudgetedRoot(TieredRoot, Protocol):
    """What `make_room` needs of `Tiers`."""

    largest_bytes: int
    """See `Tiers.largest_bytes`."""


def make_room(tiers: BudgetedRoot, number: int, step: int, *, needed: int | None = None, drop: bool = False) -> bool:
    """Remove checkpoints of tier `number` until a step fits; return False if the caller should wait. One process.

    The budget of a first tier without one is its disk. Removal order, oldest first: checkpoints that neither the tier's
    policy nor a further tier needs, those that no further tier needs, those that a further tier has refused, and only
    with `drop` those that a further tier needs. Never removed: the newest checkpoint, the newest sound one, the newest
    that copies on other hosts protect, and any that a process reads or saves. If those alone exceed the budget, return
    True.

    The directory of `step`, which is about to be written, is not counted. `needed` is its bytes; None stands for the
    largest checkpoint in the tier. Raises OSError if the storage fails.
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
    good = CheckpointRecord.by_creation(
        [each for each in catalogue.records(folders.values()) if each.quarantined is None]
    )
    over = sum(sizes.values()) - limit
    waiting = _waiting(tiers, number) if over > 0 else set()
    # The next checkpoint is not there yet, so one of those that stay must have been read.
    spared = catalogue.steps_to_resume_from(folders.values(), good) if over > 0 else set()
    for candidate in _candidates(tiers, number, good, folders.keys() - spared, waiting):
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
    if not isinstance(store, LocalStore):
        return None
    try:
        return store.free_space()[0]
    except OSError:
        return None


def _waiting(tiers: TieredRoot, number: int) -> set[int]:
    further = range(number + 1, len(tiers.tiers))
    if not further:
        return tiers.tiers[number].keep.keep(
            CheckpointRecord.by_creation(tiers.catalogues[number].records()), time.time()
        )
    return set[int]().union(*(steps_to_send(tiers, each, number) for each in further))


def _candidates(
    tiers: TieredRoot, number: int, good: list[CheckpointRecord], folders: Collection[int], waiting: set[int]
) -> Iterator[int]:
    kept = tiers.tiers[number].keep.keep(good, time.time())
    steps = [record.step for record in good[:-1] if record.step in folders]
    yield from (step for step in steps if step not in kept and step not in waiting)
    yield from (step for step in steps if step in kept and step not in waiting)
    yield from (step for step in steps if step in waiting)


def _is_refused(tiers: TieredRoot, number: int, entries: Collection[Entry]) -> bool:
    further = tiers.tiers[number + 1 :]
    return any(was_refused(entries, tier.url) for tier in further)


def _report(tiers: TieredRoot, number: int, step: int, size: int, *, lost: bool) -> None:
    place = tiers.catalogues[number].store_of(step).url
    if lost:
        _log.warning("%s is full: step %d was removed before every further tier had it", tiers.tiers[number].url, step)
    phase = "drop" if lost else "remove"
    installed.emit(CheckpointEvent("promote", phase, "finished", 0, place, bytes=size, time=time.time()))


def retain_in(tiers: TieredRoot, number: int, arrived: int | None) -> list[StepFolder] | None:
    """Remove checkpoints that neither the tier's policy nor a further tier needs; see `Catalogue.retain`.

    Steps above the arrived one stay: the run may have restarted by mistake.
    """
    further = range(number + 1, len(tiers.tiers))
    _, left = tiers.catalogues[number].retain(
        tiers.tiers[number].keep,
        arrived=arrived,
        spares_higher=True,
        protected=lambda folders: {step for each in further for step in steps_to_send(tiers, each, number, folders)},
    )
    return left


def retain_in_first(tiers: TieredRoot) -> None:
    """Remove checkpoints that further tiers now have; log failures."""
    try:
        retain_in(tiers, 0, None)
    except (OSError, DcpError) as error:
        _log.warning("what %s need not keep any more stays there: %s", tiers.tiers[0].url, error)
