"""Random draws for the proof: a loop, what it leaves out, when it is killed, and on how many ranks it is resumed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from integration_tests.resume.language import Language, ResumableLanguage
from integration_tests.resume.vision import BATCH, GLOBAL_BATCH, IMAGES, OMISSIONS, ResumableVision, Vision

__all__ = ["Draw"]

_OF_LANGUAGE = ("scheduler", "ema", "accumulation", "epoch", "position", "numpy-rng", "torch-rng", "one-rank-rng")
_LOOPS: dict[Callable[..., Any], tuple[str, ...]] = {
    Vision: OMISSIONS,
    Language: _OF_LANGUAGE,
    ResumableVision: tuple(omit for omit in OMISSIONS if omit not in ("epoch", "worker-seeds")),
    ResumableLanguage: tuple(omit for omit in _OF_LANGUAGE if omit != "epoch"),
}
_RANKS = (1, 1, 1, 2, 2, 3, 4)


@dataclass(frozen=True)
class Draw:
    """One draw, which follows from its number."""

    number: int

    def __post_init__(self) -> None:
        draw = random.Random(f"proof {self.number}")
        values: dict[str, Any] = {"loop": draw.choice([*_LOOPS]), "ranks": draw.choice(_RANKS), "options": {}}
        omit = draw.choice((None, None, None, *_LOOPS[values["loop"]]))
        if omit == "one-rank-rng":
            values["ranks"] = max(2, values["ranks"])
        first, last = _visible(values["loop"], omit, values["ranks"])
        kill_at = draw.randint(first, last)
        if omit == "accumulation":
            kill_at = first + (kill_at - first) // 2 * 2
        if omit == "worker-seeds":
            values["options"] = {"workers": 1}
        values |= {"omit": omit, "kill_at": kill_at, "steps": kill_at + draw.randint(2, 4)}
        # The other loops count each rank's own samples, so that other ranks would read others.
        resumable = values["loop"] in (ResumableVision, ResumableLanguage)
        other = draw.choice(_RANKS) if resumable else values["ranks"]
        values["sizes"] = (values["ranks"], *({other} - {values["ranks"]}))
        vars(self).update(values)

    loop: Callable[..., Any] = Vision
    omit: str | None = None
    ranks: int = 1
    kill_at: int = 1
    steps: int = 2
    sizes: tuple[int, ...] = (1,)

    def __str__(self) -> str:
        sizes = "-".join(map(str, self.sizes))
        return f"{self.number}-{self.loop.__name__}-without-{self.omit}-at-{self.kill_at}-on-{sizes}"


def _visible(loop: Callable[..., Any], omit: str | None, ranks: int) -> tuple[int, int]:
    """Return the first and the last step after which the kill shows what is left out.

    An epoch that is 0 anyway cannot be lost, nor what changes with the first step of the optimizer before that.
    """
    if loop in (ResumableVision, ResumableLanguage):
        epoch = 5 if loop is ResumableLanguage else IMAGES // GLOBAL_BATCH
        if omit == "position":
            return 1, epoch - 1
    else:
        epoch = 16 // ranks + 1 if loop is Language else IMAGES // BATCH // ranks
    if omit == "epoch":
        return epoch + 1, 2 * epoch - 1
    if omit == "accumulation":
        return 1, 2 * epoch + 1
    if omit == "worker-seeds":
        return epoch + 1, 2 * epoch - 1
    return 2, 2 * epoch
