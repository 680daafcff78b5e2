"""A byte backend and storages in memory: what the tests of planners and of `save`/`load` run on, without any files.

Not a storage for users: nothing is durable, and ranks of different processes do not see each other's folders.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

from dcp_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_manifest import METADATA_NAME, CheckpointIndex, choose_index
from dcp_manifest.index.items import StoredItem
from dcp_manifest.requests import ReadRequest, ReadStats, Writable

__all__ = ["FOLDERS", "MemoryBackend", "MemoryReader", "MemoryWriter"]

FOLDERS: dict[str, dict[str, bytes]] = defaultdict(dict)
"""Folder → name → bytes, of this process."""

_PIECE_BYTES = 1 << 16
_save_ids = itertools.count(1)


class MemoryBackend:
    """A folder in this process's memory; satisfies `dcp_core.ByteBackend`."""

    def __init__(self, folder: str) -> None:
        self.url = f"memory:{folder}"
        self.generation = 1
        self.changed_keys: set[str] = set()
        self._files = FOLDERS[folder]
        self._save_id = ""

    def begin_save(self, *, overwrite: bool, save_id: str | None = None) -> str:
        """A new save id."""
        del save_id
        if not overwrite and METADATA_NAME in self._files:
            raise FileExistsError(self.url)
        self._save_id = f"save{next(_save_ids)}"
        return self._save_id

    def join_save(self, save_id: str) -> None:
        """Remember the id."""
        self._save_id = save_id

    def begin_rank_local_save(self, save_id: str, rank: int, *, overwrite: bool) -> None:
        """Remember the id."""
        del rank, overwrite
        self._save_id = save_id

    def write(self, requests: Sequence[Writable], *, prefix: str, save_id: str) -> list[StoredItem]:
        """Payloads back to back in one file."""
        name = f"{prefix}0.{save_id}.distcp"
        data = bytearray()
        items = []
        for request in requests:
            payload = request.resolve()
            start, crc = len(data), 0
            source = payload.data
            for piece in (source,) if isinstance(source, bytes | memoryview) else source.pieces(_PIECE_BYTES):
                data += piece
                crc = zlib.crc32(piece, crc)
            size = len(data) - start
            items.append(StoredItem(name, start, size, 0, size, payload.framing, crc))
        self._files[name] = bytes(data)
        return items

    def publish(self, name: str, data: bytes) -> None:
        """Set the file."""
        self._files[name] = data

    def finish_save(self, keep: Collection[str]) -> None:
        """Remove data files that are not in `keep`."""
        for name in [name for name in self._files if name.endswith(".distcp") and name not in keep]:
            del self._files[name]

    def abort_save(self) -> None:
        """Remove the data files of the save."""
        for name in [name for name in self._files if f".{self._save_id}.distcp" in name]:
            del self._files[name]

    def read_index(self) -> CheckpointIndex:
        """The index in the folder."""
        names = {name: 0.0 for name in self._files if name.endswith(METADATA_NAME)}
        if not names:
            raise CheckpointNotFoundError(f"there is no checkpoint in {self.url}")
        return choose_index(names, self._files.__getitem__)

    def read(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Check each whole item, hand over the range."""
        total = 0
        self.changed_keys = set()
        for request in requests:
            item = request.item
            if item.file not in self._files:
                raise CheckpointNotFoundError(f"{self.url}/{item.file} is missing")
            start = item.offset + item.lead
            stored = self._files[item.file][start : start + item.stored_bytes]
            if zlib.crc32(stored) != item.crc32:
                raise CorruptCheckpointError("wrong bytes", file=item.file, key=request.key, offset=start)
            part = bytearray(stored[request.start : request.stop])
            total += len(part)
            self.changed_keys.add(request.key)
            if request.into is not None:
                request.into[:] = part
            if request.piece is not None:
                request.piece(request.start, memoryview(part))
            if request.done is not None:
                request.done(memoryview(part))
        return ReadStats(total)


class MemoryWriter(ByteStorageWriter):
    """Saves to a folder in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> Any:
        return MemoryBackend(str(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Any id will do."""
        return bool(str(checkpoint_id))


class MemoryReader(ByteStorageReader):
    """Loads from a folder in memory."""

    def _open(self, checkpoint_id: CheckpointId) -> Any:
        return MemoryBackend(str(checkpoint_id))
