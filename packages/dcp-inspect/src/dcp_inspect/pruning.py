"""Selection of the checkpoints that `dcp prune` removes, from the summaries of `dcp ls`. Removes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_inspect.listing import Listed
from dcp_manifest import FoundCheckpoint, noted_step_of

__all__ = ["Pruning", "choose"]

Parts = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pruning:
    """Result of the selection; each checkpoint below a folder is in one of the lists."""

    removed: list[Listed] = field(default_factory=list)
    kept: list[Listed] = field(default_factory=list)
    """The newest steps of each run, valid and complete."""
    invalid: list[Listed] = field(default_factory=list)
    """Checkpoints that are kept because they cannot be loaded, or a part of their step is missing or cannot."""
    doubtful: list[tuple[Listed, str]] = field(default_factory=list)
    """Checkpoints that are kept unless forced, each with a reason why it may be newer than a kept one."""
    without_step: list[Listed] = field(default_factory=list)
    """Checkpoints that are kept because they have no step: times alone do not make a checkpoint old."""


@dataclass(slots=True)
class _Step:
    """The checkpoints of one step's folder: the folder's own, or the parts in folders below it."""

    step: int
    members: list[tuple[FoundCheckpoint[Any], Listed]] = field(default_factory=list)

    @property
    def listed(self) -> list[Listed]:
        return [one for _, one in self.members]

    @property
    def parts(self) -> frozenset[Parts]:
        """Paths of the step's checkpoints; if the folder is a checkpoint, checkpoints below it are not included."""
        found = frozenset(found.place.parts[len(found.place.folder) :] for found, _ in self.members)
        return frozenset({()}) if () in found else found

    @property
    def created_ns(self) -> int:
        return max(one.created_ns for one in self.listed)


def choose(
    checkpoints: Sequence[tuple[FoundCheckpoint[Any], Listed]],
    keep: int,
    *,
    force: bool,
) -> Pruning:
    """Select the checkpoints to remove: those of each run below its newest valid steps.

    A run is the checkpoints with equal names except for the step: `step-500` and `step-600`, but not `ema-step-500`.

    Args:
        checkpoints: The checkpoints found, newest first.
        keep: Number of steps to keep in each run.
        force: Whether to remove doubtful checkpoints as well.
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
        _choose_of_run(pruning, [*steps.values()], keep, force=force)
    return pruning


def _choose_of_run(pruning: Pruning, steps: list[_Step], keep: int, *, force: bool) -> None:
    valid = [step for step in steps if all(one.valid for one in step.listed)]
    complete = [step for number, step in enumerate(valid) if all(step.parts >= older.parts for older in valid[number:])]
    kept, older = complete[:keep], complete[keep:]
    pruning.invalid.extend(one for step in steps if step not in complete for one in step.listed)
    pruning.kept.extend(one for step in kept for one in step.listed)
    for step in older:
        reason = None if force else _doubt(step, kept)
        if reason is None:
            pruning.removed.extend(step.listed)
        else:
            pruning.doubtful.extend((one, reason) for one in step.listed)


def _doubt(step: _Step, kept: Sequence[_Step]) -> str | None:
    """Return why a step may be newer than a kept one, although its number is lower; None without a reason."""
    for other in kept:
        if 0 < other.created_ns < step.created_ns:
            return f"it was saved after step {other.step}, which stays: training may have gone back"
    for found, _ in step.members:
        noted = noted_step_of(found)
        if noted is not None and any(noted > other.step for other in kept):
            return f"its folder says step {step.step} and the note in it step {noted}"
    return None
