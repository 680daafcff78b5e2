"""Summaries of the checkpoints under a folder, without reading their data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dcp_base.schemes import without_end_slash
from dcp_inspect.arguments import existing_folder, is_uri
from dcp_inspect.errors import known
from dcp_inspect.printing.output import age
from dcp_inspect.removal import unfinished_save
from dcp_inspect.visuals.progress_bar import count_listed
from dcp_io import find_checkpoints, open_store, verify_checkpoint
from dcp_io.roots.records import read_note
from dcp_io.stores.root import root_at
from dcp_manifest import (
    CheckpointIndex,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FoundCheckpoint,
    LocalFolder,
    UnsafeCheckpointError,
    UnsupportedFormatError,
    checkpoints_below,
    index_of,
)
from dcp_manifest.folders.find_checkpoints import file_sizes
from dcp_manifest.folders.folder import METADATA_NAME, NOTE, QUARANTINE, parse_quarantine, rank_of_data_file
from dcp_manifest.index.columns import needed_bytes

T = TypeVar("T")

# These errors report a state of the checkpoint; after every other error, the state is unknown.
_DAMAGE = (CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError)


@dataclass(frozen=True, slots=True)
class Notes:
    """Contents of the note files next to a checkpoint."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    keeps_best: str = ""
    """The run's policies for its best checkpoints."""
    quarantine: str | None = None
    quarantined_seconds: float | None = None
    """Time since the epoch; None if unknown."""

    @property
    def quarantine_text(self) -> str | None:
        """The quarantine in words."""
        if self.quarantine is None:
            return None
        when = self.quarantined_seconds
        return f"quarantined{'' if when is None else f' {age(time.time() - when)} ago'}: {self.quarantine}"

    def as_json(self) -> dict[str, object]:
        """Return JSON data."""
        quarantine = {"reason": self.quarantine, "found_seconds": self.quarantined_seconds}
        return {"metrics": dict(self.metrics), "quarantine": None if self.quarantine is None else quarantine}


@dataclass(frozen=True, slots=True)
class Listed:
    """Summary of one checkpoint or unreadable folder."""

    path: str
    step: int | None
    """From the folder's name or the manager's note."""
    modified_seconds: float
    bytes: int = 0
    """Of the index and the data files."""
    values: int | None = None
    world_size: int | None = None
    problem: str | None = None
    """None for a complete checkpoint."""
    writer: str | None = None
    save_id: str | None = None
    created_ns: int | None = None
    """Start time of the save."""
    unfinished: bool = False
    """Whether the save is running or failed, without an index."""
    unreadable: bool = False
    """Whether the state is unknown."""
    notes: Notes = field(default_factory=Notes)

    @property
    def complete(self) -> bool:
        """Whether the index is readable and the files have full length."""
        return self.problem is None

    def as_json(self) -> dict[str, object]:
        """Return JSON data."""
        names = (
            *("path", "step", "bytes", "values", "world_size", "modified_seconds", "complete", "problem", "writer"),
            *("save_id", "created_ns", "unfinished", "unreadable"),
        )
        return {**{name: getattr(self, name) for name in names}, **self.notes.as_json()}


def find(path: str, *, unfinished: bool = False) -> list[FoundCheckpoint[Any]]:
    """Return the checkpoints in a directory or URI and below, newest first; on request, unfinished saves.

    A directory that cannot be listed is returned with the reason. A file such as `run.tiers.toml` stands for all its
    places.
    """
    described = root_at(path)
    if described is not None:
        return find_checkpoints(described, unfinished=unfinished, unreadable=True)
    # Folders need none of the stores' engines.
    root: Any = open_store(path) if is_uri(path) else LocalFolder(existing_folder(path))
    return checkpoints_below(root, unfinished=unfinished, unreadable=True)


def look_at_all(found: Sequence[FoundCheckpoint[Any]], path: str) -> Iterator[Listed]:
    """Yield the checkpoints' summaries, with a progress bar."""
    return map(look_at, count_listed(found, path))


def look_at(found: FoundCheckpoint[Any]) -> Listed:
    """Summarise a checkpoint; never raises for a failing storage."""
    try:
        return _look_at(found)
    except Exception as error:  # noqa: BLE001 - bugs are raised again
        path = without_end_slash(found.store.url)
        problem = known(error)[1].removeprefix(f"{found.store.url}: ")
        unreadable = not isinstance(error, _DAMAGE)
        if unreadable and not problem.startswith("cannot be read"):
            problem = f"cannot be read: {problem}"
        return Listed(
            path,
            found.step,
            found.modified_seconds,
            bytes=_if_readable(lambda: _bytes_in(found.store), 0),
            problem=problem,
            unreadable=unreadable,
            notes=_if_readable(lambda: notes_on(found), Notes()),
        )


def _look_at(found: FoundCheckpoint[Any]) -> Listed:
    store = found.store
    path, step, modified = without_end_slash(store.url), found.step, found.modified_seconds
    if found.unreadable is not None:
        return Listed(path, step, modified, problem=f"cannot be read: {found.unreadable}", unreadable=True)
    if found.unfinished:
        folder = open_store(path)
        problem: str | None = unfinished_save(folder).summary
        return Listed(path, step, modified, _bytes_in(folder), problem=problem, unfinished=True)
    index = index_of(store)
    needed = needed_bytes(index)
    sizes = file_sizes(store, {METADATA_NAME: 0, **needed})
    notes = notes_on(found)
    problem = notes.quarantine_text or found.put_aside or _first_problem(needed, sizes)
    info = index.info
    return Listed(
        path=path,
        step=step,
        modified_seconds=modified,
        bytes=sum(size or 0 for size in sizes.values()),
        values=len(index.tensor_names) + len(index.object_names) + len(index.alias_names),
        world_size=info.world_size if info else _world_size(index),
        problem=problem,
        writer=info.writer if info else "torch.distributed.checkpoint",
        save_id=info.save_id if info else None,
        created_ns=(info.created_ns or None) if info else None,
        notes=notes,
    )


def first_damage(path: str) -> tuple[str | None, bool]:
    """Read all of a checkpoint; return the first problem, and whether it is that it cannot be read."""
    try:
        problems = verify_checkpoint(open_store(path), threads=len(os.sched_getaffinity(0))).problems
    except Exception as error:  # noqa: BLE001 - bugs are raised again
        return f"cannot be read: {known(error)[1]}", True
    return (str(problems[0]) if problems else None), False


def notes_on(found: FoundCheckpoint[Any]) -> Notes:
    """Read the notes next to a checkpoint."""
    note = read_note(found.store, NOTE) if NOTE in found.notes else None
    noted = Notes() if note is None else Notes(note.metrics, note.keeps_best)
    if QUARANTINE not in found.notes:
        return noted
    try:
        data = found.store.read(QUARANTINE)
    except CheckpointNotFoundError:  # lifted meanwhile
        return noted
    reason, seconds = parse_quarantine(data)
    return replace(noted, quarantine=reason, quarantined_seconds=seconds)


def _if_readable(read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - bugs are raised again
        known(error)
        return otherwise


def _bytes_in(folder: Any) -> int:
    return sum(entry.bytes for entry in folder.list())


def _first_problem(needed: Mapping[str, int], sizes: Mapping[str, int | None]) -> str | None:
    for name, wanted in needed.items():
        size = sizes[name]
        if size is None:
            return f"{name} is missing"
        if size < wanted:
            return f"{name} has {size:,} of {wanted:,} bytes"
    return None


def _world_size(index: CheckpointIndex) -> int | None:
    ranks = [rank for name in index.files if (rank := rank_of_data_file(name)) is not None]
    return max(ranks) + 1 if ranks else None
