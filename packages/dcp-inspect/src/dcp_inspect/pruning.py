"""Selection of the checkpoints that `dcp prune` removes: one that is unread never justifies a removal."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_inspect.listing import Listed
from dcp_io import CheckpointRecord, KeepBest, KeepLast, KeepPolicy
from dcp_manifest import FoundCheckpoint

Parts = tuple[str, ...]
Examine = Callable[[Listed], str | None]


@dataclass(frozen=True, slots=True)
class Pruning:
    """The selection: each checkpoint is in one of the lists."""

    removed: list[Listed] = field(default_factory=list)
    kept: list[Listed] = field(default_factory=list)
    """Newest steps of each run: complete, and sound if examined."""
    best: list[tuple[Listed, str]] = field(default_factory=list)
    """Best checkpoints, each with the run's policy."""
    incomplete: list[Listed] = field(default_factory=list)
    """A part of the step is missing or unloadable."""
    damaged: list[tuple[Listed, str]] = field(default_factory=list)
    """Complete, each with the first problem."""
    doubtful: list[tuple[Listed, str]] = field(default_factory=list)
    """Possibly newer than a kept one, with reasons."""
    linked: list[tuple[Listed, list[str]]] = field(default_factory=list)
    """Each with the links that point to it."""
    without_part: list[tuple[Listed, str]] = field(default_factory=list)
    """Checkpoints that lack a part that should stay, with reasons."""
    without_step: list[Listed] = field(default_factory=list)
    """Times alone do not prove age."""


@dataclass(slots=True)
class _Step:
    """Checkpoints of one step's folder, or its parts in folders below."""

    step: int
    members: list[tuple[FoundCheckpoint[Any], Listed]] = field(default_factory=list)

    @property
    def listed(self) -> list[Listed]:
        return [one for _, one in self.members]

    @property
    def parts(self) -> frozenset[Parts]:
        """Paths, without checkpoints inside a checkpoint."""
        found = frozenset(found.place.parts[len(found.place.folder) :] for found, _ in self.members)
        return frozenset({()}) if () in found else found

    @property
    def created_ns(self) -> int:
        return max(one.created_ns or 0 for one in self.listed)

    @property
    def metrics(self) -> dict[str, float]:
        return {name: value for one in self.listed for name, value in one.notes.metrics.items()}


def choose(
    checkpoints: Sequence[tuple[FoundCheckpoint[Any], Listed]],
    keep: int,
    *,
    force: bool,
    examine: Examine | None,
) -> Pruning:
    """Select the checkpoints to remove: in each run, those below its `keep` newest sound steps.

    Names in a run differ in the step only. `checkpoints` are newest first. `examine` returns a first problem; without
    it, complete checkpoints count as sound.
    """
    pruning = Pruning()
    runs: dict[Parts, dict[Parts, _Step]] = defaultdict(dict)
    for found, listed in checkpoints:
        place = found.place
        if place.step is None or not place.parts:
            pruning.without_step.append(listed)
        else:
            runs[place.series].setdefault(place.folder, _Step(place.step)).members.append((found, listed))
    for steps in runs.values():
        _choose_of_run(pruning, [*steps.values()], keep, force=force, examine=examine)
    return pruning


def _choose_of_run(pruning: Pruning, steps: list[_Step], keep: int, *, force: bool, examine: Examine | None) -> None:
    whole = [step for step in steps if all(one.complete for one in step.listed)]
    complete = [step for number, step in enumerate(whole) if all(step.parts >= older.parts for older in whole[number:])]
    pruning.incomplete.extend(one for step in steps if step not in complete for one in step.listed)
    if len(complete) <= keep:  # nothing is removed, so nothing is read
        pruning.kept.extend(one for step in complete for one in step.listed)
        return
    reading = _Reading(examine)
    kept = _select(complete, KeepLast(keep), reading, by_step=True)
    rest = [step for step in complete if step not in kept and not reading.is_unsound(step)]
    rules = next((one.notes.keeps_best for step in complete for one in step.listed if one.notes.keeps_best), "")
    best = [step for policy in _policies(rules) for step in _select([*kept, *rest], policy, reading)] if rest else []
    pruning.kept.extend(one for step in kept for one in step.listed)
    pruning.best.extend((one, rules) for step in rest if step in best for one in step.listed)
    pruning.damaged.extend((one, problem) for step, problem in reading.problems for one in step.listed)
    for step in rest:
        if step in best or reading.is_unsound(step):
            continue
        if links := [link for found, _ in step.members[:1] for link in found.links()]:
            pruning.linked.extend((one, links) for one in step.listed)
            continue
        reason = None if force else _doubt(step, kept)
        if reason is None:
            pruning.removed.extend(step.listed)
        else:
            pruning.doubtful.extend((one, reason) for one in step.listed)


class _Reading:
    def __init__(self, examine: Examine | None) -> None:
        self._examine = examine
        self._sound: list[_Step] = []
        self.problems: list[tuple[_Step, str]] = []

    def is_sound(self, step: _Step) -> bool:
        if self._examine is None or step in self._sound:
            return True
        if self.is_unsound(step):
            return False
        for one in step.listed:
            problem = self._examine(one)
            if problem is not None:
                self.problems.append((step, problem))
                return False
        self._sound.append(step)
        return True

    def is_unsound(self, step: _Step) -> bool:
        return any(step is other for other, _ in self.problems)


def _select(steps: Sequence[_Step], policy: KeepPolicy, reading: _Reading, *, by_step: bool = False) -> list[_Step]:
    numbered = dict(enumerate(reversed(steps)))
    records = [
        CheckpointRecord(number, number if by_step else step.created_ns / 1e9, step.metrics)
        for number, step in numbered.items()
    ]
    found = policy.select(records, (), lambda number: reading.is_sound(numbered[number]))
    return [numbered[number] for number in sorted(found, reverse=True) if not reading.is_unsound(numbered[number])]


def _policies(rules: str) -> tuple[KeepBest, ...]:
    with contextlib.suppress(ValueError):
        return KeepPolicy.parse(rules).best() if rules else ()
    return ()


def _doubt(step: _Step, kept: Sequence[_Step]) -> str | None:
    """Return why a step may be newer than a kept one with a higher number."""
    for other in kept:
        if 0 < other.created_ns < step.created_ns:
            return f"it was saved after step {other.step}, which stays: training may have gone back"
    for found, _ in step.members:
        noted = found.noted_step()
        if noted is not None and any(noted > other.step for other in kept):
            return f"its directory says step {step.step} and the note in it step {noted}"
    return None
