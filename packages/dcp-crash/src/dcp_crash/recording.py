"""Record a directory's changes in order, each when its system call returns."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from dcp_crash.calls import Memory


@dataclass(frozen=True, slots=True)
class Change:
    """One recorded change, sync or mark, with absolute paths.

    `create`, `mkdir`: `path` is created. `unlink`, `rmdir`: it is removed. `rename`, `link`, `symlink`: `path` is
    renamed or linked to `target`. `write`: `data` is written at `offset`. `truncate`: the length becomes `offset`.
    `grow`: the length becomes at least `offset`. `sync`: the changes of `path` before change `begun` (from 0) are
    durable. `mark`: `path` is the text, `offset` the rank.
    """

    kind: str
    path: str
    target: str = ""
    offset: int = 0
    data: bytes = b""
    begun: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """A system call at its beginning."""

    name: str
    arguments: tuple[int, ...]
    places: list[str]
    existed: bool
    """Whether its first path existed."""
    begun: int
    """Number of changes before it."""
    rank: int = 0
    own: bool = True
    """Whether the rank's process made it, and not a process that it started."""


@dataclass
class Recorder:
    """Record all traced processes' changes, syncs and marks."""

    changes: list[Change] = field(default_factory=list)

    @property
    def now(self) -> int:
        """Number of the next change, from 0."""
        return len(self.changes)

    def mark(self, text: str, rank: int) -> None:
        """Record a rank's text."""
        self.changes.append(Change("mark", text, offset=rank))

    def done(self, call: Call, result: int, memory: Memory) -> None:
        """Record a successful system call."""
        name, arguments, path = call.name, call.arguments, call.places[0]
        if name in {"fsync", "fdatasync"}:
            self.changes.append(Change("sync", path, begun=call.begun))
        elif name in _NAMES:
            self.changes.append(Change(_named(name, arguments), path, target=call.places[-1]))
        elif name in {"open", "openat", "creat"}:
            self._opened(path, existed=call.existed, truncated=name == "creat" or _truncates(name, arguments))
        elif name in {"ftruncate", "truncate"}:
            self.changes.append(Change("truncate", path, offset=arguments[1]))
        elif name == "fallocate":
            self.changes.append(Change("grow", path, offset=arguments[2] + arguments[3]))
        elif name in {"symlink", "symlinkat"}:
            self.changes.append(Change("symlink", path, target=os.readlink(path)))
        elif name not in _NOTHING:
            offset, data = _written(name, arguments, result, memory)
            self.changes.append(Change("write", path, offset=offset, data=data))

    def _opened(self, path: str, *, existed: bool, truncated: bool) -> None:
        if not existed:
            self.changes.append(Change("create", path))
        elif truncated:
            self.changes.append(Change("truncate", path))


_NAMES = {
    "rename": "rename", "renameat": "rename", "renameat2": "rename", "link": "link", "linkat": "link",
    "unlink": "unlink", "unlinkat": "unlink", "mkdir": "mkdir", "mkdirat": "mkdir", "rmdir": "rmdir",
}  # fmt: skip
_NOTHING = {"close", "utimensat", "sync_file_range"}
_AT_REMOVEDIR = 0x200
_FLAGS = {"open": 1, "openat": 2}


def _named(name: str, arguments: tuple[int, ...]) -> str:
    return "rmdir" if name == "unlinkat" and arguments[2] & _AT_REMOVEDIR else _NAMES[name]


def _truncates(name: str, arguments: tuple[int, ...]) -> bool:
    return bool(arguments[_FLAGS[name]] & os.O_TRUNC)


def _written(name: str, arguments: tuple[int, ...], count: int, memory: Memory) -> tuple[int, bytes]:
    if name == "pwrite64":
        return arguments[3], memory.read(arguments[1], count)
    if name == "write":
        return memory.position(arguments[0]) - count, memory.read(arguments[1], count)
    if name in {"writev", "pwritev", "pwritev2"}:
        data = memory.gather(arguments[1], arguments[2], count)
        return (memory.position(arguments[0]) - count if name == "writev" else arguments[3]), data
    descriptor = arguments[2] if name == "copy_file_range" else arguments[0]
    offset = memory.position(descriptor) - count
    if name == "copy_file_range" and arguments[3]:
        offset = int.from_bytes(memory.read(arguments[3], 8), "little") - count
    return offset, memory.file(descriptor, offset, count)
