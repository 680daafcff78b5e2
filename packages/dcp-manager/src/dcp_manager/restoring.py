"""Restoring: all ranks load the newest undamaged checkpoint; damaged checkpoints are quarantined.

Each step is loaded from the nearest place with an undamaged copy. The coordinator decides whether a checkpoint is
damaged: a file that it finds, but another rank does not, is not damage.
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

from dcp_base.logs import library_logger
from dcp_core import CheckpointException, CheckpointNotFoundError, CorruptCheckpointError, DcpError, LoadReport
from dcp_io import CheckpointRecord, HostStore
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.unfinished import Unfinished
from dcp_io.timed_call import TimedCall
from dcp_manager.together import Ranks
from dcp_manifest import index_of

_log = library_logger(__name__)

# Corruption comes first: a file that one rank misses may exist for others.
_DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError)
_POLL_SECONDS = 1.0
Load = Callable[[Catalogue, int], LoadReport]
_Copy = tuple[int, int]
"""A step, and the number of the place of its copy."""
_Own = Sequence[CheckpointRecord] | OSError | None
"""Records of a rank's host, or an error; None if all ranks share the place."""


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of restoring from a checkpoint."""

    step: int
    report: LoadReport
    """Report of the load on this rank."""
    passed_over: tuple[int, ...] = ()
    """Higher steps whose checkpoints are damaged."""
    unfinished: tuple[Unfinished, ...] = ()
    """Higher steps without an index, whose saves or copies are running or were interrupted."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Damage that made a load fail."""

    reason: str
    is_missing: bool
    """Whether a file is missing, rather than damaged."""


class _Verdict(Enum):
    DAMAGED = auto()
    GONE = auto()
    WHOLE = auto()
    """It is undamaged, but a rank does not find its files."""


def restore_step(catalogues: Sequence[Catalogue], ranks: Ranks, load: Load, step: int) -> Restored:
    """Load one step, from the nearest place with an undamaged copy with all values, without quarantine. Collective."""
    number, passed, failure = 0, list[int](), None
    if len(catalogues) > 1 and not _per_host(catalogues[0]):
        number = ranks.decide("choose a copy", partial(_nearest, catalogues, step, ())) or 0
    while True:
        try:
            with _held(catalogues[number], ranks, step):
                report = load(catalogues[number], step)
                catalogues[number].note_sound(step)
                return Restored(step, report)
        except DcpError as error:
            failure, passed = failure or error, [*passed, number]
            following = _pass_to_next(error, catalogues, ranks, step, passed)
            if following is None:
                raise failure from None
            number = following


def _pass_to_next(
    error: DcpError, catalogues: Sequence[Catalogue], ranks: Ranks, step: int, passed: Sequence[int]
) -> int | None:
    """Return the next place with an undamaged copy, after damage or if parts were removed. Collective."""
    if len(passed) == len(catalogues):
        return None
    damage = ranks.combine("judge a failed load", partial(damage_of, error), _worst)
    last = catalogues[passed[-1]]
    if damage is None and not ranks.decide("look for removed parts", partial(_lacks_parts, last, step)):
        return None
    following = ranks.decide("choose another copy", partial(_nearest, catalogues, step, passed))
    if following is not None and ranks.is_coordinator:
        places, reason = (last.store.url, catalogues[following].store.url), _line(error)
        if damage is None:
            _log.info("step %d in %s lacks parts, and is loaded from %s: %s", step, *places, reason)
        else:
            _log.warning("step %d in %s is damaged, and loaded from %s: %s", step, *places, damage.reason)
    return following


def _lacks_parts(catalogue: Catalogue, step: int) -> bool:
    try:
        info = None if _per_host(catalogue) else index_of(catalogue.store_of(step)).info
    except (DcpError, OSError):
        return False
    return info is not None and bool(info.dropped)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Steps for which a restore waits."""

    min_step: int | None = None
    hosts_timeout_seconds: float = 0.0
    """Time to wait for `min_step`, or for missing parts of the newest step."""

    def is_too_low(self, copy: _Copy | None) -> bool:
        """Return whether a copy, or none, is too low."""
        return self.min_step is not None and (copy is None or copy[0] < self.min_step)

    def lacks(self, copy: _Copy | None, damaged: Mapping[_Copy, str]) -> bool:
        """Return whether a copy is too low, or a higher step was passed over."""
        passed = max((step for step, _ in damaged), default=-1)
        return self.is_too_low(copy) or passed > (-1 if copy is None else copy[0])

    def check(self, copy: _Copy | None, damaged: Mapping[_Copy, str]) -> None:
        """Raise CheckpointNotFoundError if a copy is too low, or all are damaged."""
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
    """Load the newest checkpoint that can be loaded; None if no checkpoint exists.

    While the time of `wanted` lasts, a step is loaded only if there is no higher one.

    Raises:
        CheckpointNotFoundError: As for `CheckpointManager.restore`: training must not silently start from scratch.

    Ranks: every rank; collective.
    """
    wanted = wanted or Wanted()
    damaged: dict[_Copy, str] = {}
    gone: set[_Copy] = set()
    end = time.monotonic() + wanted.hosts_timeout_seconds
    while True:
        copy, problems, unfinished = ranks.combine(
            "choose a checkpoint",
            lambda: _own_records(catalogues[0]) if _per_host(catalogues[0]) else None,
            partial(_choose_and_look, catalogues, damaged.keys() | gone),
        )
        damaged.update(problems)
        waits = wanted.hosts_timeout_seconds > 0 and wanted.lacks(copy, damaged)
        if waits and ranks.decide("wait for a checkpoint", lambda: time.monotonic() < end):
            time.sleep(_POLL_SECONDS)
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
                catalogue.note_sound(step)
                passed_over = {other for other, _ in damaged} - {step}
                return Restored(step, report, tuple(sorted(passed_over, reverse=True)), unfinished)
        except DcpError as error:
            reason = _pass_over(error, catalogue, ranks, step)
            if reason is None:
                gone.add(copy)
            else:
                damaged[copy] = reason


def _pass_over(error: DcpError, catalogue: Catalogue, ranks: Ranks, step: int) -> str | None:
    """Quarantine a checkpoint; return the reason, or None if it is gone. Collective."""
    damage = ranks.combine("judge a failed load", partial(damage_of, error), _worst)
    if damage is None:
        raise error
    verdict, reason = ranks.decide("put a checkpoint aside", partial(_judge, catalogue, step, damage))
    if verdict is _Verdict.WHOLE:
        raise CheckpointNotFoundError(
            f"the coordinator sees step {step}, but it could not be loaded ({reason}); nothing is quarantined. Check "
            "whether the storage is mounted on that rank's host, then restore again"
        ) from error
    return reason if verdict is _Verdict.DAMAGED else None


def _reasons(damaged: Mapping[_Copy, str]) -> str:
    return "; ".join(f"step {step}: {reason}" for (step, _), reason in sorted(damaged.items(), reverse=True)) or "none"


def damage_of(error: BaseException) -> Damage | None:
    """Return the damage that a load's error reports, if any."""
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


def _own_records(catalogue: Catalogue) -> _Own:
    try:
        return catalogue.records()
    except OSError as error:
        return error


def _choose_and_look(
    catalogues: Sequence[Catalogue], without: Collection[_Copy], hosts: Sequence[_Own]
) -> tuple[_Copy | None, dict[_Copy, str], tuple[Unfinished, ...]]:
    copy, problems = _choose(catalogues, without, hosts)
    known = {step for step, _ in (*problems, *without)}
    unfinished = Catalogue.unfinished_above(catalogues, None if copy is None else copy[0])
    return copy, problems, tuple(one for one in unfinished if one.step not in known)


def _report_unfinished(unfinished: Sequence[Unfinished], copy: _Copy | None) -> None:
    chosen = "nothing is restored" if copy is None else f"step {copy[0]} is restored"
    for one in unfinished:
        level = logging.INFO if one.is_running else logging.WARNING
        _log.log(level, "step %d cannot be loaded, and %s: %s", one.step, chosen, one.text)


def _choose(
    catalogues: Sequence[Catalogue], without: Collection[_Copy], hosts: Sequence[_Own]
) -> tuple[_Copy | None, dict[_Copy, str]]:
    problems: dict[_Copy, str] = {}

    def ask(catalogue: Catalogue) -> Sequence[CheckpointRecord]:
        return _over_hosts(hosts) if _per_host(catalogue) else catalogue.records()

    for record, number in Catalogue.newest_first(catalogues, ask):
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


def _over_hosts(hosts: Sequence[_Own]) -> list[CheckpointRecord]:
    records = [record for found in hosts if found is not None and not isinstance(found, OSError) for record in found]
    failed = next((found for found in hosts if isinstance(found, OSError)), None)
    if failed is not None:
        if not records:
            raise failed
        _log.warning("what a host has is not counted: %s", failed)
    by_step: dict[int, CheckpointRecord] = {}
    for record in sorted(records, key=lambda record: record.quarantined is not None):
        by_step.setdefault(record.step, record)
    return [*by_step.values()]


def _nearest(catalogues: Sequence[Catalogue], step: int, without: Collection[int]) -> int | None:
    def look(catalogue: Catalogue) -> bool:
        if not catalogue.is_good(step):
            return False
        catalogue.check(step)
        return True

    for number, catalogue in enumerate(catalogues):
        try:
            if number not in without and TimedCall(catalogue.store.url, partial(look, catalogue)).result():
                return number
        except (OSError, DcpError) as error:
            _log.warning("step %d is not loaded from %s: %s", step, catalogue.store.url, error)
    return None


def _judge(catalogue: Catalogue, step: int, damage: Damage) -> tuple[_Verdict, str]:
    reason = damage.reason
    if _per_host(catalogue):  # another job, on other hosts, may have the missing parts
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
    if not catalogue.has_checkpoint(step):
        return False
    _log.warning("step %d is damaged and quarantined: %s", step, reason)
    with contextlib.suppress(OSError):  # a full disk must not prevent the use of an earlier checkpoint
        catalogue.quarantine(step, reason)
    return True


@contextlib.contextmanager
def _held(catalogue: Catalogue, ranks: Ranks, step: int) -> Iterator[None]:
    held: list[AbstractContextManager[None]] = []
    if _per_host(catalogue):  # parts on a host are removed only after a save of this run
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
