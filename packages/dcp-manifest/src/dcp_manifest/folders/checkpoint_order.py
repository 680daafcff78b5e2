"""Order of checkpoints by steps, newest first: for the library, the command and the manager.

A step is a number that a folder's name gives as such (`step-500`, `checkpoint-500`, `global_step500`,
`epoch=1-step=20.ckpt`). Times of files decide last of all: a copy changes them. No storage here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["Place", "newest_first", "step_of"]

T = TypeVar("T")
# The number must end there: `checkpoint-2024-01-31`, `step-1.5` and `step-10k` name no step.
# Python refuses to convert thousands of digits, which stores other than file systems allow in a name.
_DIGITS = "[0-9]{1,99}"
_NUMBER = rf"s?[-_=. ]?({_DIGITS})(?![a-z0-9]|[-_.:][0-9])"
_WORDS = tuple(
    re.compile(rf"(?<![a-z])(?:{word}){_NUMBER}", re.ASCII | re.IGNORECASE)
    for word in (r"(?:global[-_ ]?)?step", "iteration|iter", "checkpoint|ckpt|chkpt", "epoch")
)
_BARE = re.compile(_DIGITS, re.ASCII)


def step_of(name: str) -> int | None:
    """Return the step in a folder's name; None if it has none.

    The words `step` (`global_step`), `iter` (`iteration`), `checkpoint` (`ckpt`) and `epoch` count, in this order; so
    does a name of digits alone. Other numbers (`seed-3`, `rank_0`, `2024-01-31`) are no steps.
    """
    for word in _WORDS:
        found = word.findall(name)
        if found:
            return int(found[-1])
    return int(name) if _BARE.fullmatch(name) else None


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a checkpoint below the searched folder, and the step that its folders or its note give."""

    parts: tuple[str, ...] = ()
    """Names of folders, from below the one that was searched down to the checkpoint's own."""
    step: int | None = None
    run: tuple[str, ...] = ()
    """The folders above the one that has the step: steps are compared within a run."""
    series: tuple[str, ...] = ()
    """The folder that has the step, without its numbers: the same for one program's saves at several steps."""

    @property
    def folder(self) -> tuple[str, ...]:
        """The folder that has the step: the checkpoint's own, or one above it that holds its parts."""
        return self.parts[: len(self.run) + 1]

    @classmethod
    def of(cls, parts: tuple[str, ...], noted_step: int | None = None) -> Place:
        """Return the place of a checkpoint.

        Args:
            parts: See the field.
            noted_step: Step from the note beside it; counts if no name has a step.
        """
        for number in reversed(range(len(parts))):
            own = number == len(parts) - 1
            # Digits alone are a step in the checkpoint's own name; above it they number jobs and ranks as well.
            step = step_of(parts[number]) if own or not _BARE.fullmatch(parts[number]) else None
            if step is not None:
                return cls(parts, step, parts[:number], (*parts[:number], _without_numbers(parts[number])))
        return cls(parts, noted_step, parts[:-1], parts)


def _without_numbers(name: str) -> str:
    for word in _WORDS:
        name = word.sub(lambda found: found[0][: found.start(1) - found.start()] + "*", name)
    return "*" if _BARE.fullmatch(name) else name


def newest_first(found: Iterable[T], place: Callable[[T], Place], made: Callable[[T], Any]) -> list[T]:
    """Sort checkpoints: the higher step of a run first, of equal steps the one that was made later.

    Of several runs the one nearest to the folder that was searched comes first, then the one whose newest checkpoint
    was made later. Those without a step come last, in the order in which they were made.

    Args:
        found: The checkpoints.
        place: Returns the place of one.
        made: Returns the time when one was made, in comparable form; called only where steps do not decide.
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
