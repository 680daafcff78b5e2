"""What was measured, and how it is kept in a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.figures import Spread, paired, spread

__all__ = ["Entry", "Results", "RowResult"]

Cost = dict[str, float]


@dataclass(slots=True)
class Entry:
    """What one contender did in one row: operation → one cost per counted round."""

    operations: dict[str, list[Cost]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    failure: str | None = None

    def values(self, operation: str, figure: str = "seconds") -> list[float]:
        """One figure of each round."""
        return [cost[figure] for cost in self.operations.get(operation, [])]

    def spread(self, operation: str, figure: str = "seconds") -> Spread | None:
        """Median and ends of a figure."""
        return spread(self.values(operation, figure))


@dataclass(slots=True)
class RowResult:
    """One case in one place with one fsync setting."""

    case: str
    title: str
    place: str
    fsync: bool
    scale: float
    rounds: int
    tensors: int
    bytes: int
    measured: str
    notes: str = ""
    entries: dict[str, Entry] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, bool]:
        """What identifies a row."""
        return self.case, self.place, self.fsync

    def ratio(self, operation: str, ours: str, theirs: str, their_operation: str | None = None) -> Spread | None:
        """Seconds of one contender ÷ those of another, paired; the other's operation may be another variant."""
        if ours not in self.entries or theirs not in self.entries:
            return None
        others = self.entries[theirs].values(their_operation or operation)
        return paired(self.entries[ours].values(operation), others)


@dataclass(slots=True)
class Results:
    """A run, or several on one machine."""

    machine: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    rows: list[RowResult] = field(default_factory=list)

    def row(self, case: str, place: str, *, fsync: bool) -> RowResult | None:
        """A row, if it was measured."""
        return next((row for row in self.rows if row.key == (case, place, fsync)), None)

    def put(self, row: RowResult) -> None:
        """Add a row, in the place of the same one measured before."""
        keys = [each.key for each in self.rows]
        if row.key in keys:
            self.rows[keys.index(row.key)] = row
        else:
            self.rows.append(row)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        """What `write` wrote."""
        found: dict[str, Any] = json.loads(path.read_text())
        rows = [
            RowResult(**{**row, "entries": {name: Entry(**entry) for name, entry in row["entries"].items()}})
            for row in found["rows"]
        ]
        return cls(found["machine"], found["versions"], rows)
