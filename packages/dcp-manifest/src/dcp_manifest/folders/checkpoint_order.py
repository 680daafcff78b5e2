"""Order of checkpoints by training step. Copying changes modification times, so they are a last resort."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
# The number must end there: `checkpoint-2024-01-31`, `step-1.5` and `step-10k` have no step.
# Python refuses to convert thousands of digits, which names in object stores may contain.
_DIGITS = "[0-9]{1,99}"
_NUMBER = rf"s?[-_=. ]?({_DIGITS})(?![a-z0-9]|[-_.:][0-9])"
_WORDS = tuple(
    re.compile(rf"(?<![a-z])(?:{word}){_NUMBER}", re.ASCII | re.IGNORECASE)
    for word in (r"(?:global[-_ ]?)?step", "iteration|iter", "checkpoint|ckpt|chkpt", "epoch")
)
_BARE = re.compile(_DIGITS, re.ASCII)


def step_of(name: str) -> int | None:
    """Return the training step in a folder's name; None without a step.

    A step is a number after the word `step` (`global_step`), `iter` (`iteration`), `checkpoint` (`ckpt`) or `epoch`;
    the first word in this list decides. A name of digits alone is also a step; `seed-3` or `2024-01-31` is not.
    """
    for word in _WORDS:
        found = word.findall(name)
        if found:
            return int(found[-1])
    return int(name) if _BARE.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a checkpoint below the searched folder, and its step."""

    parts: tuple[str, ...] = ()
    """Folders from the searched one (excluded) to the checkpoint's."""
    step: int | None = None
    run: tuple[str, ...] = ()
    """Folders above the one with the step."""
    series: tuple[str, ...] = ()
    """`run`, and the step's folder without its numbers."""

    @property
    def folder(self) -> tuple[str, ...]:
        """Folders down to the one with the step."""
        return self.parts[: len(self.run) + 1]

    @classmethod
    def of(cls, parts: tuple[str, ...], noted_step: int | None = None) -> Place:
        """Return a place, with the step in its folders' names or else `noted_step`."""
        for number in reversed(range(len(parts))):
            own = number == len(parts) - 1
            # Digits alone are a step only in the checkpoint's own folder: parents may number jobs and ranks.
            step = step_of(parts[number]) if own or not _BARE.fullmatch(parts[number]) else None
            if step is not None:
                return cls(parts, step, parts[:number], (*parts[:number], _without_numbers(parts[number])))
        return cls(parts, noted_step, parts[:-1], parts)


def _without_numbers(name: str) -> str:
    for word in _WORDS:
        name = word.sub(lambda found: found[0][: found.start(1) - found.start()] + "*", name)
    return "*" if _BARE.fullmatch(name) else name


def newest_first(found: Iterable[T], place: Callable[[T], Place], made: Callable[[T], Any]) -> list[T]:
    """Sort checkpoints: within a run by descending step; of equal steps, the later checkpoint first.

    Of several runs, the run nearest to the searched folder precedes; of equally near runs, the run whose newest
    checkpoint is later. Checkpoints without a step follow, the latest first. `made` returns a comparable creation time,
    and is called only if steps do not decide.
    """
    runs: dict[tuple[str, ...], dict[int, list[T]]] = defaultdict(lambda: defaultdict(list))
    without: list[T] = []
    for one in found:
        where = place(one)
        if where.step is None:
            without.append(one)
        else:
            runs[where.run][where.step].append(one)
    by_depth: dict[int, list[list[T]]] = defaultdict(list)
    for run, steps in runs.items():
        ordered = [one for step in sorted(steps, reverse=True) for one in _latest_first(steps[step], made)]
        by_depth[len(run)].append(ordered)
    groups = [group for depth in sorted(by_depth) for group in _latest_first(by_depth[depth], lambda run: made(run[0]))]
    return [one for group in (*groups, _latest_first(without, made)) for one in group]


def _latest_first(some: list[T], made: Callable[[T], Any]) -> list[T]:
    return sorted(some, key=made, reverse=True) if len(some) > 1 else some
