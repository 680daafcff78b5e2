"""What the demo found out: the records that its stages fill and that the report shows."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Check", "Curve", "Results", "Timing"]


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and whether it was kept."""

    promise: str
    found: str
    kept: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """The loss of each step of one job; the steps are counted from 1."""

    label: str
    losses: dict[int, float]


@dataclass(frozen=True, slots=True)
class Timing:
    """One operation on one state, by library: median seconds, and bytes on disk."""

    what: str
    seconds: dict[str, float]
    checkpoint_bytes: dict[str, int]


@dataclass(slots=True)
class Results:
    """All of it, in the order in which it was found."""

    checks: list[Check] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    saved_at: int = 0
    killed_at: int = 0

    def all_kept(self) -> bool:
        """Whether every promise was kept."""
        return all(check.kept for check in self.checks)
