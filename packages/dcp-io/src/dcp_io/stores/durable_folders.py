"""Folders of a local file system that survive a loss of power: durable creation, and fsync."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from dcp_io.errors import NotAFolderError
from dcp_manifest.descriptors import open_descriptor

__all__ = ["make_folder", "sync_folder"]

# Errors of file systems that cannot fsync a folder.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
# On a shared file system a folder made by another process may become visible late.
_SECONDS_TO_BE_SEEN = 5.0


def make_folder(path: str) -> None:
    """Make a folder and its missing parents, durably. Raises NotAFolderError if one of them is a file."""
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # another rank made it first, or it is not a folder
            if not _is_folder(folder):
                raise NotAFolderError.of(folder) from None
        with contextlib.suppress(PermissionError):  # a parent that may be entered but not read cannot be fsynced
            sync_folder(os.path.dirname(folder))


def _is_folder(path: str) -> bool:
    """Whether an existing path is a folder; waits, as a shared file system may show another process's folder late."""
    deadline = time.monotonic() + _SECONDS_TO_BE_SEEN
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.isdir(path)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable by fsync, if the file system supports fsync of folders."""
    fd = open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    finally:
        os.close(fd)
