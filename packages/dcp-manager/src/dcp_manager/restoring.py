"""Restoring: all ranks load the newest undamaged checkpoint; damaged checkpoints are quarantined.

Of several places, each step is loaded from the nearest that has it undamaged. The coordinator decides whether a
checkpoint is damaged: a file that the coordinator finds, but another rank does not, is no damage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

from dcp_core import CheckpointException, CheckpointNotFoundError, CorruptCheckpointError, DcpError, LoadReport
from dcp_io import Catalogue, CheckpointRecord, ask_places
from dcp_manager.together import Ranks
from dcp_manifest import library_logger

__all__ = ["Damage", "Restored", "damage_of", "restore_newest", "restore_step"]

_log = library_logger(__name__)

# What is missing may be there for others; so what is corrupt is looked for first.
_DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError)
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
    if len(catalogues) > 1:
        catalogue = catalogues[ranks.decide("choose a copy", partial(_nearest, catalogues, step))]
    with _held(catalogue, ranks, step):
        return Restored(step, load(catalogue, step))


def restore_newest(catalogues: Sequence[Catalogue], ranks: Ranks, load: Load) -> Restored | None:
    """Load the newest checkpoint that can be loaded; None if there is no checkpoint. Arguments: see `restore_step`.

    Raises:
        CheckpointNotFoundError: There are checkpoints, but none can be loaded (training must not silently start from
            scratch); or a rank does not find files that the coordinator finds.

    Ranks: every rank; collective.
    """
    damaged: dict[_Copy, str] = {}
    gone: set[_Copy] = set()
    while True:
        found = ranks.decide("choose a checkpoint", partial(_choose, catalogues, damaged.keys() | gone))
        copy, problems = found
        damaged.update(problems)
        if copy is None:
            break
        step, catalogue = copy[0], catalogues[copy[1]]
        try:
            with _held(catalogue, ranks, step):
                report = load(catalogue, step)
                passed_over = {other for other, _ in damaged} - {step}
                return Restored(step, report, tuple(sorted(passed_over, reverse=True)))
        except DcpError as error:
            damage = ranks.combine("judge a failed load", partial(damage_of, error), _worst)
            if damage is None:
                raise
            verdict, reason = ranks.decide("put a checkpoint aside", partial(_judge, catalogue, step, damage))
            if verdict is _Verdict.WHOLE:
                raise CheckpointNotFoundError(
                    f"step {step} is there for the coordinator, but could not be loaded ({reason}); nothing is put "
                    "aside. See whether the storage is mounted on that rank's host, then restore again"
                ) from error
            if verdict is _Verdict.DAMAGED:
                damaged[copy] = reason
            else:
                gone.add(copy)
    if damaged:
        reasons = "; ".join(f"step {step}: {reason}" for (step, _), reason in sorted(damaged.items(), reverse=True))
        raise CheckpointNotFoundError(
            f"none of the checkpoints can be loaded ({reasons}); restore one from a copy, or begin in another root"
        )
    return None


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


def _choose(catalogues: Sequence[Catalogue], without: Collection[_Copy]) -> tuple[_Copy | None, dict[_Copy, str]]:
    """Choose the copy of the highest step that looks undamaged, in the nearest place. Coordinator only.

    Returns:
        The copy, or None, and the problems of those that were passed over.
    """
    problems: dict[_Copy, str] = {}
    for record, number in _copies(catalogues):
        copy = record.step, number
        if copy in without:
            continue
        if record.quarantined is not None:
            problems[copy] = record.quarantined
            continue
        try:
            catalogues[number].check(record.step)
        except _DAMAGE as error:
            reason = _line(error)
            if _put_aside(catalogues[number], record.step, reason):
                problems[copy] = reason
            continue
        return copy, problems
    return None, problems


def _copies(catalogues: Sequence[Catalogue]) -> list[tuple[CheckpointRecord, int]]:
    """Return all copies with the numbers of their places, the highest step and the nearest place first."""
    numbers = {catalogue.store.url: number for number, catalogue in enumerate(catalogues)}
    stores = [catalogue.store for catalogue in catalogues]
    found = ask_places(stores, lambda store: catalogues[numbers[store.url]].records())
    copies = [(record, number) for number, records in enumerate(found) for record in records]
    return sorted(copies, key=lambda copy: (-copy[0].step, copy[1]))


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
