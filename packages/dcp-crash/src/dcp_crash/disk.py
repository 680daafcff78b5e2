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
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dcp_crash.recording import Change

_SECTOR_BYTES = 512
_AGE_SECONDS = 60.0  # of restored files
Tree = dict[str, "bytes | str | None"]
"""Absolute path → contents of a file, text of a symbolic link, or None for a directory."""


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

    def put(self, folder: str | os.PathLike[str], *, recorded: str | os.PathLike[str]) -> None:
        """Write this state into an empty directory.

        Args:
            folder: Empty directory.
            recorded: Directory of the recording.
        """
        base = os.path.realpath(recorded)
        then = time.time() - _AGE_SECONDS
        for path, data in sorted(self.tree.items()):
            place = Path(folder) / os.path.relpath(path, base)
            if data is None:
                place.mkdir(exist_ok=True)
            elif isinstance(data, str):
                place.symlink_to(data)
            else:
                place.write_bytes(data)
                os.utime(place, (then, then))


def snapshot(folder: str | os.PathLike[str]) -> Tree:
    """Return a directory's contents, as the durable start state for `disk_states`."""
    base = os.path.realpath(folder)
    found: Tree = {base: None}
    for path in Path(base).rglob("*"):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_dir():
            found[str(path)] = None
        elif path.is_file():
            found[str(path)] = path.read_bytes()
        else:
            raise NotImplementedError(f"{path}: neither a file nor a directory nor a symbolic link")
    return found


def disk_states(
    before: Tree,
    changes: list[Change],
    *,
    every: int = 1,
    random_states: int = 4,
    seed: int = 0,
    sample: int | None = None,
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
        sample: Number of states, drawn from all moments in random order; by default all, in the order of the moments.
    """
    synced = _first_syncs(before, changes)
    moments = sorted({*range(0, len(changes) + 1, every), len(changes)})

    def choices(at: int) -> Iterator[tuple[str, Choose]]:
        pending = [n for n, change in enumerate(changes[:at]) if change.kind in _FILE | _NAME and synced[n] >= at]
        return _choices(changes, pending, random_states, random.Random(f"{seed} {at}"))

    in_order = ((at, choice) for at in moments for choice in choices(at))
    seen: set[bytes] = set()
    for at, (how, choose) in in_order if sample is None else _drawn(moments, choices, random.Random(seed)):
        if len(seen) == sample:
            return
        marks = tuple(change.path for change in changes[:at] if change.kind == "mark")
        tree = replay(before, changes[:at], choose)
        digest = _digest(tree, marks)
        if digest not in seen:
            seen.add(digest)
            yield DiskState(at, how, tree, marks)


Choose = Callable[[int], "bool | str | random.Random"]
"""Whether a change (by number) reaches the disk: a bool, `length` for only a file's new length, or a random generator
for a torn write.
"""
_FILE = frozenset({"write", "truncate", "grow"})
_MAKING = frozenset({"create", "mkdir", "symlink"})
_MOVING = frozenset({"rename", "link"})
_NAME = _MAKING | _MOVING | {"unlink", "rmdir"}


_NEVER = sys.maxsize
_HOW: dict[bool | str, str] = {True: "with", False: "without", "length": "only the length of", "torn": "part of"}


def _first_syncs(before: Tree, changes: list[Change]) -> list[int]:
    disk = _Disk(before)
    inodes = []
    for change in changes:
        inodes.append(disk.inode_to_sync(change))
        if change.kind in _NAME:
            disk.change_names(change, kept=True)
    found = [_NEVER] * len(changes)
    for number, change in enumerate(changes):
        for other in range(change.begun if change.kind == "sync" else 0):
            if inodes[other] == inodes[number]:
                found[other] = min(found[other], number)
    return found


def _how(change: Change, kept: bool | str) -> str:
    return _HOW[kept] if change.kind in _FILE else _HOW[kept is not False]


def _drawn(
    moments: list[int], choices: Callable[[int], Iterator[tuple[str, Choose]]], chance: random.Random
) -> Iterator[tuple[int, tuple[str, Choose]]]:
    """Yield all choices of all moments in random order; those of a moment are only made when it is drawn."""
    left = [*moments]
    made: dict[int, list[tuple[str, Choose]]] = {}
    while left:
        at = chance.choice(left)
        if at not in made:
            made[at] = [*choices(at)]
            chance.shuffle(made[at])
        yield at, made[at].pop()
        if not made[at]:
            left.remove(at)


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
    what = {number: f"{changes[number].kind} {os.path.basename(changes[number].path)}" for number in pending}
    for number in pending:
        yield f"only {what[number]}", keeping([number])
        yield f"all but {what[number]}", keeping(waiting - {number})
    for _ in range(random_states):
        kept = {one: chance.choice([*_HOW]) for one in pending}
        tear = random.Random(chance.random())
        yield (
            "at random: " + ", ".join(f"{_how(changes[number], kept[number])} {what[number]}" for number in pending),
            lambda n, kept=kept, tear=tear: (  # type: ignore[misc]
                tear if kept.get(n, True) == "torn" else kept.get(n, True)
            ),
        )


def replay(before: Tree, changes: list[Change], choose: Choose = lambda _: True) -> Tree:
    """Return what the disk holds if the chosen changes, by default all, reach it."""
    disk = _Disk(before)
    for number, change in enumerate(changes):
        if change.kind in _NAME:
            disk.change_names(change, kept=choose(number) is not False)
        elif change.kind in _FILE:
            disk.change_bytes(change, choose(number))
    return disk.tree()


Name = tuple[int, str]
"""Number of a directory in `_Disk`, and a name in it: so the names in a renamed directory stay what they are."""


class _Disk:
    def __init__(self, before: Tree) -> None:
        (self._base, _), *others = sorted(before.items())
        self._inodes: list[bytearray | str | None] = [None]
        # Processes see `_seen`, which may differ from the disk.
        self._seen: dict[Name, int] = {}
        for path, data in others:
            self._seen[self._name(path)] = self._new(bytearray(data) if isinstance(data, bytes) else data)
        self._kept = dict(self._seen)

    def _new(self, data: bytearray | str | None) -> int:
        self._inodes.append(data)
        return len(self._inodes) - 1

    def _name(self, path: str) -> Name:
        if not path.startswith(self._base + os.sep):
            raise NotImplementedError(f"{path}: moves and links from and to other directories are not modelled")
        *folders, name = os.path.relpath(path, self._base).split(os.sep)
        inode = 0
        for folder in folders:
            inode = self._known((inode, folder), path)
        return inode, name

    def _known(self, name: Name, path: str) -> int:
        if name not in self._seen:
            raise NotImplementedError(f"{path}: appeared without a traced system call")
        return self._seen[name]

    def _inode(self, path: str) -> int | None:
        return 0 if path == self._base else self._seen.get(self._name(path))

    def inode_to_sync(self, change: Change) -> int | None:
        """Return the number of the file or directory whose sync makes a change durable, or which a sync syncs."""
        if change.path == self._base and change.kind != "sync":
            return None
        if change.kind in _NAME:
            return self._name(change.target if change.kind in _MOVING else change.path)[0]
        return self._inode(change.path) if change.kind in _FILE | {"sync"} else None

    def change_names(self, change: Change, *, kept: bool) -> None:
        """Change names for processes, and on the disk if `kept`. The directory of the recording itself always stays."""
        if change.path == self._base and change.kind in {"mkdir", "rmdir"}:
            return
        name = self._name(change.path)
        if change.kind in _MAKING:
            contents = {"create": bytearray(), "mkdir": None, "symlink": change.target}
            inode = self._new(contents[change.kind])
        else:
            inode = self._known(name, change.path)
        for names in (self._seen, self._kept) if kept else (self._seen,):
            if change.kind in {"rename", "unlink", "rmdir"}:
                names.pop(name, None)
            if change.kind in _MOVING | _MAKING:
                names[self._name(change.target) if change.kind in _MOVING else name] = inode

    def change_bytes(self, change: Change, kept: bool | str | random.Random) -> None:
        data = self._inodes[self._inode(change.path) or 0]
        if not isinstance(data, bytearray) or kept is False:
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
        found: Tree = {self._base: None}
        inodes = {self._base: 0}
        children: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), inode in sorted(self._kept.items()):
            children.setdefault(folder, []).append((name, inode))
        waiting = [self._base]
        while waiting:
            path = waiting.pop()
            for name, inode in children.pop(inodes[path], ()):
                below = os.path.join(path, name)
                data = self._inodes[inode]
                found[below] = bytes(data) if isinstance(data, bytearray) else data
                inodes[below] = inode
                waiting.append(below)
        return found


def _digest(tree: Tree, marks: tuple[str, ...]) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for path, data in sorted(tree.items()):
        found.update(f"{path}\0{type(data).__name__}\0{len(data or '')}\0".encode(errors="surrogateescape"))
        found.update(data if isinstance(data, bytes) else os.fsencode(data or ""))
    found.update("\0".join(marks).encode())
    return found.digest()
