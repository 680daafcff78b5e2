"""Restoring: all ranks load the newest undamaged checkpoint; damaged checkpoints are quarantined.

Of several places, each step is loaded from the nearest that has it undamaged. Where each host has a place of its own,
all say which steps they have, and the load itself finds out whether a step is complete. The coordinator decides whether
a checkpoint is damaged: a file that the coordinator finds, but another rank does not, is no damage.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain

from dcp_core import CheckpointException, CheckpointNotFoundError, CorruptCheckpointError, DcpError, LoadReport
from dcp_io import Catalogue, CheckpointRecord, HostStore, Store, Unfinished, ask_places
from dcp_manager.together import Ranks
from dcp_manifest import library_logger

__all__ = ["Damage", "Restored", "Wanted", "damage_of", "restore_newest", "restore_step"]

_log = library_logger(__name__)

# What is missing may be there for others; so what is corrupt is looked for first.
_DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError)
_LOOK_SECONDS = 1.0
Load = Callable[[Catalogue, int], LoadReport]
_Copy = tuple[int, int]
"""A step, and the number of the place of a copy of it."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of restoring from a checkpoint."""

    step: int
    report: LoadReport
    """Report of the load on this rank."""
    passed_over: tuple[int, ...] = ()
    """Higher steps whose checkpoints turned out to be damaged."""
    unfinished: tuple[Unfinished, ...] = ()
    """What there is of higher steps without an index, whose saves or copies are running or were interrupted."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage of a checkpoint that made a load fail."""

    reason: str
    is_missing: bool
    """Whether a file is missing; False if the contents of a file are damaged."""


class _Verdict(Enum):
    DAMAGED = auto()
    GONE = auto()
    """The checkpoint has been removed meanwhile."""
    WHOLE = auto()
    """The checkpoint is undamaged, but a rank does not find its files: the storage of that rank is at fault."""


def restore_step(catalogues: Sequence[Catalogue], ranks: Ranks, load: Load, step: int) -> Restored:
    """Load the checkpoint of one step, and return the load's report. A failure is raised; nothing is quarantined.

    Args:
        catalogues: Catalogues of the checkpoints in each place, the nearest first.
        ranks: The ranks that load.
        load: Function (catalogue, step) → report of the load; it loads the checkpoint, on all ranks together.
        step: The step to load, from the nearest place that has an undamaged copy; from the first if none has.

    Ranks: every rank; collective.
    """
    catalogue = catalogues[0]
    if len(catalogues) > 1 and not _per_host(catalogue):
        catalogue = catalogues[ranks.decide("choose a copy", partial(_nearest, catalogues, step))]
    with _held(catalogue, ranks, step):
        return Restored(step, load(catalogue, step))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a restore waits for, rather than load less."""

    min_step: int | None = None
    """Lowest step to load; None takes any."""
    wait_seconds: float = 0.0
    """Time to wait for such a step, or for what the newest step lacks."""

    def is_too_low(self, copy: _Copy | None) -> bool:
        """Whether a copy is of a lower step than the lowest to load; None is too low for any."""
        return self.min_step is not None and (copy is None or copy[0] < self.min_step)

    def lacks(self, copy: _Copy | None, damaged: Mapping[_Copy, str]) -> bool:
        """Whether more is wanted than a copy: a higher step is there, but was passed over, or the step is too low."""
        passed = max((step for step, _ in damaged), default=-1)
        return self.is_too_low(copy) or passed > (-1 if copy is None else copy[0])

    def check(self, copy: _Copy | None, damaged: Mapping[_Copy, str]) -> None:
        """Raise CheckpointNotFoundError if a copy is of too low a step, or there is none among damaged ones."""
        if self.is_too_low(copy):
            newest = "there is none" if copy is None else f"the newest complete one is of step {copy[0]}"
            raise CheckpointNotFoundError(
                f"min_step is {self.min_step}, and of the checkpoints {newest}; passed over: {_reasons(damaged)}"
            )
        if copy is None and damaged:
            raise CheckpointNotFoundError(
                f"none of the checkpoints can be loaded ({_reasons(damaged)}); restore one from a copy, or begin in "
                "another root"
            )


def restore_newest(
    catalogues: Sequence[Catalogue], ranks: Ranks, load: Load, wanted: Wanted | None = None
) -> Restored | None:
    """Load the newest checkpoint that can be loaded; None if there is no checkpoint. Arguments: see `restore_step`.

    With `wanted`, a step is loaded only if no higher one is there, until its time is over.

    Raises:
        CheckpointNotFoundError: There are checkpoints, but none can be loaded (training must not silently start from
            scratch); or a rank does not find files that the coordinator finds.

    Ranks: every rank; collective.
    """
    wanted = wanted or Wanted()
    damaged: dict[_Copy, str] = {}
    gone: set[_Copy] = set()
    end = time.monotonic() + wanted.wait_seconds
    while True:
        copy, problems, unfinished = ranks.combine(
            "choose a checkpoint",
            lambda: catalogues[0].records() if _per_host(catalogues[0]) else None,
            partial(_choose_and_look, catalogues, damaged.keys() | gone),
        )
        damaged.update(problems)
        waits = wanted.wait_seconds > 0 and wanted.lacks(copy, damaged)
        if waits and ranks.decide("wait for a checkpoint", lambda: time.monotonic() < end):
            time.sleep(_LOOK_SECONDS)
            damaged.clear()
            continue
        if ranks.is_coordinator:
            _report_unfinished(unfinished, copy)
        wanted.check(copy, damaged)
        if copy is None:
            return None
        step, catalogue = copy[0], catalogues[copy[1]]
        try:
            with _held(catalogue, ranks, step):
                report = load(catalogue, step)
                passed_over = {other for other, _ in damaged} - {step}
                return Restored(step, report, tuple(sorted(passed_over, reverse=True)), unfinished)
        except DcpError as error:
            reason = _pass_over(error, catalogue, ranks, step)
            if reason is None:
                gone.add(copy)
            else:
                damaged[copy] = reason


def _pass_over(error: DcpError, catalogue: Catalogue, ranks: Ranks, step: int) -> str | None:
    """Put a checkpoint aside that failed to load, and return the reason; None if it has been removed meanwhile.

    Raises:
        DcpError: The error itself, if it is about no damage.
        CheckpointNotFoundError: A rank does not find files that the coordinator finds.

    Ranks: every rank; collective.
    """
    damage = ranks.combine("judge a failed load", partial(damage_of, error), _worst)
    if damage is None:
        raise error
    verdict, reason = ranks.decide("put a checkpoint aside", partial(_judge, catalogue, step, damage))
    if verdict is _Verdict.WHOLE:
        raise CheckpointNotFoundError(
            f"step {step} is there for the coordinator, but could not be loaded ({reason}); nothing is put aside. See "
            "whether the storage is mounted on that rank's host, then restore again"
        ) from error
    return reason if verdict is _Verdict.DAMAGED else None


def _reasons(damaged: Mapping[_Copy, str]) -> str:
    return "; ".join(f"step {step}: {reason}" for (step, _), reason in sorted(damaged.items(), reverse=True)) or "none"


def damage_of(error: BaseException) -> Damage | None:
    """Return the damage that the error of a load reports; None if the load failed for another reason."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    for kind in _DAMAGE:
        is_missing = kind is CheckpointNotFoundError
        if isinstance(error, kind):
            return Damage(_line(error), is_missing)
        for rank, (cause, text) in failures.items():
            if isinstance(cause, kind):
                return Damage(f"rank {rank}: {_line(cause)}", is_missing)
            if cause is None and kind.__name__ in text:
                return Damage(f"rank {rank}: {text.strip().rpartition(chr(10))[2]}", is_missing)
    return None


def _line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _worst(problems: list[Damage | None]) -> Damage | None:
    found = [damage for damage in problems if damage is not None]
    return next((damage for damage in found if not damage.is_missing), found[0] if found else None)


def _per_host(catalogue: Catalogue) -> bool:
    return isinstance(catalogue.store, HostStore)


def _choose_and_look(
    catalogues: Sequence[Catalogue], without: Collection[_Copy], hosts: Sequence[Sequence[CheckpointRecord] | None]
) -> tuple[_Copy | None, dict[_Copy, str], tuple[Unfinished, ...]]:
    """Choose a copy, and find what there is of higher steps that are in no place. Arguments: see `_choose`."""
    copy, problems = _choose(catalogues, without, hosts)
    known, above = {step for step, _ in (*problems, *without)}, -1 if copy is None else copy[0]
    by_url = {catalogue.store.url: catalogue for catalogue in catalogues}
    stores = [catalogue.store for catalogue in catalogues]
    found = ask_places(stores, lambda store: by_url[store.url].unfinished(above), optional=True)
    return copy, problems, tuple(one for one in chain(*found) if one.step not in known)


def _report_unfinished(unfinished: Sequence[Unfinished], copy: _Copy | None) -> None:
    chosen = "nothing is restored" if copy is None else f"step {copy[0]} is restored"
    for one in unfinished:
        level = logging.INFO if one.is_running else logging.WARNING
        _log.log(level, "step %d cannot be loaded, and %s: %s", one.step, chosen, one.text)


def _choose(
    catalogues: Sequence[Catalogue], without: Collection[_Copy], hosts: Sequence[Sequence[CheckpointRecord] | None]
) -> tuple[_Copy | None, dict[_Copy, str]]:
    """Choose the copy of the highest step that looks undamaged, in the nearest place. Coordinator only.

    Args:
        catalogues: Catalogue of each place.
        without: Copies to leave out.
        hosts: What each rank's host has in the nearest place; None if all ranks share it.

    Returns:
        The copy, or None, and the problems of those that were passed over.
    """
    problems: dict[_Copy, str] = {}
    for record, number in _copies(catalogues, hosts):
        copy = record.step, number
        if copy in without:
            continue
        if record.quarantined is not None:
            problems[copy] = record.quarantined
            continue
        if _per_host(catalogues[number]):
            return copy, problems
        try:
            catalogues[number].check(record.step)
        except _DAMAGE as error:
            reason = _line(error)
            if _put_aside(catalogues[number], record.step, reason):
                problems[copy] = reason
            continue
        return copy, problems
    return None, problems


def _copies(
    catalogues: Sequence[Catalogue], hosts: Sequence[Sequence[CheckpointRecord] | None]
) -> list[tuple[CheckpointRecord, int]]:
    """Return all copies with the numbers of their places, the highest step and the nearest place first."""
    numbers = {catalogue.store.url: number for number, catalogue in enumerate(catalogues)}
    stores = [catalogue.store for catalogue in catalogues]

    def ask(store: Store) -> Sequence[CheckpointRecord]:
        return _over_hosts(hosts) if isinstance(store, HostStore) else catalogues[numbers[store.url]].records()

    found = ask_places(stores, ask)
    copies = [(record, number) for number, records in enumerate(found) for record in records]
    return sorted(copies, key=lambda copy: (-copy[0].step, copy[1]))


def _over_hosts(hosts: Sequence[Sequence[CheckpointRecord] | None]) -> list[CheckpointRecord]:
    """Return the records of all hosts, one for each step: an undamaged one if a host has one."""
    records = [record for found in hosts for record in found or ()]
    by_step: dict[int, CheckpointRecord] = {}
    for record in sorted(records, key=lambda record: record.quarantined is not None):
        by_step.setdefault(record.step, record)
    return [*by_step.values()]


def _nearest(catalogues: Sequence[Catalogue], step: int) -> int:
    """Return the number of the nearest place with an undamaged copy of a step; 0 if there is none. Coordinator only."""
    for number, catalogue in enumerate(catalogues):
        try:
            if catalogue.is_good(step):
                catalogue.check(step)
                return number
        except (OSError, DcpError) as error:
            _log.warning("step %d is not loaded from %s: %s", step, catalogue.store.url, error)
    return 0


def _judge(catalogue: Catalogue, step: int, damage: Damage) -> tuple[_Verdict, str]:
    """Classify a checkpoint that failed to load, with the reason; quarantines a damaged one. Coordinator only."""
    reason = damage.reason
    if _per_host(catalogue):  # another job, on other hosts, may have what this one lacks
        _log.warning("step %d is passed over: %s", step, reason)
        return _Verdict.DAMAGED, reason
    if damage.is_missing and catalogue.has_checkpoint(step):
        try:
            catalogue.check(step)
        except _DAMAGE as error:
            reason = _line(error)
        else:
            return _Verdict.WHOLE, reason
    return (_Verdict.DAMAGED if _put_aside(catalogue, step, reason) else _Verdict.GONE), reason


def _put_aside(catalogue: Catalogue, step: int, reason: str) -> bool:
    """Quarantine a damaged checkpoint; returns False if it has been removed meanwhile. Coordinator only."""
    if not catalogue.has_checkpoint(step):
        return False
    _log.warning("step %d is damaged and put aside: %s", step, reason)
    with contextlib.suppress(OSError):  # a full disk must not prevent the use of an earlier checkpoint
        catalogue.quarantine(step, reason)
    return True


@contextlib.contextmanager
def _held(catalogue: Catalogue, ranks: Ranks, step: int) -> Iterator[None]:
    """Hold a reader's lease on a checkpoint while all ranks read it, so that it is not removed."""
    held: list[AbstractContextManager[None]] = []
    if _per_host(catalogue):  # what a host has is removed only after a save of this run
        yield
        return

    def take() -> None:
        sign = catalogue.reading(step)
        sign.__enter__()
        held.append(sign)

    ranks.decide("hold a checkpoint", take)
    try:
        yield
    finally:
        for sign in held:
            sign.__exit__(None, None, None)
