"""Protocol of a folder for finding checkpoints: list and read files, open subfolders. Read-only.

`Folder` is the protocol, which every `dcp_io.Store` implements; `LocalFolder` implements it for local paths.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from dcp_manifest.descriptors import open_descriptor
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from dcp_manifest.folders.file_names import DATA_SUFFIX, is_index_name

__all__ = ["Entry", "Folder", "LocalFolder"]

# Prefix of notes, reader leases and save markers.
_OURS = ".dcp-"


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a folder's listing: one file or object."""

    name: str
    bytes: int
    mtime: float
    """Modification time, seconds on the storage's clock."""


@runtime_checkable
class Folder(Protocol):
    """Protocol of a folder with checkpoints: lists and reads files. For the guarantees see `dcp_io.Store`."""

    @property
    def url(self) -> str:
        """Path or URI of the folder, for messages."""

    def list(self) -> list[Entry]:
        """List the files directly in the folder; empty if the folder does not exist."""

    def folders(self) -> Sequence[str]:
        """Return the names of the subfolders."""

    def child(self, name: str) -> Folder:
        """Open the subfolder of that name."""

    def read(self, name: str) -> bytes:
        """Read all bytes of a file. Raises CheckpointNotFoundError if it is missing."""

    def size(self, name: str) -> int:
        """Return the size of a file in bytes. Raises CheckpointNotFoundError if it is missing."""


class LocalFolder:
    """Read-only folder of the local file system. Symbolic links in it to other folders are not followed.

    Args:
        path: Path of the folder, which may be missing.

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
        """Path of the folder, as it was passed to the constructor."""
        return self._path

    def list(self) -> list[Entry]:
        """List the checkpoint files, notes and markers in the folder, by their names; other files are left out."""
        found = []
        for item in self._scan():
            if item.name.endswith(DATA_SUFFIX) or item.name.startswith(_OURS) or is_index_name(item.name):
                try:
                    status = item.stat()
                except OSError:  # removed meanwhile, or a dangling link
                    continue
                found.append(Entry(item.name, status.st_size, status.st_mtime_ns / 1e9))
        return found

    def folders(self) -> tuple[str, ...]:
        """Return the names of the subfolders, sorted; symbolic links are left out."""
        return tuple(sorted(item.name for item in self._scan() if item.is_dir(follow_symlinks=False)))

    def _scan(self) -> Sequence[os.DirEntry[str]]:
        try:
            with os.scandir(self._path) as found:
                return [*found]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def child(self, name: str) -> LocalFolder:
        """Open the subfolder of that name."""
        return LocalFolder(os.path.join(self._path, name))

    def read(self, name: str) -> bytes:
        """Read all bytes of a regular file. Pipes and devices are refused, since reading them need not end."""
        path = Path(self._path, name)
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
        """Return the size of a file in bytes; symbolic links are followed."""
        path = Path(self._path, name)
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise _missing(path) from error
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError("a folder or device has the name of a data file", file=str(path))
        return status.st_size


def _missing(path: Path) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"the file {path} is missing; restore it from a copy")


def _no_file(path: Path) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file; the checkpoint may be hostile: do not load it")
