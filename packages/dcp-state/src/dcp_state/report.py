"""Report of a load into a model or optimizer: names restored, initialised and dropped, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.nn.modules.module import _IncompatibleKeys

__all__ = ["IncompatibleKeys", "StateReport"]


@dataclass(slots=True)
class StateReport:
    """Report of a load on this rank: names restored, and name → reason for names initialised or dropped.

    Names are FQNs for the model, and `state.<FQN>` for optimizer state.
    """

    restored: list[str] = field(default_factory=list)
    initialised: dict[str, str] = field(default_factory=dict)
    """Name of state that was not restored, but initialised or left unchanged → the reason."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Name in the state dict whose value was not used → the reason."""

    def merge(self, other: StateReport) -> None:
        """Add the entries of another report."""
        self.restored += other.restored
        self.initialised |= other.initialised
        self.dropped |= other.dropped

    def __str__(self) -> str:
        lines = [f"{len(self.restored)} restored"]
        for word, entries in (("initialised", self.initialised), ("dropped", self.dropped)):
            lines += [f"{word}: {name} ({why})" for name, why in sorted(entries.items())]
        return "\n".join(lines)


class IncompatibleKeys(_IncompatibleKeys):
    """Result of loading a model: FQNs as `missing_keys` and `unexpected_keys`, and a `StateReport` as `report`."""

    report: StateReport

    @classmethod
    def of(cls, missing: list[str], unexpected: list[str], report: StateReport) -> IncompatibleKeys:
        """Return the result of `set_model_state_dict` or `set_state_dict`."""
        keys = cls(missing, unexpected)
        keys.report = report
        return keys

    def __reduce__(self) -> Any:
        return type(self).of, (self.missing_keys, self.unexpected_keys, self.report)
