"""Working directory and environment variables of the trainer, recorded at the start of a save for the worker process.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Surroundings", "SurroundingsChange"]


@dataclass(frozen=True, slots=True)
class SurroundingsChange:
    """The difference between two recorded environments."""

    folder: str | None
    """The new working directory; None if it is unchanged, or has been removed."""
    variables: dict[str, str | None]
    """Changed environment variables with their new values; None for removed ones."""

    def apply(self) -> None:
        """Apply the change to this process. A working directory that no longer exists is ignored."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self.folder)
        for name, value in self.variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Working directory and environment variables at one moment."""

    folder: str | None = None
    """Path of the working directory; None if it is not known."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def now(cls) -> Surroundings:
        """Record the working directory and environment variables of this process."""
        try:
            folder = os.getcwd()
        except FileNotFoundError:  # it has been removed
            folder = None
        return cls(folder, dict(os.environ))

    def since(self, before: Surroundings) -> SurroundingsChange | None:
        """Return the change since an earlier record; None if there is none."""
        folder = None if self.folder == before.folder else self.folder
        variables: dict[str, str | None] = {
            name: value for name, value in self.environment.items() if before.environment.get(name) != value
        }
        variables |= dict.fromkeys(before.environment.keys() - self.environment.keys())
        return SurroundingsChange(folder, variables) if variables or folder is not None else None
