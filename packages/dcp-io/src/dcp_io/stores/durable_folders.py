"""Durable folders of a local file system: made and synced so that they survive a loss of power."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from dcp_manifest.descriptors import open_descriptor

__all__ = ["make_folder", "sync_folder"]

# What file systems without synchronous folders answer.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
# A folder that another process made may be seen late on shared file systems.
_SECONDS_TO_BE_SEEN = 5.0


def make_folder(path: str) -> None:
    """Make a folder and those above it that are missing, durably."""
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # another rank was faster, or it is not a folder
            if not _is_folder(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder) from None
        with contextlib.suppress(PermissionError):  # a parent that may be passed but not read cannot be synced
            sync_folder(os.path.dirname(folder))


def _is_folder(path: str) -> bool:
    """Whether a path that is known to exist is a folder: a shared file system may not see another's folder at once."""
    deadline = time.monotonic() + _SECONDS_TO_BE_SEEN
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.isdir(path)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable, where the file system can."""
    fd = open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    finally:
        os.close(fd)
