"""Report of a load into a model or optimizer: names restored, initialised and dropped, with reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.nn.modules.module import _IncompatibleKeys

__all__ = ["IncompatibleKeys", "StateReport"]


@dataclass(slots=True)
class StateReport:
    """Outcome per name on this rank; names are FQNs, for optimizer state `state.<FQN>`."""

    restored: list[str] = field(default_factory=list)
    initialised: dict[str, str] = field(default_factory=dict)
    """Name of state that was not restored (initial, or unchanged by the call) → the reason."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Name in the state dict that was not used → the reason."""

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
    """Canonical names as `missing_keys` and `unexpected_keys`, and the whole `report`."""

    report: StateReport

    @classmethod
    def of(cls, missing: list[str], unexpected: list[str], report: StateReport) -> IncompatibleKeys:
        """Return the result of a `set_…` function."""
        keys = cls(missing, unexpected)
        keys.report = report
        return keys

    def __reduce__(self) -> Any:
        return type(self).of, (self.missing_keys, self.unexpected_keys, self.report)
