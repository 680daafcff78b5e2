"""`StoreBackend`: the byte engine of checkpoint storages on any `Store`; holds their options and the running save."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence

from dcp_io.errors import CheckpointReplacedError
from dcp_io.layout_choices import Layout, Verify
from dcp_io.reading.delivery import Delivery
from dcp_io.reading.read_engine import read_items
from dcp_io.reading.read_plan import RUN_GAP_BYTES
from dcp_io.requests import RateGauge, ReadRequest, ReadStats, Writable
from dcp_io.saves.current_checkpoint import read_current
from dcp_io.saves.joined_session import JoinedSave
from dcp_io.saves.save_session import STALE_AFTER_SECONDS, SaveSession
from dcp_io.stores.store import Store
from dcp_io.writing.measured_writes import MeasuringStore
from dcp_io.writing.write_engine import MAX_INFLIGHT_BYTES, write_items
from dcp_manifest.errors import CheckpointNotFoundError, DcpError
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.stored_items import StoredItems

__all__ = ["StoreBackend"]


class StoreBackend:
    """Byte engine for the folder of one checkpoint: carries out saves and loads for the storages of `dcp_core`.

    Args:
        store: The folder.
        layout: Layout of data files, `torch` or `raw`; see `Layout`.
        threads: Number of writer or reader threads of this rank.
        single_file: Whether each writer thread writes one file for all its items; otherwise one file per item.
        sync: Whether `write` and `publish` make files durable (fsync), to survive a crash of the machine.
        verify: Which CRCs `read` checks; see `Verify`.
        stale_after_seconds: A save on another host counts as dead when it has not renewed its marker for this long.
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

    def __init__(
        self,
        store: Store,
        *,
        layout: Layout = "torch",
        threads: int = 1,
        single_file: bool = True,
        sync: bool = True,
        verify: Verify = "blocks",
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        max_inflight_bytes: int = MAX_INFLIGHT_BYTES,
    ) -> None:
        self.store = store
        self.changed_keys: set[str] = set()
        """Keys whose destinations the last `read` may have changed, even if it failed."""
        self._layout: Layout = layout
        self._threads = threads
        self._single_file = single_file
        self._sync = sync
        self._verify: Verify = verify
        self._stale_after_seconds = stale_after_seconds
        self._max_inflight_bytes = max_inflight_bytes
        self._save: SaveSession | JoinedSave | None = None
        self._generation = 1
        self._save_id: str | None = None

    @property
    def url(self) -> str:
        """Path or URI of the folder, for messages."""
        return self.store.url

    @property
    def threads(self) -> int:
        """Number of writer or reader threads of this rank."""
        return self._threads

    @property
    def verify(self) -> Verify:
        """Which CRCs `read` checks; see `Verify`."""
        return self._verify

    @property
    def max_inflight_bytes(self) -> int:
        """Limit of the memory for buffers of a write or a read."""
        return self._max_inflight_bytes

    @property
    def generation(self) -> int:
        """Generation number of the save begun last: the number of the checkpoint that it replaces, plus one."""
        return self._generation

    def measuring(self) -> StoreBackend:
        """Return a backend with the same options that writes nothing: its store keeps the names and sizes of files."""
        twin = copy.copy(self)
        vars(twin).update(store=MeasuringStore(self.url), changed_keys=set(), _save=None)
        return twin

    def read_current(self) -> CheckpointIndex | None:
        """Return the index of the newest complete checkpoint; None if there is none, or the index cannot be read."""
        return read_current(self.store).index

    def begin_save(self, *, overwrite: bool, save_id: str | None = None) -> str:
        """Claim the folder for a new save, and remove leftovers of dead saves; returns the id of the save.

        A damaged checkpoint counts as an existing checkpoint.

        Args:
            overwrite: Whether an existing checkpoint may be replaced.
            save_id: Id of the save, never used before; None generates an id.

        Raises:
            SaveInProgressError: Another live save is in the folder.
            CheckpointExistsError: The folder has a checkpoint, readable or not, and `overwrite` is False.

        Ranks: the coordinator.
        """
        return self._begin(overwrite=overwrite, save_id=save_id).save_id

    def begin_rank_local_save(self, save_id: str, rank: int, *, overwrite: bool) -> None:
        """Begin a save without a coordinator on this rank: claim the folder, and remove leftovers of dead saves.

        Errors: see `begin_save`.

        Args:
            save_id: Id of the save, on which all ranks have agreed; never used before in this folder.
            rank: Number of this rank.
            overwrite: Whether an existing checkpoint may be replaced.

        Ranks: every rank.
        """
        self._begin(overwrite=overwrite, save_id=save_id, rank=rank)

    def _begin(self, *, overwrite: bool, save_id: str | None = None, rank: int | None = None) -> SaveSession:
        session = SaveSession.begin(
            self.store,
            overwrite=overwrite,
            stale_after_seconds=self._stale_after_seconds,
            save_id=save_id,
            rank=rank,
            sync=self._sync,
        )
        self._save = session
        self._generation = session.generation
        return session

    def join_save(self, save_id: str) -> None:
        """Join the save that the coordinator began. Joining the same save again does nothing.

        Ranks: every rank but the coordinator.
        """
        if self._save is None or self._save.save_id != save_id:
            self.store.make()
            self._save = JoinedSave(self.store, save_id)

    def write(
        self, requests: Sequence[Writable], *, prefix: str, save_id: str, gauge: RateGauge | None = None
    ) -> StoredItems:
        """Write items to data files, and return their locations. Arguments and further errors: see `write_items`.

        Raises:
            DcpError: This rank has neither begun nor joined the save.
        """
        save = self._running()
        if save.save_id != save_id:
            raise DcpError(f"save {save_id} was not begun in {self.url}; the running one is {save.save_id}")
        items = write_items(
            self.store,
            requests,
            prefix=prefix,
            save_id=save_id,
            layout=self._layout,
            threads=self._threads,
            single_file=self._single_file,
            sync=self._sync,
            max_inflight_bytes=self._max_inflight_bytes,
            gauge=gauge,
        )
        if isinstance(save, JoinedSave):
            save.wrote(items.files)
        return items

    def publish(self, name: str, data: bytes) -> None:
        """Publish an object: write `data` to `name` atomically; see `SaveSession.publish`.

        Ranks: the coordinator; every rank in a save without one.
        """
        save = self._running()
        if not isinstance(save, SaveSession):
            raise DcpError(f"only the coordinator of save {save.save_id} may publish {name!r}")
        save.publish(name, data)

    def finish_save(self, keep: Collection[str]) -> None:
        """End a published save: remove the files that it replaced, then its marker. Failures are logged, not raised.

        Args:
            keep: Names of the data files in the new index.
        """
        save, self._save = self._running(), None
        if isinstance(save, SaveSession):
            save.finish(keep)

    def abort_save(self) -> None:
        """End a failed save: remove its files, unless they are published. Does nothing if no save is running."""
        save, self._save = self._save, None
        if save is not None:
            save.abort()

    def leave_save(self) -> None:
        """End a failed save without removing its files: another host may have published its index."""
        save, self._save = self._save, None
        if isinstance(save, SaveSession):
            save.leave()

    def read_index(self) -> CheckpointIndex:
        """Read and return the index of the newest complete checkpoint.

        Raises:
            CheckpointNotFoundError: There is no checkpoint; the message names the folder.
            CorruptCheckpointError, UnsafeCheckpointError, UnsupportedFormatError: The index is damaged, hostile, or of
                an unknown format; the message names the folder.
        """
        current = read_current(self.store)
        if current.damage is not None:
            current.damage.name_place(self.url)
            raise current.damage
        if current.index is None:
            lack = current.lack or "it has no .metadata, nor rank-local indexes"
            if any(entry.name.endswith(".safetensors") for entry in self.store.list()):
                lack += ", but safetensors files, which the HuggingFaceStorageReader of dcp-format loads"
            raise CheckpointNotFoundError(
                f"there is no checkpoint in {self.url}: {lack}; check the path, or whether the save finished"
            )
        self.use_index(current.index)
        return current.index

    def use_index(self, index: CheckpointIndex) -> None:
        """Set the checkpoint to read, as `read_index` does, from an index that another process has read."""
        self._save_id = None if index.info is None else index.info.save_id

    def read(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Read and verify ranges of stored items. Result and further errors: see `read_items`.

        Raises:
            CheckpointReplacedError: A newer save has replaced this checkpoint since `read_index`, and a file is
                missing: call `read_index` again, and repeat the read.
        """
        self.changed_keys = set()
        return self.read_more(requests)

    def read_more(self, requests: Sequence[ReadRequest]) -> ReadStats:
        """Read like `read`, as a further part of the same read: `changed_keys` grows."""
        with self.noticing_replacement():
            return read_items(
                self.store,
                requests,
                threads=self._threads,
                verify=self._verify,
                changed_keys=self.changed_keys,
                max_inflight_bytes=self._max_inflight_bytes,
            )

    def start_delivery(self, requests: Sequence[ReadRequest], count: Callable[[int], object] | None = None) -> Delivery:
        """Return a delivery for the requests, with this backend's checks, for bytes that other processes read.

        Args:
            requests: Requests for byte ranges, as for `read`.
            count: Function that is called with the number of bytes of each delivered part; None for none.

        Raises:
            CorruptCheckpointError, ValueError: See `read_items`.
        """
        self.changed_keys = set()
        return Delivery(
            requests,
            verify=self._verify,
            run_gap_bytes=max(RUN_GAP_BYTES, self.store.read_gap_bytes or 0),
            changed_keys=self.changed_keys,
            count=count,
        )

    @contextlib.contextmanager
    def noticing_replacement(self) -> Iterator[None]:
        """Context manager for reads of the checkpoint's files, in which a missing file is looked into.

        Raises:
            CheckpointReplacedError: A file is missing because a newer save has replaced this checkpoint.
        """
        try:
            yield
        except CheckpointNotFoundError as error:
            now = read_current(self.store).save_id
            if now is not None and now != self._save_id:
                raise CheckpointReplacedError(
                    f"the checkpoint in {self.url} was replaced by save {now} while it was read; load again",
                    save_id=now,
                ) from error
            raise

    def _running(self) -> SaveSession | JoinedSave:
        if self._save is None:
            raise DcpError(f"no save is running in {self.url}; call begin_save or join_save first")
        return self._save
