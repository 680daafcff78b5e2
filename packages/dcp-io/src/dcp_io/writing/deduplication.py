"""Data files of an earlier checkpoint become hard links. See decision 33.

Items of more than 64 KiB are packed into files of their own. Another file has their digests, taken during the write.
The next save compares:

1. An item whose first CRC block is not in the base has changed. Others are digested.
2. Files with found items are linked, those with the smallest unused share first.
3. Other found items, and changed ones, go to separate files.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger
from dcp_io.archives.crc import crc32
from dcp_io.requests import Layout, Payload, PiecewiseData, Writable
from dcp_io.saves.save_files import DIGESTS, MARK_BYTES, data_mark, marker_name
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Store, SupportsFolders, SupportsLinks
from dcp_io.workers import StopSignal, run_together
from dcp_io.writing.write_engine import FILE_MIN_BYTES, STEP_BYTES, assign_to_threads
from dcp_manifest.errors import CheckpointNotFoundError, UnsafeCheckpointError
from dcp_manifest.folders.checkpoint_order import step_of
from dcp_manifest.folders.folder import QUARANTINE, data_file_name, put_aside_reason
from dcp_manifest.index.columns import CRC_BLOCK_MIN_BYTES, Framing, ItemColumns, block_bytes, starts
from dcp_manifest.index.stored_items import StoredItems

try:
    import xxhash

    new_digest: Any = xxhash.xxh3_128
except ImportError:  # the standard library has a slower one
    new_digest = functools.partial(hashlib.blake2b, digest_size=16)
_KIND = new_digest().name

_log = library_logger(__name__)
# A file with one changed item is written again as a whole, so files are small; but each costs time. Measured: 800
# files of 2 GiB take twice the time of two files, 32 files the same time.
_FILES = 32
_COLUMNS = ("file", "offset", "length", "lead", "stored_bytes", "framing", "crc32", "running_crcs")
_last: dict[tuple[str, str], LocalStore] = {}
"""Parent directory and file prefix → this process's last checkpoint."""


class _Backend(Protocol):
    store: Store
    layout: Layout
    threads: int
    single_file: bool

    def write(
        self, requests: Sequence[Writable], *, prefix: str, save_id: str, groups: Sequence[Sequence[int]] = ()
    ) -> StoredItems: ...

    def wrote(self, names: Iterable[str]) -> None: ...


class Deduplication:
    """Writer of a rank's items, with links for files of an earlier checkpoint.

    Args:
        base: Path of a checkpoint to compare with in addition.
        repeatable: Classes of piecewise data with `pieces` that may be called again.
    """

    def __init__(self, base: str | os.PathLike[str] | None = None, repeatable: tuple[type, ...] = ()) -> None:
        self._base = None if base is None else LocalStore(base)
        self._repeatable = repeatable

    def write(self, backend: _Backend, requests: Sequence[Writable], *, prefix: str, save_id: str) -> StoredItems:
        """Write or link all items; see `StoreBackend.write`. A store without links gets plain files."""
        store, count = backend.store, range(len(requests))
        large = [n for n in count if requests[n].cost_bytes > CRC_BLOCK_MIN_BYTES]
        if not isinstance(store, SupportsLinks) or not large:
            return backend.write(requests, prefix=prefix, save_id=save_id)
        hashed = {n: _Hashed(requests[n], backend.layout, self._repeatable) for n in large}
        links = _Links(backend, store, prefix, save_id)
        links.compare(hashed, self._bases(store, prefix, save_id))
        rest = [n for n in count if n not in links.positions]
        small = [n for n in rest if n not in hashed]
        limit = max(FILE_MIN_BYTES, sum(one.cost_bytes for one in hashed.values()) // _FILES)
        buckets = assign_to_threads([requests[n] for n in small], backend.threads)
        groups = [
            *([small[n] for n in bucket] for bucket in buckets if bucket),
            *_packed({n: hashed[n] for n in rest if n in hashed and hashed[n].digest}, limit * backend.single_file),
            *_packed({n: hashed[n] for n in rest if n in hashed and not hashed[n].digest}, limit * backend.single_file),
        ]
        row = {n: row for row, n in enumerate(rest)}
        chosen, files = [hashed.get(n, requests[n]) for n in rest], [[row[n] for n in group] for group in groups]
        written = backend.write(chosen, prefix=prefix, save_id=save_id, groups=files)
        store.sync(written.files)
        items = StoredItems.joined([written, *links.items]).take(np.argsort([*rest, *links.positions]))
        _write_digests(backend, data_file_name(f"{prefix}digests", 0, save_id), save_id, items, hashed)
        _last[store.parent().url, prefix] = LocalStore(store.url)
        return items

    def _bases(self, store: SupportsLinks, prefix: str, save_id: str) -> list[_Base]:
        parent = store.parent()
        bases = [] if self._base is None else _Base.of(self._base, prefix)
        if self._base is not None and not any(DIGESTS.fullmatch(entry.name) for entry in self._base.list()):
            _log.warning("nothing in %s is linked: no save with deduplicate=… has written to it", self._base.url)
        last, found = _last.get((parent.url, prefix)), list[_Base]()
        try:
            if isinstance(store, LocalStore):
                # The directory may have been created with another umask, but the marker belongs to this save.
                access = _access(store, marker_name(save_id, None))
                nearest = chain([] if last is None else [last], _siblings(store))
                found = next(filter(None, (_Base.of(one, prefix, access) for one in nearest)), [])
        except (OSError, DcpError) as error:
            _log.warning("nothing in %s is linked: %s", parent.url, error)
        return bases + found


def _siblings(store: LocalStore) -> Iterator[LocalStore]:
    # Highest step first. Other users may change the files of theirs.
    parent, user = store.parent(), os.stat(store.path).st_uid
    names = sorted(parent.folders(), key=lambda name: (step_of(name) or 0, name), reverse=True)
    yield from (child for child in map(parent.child, names) if os.stat(child.path).st_uid == user)


def _access(store: LocalStore, name: str) -> Hashable:
    path = os.path.join(store.path, name)
    facts = os.stat(path if os.path.exists(path) else store.path)
    return facts.st_uid, facts.st_gid, facts.st_mode & 0o444


def _packed(requests: dict[int, _Hashed], limit: int) -> list[list[int]]:
    groups: list[list[int]] = []
    size = 0
    for n, request in requests.items():
        size += request.cost_bytes
        if not groups or size > limit:
            groups.append([])
            size = request.cost_bytes
        groups[-1].append(n)
    return groups


class _Hashed:
    __slots__ = ("_payload", "_repeatable", "_request", "cost_bytes", "digest", "key", "layout")
    alike = None

    def __init__(self, request: Writable, layout: str, repeatable: tuple[type, ...]) -> None:
        self._request, self.layout, self._repeatable = request, layout, (bytes, memoryview, *repeatable)
        self._payload: Payload | None = None
        self.key, self.cost_bytes = request.key, request.cost_bytes
        self.digest = b""

    def compare(self, heads: set[tuple[int, int]]) -> None:
        """Take the digest now if an item of a base begins with the same bytes."""
        payload = self._payload = self._request.resolve()
        if payload.framing is not Framing.RAW or not isinstance(payload.data, self._repeatable):
            return
        crc, left = 0, block_bytes(self.cost_bytes)
        for piece in _pieces(payload.data, left):
            crc = crc32(piece[:left], crc)
            left -= min(left, len(piece))
            if not left:
                break
        if (self.cost_bytes, crc) in heads:
            deque(_DigestedData(self, payload).pieces(STEP_BYTES), maxlen=0)

    def resolve(self) -> Payload:
        payload = self._payload or self._request.resolve()
        if payload.framing is not Framing.RAW or self.digest:
            return payload
        return replace(payload, data=_DigestedData(self, payload))


class _DigestedData:
    def __init__(self, request: _Hashed, payload: Payload) -> None:
        self._request, self._payload, data = request, payload, payload.data
        self.nbytes = len(data) if isinstance(data, bytes | memoryview) else data.nbytes

    def pieces(self, max_bytes: int) -> Iterator[memoryview]:
        payload = self._payload
        digest = new_digest(f"{_KIND} {self._request.layout} {payload.dtype} {payload.sizes} ".encode())
        for piece in _pieces(payload.data, max_bytes):
            digest.update(piece)
            yield piece
        self._request.digest = digest.digest()


def _pieces(data: bytes | memoryview | PiecewiseData, max_bytes: int) -> Iterator[memoryview]:
    # Small pieces stay in the cache until their CRC is taken.
    for piece in (data,) if isinstance(data, bytes | memoryview) else data.pieces(max_bytes):
        view, step = memoryview(piece).toreadonly(), min(max_bytes, STEP_BYTES)
        for start in range(0, len(view), step):
            yield view[start : start + step]


@dataclass(frozen=True, slots=True)
class _Base:
    store: LocalStore
    items: StoredItems
    digests: list[bytes]
    access: Hashable  # owner, group and permissions of the files that may be linked, as links have them; None for all

    @classmethod
    def of(cls, store: Store, prefix: str, access: Hashable = None) -> list[_Base]:
        try:
            names = [entry.name for entry in store.list()]
            if not isinstance(store, LocalStore) or put_aside_reason(names) is not None:
                return []
            return [cls._read(store, one, access) for one in names if one.startswith(prefix) and DIGESTS.fullmatch(one)]
        except Exception as error:  # noqa: BLE001 - then the save writes all files
            _log.warning("nothing in %s is linked: %s", store.url, error)
            return []

    @classmethod
    def _read(cls, store: LocalStore, name: str, access: Hashable) -> _Base:
        with np.load(io.BytesIO(store.read(name)[MARK_BYTES:]), allow_pickle=False) as arrays:
            columns = {column: arrays[f"item_{column}"] for column in _COLUMNS}
            files, digests = arrays["files"].tolist(), arrays["digests"]
        count = len(digests)
        items = ItemColumns(**columns, chain=np.zeros(count, np.uint8), checked=np.ones(count, np.uint8))
        if len(items) != count or items.running_counts().sum() != len(items.running_crcs):
            raise ValueError(f"{name} is damaged")
        return cls(store, StoredItems(items, files), [digest.tobytes() for digest in digests], access)

    def heads(self) -> Iterator[tuple[int, int]]:
        columns = self.items.columns
        firsts = columns.running_crcs[starts(columns.running_counts())[:-1]]
        return zip(columns.stored_bytes.tolist(), firsts.tolist(), strict=True)

    def stored_files(self, avoided: set[Hashable]) -> Iterator[_StoredFile]:
        rows: dict[int, list[int]] = defaultdict(list)
        for row, file in enumerate(self.items.columns.file.tolist()):
            rows[file].append(row)
        for file, some in rows.items():
            name = self.items.files[file]
            try:
                if self.access in (None, _access(self.store, name)) and self.store.identity(name) not in avoided:
                    yield _StoredFile(self, name, some, self.store.size(name))
            except (OSError, DcpError) as error:
                _log.info("%s of %s is written again: %s", name, self.store.url, error)


@dataclass(frozen=True, slots=True)
class _StoredFile:
    base: _Base
    name: str
    rows: list[int]
    stored_bytes: int

    def found(self, wanted: dict[bytes, list[int]]) -> list[int]:
        # Each digest at most as often as it is wanted.
        found, taken = [], Counter[bytes]()
        for row in self.rows:
            digest = self.base.digests[row]
            if taken[digest] < len(wanted.get(digest, ())):
                taken[digest] += 1
                found.append(row)
        return found

    def unused_bytes(self, found: list[int]) -> int:
        return self.stored_bytes - int(self.base.items.columns.length[found].sum())

    def link(self, found: list[int], store: SupportsLinks, name: str, save_id: str) -> StoredItems:
        columns = self.base.items.take(np.array(found, np.int64)).columns
        if self.stored_bytes < int((columns.offset + columns.length).max()):
            raise OSError("it is shorter than when it was written")
        store.link(name, self.base.store, self.name, tag=save_id, sync=False)  # the base was synced
        return StoredItems(replace(columns, file=np.zeros(len(found), np.uint32)), [name])


class _Links:
    def __init__(self, backend: _Backend, store: SupportsLinks, prefix: str, save_id: str) -> None:
        self._backend, self._store, self._prefix, self._save_id = backend, store, prefix, save_id
        self.items: list[StoredItems] = []
        self.positions: dict[int, None] = {}

    def compare(self, requests: dict[int, _Hashed], bases: Sequence[_Base]) -> None:
        heads = {head for base in bases for head in base.heads()}
        sizes = {size for size, _ in heads}
        waiting = iter([request for request in requests.values() if request.cost_bytes in sizes])

        def compare(stop: StopSignal) -> None:
            for request in waiting:
                stop.check()
                request.compare(heads)

        run_together([compare] * self._backend.threads)
        wanted: dict[bytes, list[int]] = defaultdict(list)
        for n in [n for n, request in requests.items() if request.digest]:
            wanted[requests[n].digest].append(n)
        if wanted:
            avoided = {*_quarantined(self._store.parent())}
            self._link_files([file for base in bases for file in base.stored_files(avoided)], wanted)

    def _link_files(self, files: list[_StoredFile], wanted: dict[bytes, list[int]]) -> None:
        linked = unused = 0
        for file in sorted(files, key=lambda file: file.unused_bytes(file.found(wanted)) / max(1, file.stored_bytes)):
            found = file.found(wanted)
            more = file.unused_bytes(found)
            if not found or 8 * (unused + more) > linked + file.stored_bytes:  # old values shall take little space
                continue
            name = data_file_name(f"{self._prefix}linked", len(self.items), self._save_id)
            try:
                self.items.append(file.link(found, self._store, name, self._save_id))
            except (OSError, DcpError) as error:
                _log.info("%s of %s is written again: %s", file.name, file.base.store.url, error)
                continue
            self._backend.wrote([name])
            self.positions |= {wanted[file.base.digests[row]].pop(): None for row in found}
            linked, unused = linked + file.stored_bytes, unused + more


def _quarantined(parent: SupportsFolders) -> Iterator[Hashable]:
    folders = [parent.child(name) for name in parent.folders() if parent.exists(f"{name}/{QUARANTINE}")]
    for folder in folders:
        if isinstance(folder, SupportsLinks):
            for entry in folder.list():
                with contextlib.suppress(CheckpointNotFoundError, UnsafeCheckpointError):  # removed, or a link
                    yield folder.identity(entry.name)


def _write_digests(
    backend: _Backend, name: str, save_id: str, items: StoredItems, requests: dict[int, _Hashed]
) -> None:
    chosen = items.take(np.array([*requests], np.int64))
    digests = b"".join([request.digest.ljust(16, b"\0") for request in requests.values()])
    arrays: dict[str, Any] = {f"item_{column}": getattr(chosen.columns, column) for column in _COLUMNS}
    arrays["digests"] = np.frombuffer(digests, np.uint8).reshape(-1, 16)
    buffer = io.BytesIO()
    np.savez(buffer, files=np.array(chosen.files), **arrays)
    with backend.store.create(name, sync=False) as sink:
        sink.write([data_mark(save_id), buffer.getbuffer()])
    backend.wrote([name])
