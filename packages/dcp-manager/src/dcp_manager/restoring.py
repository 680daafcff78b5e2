"""Finding a checkpoint that loads: the newest first, damaged ones put aside, the same one on all ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from dcp_core import CheckpointException, CheckpointNotFoundError, CorruptCheckpointError, DcpError, LoadReport
from dcp_manager.catalogue import Catalogue
from dcp_manager.together import Ranks

__all__ = ["Restored", "damage_of", "restore_newest", "restore_step"]

_log = logging.getLogger(__name__)

_DAMAGE = (CorruptCheckpointError, CheckpointNotFoundError)
Load = Callable[[int], LoadReport]


@dataclass(frozen=True, slots=True)
class Restored:
    """What was loaded."""

    step: int
    report: LoadReport
    """Of this rank."""
    passed_over: tuple[int, ...] = ()
    """Newer steps that turned out to be damaged."""


def restore_step(catalogue: Catalogue, ranks: Ranks, load: Load, step: int) -> Restored:
    """Load one step, or raise why it cannot be loaded; nothing is put aside.

    Ranks: every rank; collective.
    """
    with _held(catalogue, ranks, step):
        return Restored(step, load(step))


def restore_newest(catalogue: Catalogue, ranks: Ranks, load: Load) -> Restored | None:
    """Load the newest checkpoint that can be loaded; None if there is none at all.

    Raises:
        CheckpointNotFoundError: There are checkpoints and none can be loaded: training must not begin anew unasked.

    Ranks: every rank; collective.
    """
    damaged: dict[int, str] = {}
    gone: set[int] = set()
    while True:
        found = ranks.decide("choose a checkpoint", partial(_choose, catalogue, damaged.keys() | gone))
        step, told = found
        damaged.update(told)
        if step is None:
            break
        try:
            with _held(catalogue, ranks, step):
                return Restored(step, load(step), tuple(sorted(damaged, reverse=True)))
        except DcpError as error:
            reason = ranks.combine("judge a failed load", partial(damage_of, error), _first)
            if reason is None:
                raise
            if ranks.decide("put a checkpoint aside", partial(_put_aside, catalogue, step, reason)):
                damaged[step] = reason
            else:
                gone.add(step)
    if damaged:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in sorted(damaged.items(), reverse=True))
        raise CheckpointNotFoundError(
            f"none of the checkpoints can be loaded ({reasons}); restore one from a copy, or begin in another root"
        )
    return None


def damage_of(error: BaseException) -> str | None:
    """What an error says of a checkpoint's damage; None if it is not damage that made the load fail."""
    if isinstance(error, _DAMAGE):
        return str(error).partition("\n")[0]
    if isinstance(error, CheckpointException):
        for rank, (cause, text) in error.failures.items():
            if isinstance(cause, _DAMAGE):
                return f"rank {rank}: {cause}".partition("\n")[0]
            if cause is None and any(kind.__name__ in text for kind in _DAMAGE):
                return f"rank {rank}: {text.strip().rpartition(chr(10))[2]}"
    return None


def _first(reasons: list[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _choose(catalogue: Catalogue, without: Collection[int]) -> tuple[int | None, dict[int, str]]:
    """The newest step that looks whole, and what is wrong with newer ones. Coordinator."""
    told: dict[int, str] = {}
    for record in reversed(catalogue.records()):
        if record.step in without:
            continue
        if record.quarantined is not None:
            told[record.step] = record.quarantined
            continue
        try:
            catalogue.check(record.step)
        except _DAMAGE as error:
            reason = str(error).partition("\n")[0]
            if _put_aside(catalogue, record.step, reason):
                told[record.step] = reason
            continue
        return record.step, told
    return None, told


def _put_aside(catalogue: Catalogue, step: int, reason: str) -> bool:
    """Quarantine a damaged checkpoint; False if it was not damaged but has been removed meanwhile. Coordinator."""
    if not any(record.step == step for record in catalogue.records()):
        return False
    _log.warning("step %d is damaged and put aside: %s", step, reason)
    with contextlib.suppress(OSError):  # a full disk must not keep anybody from the checkpoint before
        catalogue.quarantine(step, reason)
    return True


@contextlib.contextmanager
def _held(catalogue: Catalogue, ranks: Ranks, step: int) -> Iterator[None]:
    """Keep a checkpoint from being removed while all ranks read it."""
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
