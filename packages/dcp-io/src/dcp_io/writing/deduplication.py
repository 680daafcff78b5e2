"""Data files that are equal to files of an earlier checkpoint become hard links of them. See decision 33.

Items of more than 64 KiB are packed into files of their own, in the order of the plan. A file next to them has the
digest of each such item, taken while the item was written. The next save compares:

1. An item whose first CRC block is not in the base has changed. Other items of the same size are digested.
2. A file of the base is linked if all of its items are found.
3. Found items of other files, and changed items, go to separate files: the next save can link the first.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger
from dcp_io.archives.crc import crc32
from dcp_io.requests import Layout, Payload, PiecewiseData, Writable
from dcp_io.saves.save_files import DIGESTS, MARK_BYTES, data_mark
from dcp_io.stores.local_store import LocalStore
from dcp_io.stores.store import Store, SupportsFolders, SupportsLinks
from dcp_io.workers import StopSignal, run_together
from dcp_io.writing.write_engine import FILE_MIN_BYTES, STEP_BYTES, assign_to_threads
from dcp_manifest.folders.find_checkpoints import checkpoints_below
from dcp_manifest.folders.folder import QUARANTINE, data_file_name, put_aside_reason
from dcp_manifest.index.columns import CRC_BLOCK_MIN_BYTES, Framing, ItemColumns, block_bytes, starts
from dcp_manifest.index.stored_items import StoredItems

try:
    import xxhash

    new_digest: Any = xxhash.xxh3_128
except ImportError:  # the standard library has a slower one
    new_digest = functools.partial(hashlib.blake2b, digest_size=16)
_KIND = new_digest().name

__all__ = ["Deduplication"]

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
    """Writer of a rank's items, with links for files that an earlier checkpoint in the parent directory has.

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
        links.compare(hashed, self._bases(store.parent(), prefix))
        rest = [n for n in count if n not in links.positions]
        small = [n for n in rest if n not in hashed]
        limit = max(FILE_MIN_BYTES, sum(one.cost_bytes for one in hashed.values()) // _FILES)
        groups = [
            *([small[n] for n in bucket] for bucket in _balanced([requests[n] for n in small], backend.threads)),
            *_packed({n: hashed[n] for n in rest if n in hashed and hashed[n].digest}, limit * backend.single_file),
            *_packed({n: hashed[n] for n in rest if n in hashed and not hashed[n].digest}, limit * backend.single_file),
        ]
        row = {n: row for row, n in enumerate(rest)}
        written = backend.write(
            [hashed.get(n, requests[n]) for n in rest],
            prefix=prefix,
            save_id=save_id,
            groups=[[row[n] for n in group] for group in groups],
        )
        store.sync(written.files)
        items = StoredItems.joined([written, *links.items]).take(np.argsort([*rest, *links.positions]))
        _write_digests(backend, data_file_name(f"{prefix}digests", 0, save_id), save_id, items, hashed)
        _last[store.parent().url, prefix] = LocalStore(store.url)
        return items

    def _bases(self, parent: SupportsFolders, prefix: str) -> list[_Base]:
        bases = [] if self._base is None else _Base.of(self._base, prefix)
        last = _last.get((parent.url, prefix))
        found = [] if last is None else _Base.of(last, prefix)
        try:
            if not found:
                found = next(filter(None, (_Base.of(one.store, prefix) for one in checkpoints_below(parent))), [])
        except (OSError, DcpError) as error:
            _log.warning("nothing in %s is linked: %s", parent.url, error)
        return bases + found


def _balanced(requests: Sequence[Writable], threads: int) -> list[list[int]]:
    return assign_to_threads(requests, threads) if requests else []


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
            for _ in _DigestedData(self, payload).pieces(STEP_BYTES):
                pass

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
    if not isinstance(data, bytes | memoryview):
        yield from data.pieces(max_bytes)
        return
    view, step = memoryview(data).toreadonly(), min(max_bytes, STEP_BYTES)
    for start in range(0, len(view), step):
        yield view[start : start + step]


@dataclass(frozen=True, slots=True)
class _Base:
    store: LocalStore
    items: StoredItems
    digests: list[bytes]

    @classmethod
    def of(cls, store: Store, prefix: str) -> list[_Base]:
        try:
            names = [entry.name for entry in store.list()]
            if not isinstance(store, LocalStore) or put_aside_reason(names) is not None:
                return []
            return [cls._read(store, name) for name in names if name.startswith(prefix) and DIGESTS.fullmatch(name)]
        except Exception as error:  # noqa: BLE001 - then the save writes all files
            _log.warning("nothing in %s is linked: %s", store.url, error)
            return []

    @classmethod
    def _read(cls, store: LocalStore, name: str) -> _Base:
        with np.load(io.BytesIO(store.read(name)[MARK_BYTES:]), allow_pickle=False) as arrays:
            columns = {column: arrays[f"item_{column}"] for column in _COLUMNS}
            files, digests = arrays["files"].tolist(), arrays["digests"]
        count = len(digests)
        items = ItemColumns(**columns, chain=np.zeros(count, np.uint8), checked=np.ones(count, np.uint8))
        if len(items) != count or items.running_counts().sum() != len(items.running_crcs):
            raise ValueError(f"{name} is damaged")
        return cls(store, StoredItems(items, files), [digest.tobytes() for digest in digests])

    def heads(self) -> Iterator[tuple[int, int]]:
        columns = self.items.columns
        firsts = columns.running_crcs[starts(columns.running_counts())[:-1]]
        return zip(columns.stored_bytes.tolist(), firsts.tolist(), strict=True)

    def rows_of_files(self) -> Iterator[tuple[str, list[int]]]:
        rows: dict[int, list[int]] = defaultdict(list)
        for row, file in enumerate(self.items.columns.file.tolist()):
            rows[file].append(row)
        return ((self.items.files[file], some) for file, some in rows.items())

    def link(self, file: str, rows: list[int], store: SupportsLinks, name: str, save_id: str) -> None:
        columns = self.items.columns
        if self.store.size(file) != int((columns.offset[rows] + columns.length[rows]).max()):
            raise OSError(f"{file} has another length than when it was written")
        store.link(name, self.store, file, tag=save_id, sync=False)  # the base was synced


class _Links:
    def __init__(self, backend: _Backend, store: SupportsLinks, prefix: str, save_id: str) -> None:
        self._backend, self._store, self._prefix, self._save_id = backend, store, prefix, save_id
        self.items: list[StoredItems] = []
        self.positions: dict[int, None] = {}

    def compare(self, requests: dict[int, _Hashed], bases: Sequence[_Base]) -> None:
        """Digest requests that may be in a base, and link the files with wanted items only."""
        heads = {head for base in bases for head in base.heads()}
        sizes = {size for size, _ in heads}
        waiting = iter([request for request in requests.values() if request.cost_bytes in sizes])

        def compare(stop: StopSignal) -> None:
            for request in waiting:
                stop.check()
                request.compare(heads)

        run_together([compare] * self._backend.threads)
        wanted: dict[bytes, list[int]] = defaultdict(list)
        for n, request in requests.items():
            if request.digest:
                wanted[request.digest].append(n)
        avoided = _quarantined(self._store.parent()) if wanted else set()
        for base in bases:
            for file, rows in base.rows_of_files():
                need = Counter(base.digests[row] for row in rows)
                if all(len(wanted.get(digest, ())) >= count for digest, count in need.items()):
                    self._link(base, file, rows, wanted, avoided)

    def _link(
        self, base: _Base, file: str, rows: list[int], wanted: dict[bytes, list[int]], avoided: set[Hashable]
    ) -> None:
        name = data_file_name(f"{self._prefix}linked", len(self.items), self._save_id)
        try:
            if base.store.identity(file) in avoided:
                return
            base.link(file, rows, self._store, name, self._save_id)
        except (OSError, DcpError) as error:
            _log.info("%s of %s is written again: %s", file, base.store.url, error)
            return
        self._backend.wrote([name])
        columns = base.items.take(np.array(rows, np.int64)).columns
        self.items.append(StoredItems(replace(columns, file=np.zeros(len(rows), np.uint32)), [name]))
        self.positions |= {wanted[base.digests[row]].pop(): None for row in rows}


def _quarantined(parent: SupportsFolders) -> set[Hashable]:
    folders = [parent.child(name) for name in parent.folders() if parent.exists(f"{name}/{QUARANTINE}")]
    return {
        folder.identity(entry.name)
        for folder in folders
        if isinstance(folder, SupportsLinks)
        for entry in folder.list()
    }


def _write_digests(
    backend: _Backend, name: str, save_id: str, items: StoredItems, requests: dict[int, _Hashed]
) -> None:
    chosen = items.take(np.array([*requests], np.int64))
    digests = b"".join([request.digest.ljust(16, b"\0") for request in requests.values()])
    arrays: dict[str, Any] = {f"item_{column}": getattr(chosen.columns, column) for column in _COLUMNS}
    arrays["digests"] = np.frombuffer(digests, np.uint8).reshape(-1, 16)
    buffer = io.BytesIO()
    np.savez(buffer, files=np.array(chosen.files), **arrays)
    sink = backend.store.create(name, sync=False)
    try:
        sink.write([data_mark(save_id), buffer.getbuffer()])
        sink.close()
    except BaseException:
        sink.abort()
        raise
    backend.wrote([name])
