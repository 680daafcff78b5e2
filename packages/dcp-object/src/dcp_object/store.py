"""`ObjectStore`: a folder in a container of an object store, as a `dcp_io.Store`."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from dcp_io import Entry, Place, Sink, Source, StorageError, SupportsFolders, check_name
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_object.address import Address
from dcp_object.client import Client
from dcp_object.sink import PART_BYTES, UPLOADS, ObjectSink

_SPREAD = re.compile(r"~[0-9a-f]{2}")
_REPLACE_TRIES = 100


class ObjectStore(SupportsFolders):
    """Store in a folder of an object store: all objects with keys below the folder's path.

    Guarantees: those of `Store`. Acknowledged writes are durable, and immediately visible to all processes (as S3, GCS
    and Azure promise); an object appears when all of its bytes have arrived. `publish` is one PUT on the condition that
    no other process has changed the object, if the service reports ETags or versions.
    """

    read_gap_bytes = 64 << 10
    read_step_bytes = 8 << 20

    def __init__(
        self,
        client: Client,
        address: Address,
        *,
        part_bytes: int = PART_BYTES,
        uploads: int = UPLOADS,
        spread: int = 0,
    ) -> None:
        self._client = client
        self._address = address
        self._part_bytes = part_bytes
        self._uploads = uploads
        self._spread = spread

    @property
    def url(self) -> str:
        """URI of the folder."""
        return self._address.url

    @property
    def place(self) -> Place:
        """Always `remote`."""
        return "remote"

    def make(self) -> None:
        """Do nothing: folders are only prefixes of keys."""

    def child(self, name: str) -> ObjectStore:
        """Return a subfolder's store, with the same client."""
        address = self._address.child(name)
        return type(self)(
            self._client, address, part_bytes=self._part_bytes, uploads=self._uploads, spread=self._spread
        )

    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Begin the upload of a new object.

        In a store opened with `spread`, a name without folders gets one of up to `spread` prefixes, such as `~3f/`; the
        sink's `name` then contains this prefix, and must be used in later calls.
        """
        del sync
        check_name(name)
        if self._spread and "/" not in name:
            name = f"~{zlib.crc32(name.encode()) % min(self._spread, 256):02x}/{name}"
        key = self._address.key(name)
        if self.exists(name):
            raise FileExistsError(f"{self.url}/{name} exists already")
        return ObjectSink(self._client, name, key, part_bytes=self._part_bytes, uploads=self._uploads)

    def publish(self, name: str, data: bytes | bytearray | memoryview, *, tag: str = "", sync: bool = True) -> None:
        """Create or replace the object by one PUT; it is always durable."""
        del tag, sync
        key, content = self._key(name), bytes(data)

        def mine() -> bool | None:
            """Return True if an earlier attempt replaced the object, but its response was lost; otherwise None."""
            found = self._get(key)
            return True if found is not None and found[0] == content else None

        for _ in range(_REPLACE_TRIES):
            before = self._head(key)
            mode: Any = "create" if before is None else _version(before)
            attempts: list[None] = []

            def put(mode: Any = mode, attempts: list[None] = attempts) -> bool:
                attempts.append(None)
                self._client.put(key, content, mode)
                return True

            try:
                self._client.call("PUT", key, put, on_doubt=mine, attempts=self._client.attempts)
            except (FileExistsError, FileNotFoundError):
                if len(attempts) > 1:  # unknown whether ours was published in between
                    raise StorageError(f"PUT {self.url}/{name}: others have replaced it meanwhile") from None
                continue  # another process published or removed it since we looked
            return
        raise StorageError(f"PUT {self.url}/{name}: others have replaced it {_REPLACE_TRIES} times meanwhile")

    def touch(self, name: str) -> None:
        """Write the same bytes again, unless the object changes."""
        key = self._key(name)
        found = self._get(key)
        if found is None:
            raise self._missing(name)
        data, meta = found
        try:
            put = partial(self._client.put, key, data, _version(meta))
            self._client.call("PUT", key, put, attempts=self._client.attempts)
        except (FileExistsError, FileNotFoundError):
            # A process that changed it has renewed its time; one that removed it must find it removed.
            if not self.exists(name):
                raise self._missing(name) from None

    def read(self, name: str) -> bytes:
        """Read the whole object."""
        found = self._get(self._key(name))
        if found is None:
            raise self._missing(name)
        return found[0]

    def fetch(self, name: str, offset: int, wanted: int) -> memoryview:
        """Return `wanted` bytes by one ranged GET. Errors: see `Source.read_into`."""
        key = self._key(name)
        if not wanted:
            self.size(name)
            return memoryview(b"")

        def get() -> memoryview:
            found = memoryview(self._client.get_range(key, offset, offset + wanted))
            if len(found) != wanted:
                raise ConnectionError(f"{len(found)} of {wanted} bytes arrived")
            return found

        def too_short() -> memoryview | None:
            if self.size(name) < offset + wanted:
                raise CorruptCheckpointError(
                    f"the object ends before byte {offset + wanted}, which is needed: it is truncated",
                    file=name,
                    offset=offset,
                )
            return None

        try:
            return self._client.call("GET", key, get, on_doubt=too_short)
        except FileNotFoundError:
            raise self._missing(name) from None

    def open(self, name: str) -> Source:
        """Open the object; each read is a request."""
        check_name(name)
        return _ObjectSource(self, name)

    def size(self, name: str) -> int:
        """Return the size in bytes."""
        return int(self.about(name)["size"])

    def about(self, name: str) -> Mapping[str, Any]:
        """Return `size`, `last_modified`, … Raises CheckpointNotFoundError if the object is missing."""
        meta = self._head(self._key(name))
        if meta is None:
            raise self._missing(name)
        return meta

    def exists(self, name: str) -> bool:
        """Whether the object exists."""
        return self._head(self._key(name)) is not None

    def list(self) -> list[Entry]:
        """List the objects directly in the folder, and those that `spread` puts under a prefix."""
        listing = self._listing("")
        entries = [_entry(meta, self._address.folder) for meta in listing["objects"]]
        for prefix in self._parts(listing):
            if _SPREAD.fullmatch(prefix):
                entries += [_entry(meta, self._address.folder) for meta in self._listing(prefix)["objects"]]
        return entries

    def folders(self) -> tuple[str, ...]:
        """Return the direct subfolders, from the keys."""
        return tuple(sorted(name for name in self._parts(self._listing("")) if not _SPREAD.fullmatch(name)))

    def delete(self, name: str) -> None:
        """Remove the object."""
        key = self._key(name)
        try:
            self._client.call("DELETE", key, lambda: self._client.delete(key))
        except FileNotFoundError:
            return

    def sync_folder(self) -> None:
        """Do nothing: acknowledged writes are durable."""

    def _key(self, name: str) -> str:
        return self._address.key(check_name(name))

    def _head(self, key: str) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = self._client.call("HEAD", key, lambda: self._client.head(key))
        except FileNotFoundError:
            return None
        return found

    def _get(self, key: str) -> tuple[bytes, Mapping[str, Any]] | None:
        try:
            return self._client.call("GET", key, lambda: self._client.get(key))
        except FileNotFoundError:
            return None

    def _listing(self, below: str) -> Mapping[str, Any]:
        prefix = self._address.key(below) if below else self._address.folder
        try:
            found: Mapping[str, Any] = self._client.call("list", prefix, lambda: self._client.listing(prefix))
        except FileNotFoundError:
            return {"objects": [], "common_prefixes": []}
        return found

    def _parts(self, listing: Mapping[str, Any]) -> Sequence[str]:
        return [prefix.rstrip("/").rpartition("/")[2] for prefix in listing["common_prefixes"]]

    def _missing(self, name: str) -> CheckpointNotFoundError:
        return CheckpointNotFoundError(f"{self.url}/{name} is missing; the checkpoint is incomplete or was removed")


class _ObjectSource(Source):
    __slots__ = ("_name", "_store")

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name = store, name

    def size(self) -> int:
        return self._store.size(self._name)

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        data, position = np.frombuffer(self.fetch(offset, sum(map(len, buffers))), np.uint8), 0
        for buffer in buffers:
            # Copies of arrays let other threads run, those of memoryviews do not.
            np.frombuffer(buffer, np.uint8)[:] = data[position : position + len(buffer)]
            position += len(buffer)

    def fetch(self, offset: int, size: int) -> memoryview:
        return self._store.fetch(self._name, offset, size)

    def close(self) -> None:
        """Do nothing: no file is open."""


def _entry(meta: Mapping[str, Any], folder: str) -> Entry:
    name = str(meta["path"])
    return Entry(name[len(folder) + 1 :] if folder else name, int(meta["size"]), meta["last_modified"].timestamp())


def _version(meta: Mapping[str, Any]) -> Any:
    found = {name: meta[name] for name in ("e_tag", "version") if meta.get(name) is not None}
    return found or "overwrite"
