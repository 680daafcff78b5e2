"""Removal of parts of a checkpoint, such as its optimizer: what stays is a smaller checkpoint of the same save.

It is published like a save. Values that stay, but share a data file with others, are copied to a new file. Then the new
index replaces the old one, and the old files are removed. A crash leaves the old or the smaller checkpoint, and a save
marker, by which the next cleanup finds the files that belong to neither.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from dcp_io.archives.zip_format import ALIGNMENT_BYTES
from dcp_io.checkpoints.remove_checkpoint import ReadingSign, clear_dead_saves
from dcp_io.checkpoints.verify_checkpoint import PassingCrcs
from dcp_io.errors import SaveInProgressError
from dcp_io.saves.cleanup import STALE_AFTER_SECONDS, Current, index_digest, read_current
from dcp_io.saves.save_files import MARK_BYTES, data_mark
from dcp_io.saves.save_session import SaveSession
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.store import Store
from dcp_manifest.errors import CheckpointNotFoundError, UnsupportedFormatError
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.find_checkpoints import check_files
from dcp_manifest.folders.folder import (
    METADATA_NAME,
    NEXT_NOTE,
    data_file_name,
    data_file_prefix,
    rank_of_data_file,
)
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns, ManifestInfo, needed_bytes
from dcp_manifest.index.merge_indexes import take_tensors
from dcp_manifest.index.stored_items import join_items

_PIECE_BYTES = 4 << 20


def is_in(name: str, parts: Collection[str]) -> bool:
    """Whether a name is one of the parts, or below one: `model.bias` is in the part `model`."""
    return name in parts or any(prefix in parts for prefix in _prefixes(name))


@dataclass(slots=True)
class _Move:
    """Ranges of a data file that move to a new one: ascending, and apart."""

    file: str
    new_file: str = ""
    starts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    new_starts: list[int] = field(default_factory=list)
    new_bytes: int = MARK_BYTES
    """Size of the new file."""

    @classmethod
    def of(cls, file: str, ranges: Collection[tuple[int, int]]) -> _Move:
        move = cls(file)
        for start, stop in sorted(ranges):
            if move.stops and start <= move.stops[-1]:
                move.new_bytes += max(0, stop - move.stops[-1])
                move.stops[-1] = max(stop, move.stops[-1])
            else:  # aligned as before
                new_start = move.new_bytes + (start - move.new_bytes) % ALIGNMENT_BYTES
                move.starts.append(start)
                move.stops.append(stop)
                move.new_starts.append(new_start)
                move.new_bytes = new_start + stop - start
        return move

    def new_offset(self, offset: int) -> int:
        at = bisect_right(self.starts, offset) - 1
        return self.new_starts[at] + offset - self.starts[at]


class SmallerCheckpoint:
    """The checkpoint in a folder without some of its parts, before it is published.

    Args:
        store: The folder.
        keep: Parts that stay, such as `app.model`; empty for all that are not in `drop`.
        drop: Parts that are removed.

    Creating the object changes nothing.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        UnsupportedFormatError: Its files are on several hosts, of which none sees the others'.
        CorruptCheckpointError, UnsafeCheckpointError: The index is damaged or hostile.
    """

    def __init__(self, store: Store, *, keep: Collection[str] = (), drop: Collection[str] = ()) -> None:
        if isinstance(store, HostStore):
            raise UnsupportedFormatError(
                f"{store.url}: no part is removed from a checkpoint with files on several hosts"
            )
        current, self._state = _look(store)
        if current.damage is not None:
            current.damage.name_place(store.url)
            raise current.damage
        if current.index is None:
            raise CheckpointNotFoundError(f"there is no checkpoint in {store.url}: it has no complete index")
        self._store = store
        self.whole = current.index
        """The index of the checkpoint as it is."""

        asked, kept, dropped = dict.fromkeys((*keep, *drop)), {*keep}, {*drop}

        def stays(name: str) -> bool:
            return (not kept or is_in(name, kept)) and not is_in(name, dropped)

        all_names = self.whole.names()
        names = [*filter(stays, all_names)]
        self.parts = _parts_of({*all_names}.difference(names), names) if len(names) < len(all_names) else []
        """What is removed: names, or parts of which nothing stays."""
        info = self.whole.info or ManifestInfo("", 1, "")
        known = {*all_names}.union(*map(_prefixes, all_names))
        self.unknown = [part for part in asked if part not in known and info.why_missing(part) is None]
        """Parts that the checkpoint never had."""
        self.is_empty = not names
        """Whether nothing would stay."""
        self._index = _select(self.whole, stays) if self.parts else self.whole
        self._moves = _moves(self.whole, self._index) if self.parts else []

    @property
    def bytes(self) -> int:
        """How many bytes of data files are removed, less those that are copied first."""
        moved = {move.file: move.new_bytes for move in self._moves}
        sizes = needed_bytes(self.whole)
        return sum(size - moved.get(name, size * (name in self._index.files)) for name, size in sizes.items())

    def publish(self, *, by: str, stale_after_seconds: float = STALE_AFTER_SECONDS) -> None:
        """Replace the checkpoint by the smaller one; `by` says why, for messages about what it lacks.

        Without parts to remove, or if nothing would stay, the checkpoint is not changed. Leftovers of dead saves are
        removed in any case.

        Raises:
            SaveInProgressError: A process saves to the folder or reads the checkpoint, or it has changed since.
            CheckpointNotFoundError, CorruptCheckpointError: A file that stays is missing or short, or a value that must
                be copied is damaged.
            OSError: The storage failed.

        Ranks: one.
        """
        clear_dead_saves(self._store, stale_after_seconds=stale_after_seconds)
        if not self.parts or self.is_empty:
            return
        session = SaveSession.begin(self._store, stale_after_seconds=stale_after_seconds)
        try:
            self._refuse_use(stale_after_seconds)
            check_files(self._store, self._index)
            self._copy(session.save_id)
            old = (self.whole.info or _info_of_stock(self._store, self.whole)).without(self.parts, by)
            index = self._moved()
            index.info = replace(old, save_id=session.save_id, generation=session.generation)
            self._refuse_use(stale_after_seconds)  # again, since copying takes time
            session.publish(METADATA_NAME, encode(index))
        except BaseException:
            session.abort()
            raise
        session.finish(index.files)

    def _refuse_use(self, stale_after_seconds: float) -> None:
        url = self._store.url
        if ReadingSign.alive(self._store, stale_after_seconds=stale_after_seconds):
            raise SaveInProgressError(f"a process is reading {url}; wait for it")
        if self._store.exists(NEXT_NOTE):  # it names the index that its save replaces, which must not change
            raise SaveInProgressError(
                f"a save to {url} is about to begin, or was killed: it has left {NEXT_NOTE}. Wait for the save, or "
                "start the run's checkpoint manager, which removes what a killed save has left"
            )
        if _look(self._store)[1] != self._state:
            raise SaveInProgressError(f"another save has replaced the checkpoint in {url}: try again")

    def _copy(self, save_id: str) -> None:
        spans = PassingCrcs.spans_by_file(self._index)
        memory = memoryview(bytearray(min(_PIECE_BYTES, max((move.new_bytes for move in self._moves), default=0))))
        for number, move in enumerate(self._moves):
            move.new_file = data_file_name(data_file_prefix(rank_of_data_file(move.file) or 0), number, save_id)
            crcs = PassingCrcs(move.file, spans.get(move.file, []))
            with contextlib.closing(self._store.open(move.file)) as source, self._store.create(move.new_file) as sink:
                gap: bytes = data_mark(save_id)
                end = MARK_BYTES
                for start, stop, new_start in zip(move.starts, move.stops, move.new_starts, strict=True):
                    gap += bytes(new_start - end)
                    for position in range(start, stop, _PIECE_BYTES):
                        piece = memory[: min(_PIECE_BYTES, stop - position)]
                        source.read_into(position, [piece])
                        crcs.take(position, piece)
                        sink.write([gap, piece])
                        gap = b""
                    end = new_start + stop - start
                sink.write([gap])  # before values without bytes
        if self._moves:
            self._store.sync_folder()

    def _moved(self) -> CheckpointIndex:
        new = {move.file: move.new_file for move in self._moves}
        moves = {self._index.files.index(move.file): move for move in self._moves}

        def moved(items: ItemColumns | None) -> ItemColumns | None:
            if items is None:
                return items
            places = zip(items.file.tolist(), items.offset.tolist(), strict=True)
            offsets = [moves[file].new_offset(offset) if file in moves else offset for file, offset in places]
            return replace(items, offset=np.array(offsets, np.uint64))

        return replace(
            self._index,
            files=tuple(new.get(name, name) for name in self._index.files),
            chunk_items=moved(self._index.chunk_items),
            object_items=moved(self._index.object_items),
        )


def _select(index: CheckpointIndex, stays: Callable[[str], bool]) -> CheckpointIndex:
    rows = {row: name for row, name in enumerate(index.tensor_names) if stays(name)}
    aliases = {}
    for name, target in zip(index.alias_names, index.alias_targets.tolist(), strict=True):
        if stays(name):
            if target in rows:
                aliases[name] = target
            else:  # the tensor stays under the name of its first alias
                rows[target] = name
    chosen = sorted(rows)
    small = take_tensors(index, np.array(chosen, np.int64))
    small.tensor_names = [rows[row] for row in chosen]
    small.alias_names = [*aliases]
    small.alias_targets = np.searchsorted(chosen, [*aliases.values()]).astype(np.uint32)
    objects = [row for row, name in enumerate(index.object_names) if stays(name)]
    small.object_names = [index.object_names[row] for row in objects]
    small.object_owner = index.object_owner[objects]
    if index.object_items is not None:
        small.object_items = join_items([index.object_items], np.array(objects, np.int64))
    if index.paths is not None:
        small.paths = {name: path for name, path in index.paths.items() if stays(name)}
    tables = [items for items in (small.chunk_items, small.object_items) if items is not None]
    used = sorted({file for items in tables for file in items.file.tolist()})
    small.files = tuple(index.files[file] for file in used)
    rank = np.zeros(len(index.files), np.uint32)
    rank[used] = np.arange(len(used), dtype=np.uint32)
    for items in tables:
        items.file = rank[items.file]
    return small


def _moves(old: CheckpointIndex, new: CheckpointIndex) -> list[_Move]:
    """Return the moves out of the files that would otherwise keep bytes of removed values."""
    before, after = _ranges(old), _ranges(new)
    return [_Move.of(name, after[name]) for name in new.files if after[name] != before[name]]


def _ranges(index: CheckpointIndex) -> dict[str, set[tuple[int, int]]]:
    found: dict[str, set[tuple[int, int]]] = {name: set() for name in index.files}
    for items in (index.chunk_items, index.object_items):
        if items is not None:
            columns = (items.file.tolist(), items.offset.tolist(), (items.offset + items.length).tolist())
            for file, start, stop in zip(*columns, strict=True):
                found[index.files[file]].add((start, stop))
    return found


def _parts_of(gone: Collection[str], stay: Collection[str]) -> list[str]:
    """Return the shortest names or prefixes of them that cover all names in `gone` and none in `stay`."""
    inner = {prefix for name in stay for prefix in _prefixes(name)}
    found = (next((prefix for prefix in _prefixes(name) if prefix not in inner), name) for name in sorted(gone))
    return [*dict.fromkeys(found)]


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (prefix for end in range(1, len(parts) + 1) if (prefix := ".".join(parts[:end])))


def _look(store: Store) -> tuple[Current, object]:
    """Return the checkpoint, and a state that differs after any other save.

    PyTorch's saves use the same file names again, write no marker, and have no id.
    """
    entries, digest = store.list(), index_digest(store, [METADATA_NAME])  # before the index is read
    current = read_current(store, entries)
    files = {*current.index.files} if current.index is not None else set[str]()
    info = current.index.info if current.index is not None else None
    return current, (info, digest, {entry for entry in entries if entry.name in files})


def _info_of_stock(store: Store, index: CheckpointIndex) -> ManifestInfo:
    """Return facts about a checkpoint of PyTorch's, whose index has none; its digest is the id."""
    ranks = max((rank_of_data_file(name) or 0 for name in index.files), default=0) + 1
    written = next((entry.mtime for entry in store.list() if entry.name == METADATA_NAME), 0.0)
    digest = index_digest(store, [METADATA_NAME])
    return ManifestInfo(digest, ranks, "torch.distributed.checkpoint", created_ns=int(written * 1e9))
