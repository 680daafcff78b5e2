"""Records of one rank's run, as lines of JSON that survive the death of the process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple


class Item(NamedTuple):
    """Fingerprint of one part of the state."""

    kind: str
    """`parameter`, `buffer`, `batchnorm`, `gradient`, `optimizer`, `scheduler`, `scaler`, `average`, `random`,
    `generator`, `sampler`, `epoch`, `tensor` or `value`.
    """
    digest: str
    shown: str


@dataclass(slots=True)
class Moment:
    """Observations at one moment of a run, on one rank."""

    at: str
    """`step` after a training step, `saved` after a save, `restored` after a restore."""
    step: int
    full: bool
    """Whether all state was observed, or only numbers and random states."""
    items: dict[str, Item] = field(default_factory=dict)
    loss: float | None = None
    batches: list[str] = field(default_factory=list)
    """Fingerprints of the batches of data loaders, or else of model inputs, since the last moment."""
    samples: list[Any] = field(default_factory=list)
    """Ids of the samples since the last moment, if known."""
    iterators: int = 0
    """New data loader iterators since the last moment."""
    workers: int = 0


@dataclass(slots=True)
class RunRecord:
    """Moments of one run on one rank, in order."""

    moments: list[Moment]
    notes: list[str] = field(default_factory=list)

    def at(self, name: str, step: int) -> Moment | None:
        """Return a moment, if any."""
        return next((moment for moment in self.moments if moment.at == name and moment.step == step), None)

    def steps(self) -> dict[int, Moment]:
        """Return step → the moment after it."""
        return {moment.step: moment for moment in self.moments if moment.at == "step"}


def write_moment(file: Any, moment: Moment) -> None:
    """Append a moment to a file, and flush it."""
    file.write(json.dumps({"moment": asdict(moment)}) + "\n")
    file.flush()


def write_note(file: Any, note: str) -> None:
    """Append a note to a file, and flush it."""
    file.write(json.dumps({"note": note}) + "\n")
    file.flush()


def read_record(path: Path) -> RunRecord:
    """Read the record of a rank, without a truncated last line."""
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
