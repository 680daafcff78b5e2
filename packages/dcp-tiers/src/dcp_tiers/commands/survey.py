"""Survey of a run's tiers: which checkpoint is in which tier, and what each tier must still get. Prints nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_io import Catalogue, call_in_time, policy_text
from dcp_manifest import DcpError
from dcp_tiers.listing import TieredStep, list_steps
from dcp_tiers.tiers import Tiers
from dcp_tiers.waiting import steps_to_send

__all__ = ["Survey", "survey_tiers"]


@dataclass(frozen=True, slots=True)
class Survey:
    """State of a run's tiers."""

    tiers: Tiers
    problems: tuple[str | None, ...]
    """Why a tier cannot be read; None for one that can."""
    steps: tuple[TieredStep, ...]
    """The checkpoints in the tiers that can be read, by ascending step."""
    to_go_bytes: tuple[dict[int, int], ...]
    """For each tier: step that it must still get → bytes that are not there yet."""

    def bytes_in(self, number: int) -> int:
        """Return the size of the data files of all copies in a tier."""
        return sum(copy.bytes for step in self.steps if (copy := step.copies[number]) is not None)

    def as_json(self) -> dict[str, Any]:
        """Return the survey as values for JSON."""
        tiers = [
            {
                "root": tier.url,
                "keep": policy_text(tier.keep),
                "problem": self.problems[number],
                "bytes": self.bytes_in(number),
                "bytes_to_go": sum(self.to_go_bytes[number].values()),
                "steps_to_go": sorted(self.to_go_bytes[number]),
            }
            for number, tier in enumerate(self.tiers.tiers)
        ]
        return {"tiers": tiers, "steps": [self._step(step) for step in self.steps]}

    def _step(self, step: TieredStep) -> dict[str, Any]:
        copies: list[dict[str, Any]] = []
        for number, copy in enumerate(step.copies):
            state = self.state(step, number)
            to_go = self.to_go_bytes[number].get(step.step, 0)
            found: dict[str, Any] = {}
            if copy is not None:
                found = {"bytes": copy.bytes, "save_id": copy.save_id, "problem": copy.problem}
                found["protected"] = copy.protected
            copies.append({"state": state, "bytes_to_go": to_go, **found})
        return {"step": step.step, "copies": copies}

    def state(self, step: TieredStep, number: int) -> str:
        """Return the state of a step in a tier.

        That of its copy; without a copy, `waits` if the tier must still get it, `unknown` if the tier cannot be read,
        and else `absent`.
        """
        copy = step.copies[number]
        if copy is not None:
            return copy.state
        if self.problems[number] is not None:
            return "unknown"
        return "waits" if step.step in self.to_go_bytes[number] else "absent"


def survey_tiers(tiers: Tiers) -> Survey:
    """Read the indexes in all tiers; a tier that cannot be read is noted, and the others are read.

    Ranks: one process.
    """
    problems = tuple(map(_problem, tiers.catalogues))
    known = [
        catalogue if problem is None else None for catalogue, problem in zip(tiers.catalogues, problems, strict=True)
    ]
    steps = tuple(list_steps(known))
    to_go: list[dict[int, int]] = [{} for _ in problems]
    for number in range(1, len(problems)):
        holders = [nearer for nearer in range(number) if problems[nearer] is None]
        waiting = set[int]().union(*(steps_to_send(tiers, number, nearer) for nearer in holders))
        for step in steps:
            count = _bytes_to_go(step, number) if step.step in waiting else None
            if count is not None:
                to_go[number][step.step] = count
    return Survey(tiers, problems, steps, tuple(to_go))


def _problem(catalogue: Catalogue) -> str | None:
    try:
        call_in_time(catalogue.store.url, catalogue.folders)
    except (OSError, DcpError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _bytes_to_go(step: TieredStep, number: int) -> int | None:
    """Return the bytes of a step that a tier lacks; None if it has the save of the nearest complete copy."""
    source = next((step.copies[holder] for holder in step.complete_in if holder < number), None)
    there = step.copies[number]
    if source is None or (there is not None and there.state == "complete" and there.save_id == source.save_id):
        return None
    return source.bytes - (there.bytes if there is not None and there.state == "incomplete" else 0)
