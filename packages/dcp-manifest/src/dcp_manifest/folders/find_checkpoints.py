"""Search for checkpoints: all checkpoints below a folder, the newest valid checkpoint, the current index of a folder.

One implementation serves every store and `LocalFolder`, through the `Folder` protocol. `index_choice` chooses between
index files, `checkpoint_order` orders checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import numpy as np

from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, DcpError
from dcp_manifest.folders.checkpoint_order import Place, newest_first
from dcp_manifest.folders.file_names import DATA_SUFFIX, METADATA_NAME, SAVE_MARKER_PREFIX, is_index_name
from dcp_manifest.folders.folder import Entry, Folder, LocalFolder
from dcp_manifest.folders.folder_notes import NOTE, noted_step, put_aside_reason
from dcp_manifest.folders.index_choice import choose_index
from dcp_manifest.index.columns import CheckpointIndex

__all__ = [
    "FoundCheckpoint",
    "check_files",
    "checkpoints_below",
    "current_index",
    "file_sizes",
    "first_valid",
    "index_of",
    "merge_places",
    "needed_bytes",
    "noted_step_of",
]

F = TypeVar("F", bound=Folder)
Path_ = str | os.PathLike[str]
# An index may be replaced between listing and reading, repeatedly.
_TRIES = 5
# A note contains a step, a few metrics and a process; a larger file is not a note.
_NOTE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FoundCheckpoint(Generic[F]):
    """A checkpoint that a search found: a folder with an index; on request, also one with data files and no index."""

    store: F
    """Folder of the checkpoint: a store of `dcp_io`, or a `LocalFolder`."""
    modified_seconds: float
    """Modification time of the latest index, seconds since the epoch on the storage's clock. Copying may change it."""
    place: Place = field(default_factory=Place)
    """Location of the checkpoint below the searched folder, with its training step."""
    put_aside: str | None = None
    """Reason why readers should skip the checkpoint although it has an index (quarantined, being removed), or None."""
    unfinished: bool = False
    """Whether there are files of a save and no index: the save is still running, or it did not finish."""

    @property
    def step(self) -> int | None:
        """Training step, from the name of the folder or of a parent, or from the manager's note; None if unknown."""
        return self.place.step

    @property
    def path(self) -> Path:
        """Local path of the checkpoint's folder. Raises TypeError if it is on another storage: use `store.url` then."""
        if not isinstance(self.store, os.PathLike):
            raise TypeError(f"{self.store.url} is not a folder of the file system: use .store, or .store.url as an id")
        return Path(self.store)


def checkpoints_below(root: F, *, unfinished: bool = False) -> list[FoundCheckpoint[F]]:
    """Return the checkpoints in a folder and its subfolders, newest first; see `checkpoint_order.newest_first`.

    Indexes are read only if steps do not decide: for several runs, equal steps, or checkpoints without a step.

    Args:
        root: The folder to search, which may be missing. Symbolic links below it are not followed. Subfolders without
            permission to list them are skipped.
        unfinished: Whether to return also folders with files of a save that has not published an index.

    Raises:
        OSError: The storage failed, or there is no permission to list `root`.
    """
    return _newest_first([one for one in _walk(root) if unfinished or not one.unfinished])


def _walk(root: F) -> Iterator[FoundCheckpoint[F]]:
    """Yield the checkpoints and unfinished saves below a folder, sorted by name."""
    waiting: list[tuple[tuple[str, ...], F, bool]] = [((), root, False)]
    while waiting:
        parts, folder, inside = waiting.pop()
        try:
            entries, below = folder.list(), folder.folders()
        except PermissionError:
            if not parts:
                raise
            continue
        times = [entry.mtime for entry in entries if is_index_name(entry.name)]
        # The folders within a checkpoint may hold its data files.
        saved = [] if times or inside else [entry.mtime for entry in entries if _is_of_save(entry.name)]
        if times or saved:
            put_aside = put_aside_reason({entry.name for entry in entries})
            place = _place(folder, parts, entries)
            yield FoundCheckpoint(folder, max(times or saved), place, put_aside, unfinished=not times)
        inside = inside or bool(times)
        waiting += [((*parts, name), cast(F, folder.child(name)), inside) for name in reversed(below)]


def _is_of_save(name: str) -> bool:
    return name.endswith(DATA_SUFFIX) or name.startswith(SAVE_MARKER_PREFIX)


def _place(folder: Folder, parts: tuple[str, ...], entries: Sequence[Entry]) -> Place:
    # For a checkpoint directly in the searched folder, that folder's own name counts.
    where = Place.of(parts or (os.path.basename(os.path.abspath(folder.url)),))
    if where.step is None:
        where = Place.of(where.parts, _noted_step(folder, entries))
    return where if parts else Place(step=where.step)


def noted_step_of(found: FoundCheckpoint[Any]) -> int | None:
    """Return the step in the manager's note on a checkpoint; None if there is no readable note."""
    return _noted_step(found.store, found.store.list())


def _noted_step(folder: Folder, entries: Sequence[Entry]) -> int | None:
    if not any(entry.name == NOTE and entry.bytes <= _NOTE_BYTES for entry in entries):
        return None
    try:
        return noted_step(folder.read(NOTE))
    except (DcpError, OSError):  # removed meanwhile, or unreadable: the note is optional
        return None


def merge_places(places: Sequence[Sequence[FoundCheckpoint[F]]]) -> list[FoundCheckpoint[F]]:
    """Return the checkpoints of several folders, which hold copies of one run's checkpoints, newest first.

    Of copies of one save, that of the earlier folder comes first; of different saves of one step, the later save.

    Args:
        places: Results of `checkpoints_below`, by descending preference of their folders.
    """
    number = {one.store.url: number for number, found in enumerate(places) for one in found}
    return _newest_first([one for found in places for one in found], lambda url: -number[url])


def _newest_first(
    found: list[FoundCheckpoint[F]], preference: Callable[[str], int] = lambda _: 0
) -> list[FoundCheckpoint[F]]:
    known: dict[str, tuple[int, int, float, str]] = {}

    def made(one: FoundCheckpoint[F]) -> tuple[int, int, float, str]:
        url = one.store.url
        if url not in known:
            created_ns = _created_ns(one.store) or int(one.modified_seconds * 1e9)
            known[url] = (created_ns, preference(url), one.modified_seconds, url)
        return known[url]

    return newest_first(found, lambda one: one.place, made)


def _created_ns(folder: Folder) -> int:
    """Return the start time of a checkpoint's save from its index, in ns; 0 if unknown."""
    try:
        info = index_of(folder).info
    except (DcpError, OSError):
        return 0
    return 0 if info is None else info.created_ns


def first_valid(
    found: Sequence[FoundCheckpoint[F]], check: Callable[[FoundCheckpoint[F]], None]
) -> FoundCheckpoint[F] | None:
    """Return the first checkpoint that is valid; None if none is.

    Valid is a checkpoint that is not put aside (quarantined, being removed), and for which `check` raises neither
    DcpError nor OSError.
    """
    for one in found:
        if one.put_aside is not None:
            continue
        try:
            check(one)
        except (DcpError, OSError):
            continue
        return one
    return None


def index_of(folder: Path_ | Folder) -> CheckpointIndex:
    """Return the newest complete index in a folder; see `choose_index`.

    Raises:
        CheckpointNotFoundError: There is no complete index; the message names the folder.
        CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError: The index is damaged, hostile, or of an
            unknown format; the message names the folder.
    """
    place = _opened(folder)
    try:
        index = current_index(place)
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"there is no checkpoint in {place.url}: {error}") from error
    except DcpError as error:
        error.name_place(place.url)
        raise
    if index is None:
        raise CheckpointNotFoundError(
            f"there is no checkpoint in {place.url}: it has no {METADATA_NAME}; check the path"
        )
    return index


def current_index(folder: Folder, entries: Sequence[Entry] | None = None) -> CheckpointIndex | None:
    """Return the newest complete index in a folder; None if the folder has no index file.

    Args:
        folder: The checkpoint's folder.
        entries: Listing of the folder, if the caller has a fresh one; None lists the folder.

    Raises:
        CheckpointNotFoundError: There are indexes, but none is complete; the message names the ranks whose indexes are
            missing.
        CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError: The newest index cannot be read.
        OSError: The storage failed.
    """
    for _ in range(_TRIES):
        times = _index_times(folder.list() if entries is None else entries)
        if not times:
            return None
        try:
            return choose_index(times, folder.read)
        except CheckpointNotFoundError:
            # No set is complete, or a file was removed between listing and reading.
            entries = folder.list()
            if _index_times(entries).keys() == times.keys():
                raise
    return None


def _index_times(entries: Sequence[Entry]) -> dict[str, float]:
    return {entry.name: entry.mtime for entry in entries if is_index_name(entry.name)}


def check_files(folder: Path_ | Folder, index: CheckpointIndex) -> None:
    """Check that the data files of a checkpoint exist and are long enough, without reading them.

    Args:
        folder: The checkpoint's folder: a local path, or a `Folder` such as a store.
        index: Index of the checkpoint.

    Raises:
        CheckpointNotFoundError: A data file is missing; the message names it.
        CorruptCheckpointError: A data file is too short; the message names it.
    """
    place = _opened(folder)
    needed = needed_bytes(index)
    for name, size in file_sizes(place, needed).items():
        if size is None:
            raise CheckpointNotFoundError(f"the data file {name} in {place.url} is missing; restore it from a copy")
        if size < needed[name]:
            raise CorruptCheckpointError(
                f"the data file in {place.url} has {size} bytes and the index needs {needed[name]}", file=name
            )


def file_sizes(folder: Folder, needed: Mapping[str, int]) -> dict[str, int | None]:
    """Return the name of each data file → its size in bytes, or None for a missing file.

    Args:
        folder: The checkpoint's folder.
        needed: Result of `needed_bytes` for the checkpoint's index.

    Raises:
        CorruptCheckpointError, UnsafeCheckpointError: Something other than a file, such as a folder, has the name of a
            data file.
        OSError: The storage failed.
    """
    sizes: dict[str, int | None] = {entry.name: entry.bytes for entry in folder.list()}
    for name, wanted in needed.items():
        listed = sizes.get(name)
        if listed is None or listed < wanted:  # it is in a subfolder, or a link, which is listed with its own length
            try:
                sizes[name] = folder.size(name)
            except CheckpointNotFoundError:
                sizes[name] = None
    return {name: sizes[name] for name in needed}


def needed_bytes(index: CheckpointIndex) -> dict[str, int]:
    """Return the minimum size of each data file in bytes: the end of the last item in the file."""
    ends = np.zeros(len(index.files), np.uint64)
    for items in (index.chunk_items, index.object_items):
        if items is not None:
            np.maximum.at(ends, items.file, items.offset + items.length)
    return dict(zip(index.files, ends.tolist(), strict=True))


def _opened(folder: Path_ | Folder) -> Folder:
    return folder if isinstance(folder, Folder) and not isinstance(folder, str) else LocalFolder(folder)
