"""Damage to files of checkpoints, for tests."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

__all__ = ["data_files", "flip", "lose"]


def data_files(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the data files of a checkpoint, sorted by name."""
    return sorted(Path(folder).glob("*.distcp"))


def flip(path: str | os.PathLike[str], offset: int | None = None, mask: int = 1) -> None:
    """Flip the bits of `mask` in a byte of a file, by default the middle one; a negative offset counts from the end."""
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at = size // 2 if offset is None else offset % size
        file.seek(at)
        changed = bytes([file.read(1)[0] ^ mask])
        file.seek(at)
        file.write(changed)


def lose(folder: str | os.PathLike[str]) -> None:
    """Take a folder away at once, even while a process that a test does not wait for writes files into it."""
    aside = Path(folder).rename(f"{os.fspath(folder)}.lost-{uuid.uuid4().hex}")
    shutil.rmtree(aside, ignore_errors=True)
