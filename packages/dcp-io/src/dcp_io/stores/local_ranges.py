"""Ranges of local files: files of known size, whose ranges several processes write, and early write-back of a range."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable, Sequence

from dcp_io.stores.full_transfers import write_fully
from dcp_io.stores.naming import naming
from dcp_io.stores.store import Buffer, RangeSink
from dcp_manifest.descriptors import kernel_call, open_descriptor
from dcp_manifest.errors import UnsafeCheckpointError

__all__ = ["create_sized", "open_sized", "start_writeback"]

# Without O_NONBLOCK, opening a pipe in place of a file would block for ever.
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666
_SYNC_FILE_RANGE_WRITE = 2
# Answers of file systems that reserve no space.
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def create_sized(name: str, path: str, size: int) -> RangeSink:
    """Create a file of zeros; errors: see `Store.create_sized`.

    Args:
        name: Name of the object, for `RangeSink.name`.
        path: Path of the new file.
        size: Size of the file in bytes.
    """
    if size < 0:
        raise ValueError(f"{path} cannot have {size} bytes")
    with naming(path):
        fd = open_descriptor(path, _CREATE, _MODE)
        try:
            _reserve(fd, size)
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise
    return _LocalRangeSink(name, path, fd, size)


def open_sized(name: str, path: str) -> RangeSink:
    """Open an existing file; raises UnsafeCheckpointError for a link, a pipe or another special file."""
    try:
        fd = open_descriptor(path, _WRITE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _no_file(path) from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _no_file(path)
    return _LocalRangeSink(name, path, fd, status.st_size)


class _LocalRangeSink(RangeSink):
    """An open file of fixed size."""

    def __init__(self, name: str, path: str, fd: int, size: int) -> None:
        self._name = name
        self._path = path
        self._fd = fd
        self._size = size

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._size

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers at an offset of the file."""
        stop = offset + sum(map(len, buffers))
        if offset < 0 or stop > self._size:
            raise ValueError(f"bytes {offset} to {stop} are not within {self._path}, which has {self._size} bytes")
        with naming(self._path):
            write_fully(self._fd, buffers, offset)

    def start_sync(self, offset: int, size: int) -> None:
        """Ask the kernel to begin writing back a range."""
        start_writeback(self._fd, offset, size)

    def close(self, *, sync: bool) -> None:
        """Close the file, after an fsync if `sync`."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if sync:
                with naming(self._path):
                    os.fsync(fd)
        finally:
            os.close(fd)


def _no_file(path: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file that a save made; do not write to it")


def _reserve(fd: int, size: int) -> None:
    """Set the size of an empty file, and reserve its space where the file system can."""
    # Not `os.posix_fallocate`, which writes to every block where the file system reserves nothing.
    call = _fallocate()
    if call is None or size == 0:
        os.ftruncate(fd, size)
    elif call(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code not in _NO_RESERVATION:
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, size)


def _fallocate() -> Callable[..., int] | None:
    return kernel_call("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing a range of a file to its device; does not wait for it.

    This is only a hint: a system without support for it does nothing, and the caller must still call fsync, which
    reports errors of the device.

    Args:
        fd: File descriptor.
        offset: Start of the range in the file, bytes.
        length: Length of the range, bytes.
    """
    call = kernel_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None and length > 0:
        call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)
