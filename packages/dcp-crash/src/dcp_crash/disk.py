"""Possible disk states after a power loss at a moment of a recording.

The model assumes only what POSIX guarantees. Until a file is synced, any of its writes may be missing, and it may have
its new length without the bytes. Until a directory is synced, any of its new names, removals and renames may be
missing; a single rename is atomic. Syncing a file does not make its name durable.

Source: Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014 (section 3, abstract persistence model);
Mohan et al., "CrashMonkey and ACE", OSDI 2018.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_crash.recording import Change

__all__ = ["DiskState", "disk_states", "snapshot"]

_SECTOR_BYTES = 512
Tree = dict[str, bytes | None]
"""Absolute path → contents, or None for a directory."""


@dataclass(frozen=True)
class DiskState:
    """One possible state of a directory (`tree`) after a power loss."""

    at: int
    """Number of changes before the power loss."""
    how: str
    """Unsynced changes that reached the disk, in words."""
    tree: Tree
    marks: tuple[str, ...]
    """Texts from `mark` before the power loss."""

    def put(self, folder: str | os.PathLike[str], *, recorded: str | os.PathLike[str], seconds_ago: float = 60) -> None:
        """Write this state into an empty directory.

        Args:
            folder: Empty directory.
            recorded: Directory of the recording.
            seconds_ago: Age of the restored files.
        """
        base = os.path.realpath(recorded)
        then = time.time() - seconds_ago
        for path, data in sorted(self.tree.items()):
            place = Path(folder) / os.path.relpath(path, base)
            if data is None:
                place.mkdir(exist_ok=True)
            else:
                place.write_bytes(data)
                os.utime(place, (then, then))


def snapshot(folder: str | os.PathLike[str]) -> Tree:
    """Return a directory's contents, as the durable start state for `disk_states`."""
    base = os.path.realpath(folder)
    found: Tree = {base: None}
    for path in Path(base).rglob("*"):
        found[str(path)] = None if path.is_dir() else path.read_bytes()
    return found


def disk_states(
    before: Tree, changes: list[Change], *, every: int = 1, random_states: int = 4, seed: int = 0
) -> Iterator[DiskState]:
    """Yield the possible disk states of a power loss before each change and after the last.

    ```python
    import tempfile
    from pathlib import Path
    from dcp_crash import disk_states, run_traced, snapshot

    settings = Path("settings")
    settings.mkdir()
    before = snapshot(settings)
    run = run_traced(lambda rank: (settings / "new").write_text("b"), settings, record=True)
    for state in disk_states(before, run.changes):
        state.put(tempfile.mkdtemp(), recorded=settings)
    ```

    The unsynced changes that reached the disk are: none; all; names without bytes; names and lengths without bytes;
    bytes without names; each change alone; all but one; and random choices with torn writes. Repeated states are
    skipped.

    Args:
        before: Result of `snapshot` before the run.
        changes: `Run.changes` of `run_traced` with `record=True`.
        every: Changes between two moments; the last moment is always included.
        random_states: Random choices per moment.
        seed: Seed of the random choices.
    """
    seen: set[bytes] = set()
    moments = sorted({*range(0, len(changes) + 1, every), len(changes)})
    for at in moments:
        marks = tuple(change.path for change in changes[:at] if change.kind == "mark")
        chance = random.Random(f"{seed} {at}")
        for how, choose in _choices(changes, _unsynced(changes, at), random_states, chance):
            tree = _replay(before, changes[:at], choose)
            digest = _digest(tree, marks)
            if digest not in seen:
                seen.add(digest)
                yield DiskState(at, how, tree, marks)


Choose = Callable[[int], "bool | str | random.Random"]
"""Whether a change (by number) reaches the disk: a bool, `length` for only a file's new length, or a random generator
for a torn write.
"""
_FILE = frozenset({"write", "truncate", "grow"})
_NAME = frozenset({"create", "mkdir", "unlink", "rmdir", "rename", "link", "symlink"})


def _unsynced(changes: list[Change], at: int) -> list[int]:
    names = _names_then(changes, at)
    durable: set[int] = set()
    for change in changes[:at]:
        if change.kind != "sync":
            continue
        target = names(change.path, change)
        for number, other in enumerate(changes[: change.begun]):
            if (other.kind in _FILE and names(other.path, other) == target) or (
                other.kind in _NAME and os.path.dirname(other.target or other.path) == change.path
            ):
                durable.add(number)
    return [n for n, change in enumerate(changes[:at]) if change.kind in _FILE | _NAME and n not in durable]


def _names_then(changes: list[Change], at: int) -> Callable[[str, Change], int]:
    """Return a function of (path, change): the change that created the path's file."""
    meant: dict[str, int] = {}
    found: dict[tuple[int, str], int] = {}
    fresh = -1
    for change in changes[:at]:
        if change.kind == "create":
            fresh -= 1
            meant[change.path] = fresh
        for path in (change.path, change.target):
            if path and path not in meant:
                fresh -= 1
                meant[path] = fresh
        found[id(change), change.path] = meant[change.path]
        if change.kind == "rename":
            meant[change.target] = meant.pop(change.path)
        elif change.kind == "link":
            meant[change.target] = meant[change.path]
        elif change.kind == "unlink":
            meant.pop(change.path)
    return lambda path, change: found[id(change), path]


def _choices(
    changes: list[Change], pending: list[int], random_states: int, chance: random.Random
) -> Iterator[tuple[str, Choose]]:
    waiting = frozenset(pending)

    def keeping(kept: Iterable[int]) -> Choose:
        chosen = frozenset(kept)
        return lambda number: number not in waiting or number in chosen

    names = [number for number in pending if changes[number].kind in _NAME]
    yield "nothing that was not synced", keeping([])
    yield "everything", keeping(pending)
    if not pending:
        return
    yield "names without bytes", keeping(names)
    yield "bytes without names", keeping(waiting - set(names))
    yield "names and lengths without bytes", lambda n: n not in waiting or changes[n].kind in _NAME or "length"
    for number in pending:
        what = f"{changes[number].kind} {os.path.basename(changes[number].path)}"
        yield f"only {what}", keeping([number])
        yield f"all but {what}", keeping(waiting - {number})
    for number in range(random_states):
        kept = {one: chance.choice((True, False, "length", "torn")) for one in pending}
        tear = random.Random(chance.random())
        yield (
            f"at random, {number}",
            lambda n, kept=kept, tear=tear: (  # type: ignore[misc]
                tear if kept.get(n, True) == "torn" else kept.get(n, True)
            ),
        )


def _replay(before: Tree, changes: list[Change], choose: Choose) -> Tree:
    disk = _Disk(before)
    for number, change in enumerate(changes):
        if change.kind in _NAME:
            disk.rename_things(change, kept=choose(number) is not False)
        elif change.kind in _FILE:
            disk.change_bytes(change, choose(number))
    return disk.tree()


class _Disk:
    def __init__(self, before: Tree) -> None:
        self._files: list[bytearray | None] = []
        # Processes see `_seen`, which may differ from the disk.
        self._seen: dict[str, int] = {}
        for path, data in before.items():
            self._seen[path] = self._new(None if data is None else bytearray(data))
        self._kept = dict(self._seen)

    def _new(self, data: bytearray | None) -> int:
        self._files.append(data)
        return len(self._files) - 1

    def rename_things(self, change: Change, *, kept: bool) -> None:
        """Change names for processes, and on the disk if `kept`."""
        if change.kind in {"create", "mkdir"}:
            inode = self._new(None if change.kind == "mkdir" else bytearray())
        elif change.kind == "symlink":
            raise NotImplementedError(f"{change.path}: symbolic links are not modelled")
        else:
            inode = self._seen[change.path]
        if change.kind == "rename" and self._files[inode] is None:
            raise NotImplementedError(f"{change.path}: renamed directories are not modelled")
        for names in (self._seen, self._kept) if kept else (self._seen,):
            if change.kind in {"rename", "unlink", "rmdir"}:
                names.pop(change.path, None)
            if change.kind not in {"unlink", "rmdir"}:
                names[change.target if change.kind in {"rename", "link"} else change.path] = inode

    def change_bytes(self, change: Change, kept: bool | str | random.Random) -> None:
        data = self._files[self._seen[change.path]]
        if data is None or kept is False:
            return
        if change.kind == "truncate":
            del data[change.offset :]
        end = change.offset + len(change.data)
        data.extend(bytes(max(0, end - len(data))))
        if kept == "length":
            return
        written = bytearray(change.data)
        if isinstance(kept, random.Random):
            for start in range(0, len(written), _SECTOR_BYTES):
                if kept.random() < 0.5:
                    place = slice(change.offset + start, min(change.offset + start + _SECTOR_BYTES, end))
                    written[start : start + _SECTOR_BYTES] = data[place]
        data[change.offset : end] = written

    def tree(self) -> Tree:
        found: Tree = {}
        for path, inode in sorted(self._kept.items()):
            data = self._files[inode]
            parent = os.path.dirname(path)
            if not found or parent in found or parent not in self._seen:
                found[path] = None if data is None else bytes(data)
        return found


def _digest(tree: Tree, marks: tuple[str, ...]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        found.update(f"{path}\0{-1 if data is None else len(data)}\0".encode())
        found.update(data or b"")
    found.update("\0".join(marks).encode())
    return found.digest()
