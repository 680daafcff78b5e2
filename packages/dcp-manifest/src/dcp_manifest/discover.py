"""Checkpoints in folders of the local file system: find them, and tell the newest one that is whole.

Which index of a folder counts is decided in `index_choice`; other storages use that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcp_manifest.columns import CheckpointIndex
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_manifest.index_choice import METADATA_NAME, choose_index, is_index_name

__all__ = [
    "DATA_SUFFIX",
    "METADATA_NAME",
    "CheckpointEntry",
    "choose_index",
    "find_checkpoints",
    "index_of",
    "is_index_name",
    "latest_valid",
    "needed_bytes",
]

DATA_SUFFIX = ".distcp"
"""What the names of data files end with."""
Folder = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """A folder that has an index; whether it can be read is another question."""

    path: Path
    modified_seconds: float
    """Of the youngest index file, seconds since the epoch."""


def find_checkpoints(root: Folder) -> list[CheckpointEntry]:
    """The checkpoints in `root` and the folders below it, newest first; nothing is read.

    Args:
        root: May be missing. Symbolic links below it are not followed.
    """
    found = []
    for folder, _, names in os.walk(root):
        times = [time for name in names if is_index_name(name) for time in _modified(os.path.join(folder, name))]
        if times:
            found.append(CheckpointEntry(Path(folder), max(times)))
    return sorted(found, key=lambda entry: (entry.modified_seconds, str(entry.path)), reverse=True)


def latest_valid(root: Folder) -> CheckpointEntry | None:
    """The newest checkpoint in `root` or below whose index is sound and whose data files are there.

    The data files must have the length that the index needs; their contents are not read.

    Returns:
        None if there is none.
    """
    for entry in find_checkpoints(root):
        try:
            check_files(entry.path, index_of(entry.path))
        except (DcpError, OSError):
            continue
        return entry
    return None


def index_of(folder: Folder) -> CheckpointIndex:
    """The newest complete index in a folder; see `choose_index`.

    Raises:
        CheckpointNotFoundError: There is none; names the folder.
        CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError: It cannot be read.
    """
    base = Path(folder)
    entries = dict(_index_files(base))
    if not entries:
        raise CheckpointNotFoundError(f"there is no checkpoint in {base}: it has no {METADATA_NAME}; check the path")
    try:
        return choose_index(entries, lambda name: (base / name).read_bytes())
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint in {base}: {error}") from error


def check_files(folder: Folder, index: CheckpointIndex) -> None:
    """Make sure that the data files of a checkpoint are there and long enough.

    Raises:
        CheckpointNotFoundError: One is missing.
        CorruptCheckpointError: One is too short.
    """
    for name, wanted in needed_bytes(index).items():
        path = os.path.join(folder, name)
        try:
            size = os.stat(path).st_size
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"the data file {path} is missing; restore it from a copy") from error
        if size < wanted:
            raise CorruptCheckpointError(f"the data file has {size} bytes and the index needs {wanted}", file=path)


def needed_bytes(index: CheckpointIndex) -> dict[str, int]:
    """For each data file of a checkpoint, where its last item ends."""
    ends = np.zeros(len(index.files), np.uint64)
    for items in (index.chunk_items, index.object_items):
        if items is not None:
            np.maximum.at(ends, items.file, items.offset + items.length)
    return dict(zip(index.files, ends.tolist(), strict=True))


def _index_files(folder: Path) -> Iterator[tuple[str, float]]:
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        if is_index_name(name):
            for time in _modified(folder / name):
                yield name, time


def _modified(path: Folder) -> Iterator[float]:
    """The file's modification time; nothing if it has gone, or is no file."""
    try:
        yield os.stat(path).st_mtime
    except OSError:
        return
