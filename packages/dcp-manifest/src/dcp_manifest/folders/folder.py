"""Protocols of a read-only folder, which every `dcp_io.Store` implements."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dcp_base.descriptors import open_descriptor
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError

# Prefix of notes, reader leases and save markers.
_OURS = ".dcp-"
# Of a file that was removed meanwhile, and of links that lead nowhere.
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}


@dataclass(frozen=True, slots=True)
class Entry:
    """One file or object in a listing."""

    name: str
    bytes: int
    mtime: float
    """Seconds on the storage's clock."""


@runtime_checkable
class Folder(Protocol):
    """Folder with checkpoints; see `dcp_io.Store`."""

    @property
    def url(self) -> str:
        """Path or URI, for messages."""

    def list(self) -> list[Entry]:
        """List the files directly in the folder; empty without a folder."""

    def read(self, name: str) -> bytes:
        """Read a file; CheckpointNotFoundError if it is missing."""

    def size(self, name: str) -> int:
        """Return a file's size in bytes; CheckpointNotFoundError if it is missing."""


class FolderTree(Folder, Protocol):
    """Folder with subfolders."""

    def folders(self) -> Sequence[str]:
        """Return the subfolders' names."""

    def child(self, name: str) -> FolderTree:
        """Open a subfolder."""


def followed(folder: str, name: str) -> str:
    """Return the path to read for a file in a folder; a symbolic link is resolved. This is the only rule for links.

    Links are followed to files inside the folder and, from a snapshot of a Hugging Face cache
    (`models--ORG--NAME/snapshots/REVISION`), to files directly in the `blobs` of the same model. Other links raise
    UnsafeCheckpointError: a stranger's checkpoint could otherwise put any file of this user into what is loaded.
    """
    path = os.path.join(folder, name)
    if not os.path.islink(path):
        if "/" in name:
            check_inside(folder, os.path.dirname(name))
        return path
    real = os.path.realpath(path)
    if os.path.dirname(real) != _hub_blobs(os.path.realpath(folder)):
        check_inside(folder, name)
    return real


def check_inside(folder: str, name: str) -> None:
    """Raise UnsafeCheckpointError if a relative path leads out of a folder by a link."""
    root, real = os.path.realpath(folder), os.path.realpath(os.path.join(folder, name))
    if os.path.commonpath([root, real]) != root:
        raise UnsafeCheckpointError(
            f"{name!r} in {folder} is a link that leads out of that directory, to {real}. Links are followed inside "
            "the directory, and in a Hugging Face cache. If you made the link (cp -s, dvc, git-annex, Bazel), copy the "
            "files (cp -rL) and use the copy; otherwise the checkpoint may be hostile: do not load it"
        )


def _hub_blobs(root: str) -> str | None:
    for place in (Path(root), *Path(root).parents):
        blobs = place.parent.parent / "blobs"
        if place.parent.name == "snapshots" and blobs.is_dir() and not blobs.is_symlink():
            return str(blobs)
    return None


class LocalFolder:
    """Read-only folder of the local file system, which may be missing.

    For links to files see `followed`; linked folders are ignored.

    Example:
        ```python
        from dcp_core import save
        from dcp_manifest import LocalFolder

        save({"step": 1}, checkpoint_id="step-1")
        print([entry.name for entry in LocalFolder("step-1").list()])
        ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)

    def __fspath__(self) -> str:
        return self._path

    def __repr__(self) -> str:
        return f"LocalFolder({self._path!r})"

    @property
    def url(self) -> str:
        """The path, as it was passed."""
        return self._path

    def list(self) -> list[Entry]:
        """List checkpoint files, notes and markers only."""
        found = []
        for item in self._scan():
            if item.name.endswith(DATA_SUFFIX) or item.name.startswith(_OURS) or is_index_name(item.name):
                try:
                    status = item.stat()
                except OSError as error:
                    if error.errno in _GONE:
                        continue
                    raise
                found.append(Entry(item.name, status.st_size, status.st_mtime_ns / 1e9))
        return found

    def folders(self) -> tuple[str, ...]:
        """Return the subfolders' names, sorted, without links."""
        return tuple(sorted(item.name for item in self._scan() if item.is_dir(follow_symlinks=False)))

    def _scan(self) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(self._path) as found:
                return [*found]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def child(self, name: str) -> LocalFolder:
        """Open a subfolder."""
        return LocalFolder(os.path.join(self._path, name))

    def read(self, name: str) -> bytes:
        """Read a regular file. Pipes and devices are refused, since reading them need not end."""
        path = Path(followed(self._path, name))
        try:
            descriptor = open_descriptor(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _missing(path) from error
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                raise _no_file(path) from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _no_file(path)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                return file.read()
        except MemoryError as error:  # a sparse file may have any size
            message = "the index is larger than the memory: damaged or hostile"
            raise CorruptCheckpointError(message, file=str(path)) from error
        finally:
            os.close(descriptor)

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        path = Path(followed(self._path, name))
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _missing(path) from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError("a directory or device has the name of a data file", file=str(path))
        return status.st_size


def _missing(path: Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"the file {path} is missing; restore it from a copy")


def _no_file(path: Path) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file; the checkpoint may be hostile: do not load it")


_MAX_SECONDS = 1e11

NOTE = ".dcp-note.json"
"""Manager's note: step, metrics, and the saving process."""
NEXT_NOTE = ".dcp-note-next.json"
"""Note of a save that has not yet replaced the checkpoint."""
QUARANTINE = ".dcp-quarantined.json"
"""Quarantines a damaged checkpoint."""
REMOVING = ".dcp-removing"
"""Announces the removal of a checkpoint."""


def put_aside_reason(names: Collection[str]) -> str | None:
    """Return why readers should skip a checkpoint with these files; None if they may use it."""
    if REMOVING in names:
        return f"it is being removed ({REMOVING})"
    if QUARANTINE in names:
        return f"it is quarantined as damaged ({QUARANTINE})"
    return None


def noted_step(data: bytes) -> int | None:
    """Parse the step from a note."""
    step = _fact(data, "step")
    return step if type(step) is int and step >= 0 else None


def parse_quarantine(data: bytes) -> tuple[str, float | None]:
    """Parse a quarantine's reason, or `unknown`, and time in seconds since the epoch, or None."""
    reason, found = _fact(data, "reason"), _fact(data, "found")
    is_time = type(found) in (int, float) and abs(found) < _MAX_SECONDS
    return "unknown" if reason is None else str(reason), float(found) if is_time else None


def _fact(data: bytes, name: str) -> Any:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts.get(name) if isinstance(facts, dict) else None


METADATA_NAME = ".metadata"
"""Index of a whole checkpoint, which exists as soon as this file does."""
DATA_SUFFIX = ".distcp"
"""Suffix of data files."""
SAVE_MARKER_PREFIX = ".dcp-save-"
"""Prefix of save markers."""
_RANK_INDEX = re.compile(r"__(?P<rank>\d{1,9})(?:\.(?P<save_id>[A-Za-z0-9_-]+))?\.metadata", re.ASCII)
_RANK_DATA = re.compile(r"__(\d{1,9})_", re.ASCII)


def rank_prefix(rank: int) -> str:
    """Return the prefix of a rank's files, such as `__3`."""
    return f"__{rank}"


def data_file_prefix(rank: int) -> str:
    """Return the prefix of a rank's data files, such as `__3_`."""
    return f"{rank_prefix(rank)}_"


def data_file_name(prefix: str, number: int, save_id: str) -> str:
    """Return a data file's name, such as `__3_0.<save id>.distcp`; `number` counts from 0."""
    return f"{prefix}{number}.{save_id}{DATA_SUFFIX}"


def rank_of_data_file(name: str) -> int | None:
    """Return the rank in a data file's name; None for others."""
    found = _RANK_DATA.match(name)
    return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class RankIndexName:
    """Name of a rank-local index."""

    rank: int
    save_id: str | None
    """None for `__<rank>.metadata`, which each save overwrites."""

    def __str__(self) -> str:
        save_id = "" if self.save_id is None else f".{self.save_id}"
        return f"{rank_prefix(self.rank)}{save_id}{METADATA_NAME}"


def rank_index_name(name: str) -> RankIndexName | None:
    """Parse `__<rank>.metadata` or `__<rank>.<save id>.metadata`; None for others."""
    found = _RANK_INDEX.fullmatch(name)
    return RankIndexName(int(found["rank"]), found["save_id"]) if found else None


def is_index_name(name: str) -> bool:
    """Whether a file is an index, of a checkpoint or of one rank."""
    return name == METADATA_NAME or _RANK_INDEX.fullmatch(name) is not None
