"""Record of one checkpoint, and the serialised note on it. This module accesses no storage."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_io.saves.marker_owner import ProcessIdentity, this_process

__all__ = ["CheckpointRecord", "Note", "by_creation"]


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """Record of a checkpoint under a manager's root, for keeping policies."""

    step: int
    created_seconds: float
    """Creation time, seconds since the epoch, on the clock of the saving process; without a note, of the storage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    quarantined: str | None = None
    """Reason why the checkpoint is quarantined; None if it is not."""


def by_creation(records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
    """Sort records by creation time, the earliest first; records of the same time by ascending step."""
    return sorted(records, key=lambda record: (record.created_seconds, record.step))


@dataclass(frozen=True, slots=True)
class Note:
    """Note on a checkpoint, written before its save: metrics and the saving process, which the index does not have."""

    step: int
    created_seconds: float
    metrics: Mapping[str, float]
    process: ProcessIdentity | None
    replaces: str = ""
    """Digest of the index that the save will replace; empty if there is no index."""

    @classmethod
    def now(cls, step: int, seconds: float, metrics: Mapping[str, float], replaces: str) -> Note:
        """Return the note for a save that this process will begin; `seconds` is the creation time in it."""
        return cls(step, seconds, dict(metrics), this_process(), replaces)

    def to_bytes(self) -> bytes:
        """Serialise the note as JSON."""
        process = None if self.process is None else self.process.to_dict()
        values = {
            "step": self.step,
            "created": self.created_seconds,
            "metrics": dict(self.metrics),
            "process": process,
            "replaces": self.replaces,
        }
        return json.dumps(values, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Note | None:
        """Parse a note from the bytes of `to_bytes`; None for other bytes: a checkpoint without a note is valid."""
        try:
            values: dict[str, Any] = json.loads(data)
            process = values["process"]
            created = float(values["created"])
            if not math.isfinite(created):
                return None
            return cls(
                int(values["step"]),
                created,
                {str(name): float(value) for name, value in values["metrics"].items()},
                None if process is None else ProcessIdentity.from_dict(process),
                str(values.get("replaces", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
