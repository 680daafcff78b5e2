"""Checkpoints in folders of the local file system: find them, and tell the newest one that is whole.

Which index of a folder counts is decided in `index_choice`; other storages use that.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dcp_manifest.columns import CheckpointIndex
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError, UnsafeCheckpointError
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
        return choose_index(entries, lambda name: _read_file(base / name))
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint in {base}: {error}") from error


def _read_file(path: Path) -> bytes:
    """All bytes of a file. Opening a pipe in another way would wait for whoever writes into it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise _no_file(path) from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _no_file(path)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read()
    except MemoryError as error:  # a file with holes may be of any size
        raise CorruptCheckpointError(
            "the index is larger than the memory: damaged or hostile", file=str(path)
        ) from error
    finally:
        os.close(descriptor)


def _no_file(path: Path) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file; the checkpoint may be hostile: do not load it")


def check_files(folder: Folder, index: CheckpointIndex) -> None:
    """Make sure that the data files of a checkpoint are there and long enough.

    Raises:
        CheckpointNotFoundError: One is missing.
        CorruptCheckpointError: One is too short.
    """
    for name, wanted in needed_bytes(index).items():
        path = os.path.join(folder, name)
        try:
            status = os.stat(path)
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"the data file {path} is missing; restore it from a copy") from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError("there is something else in the place of a data file", file=path)
        if status.st_size < wanted:
            raise CorruptCheckpointError(
                f"the data file has {status.st_size} bytes and the index needs {wanted}", file=path
            )


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
