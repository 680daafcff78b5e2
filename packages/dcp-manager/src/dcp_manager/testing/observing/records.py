"""Records of one rank's run: moments of the training, as lines of JSON that survive the death of the process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Item", "Moment", "RunRecord", "read_record", "write_moment", "write_note"]


class Item(NamedTuple):
    """Fingerprint of one part of the state."""

    kind: str
    """`parameter`, `buffer`, `batchnorm`, `gradient`, `optimizer`, `scheduler`, `scaler`, `average`, `random`,
    `generator`, `sampler`, `epoch`, `tensor` or `value`."""
    digest: str
    shown: str
    """Short text for people."""


@dataclass(slots=True)
class Moment:
    """What was observed at one moment of a run, on one rank."""

    at: str
    """`step` after a training step, `saved` after a save, `restored` after a restore."""
    step: int
    """Number of training steps that are done."""
    full: bool
    """Whether all state was observed, and not only numbers and random states."""
    items: dict[str, Item] = field(default_factory=dict)
    """Name → fingerprint."""
    loss: float | None = None
    """Loss of the step on this rank; None if it is not known."""
    batches: list[str] = field(default_factory=list)
    """Fingerprints of the batches since the moment before: of data loaders, or of the model's inputs."""
    samples: list[Any] = field(default_factory=list)
    """Ids of the samples since the moment before, in order; empty if they are not known."""
    iterators: int = 0
    """Number of iterators that data loaders made since the moment before."""
    workers: int = 0
    """Number of worker processes of the data loader that gave the last batch."""


@dataclass(slots=True)
class RunRecord:
    """All moments of one run on one rank, in order."""

    moments: list[Moment]
    notes: list[str] = field(default_factory=list)
    """What could not be observed."""

    def at(self, name: str, step: int) -> Moment | None:
        """Return the moment of that name and step; None if there is none."""
        return next((moment for moment in self.moments if moment.at == name and moment.step == step), None)

    def steps(self) -> dict[int, Moment]:
        """Return step → the moment after it."""
        return {moment.step: moment for moment in self.moments if moment.at == "step"}


def write_moment(file: Any, moment: Moment) -> None:
    """Append a moment to a file, and flush it."""
    file.write(json.dumps({"moment": asdict(moment)}) + "\n")
    file.flush()


def write_note(file: Any, note: str) -> None:
    """Append a note on what could not be observed."""
    file.write(json.dumps({"note": note}) + "\n")
    file.flush()


def read_record(path: Path) -> RunRecord:
    """Read the record that a rank has written; a last line that is cut off is left out."""
    moments: list[Moment] = []
    notes: dict[str, None] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        entry = json.loads(line)
        if "note" in entry:
            notes[entry["note"]] = None
            continue
        moment = Moment(**entry["moment"])
        moment.items = {name: Item(*item) for name, item in moment.items.items()}
        moments.append(moment)
    return RunRecord(moments, [*notes])
