"""What the worker wants of a library: make a state, save it, load it in place."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from integration_tests.benchmarks.workers.contents import TensorSpec

__all__ = ["Library", "Options", "sync_folder"]

Options = Mapping[str, Any]


class Library(Protocol):
    """One library under measurement. A module of this folder has these functions."""

    def version(self) -> str:
        """What is measured."""

    def make(self, specs: Sequence[TensorSpec], *, seed: int) -> dict[str, Any]:
        """The state in the library's own kind of tensors."""

    def as_bytes(self, value: Any) -> Any:
        """The memory of one of the state's values, as numpy bytes."""

    def save(self, state: dict[str, Any], folder: Path, *, fsync: bool, options: Options) -> None:
        """Save. This is timed."""

    def load(self, state: dict[str, Any], folder: Path, *, options: Options) -> dict[str, Any] | None:
        """Load into the state's own memory; what was loaded, if it lies elsewhere. This is timed."""


def sync_folder(folder: Path) -> None:
    """Flush every file and folder to the disk, for libraries that do not do it themselves."""
    for path in (*folder.rglob("*"), folder, folder.parent):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
