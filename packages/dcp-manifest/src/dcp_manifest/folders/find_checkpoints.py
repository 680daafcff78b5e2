"""Search for checkpoints below a `Folder`."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar, cast

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.folders.checkpoint_order import Place, newest_first
from dcp_manifest.folders.folder import (
    DATA_SUFFIX,
    METADATA_NAME,
    NOTE,
    QUARANTINE,
    SAVE_MARKER_PREFIX,
    Entry,
    Folder,
    FolderTree,
    LocalFolder,
    is_index_name,
    noted_step,
    put_aside_reason,
)
from dcp_manifest.folders.index_choice import current_index
from dcp_manifest.index.columns import CheckpointIndex, needed_bytes

_log = library_logger(__name__)

F = TypeVar("F", bound=Folder)
T = TypeVar("T", bound=FolderTree)
Path_ = str | os.PathLike[str]
# A note contains a step, a few metrics and a process; a larger file is not a note.
_NOTE_BYTES = 1 << 20
# Folder of ext4 and XFS at the root of a disk, for the administrator alone: it never holds checkpoints.
_LOST_AND_FOUND = "lost+found"


@dataclass(frozen=True, slots=True)
class FoundCheckpoint(Generic[F]):
    """A folder with an index; on request, also one with data files and no index."""

    store: F
    """A store of `dcp_io`, or a `LocalFolder`."""
    modified_seconds: float
    """Modification time of the latest index, seconds since the epoch on the storage's clock."""
    place: Place = field(default_factory=Place)
    put_aside: str | None = None
    """Why readers should skip the checkpoint, or None."""
    unfinished: bool = False
    """Whether a save has written files and no index: it is running, or did not finish."""
    unreadable: str | None = None
    """Why the folder cannot be listed."""
    notes: frozenset[str] = frozenset()
    """Names of note and quarantine files."""

    @property
    def step(self) -> int | None:
        """Training step, from the name of the folder or a parent, or from the manager's note."""
        return self.place.step

    def noted_step(self) -> int | None:
        """Read the step in the manager's note."""
        return _noted_step(self.store, self.store.list())

    def links(self) -> list[str]:
        """Return the names of symbolic links next to the step's local folder that point to or into it."""
        if not isinstance(self.store, os.PathLike):
            return []
        inner = self.place.parts[len(self.place.folder) :]
        path = os.path.realpath(os.path.join(self.store, *[os.pardir for _ in inner]))
        with os.scandir(os.path.dirname(path)) as found:
            links = {item.name: os.path.realpath(item.path) for item in found if item.is_symlink()}
        return sorted(name for name, target in links.items() if os.path.commonpath([path, target]) == path)

    @property
    def path(self) -> Path:
        """Local path of the folder. Raises TypeError on another storage: use `store.url` then."""
        if not isinstance(self.store, os.PathLike):
            raise TypeError(
                f"{self.store.url} is not a directory of the file system: use .store, or .store.url as an id"
            )
        return Path(self.store)


def checkpoints_below(root: T, *, unfinished: bool = False, unreadable: bool = False) -> list[FoundCheckpoint[T]]:
    """Return the checkpoints in a folder and its subfolders, newest first; see `checkpoint_order.newest_first`.

    Indexes are read only if steps do not decide: for several runs, equal steps, or checkpoints without a step.

    Args:
        root: Folder to search, which may be missing. Symbolic links below it are not followed.
        unfinished: Whether to return also folders with files of a save that has not published an index.
        unreadable: Whether to return also subfolders that cannot be listed. Otherwise a subfolder without permission is
            skipped with a warning, and any other failure is raised.

    Raises OSError if the storage failed, or this process may not list `root`.
    """
    found = []
    for one in _walk(root, unreadable=unreadable):
        if one.unreadable is not None and not unreadable:
            _log.warning("checkpoints in it, if any, are not counted: %s", one.unreadable)
        elif unfinished or not one.unfinished:
            found.append(one)
    return _newest_first(found)


def some_below(root: T, *, most_folders: int = 200) -> list[FoundCheckpoint[T]]:
    """Search the first folders of a tree, for error messages."""
    found = _walk(root, unreadable=True, most_folders=most_folders)
    return _newest_first([one for one in found if not one.unfinished and one.unreadable is None])


def _walk(root: T, *, unreadable: bool, most_folders: float = math.inf) -> Iterator[FoundCheckpoint[T]]:
    waiting: list[tuple[tuple[str, ...], T, bool]] = [((), root, False)]
    visited = 0
    while waiting and visited < most_folders:
        visited += 1
        parts, folder, inside = waiting.pop()
        try:
            entries, below = folder.list(), folder.folders()
        except Exception as error:  # clients of storages raise errors of all kinds
            if not parts or not (unreadable or isinstance(error, PermissionError)):
                raise
            if parts[-1] != _LOST_AND_FOUND:
                kind = "" if isinstance(error, DcpError | OSError) else f"{type(error).__name__}: "
                yield FoundCheckpoint(folder, 0.0, Place.of(parts), unreadable=f"{kind}{error}")
            continue
        times = [entry.mtime for entry in entries if is_index_name(entry.name)]
        # The folders within a checkpoint may hold its data files.
        saved = [] if times or inside else [entry.mtime for entry in entries if _is_of_save(entry.name)]
        if times or saved:
            names = {entry.name for entry in entries}
            place, notes = _place(folder, parts, entries), frozenset(names & {NOTE, QUARANTINE})
            put_aside = put_aside_reason(names)
            yield FoundCheckpoint(folder, max(times or saved), place, put_aside, unfinished=not times, notes=notes)
        inside = inside or bool(times)
        waiting += [((*parts, name), cast(T, folder.child(name)), inside) for name in reversed(below)]


def _is_of_save(name: str) -> bool:
    return name.endswith(DATA_SUFFIX) or name.startswith(SAVE_MARKER_PREFIX)


def _place(folder: Folder, parts: tuple[str, ...], entries: Sequence[Entry]) -> Place:
    # For a checkpoint directly in the searched folder, that folder's own name counts.
    where = Place.of(parts or (os.path.basename(os.path.abspath(folder.url)),))
    if where.step is None:
        where = Place.of(where.parts, _noted_step(folder, entries))
    return where if parts else Place(step=where.step)


def _noted_step(folder: Folder, entries: Sequence[Entry]) -> int | None:
    if not any(entry.name == NOTE and entry.bytes <= _NOTE_BYTES for entry in entries):
        return None
    try:
        return noted_step(folder.read(NOTE))
    except (DcpError, OSError):  # removed meanwhile, or unreadable: the note is optional
        return None


def merge_places(places: Sequence[Sequence[FoundCheckpoint[F]]]) -> list[FoundCheckpoint[F]]:
    """Merge the checkpoints of several folders with copies of one run, newest first.

    Copies of one save stay in the order of folders; of different saves of one step, the later save precedes.
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
    try:
        info = index_of(folder).info
    except (DcpError, OSError):
        return 0
    return 0 if info is None else info.created_ns


def first_valid(
    found: Sequence[FoundCheckpoint[F]], check: Callable[[FoundCheckpoint[F]], None]
) -> FoundCheckpoint[F] | None:
    """Return the first checkpoint that passes a check; each skipped one is logged.

    Checkpoints that are put aside are skipped, and those for which `check` raises DcpError or OSError.
    """
    for one in found:
        if one.put_aside is not None:
            _log.info("%s is passed over: %s", one.store.url, one.put_aside)
            continue
        try:
            check(one)
        except (DcpError, OSError) as error:
            _log.warning("%s is passed over: %s", one.store.url, error)
            continue
        return one
    return None


def index_of(folder: Path_ | Folder) -> CheckpointIndex:
    """Return the newest complete index in a folder.

    Raises the errors of `choose_index`, with the folder's name in the message.
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


def check_files(folder: Path_ | Folder, index: CheckpointIndex, *, may_lack: bool = False) -> None:
    """Check that a checkpoint's data files exist (unless it `may_lack` some) and are long enough; reads none.

    Raises CheckpointNotFoundError for a missing file, CorruptCheckpointError for a short one; the message names it.
    """
    place = _opened(folder)
    needed = needed_bytes(index)
    for name, size in file_sizes(place, needed).items():
        if size is None:
            if may_lack:
                continue
            raise CheckpointNotFoundError(f"the data file {name} in {place.url} is missing; restore it from a copy")
        if size < needed[name]:
            raise CorruptCheckpointError(
                f"the data file in {place.url} has {size} bytes and the index needs {needed[name]}", file=name
            )


def file_sizes(folder: Folder, needed: Mapping[str, int]) -> dict[str, int | None]:
    """Return each data file's size in bytes, or None for a missing file; `needed` is the result of `needed_bytes`.

    Raises CorruptCheckpointError or UnsafeCheckpointError for anything other than a file, OSError if the storage
    failed.
    """
    sizes: dict[str, int | None] = {entry.name: entry.bytes for entry in folder.list()}
    for name, wanted in needed.items():
        listed = sizes.get(name)
        if listed is None or listed < wanted:  # in a subfolder, or a link, whose listed length is its own
            try:
                sizes[name] = folder.size(name)
            except CheckpointNotFoundError:
                sizes[name] = None
    return {name: sizes[name] for name in needed}


def _opened(folder: Path_ | Folder) -> Folder:
    return folder if isinstance(folder, Folder) and not isinstance(folder, str) else LocalFolder(folder)
