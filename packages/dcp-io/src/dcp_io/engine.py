"""`StoreBackend`: the byte engine of checkpoint storages."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dcp_base.errors import DcpError
from dcp_io.errors import CheckpointReplacedError
from dcp_io.reading.delivery import Delivery
from dcp_io.reading.read_engine import read_items
from dcp_io.reading.read_plan import ReadSizes
from dcp_io.requests import Layout, ReadRequest, ReadStats, Verify, Writable
from dcp_io.saves.cleanup import STALE_AFTER_SECONDS, read_current
from dcp_io.saves.save_session import JoinedSave, RankSaveSession, SaveSession
from dcp_io.stores.store import Store, with_folders
from dcp_io.workers import MAX_INFLIGHT_BYTES
from dcp_io.writing.write_engine import assign_to_threads, by_part, write_items
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.folders.folder import METADATA_NAME, Entry
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.stored_items import StoredItems
from dcp_manifest.types import Buffer

IN_PARTS_ABOVE_BYTES = 4_000_000
"""Bytes of an index above which a load reads only what it needs of it, if it has more than 1,000,000 chunks."""


class StoreBackend:
    """Byte engine for the folder of one checkpoint: carries out saves and loads for the storages of `dcp_core`.

    Args:
        threads: Number of writer or reader threads of this rank.
        single_file: Whether each writer thread writes one file for all its items; otherwise one file per item.
        sync: Whether saves survive a crash of the machine (fsync).
        parts: Prefixes of names whose values get files of their own, unless each item has one.
        stale_after_seconds: See `SaveSession.begin`.
        max_inflight_bytes: Limit of the memory for buffers of a write or a read.

    Ranks: one backend per rank; nothing here is collective.

    Example:
        ```python
        from dcp_io import LocalStore, StoreBackend

        backend = StoreBackend(LocalStore("step-1"), threads=4)
        save_id = backend.begin_save(overwrite=True)
        backend.abort_save()  # the folder holds what it held before
        assert backend.read_current() is None
        ```
    """

    default_inflight_bytes = MAX_INFLIGHT_BYTES

    def __init__(
        self,
        store: Store,
        *,
        layout: Layout = "torch",
        threads: int = 1,
        single_file: bool = True,
        sync: bool = True,
        parts: Sequence[str] = (),
        verify: Verify = "blocks",
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    ) -> None:
        self.store = store
        self.changed_keys: set[str] = set()
        """Keys of destinations that the last `read` may have changed, even if it failed."""
        self.layout: Layout = layout
        self.single_file = single_file
        self.threads = threads
        self._sync, self._parts = sync, parts
        self.verify: Verify = verify
        self._options: dict[str, Any] = {"stale_after_seconds": stale_after_seconds, "sync": sync}
        self.max_inflight_bytes = max_inflight_bytes
        self._save: SaveSession | JoinedSave | None = None
        self._save_id: str | None = None

    @staticmethod
    def default_threads() -> int:
        """Return the number of cores that this process may use, at most 8."""
        return min(8, len(os.sched_getaffinity(0)))

    @property
    def url(self) -> str:
        """The folder's path or URI."""
        return self.store.url

    @property
    def session(self) -> SaveSession:
        """This process's save; raises DcpError without one."""
        if not isinstance(self._save, SaveSession):
            raise DcpError(f"this process has begun no save in {self.url}")
        return self._save

    def read_current(self) -> CheckpointIndex | None:
        """Return the newest complete checkpoint's index; None if it is missing or unreadable."""
        return read_current(self.store).index

    def begin_save(self, *, overwrite: bool, save_id: str | None = None) -> str:
        """Begin a save (see `SaveSession.begin`), and return its id.

        Ranks: the coordinator.
        """
        self._save = SaveSession.begin(self.store, overwrite=overwrite, save_id=save_id, **self._options)
        return self._save.save_id

    def begin_rank_local_save(self, save_id: str, rank: int, *, overwrite: bool) -> None:
        """Begin this rank's part of a save without a coordinator; see `RankSaveSession`.

        Ranks: every rank.
        """
        self._save = RankSaveSession.begin_rank(self.store, save_id, rank, overwrite=overwrite, **self._options)

    def join_save(self, save_id: str) -> None:
        """Join the coordinator's save; may be repeated.

        Ranks: every rank but the coordinator.
        """
        if self._save is None or self._save.save_id != save_id:
            self.store.make()
            self._save = JoinedSave(self.store, save_id)

    def write(
        self, requests: Sequence[Writable], *, prefix: str, save_id: str, groups: Sequence[Sequence[int]] = ()
    ) -> StoredItems:
        """See `write_items`. Raises DcpError if this rank has neither begun nor joined the save."""
        save = self._running()
        if save.save_id != save_id:
            raise DcpError(f"save {save_id} was not begun in {self.url}; the running one is {save.save_id}")
        sync = self._sync and not groups
        if self._parts and self.single_file:
            groups = by_part(requests, groups or assign_to_threads(requests, self.threads), self._parts)
        items = write_items(
            self.store,
            requests,
            prefix=prefix,
            save_id=save_id,
            layout=self.layout,
            threads=self.threads,
            single_file=self.single_file,
            sync=sync,
            max_inflight_bytes=self.max_inflight_bytes,
            groups=groups,
        )
        save.wrote(items.files)
        return items

    def wrote(self, names: Iterable[str]) -> None:
        """Record files of the running save that `write` has not written."""
        self._running().wrote(names)

    def publish(self, name: str, data: Buffer) -> None:
        """See `SaveSession.publish`.

        Ranks: the coordinator; every rank in a save without one.
        """
        self._running().publish(name, data)

    def finish_save(self, keep: Collection[str]) -> None:
        """See `SaveSession.finish`."""
        save, self._save = self._running(), None
        save.finish(keep)

    def abort_save(self) -> None:
        """See `SaveSession.abort`. Does nothing without a save."""
        save, self._save = self._save, None
        if save is not None:
            save.abort()

    def read_index(self, boxes: Callable[[], Mapping[str, Any] | None] | None = None) -> CheckpointIndex:
        """Return the index of the newest complete checkpoint.

        A large index may lack chunks that none of the `boxes` overlaps.

        Raises CheckpointNotFoundError without a checkpoint, CorruptCheckpointError, UnsafeCheckpointError or
        UnsupportedFormatError for a damaged, hostile or unknown index.
        """
        current = read_current(self.store, load=None if boxes is None else partial(_read_near, self.store, boxes))
        if current.damage is not None:
            current.damage.name_place(self.url)
            raise current.damage
        if current.index is None:
            lack = current.lack or "it has no .metadata, nor rank-local indexes"
            if any(entry.name.endswith(".safetensors") for entry in self.store.list()):
                lack += ", but safetensors files, which the HuggingFaceStorageReader of dcp-format loads"
            raise CheckpointNotFoundError(
                f"there is no checkpoint in {self.url}: {lack}; "
                f"{_below(self.store) or 'check the path, or whether the save finished'}"
            )
        self.use_index(current.index)
        return current.index

    def use_index(self, index: CheckpointIndex) -> None:
        """Set the checkpoint to read, from an index that another process has read."""
        self._save_id = None if index.info is None else index.info.save_id

    def read(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Read and verify ranges of stored items; see `read_items`.

        Raises CheckpointReplacedError if a newer save has replaced the checkpoint since `read_index`: call it again,
        and repeat the read.
        """
        self.changed_keys = set()
        return self.read_more(requests)

    def read_more(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Continue a `read`: `changed_keys` grows."""
        with self.noticing_replacement():
            return read_items(
                self.store,
                requests,
                threads=self.threads,
                verify=self.verify,
                changed_keys=self.changed_keys,
                max_inflight_bytes=self.max_inflight_bytes,
            )

    def start_delivery(self, requests: Sequence[ReadRequest], count: Callable[[int], object] | None = None) -> Delivery:
        """Return a `Delivery` with this backend's checks."""
        self.changed_keys = set()
        return Delivery(
            requests,
            verify=self.verify,
            run_gap_bytes=ReadSizes.of(self.store).run_gap_bytes,
            changed_keys=self.changed_keys,
            count=count,
        )

    @contextlib.contextmanager
    def noticing_replacement(self) -> Iterator[None]:
        """Raise CheckpointReplacedError if a file is missing because of a newer save."""
        try:
            yield
        except CheckpointNotFoundError as error:
            now = self.replaced_by()
            if now is not None:
                raise CheckpointReplacedError(
                    f"the checkpoint in {self.url} was replaced by save {now} while it was read; load again",
                    save_id=now,
                ) from error
            raise

    def replaced_by(self) -> str | None:
        """Return the id of the save that has replaced this checkpoint since `read_index`."""
        now = read_current(self.store).save_id
        return None if now == self._save_id else now

    def _running(self) -> SaveSession | JoinedSave:
        if self._save is None:
            raise DcpError(f"no save is running in {self.url}; call begin_save or join_save first")
        return self._save


def _read_near(store: Store, boxes: Callable[[], Mapping[str, Any] | None], entry: Entry) -> CheckpointIndex:
    if entry.name == METADATA_NAME and entry.bytes > IN_PARTS_ABOVE_BYTES:
        from dcp_manifest.file.manifest_near import read_near  # noqa: PLC0415 - only of large indexes

        # A file that is damaged, or was replaced meanwhile, is read whole.
        with contextlib.suppress(CorruptCheckpointError), contextlib.closing(store.open(entry.name)) as source:

            def fetch(offset: int, count: int) -> bytes:
                buffer = bytearray(count)
                source.read_into(offset, [memoryview(buffer)])
                return bytes(buffer)

            index = read_near(fetch, entry.bytes, boxes, file=entry.name)
            if index is not None:
                return index
    return read_index(store.read(entry.name), file=entry.name)


def _below(store: Store) -> str:
    from dcp_manifest.folders.find_checkpoints import some_below  # noqa: PLC0415 - only after a mistake

    try:
        found = [one.store.url for one in some_below(with_folders(store))]
    except (OSError, DcpError, NotImplementedError):
        return ""
    if not found:
        return ""
    several = f", the newest of {len(found)}" if len(found) > 1 else ""
    return f"below it there is {found[0]}{several}: pass the path of a checkpoint"
