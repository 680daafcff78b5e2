"""Record of one checkpoint, and its JSON note. Each field of a note is read independently."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_base.logs import library_logger
from dcp_io.saves.save_files import ProcessIdentity, this_process
from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError, UnsafeCheckpointError


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint under a manager's root."""

    step: int
    created_seconds: float
    """Seconds since the epoch, on the clock of the saving process; without a note, of the storage."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    quarantined: str | None = None
    """Reason of the quarantine."""

    @staticmethod
    def by_creation(records: Iterable[CheckpointRecord]) -> list[CheckpointRecord]:
        """Sort records by creation time, then by step."""
        return sorted(records, key=lambda record: (record.created_seconds, record.step))


@dataclass(frozen=True, slots=True)
class Note:
    """Note on a checkpoint, written before its save."""

    step: int | None
    created_seconds: float | None
    metrics: Mapping[str, float]
    process: ProcessIdentity | None
    replaces: str | None = ""
    """Digest of the index that the save replaces; empty without an index, None if unreadable."""
    keeps_best: str = ""
    """`KeepBest` policies as text."""

    @classmethod
    def now(cls, step: int, seconds: float, metrics: Mapping[str, float], replaces: str, keeps_best: str = "") -> Note:
        """Return a save's note; `seconds` is its creation time."""
        return cls(step, seconds, dict(metrics), this_process(), replaces, keeps_best)

    def to_bytes(self) -> bytes:
        """Return JSON; NaN and infinities become text."""
        process = None if self.process is None else self.process.to_dict()
        values = {
            "step": self.step,
            "created": self.created_seconds,
            "metrics": {name: value if math.isfinite(value) else str(value) for name, value in self.metrics.items()},
            "process": process,
            "replaces": self.replaces,
            "keeps_best": self.keeps_best,
        }
        return json.dumps(values, indent=1, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Note | None:
        """Parse `to_bytes`; None for other bytes."""
        try:
            values = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(values, dict):
            return None
        step, created, replaces = values.get("step"), _number(values.get("created")), values.get("replaces", "")
        metrics, keeps_best = values.get("metrics"), values.get("keeps_best")
        if not isinstance(metrics, dict):
            metrics = {}
        found = {str(name): number for name, value in metrics.items() if (number := _number(value)) is not None}
        return cls(
            step if isinstance(step, int) else None,
            created if created is not None and math.isfinite(created) else None,
            found,
            _process(values.get("process")),
            replaces if isinstance(replaces, str) else None,
            keeps_best if isinstance(keeps_best, str) else "",
        )


_NOT_FINITE = ("nan", "inf", "-inf")


def _number(value: Any) -> float | None:
    if value in _NOT_FINITE:
        return float(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _process(value: Any) -> ProcessIdentity | None:
    try:
        return ProcessIdentity.from_dict(value)
    except (KeyError, TypeError, ValueError):
        return None


_log = library_logger(__name__)


def read_if_there(store: Store, name: str) -> bytes | None:
    """Return an object's bytes; None if it is missing."""
    try:
        return store.read(name)
    except CheckpointNotFoundError:
        return None


def read_if_allowed(store: Store, name: str) -> bytes | None:
    """Return a note's bytes; None if it is missing or, with a warning, unreadable for this user.

    A link out of the folder is unreadable: one false note must not hide other checkpoints.
    """
    try:
        return read_if_there(store, name)
    except (PermissionError, UnsafeCheckpointError) as error:
        _notes.warn("the note %s is passed over: %s", f"{store.url}/{name}", error)
        return None


class OnceLog:
    """Log that gives equal warnings once, though places are looked at after each save."""

    def __init__(self) -> None:
        self._known: set[tuple[str, object, type]] = set()

    def warn(self, text: str, place: object, problem: object) -> None:
        """Log `text % (place, problem)`; at level DEBUG if text, place and type of the problem were logged before."""
        key = text, place, type(problem)
        _log.log(logging.DEBUG if key in self._known else logging.WARNING, text, place, problem)
        self._known.add(key)


_notes = OnceLog()


def read_note(store: Store, name: str) -> Note | None:
    """Return a note; None if it is missing or invalid."""
    return Note.from_bytes(read_if_allowed(store, name) or b"")
