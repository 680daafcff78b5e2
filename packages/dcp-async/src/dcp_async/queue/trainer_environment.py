"""Working directory and environment variables of the trainer, which the worker process uses during a save.

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
    """Changes of working directory and environment variables between two saves."""

    folder: str | None
    """Path of the new working directory; None if it is unchanged or no longer exists."""
    variables: dict[str, str | None]
    """Changed environment variables: name → new value, or None if the variable was removed."""

    def apply(self) -> None:
        """Set the changed working directory and variables in this process; a missing directory is ignored."""
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
    """Record of a process's working directory and environment variables."""

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
        """Return the changes since an earlier record; None if nothing has changed."""
        folder = None if self.folder == before.folder else self.folder
        variables: dict[str, str | None] = {
            name: value for name, value in self.environment.items() if before.environment.get(name) != value
        }
        variables |= dict.fromkeys(before.environment.keys() - self.environment.keys())
        return SurroundingsChange(folder, variables) if variables or folder is not None else None
