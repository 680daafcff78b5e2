"""Draining: waiting until further tiers have all that their policies keep, and reports of what they lack."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dcp_hooks import CheckpointEvent, installed
from dcp_manifest import library_logger
from dcp_tiers.promoter_process import PromoterProcess
from dcp_tiers.waiting import TieredRoot, steps_to_send

__all__ = ["lacking_steps", "report_lacking", "wait_for_promoter"]

_log = library_logger(__name__)

_LOOK_SECONDS, _LAST_SECONDS = 0.5, 10.0


def lacking_steps(tiers: TieredRoot) -> dict[str, list[int]]:
    """Return what further tiers must still get from the first: path or URI of the tier → steps, ascending.

    Raises:
        OSError: The first tier cannot be read.
    """
    further = range(1, len(tiers.tiers))
    folders = tiers.catalogues[0].folders() if further else ()
    left = {tiers.tiers[number].url: sorted(steps_to_send(tiers, number, 0, folders)) for number in further}
    return {url: steps for url, steps in left.items() if steps}


def wait_for_promoter(tiers: TieredRoot, promoter: PromoterProcess, seconds: float | None) -> dict[str, list[int]]:
    """Wait until the promoter has ended, at most `seconds`, and return what further tiers lack then.

    A promoter that has nothing left to bring, but hangs in a storage, is not waited for.
    """
    end = float("inf") if seconds is None else time.monotonic() + seconds
    try:
        _wait(tiers, promoter, end)
    finally:
        promoter.leave()
    return lacking_steps(tiers)


def _wait(tiers: TieredRoot, promoter: PromoterProcess, end: float) -> None:
    while not promoter.end(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))):
        if time.monotonic() >= end:
            break
        if not lacking_steps(tiers):
            ended = promoter.end(max(0.0, min(_LAST_SECONDS, end - time.monotonic())))
            if ended or not lacking_steps(tiers):  # it may have found that a tier has lost something
                break


def report_lacking(tiers: TieredRoot, left: Mapping[str, Sequence[int]]) -> None:
    """Log and emit as events what further tiers lack, and what of it the first tier alone has.

    Args:
        tiers: The tiers.
        left: Result of `lacking_steps`.
    """
    nearest, *further = (tier.url for tier in tiers.tiers)
    alone = set.intersection(*({*left.get(url, ())} for url in further)) if further else set()
    for url, steps in left.items():
        text = f"{url} lacks steps {_listed(steps)}"
        if alone:
            text += f"; {nearest} alone has {_listed(sorted(alone))}"
        _log.warning("%s", text)
        event = CheckpointEvent("promote", "left", "failed", 0, url, error=text, time=time.time())
        installed.emit(event)


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
