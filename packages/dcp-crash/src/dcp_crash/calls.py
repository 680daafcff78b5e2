"""Table of the system calls that change or read files, and access to their arguments.

Source: Linux's `arch/x86/entry/syscalls/syscall_64.tbl`.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass

MARK_FOLDER = "/.dcp-crash-mark/"
"""A directory that never exists: a file name in it is a mark for the tracer."""
CREATE_BITS = os.O_CREAT | os.O_TRUNC
_AT_FDCWD = -100
_PATH_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Kind:
    """A system call and its argument positions, counted from 0."""

    name: str
    number: int
    fds: tuple[int, ...] = ()
    """Descriptors of changed or read files."""
    paths: tuple[tuple[int | None, int], ...] = ()
    """(Directory's descriptor or None, path)."""
    flags: int | None = None
    """Open flags: the call changes files only if they create or truncate."""
    space: bool = False
    """Whether the call may fail with ENOSPC."""


WRITES = (
    Kind("write", 1, fds=(0,), space=True),
    Kind("open", 2, paths=((None, 0),), flags=1, space=True),
    Kind("close", 3, fds=(0,)),
    Kind("pwrite64", 18, fds=(0,), space=True),
    Kind("writev", 20, fds=(0,), space=True),
    Kind("sendfile", 40, fds=(0,), space=True),
    Kind("fsync", 74, fds=(0,)),
    Kind("fdatasync", 75, fds=(0,)),
    Kind("truncate", 76, paths=((None, 0),)),
    Kind("ftruncate", 77, fds=(0,)),
    Kind("rename", 82, paths=((None, 0), (None, 1))),
    Kind("mkdir", 83, paths=((None, 0),), space=True),
    Kind("rmdir", 84, paths=((None, 0),)),
    Kind("creat", 85, paths=((None, 0),), space=True),
    Kind("link", 86, paths=((None, 0), (None, 1)), space=True),
    Kind("unlink", 87, paths=((None, 0),)),
    Kind("symlink", 88, paths=((None, 1),), space=True),
    Kind("openat", 257, paths=((0, 1),), flags=2, space=True),
    Kind("mkdirat", 258, paths=((0, 1),), space=True),
    Kind("unlinkat", 263, paths=((0, 1),)),
    Kind("renameat", 264, paths=((0, 1), (2, 3))),
    Kind("linkat", 265, paths=((0, 1), (2, 3)), space=True),
    Kind("symlinkat", 266, paths=((1, 2),), space=True),
    Kind("sync_file_range", 277, fds=(0,)),
    Kind("utimensat", 280, paths=((0, 1),)),
    Kind("fallocate", 285, fds=(0,), space=True),
    Kind("pwritev", 296, fds=(0,), space=True),
    Kind("renameat2", 316, paths=((0, 1), (2, 3))),
    Kind("copy_file_range", 326, fds=(2,), space=True),
    Kind("pwritev2", 328, fds=(0,), space=True),
)
READS = (
    Kind("read", 0, fds=(0,)),
    Kind("open", 2, paths=((None, 0),)),
    Kind("stat", 4, paths=((None, 0),)),
    Kind("fstat", 5, fds=(0,)),
    Kind("lstat", 6, paths=((None, 0),)),
    Kind("pread64", 17, fds=(0,)),
    Kind("getdents64", 217, fds=(0,)),
    Kind("openat", 257, paths=((0, 1),)),
    Kind("newfstatat", 262, paths=((0, 1),)),
    Kind("preadv", 295, fds=(0,)),
    Kind("preadv2", 327, fds=(0,)),
    Kind("statx", 332, paths=((0, 1),)),
)
BY_NUMBER = {"writes": {kind.number: kind for kind in WRITES}, "reads": {kind.number: kind for kind in READS}}


class Memory:
    """Memory, open files and working directory of a stopped thread."""

    def __init__(self, tid: int) -> None:
        self._tid = tid

    def read(self, address: int, count: int) -> bytes:
        """Read up to `count` bytes; fewer at the end of mapped memory."""
        with open(f"/proc/{self._tid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(count)

    def write(self, address: int, data: bytes) -> None:
        """Write at an address."""
        with open(f"/proc/{self._tid}/mem", "r+b", buffering=0) as memory:
            memory.seek(address)
            memory.write(data)

    def text(self, address: int) -> str:
        """Return a zero-terminated text."""
        found = b""
        while b"\0" not in found and len(found) < _PATH_BYTES:
            part = self.read(address + len(found), 4096 - (address + len(found)) % 4096)
            if not part:  # the thread was killed
                raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH), str(self._tid))
            found += part
        return os.fsdecode(found.split(b"\0", 1)[0])

    def descriptor(self, number: int) -> str | None:
        """Return a descriptor's path; None if closed or deleted."""
        try:
            path = os.readlink(f"/proc/{self._tid}/fd/{_signed(number)}")
        except OSError:
            return None
        return None if path.endswith(" (deleted)") else path

    def position(self, number: int) -> int:
        """Return a descriptor's position."""
        with open(f"/proc/{self._tid}/fdinfo/{_signed(number)}", encoding="ascii") as lines:
            return int(next(lines).split()[1])

    def file(self, number: int, offset: int, count: int) -> bytes:
        """Read up to `count` bytes of a descriptor's file."""
        with open(f"/proc/{self._tid}/fd/{_signed(number)}", "rb") as file:
            file.seek(offset)
            return file.read(count)

    def vectors(self, address: int, count: int) -> list[tuple[int, int]]:
        """Return (address, length) pairs of an `iovec` array."""
        return list(struct.iter_unpack("QQ", self.read(address, 16 * count)))

    def gather(self, address: int, count: int, length: int) -> bytes:
        """Return the first `length` bytes of an `iovec` array."""
        parts = []
        for start, size in self.vectors(address, count):
            parts.append(self.read(start, min(size, length)))
            length -= len(parts[-1])
        return b"".join(parts)

    def path(self, folder: int | None, address: int) -> str:
        """Return the absolute path of a text, relative to the descriptor `folder`."""
        text = self.text(address)
        if text.startswith("/"):
            return os.path.normpath(text)
        if folder is None or _signed(folder) == _AT_FDCWD:
            base = os.readlink(f"/proc/{self._tid}/cwd")
        else:
            base = self.descriptor(folder) or "/"
        return os.path.normpath(os.path.join(base, text))


def _signed(number: int) -> int:
    return (number & 0xFFFFFFFF) - (1 << 32 if number & 0x80000000 else 0)


def places_of(kind: Kind, arguments: tuple[int, ...], memory: Memory) -> list[str]:
    """Return the absolute paths of a system call."""
    found = [memory.descriptor(arguments[index]) for index in kind.fds]
    for folder, path in kind.paths:
        if arguments[path] == 0:  # utimensat of a descriptor
            found.append(None if folder is None else memory.descriptor(arguments[folder]))
        else:
            found.append(memory.path(None if folder is None else arguments[folder], arguments[path]))
    return [path for path in found if path is not None and path.startswith("/")]
