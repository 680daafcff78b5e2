"""`ByteStorageReader`: base class of storage readers, which reads items through a `dcp_io.StoreBackend`.

The read request for one item, and the copy of its bytes, are in `read_requests`.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from dcp_core.encoding.transforms import ExtensionRegistry
from dcp_core.errors import CorruptCheckpointError, DcpError
from dcp_core.records.metadata import Metadata, MetadataIndex, TensorStorageMetadata, note_checkpoint_id, stored_item
from dcp_core.records.plan import LoadItemType, LoadPlan, ReadItem
from dcp_core.records.protocols import CheckpointId, LoadPlanner, StorageReader
from dcp_core.storage.byte_storage import ByteStorage
from dcp_core.storage.exchange import PreparedRead
from dcp_core.storage.gc_pause import collector_paused
from dcp_core.storage.item_decoder import ItemDecoder
from dcp_core.storage.read_requests import direct_memory, object_request, tensor_request, whole_request
from dcp_core.storage.whole_reads import split_whole_reads
from dcp_core.tables.metadata_columns import metadata_from_index
from dcp_core.tensors.device_copy import DeviceCopies
from dcp_io.requests import ReadRequest, ReadStats
from dcp_io.stores.store import Place
from dcp_manifest.index.columns import CheckpointIndex
from dcp_manifest.index.items import StoredItem

__all__ = ["ByteStorageReader"]

_SHOWN_KEYS = 20


class _Wanted(NamedTuple):
    """A wanted part of a tensor, and the chunk that holds it as the index describes it."""

    item: ReadItem
    stored: StoredItem
    dtype: torch.dtype
    sizes: tuple[int, ...]


class ByteStorageReader(ByteStorage, StorageReader):
    """Base class of storage readers for checkpoints of this library, in any layout, and of stock.

    All bytes are checked against the CRCs in the checkpoint, according to the `verify` setting of the backend; keys of
    bytes without a CRC are listed in `unverified_keys`. A subclass implements `_open`, which returns a
    `dcp_io.StoreBackend`.

    Args:
        checkpoint_id: Id of the checkpoint to load; `reset` may replace it.
        extensions: Registry of transforms that decode items; None for the transforms of installed plug-ins.

    Example:
        ```python
        import torch
        from dcp_core import ByteStorageReader, load, save
        from dcp_io import LocalStore, StoreBackend


        class CheckingReader(ByteStorageReader):
            def _open(self, checkpoint_id):
                return StoreBackend(LocalStore(checkpoint_id), verify="before")


        save({"weight": torch.ones(3)}, checkpoint_id="step-1")
        load({"weight": torch.zeros(3)}, storage_reader=CheckingReader("step-1"))
        ```
    """

    def __init__(self, checkpoint_id: CheckpointId, *, extensions: ExtensionRegistry | None = None) -> None:
        self._extensions = extensions or ExtensionRegistry()
        self._set_id(checkpoint_id)
        self._clear()

    def _clear(self) -> None:
        self._metadata: Metadata | None = None
        self.storage_data: Any = {}
        """Location of each item by `MetadataIndex`, once `set_up_storage_reader` has been called."""
        self.load_id = secrets.token_hex(8)
        """Id of this load; a new one with each `reset`."""
        self.unverified_keys: set[str] = set()
        """Keys that the last `read_data` read without any CRC."""
        self.bytes_read = 0
        """Number of bytes that the last `read_data` read from storage."""

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new load; a `checkpoint_id` replaces the one of the constructor."""
        if checkpoint_id is not None:
            self._set_id(checkpoint_id)
        self._reopen()
        self._clear()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and return the metadata of the newest complete checkpoint in the folder.

        Rank-local indexes of a save without a coordinator are merged, so every rank sees the whole checkpoint.

        Raises:
            CheckpointNotFoundError: There is no complete checkpoint.
            CorruptCheckpointError: The index is damaged.
        """
        del args, kwargs
        return self.use_index(self.read_index())

    def read_index(self) -> CheckpointIndex:
        """Read the index of which `use_index` makes the metadata, on one rank for all. Errors: see `read_metadata`."""
        self._reopen()
        return self._backend.read_index()

    def use_index(self, index: CheckpointIndex) -> Metadata:
        """Load the checkpoint that an index describes, which this rank or another one has read; returns its metadata.

        Args:
            index: Index of the checkpoint; must not be changed afterwards.
        """
        self._backend.use_index(index)
        metadata = metadata_from_index(index)
        note_checkpoint_id(metadata, self.checkpoint_id).load_id = self.load_id
        return metadata

    @property
    def shares_index(self) -> bool:
        """Whether `read_metadata` is that of `ByteStorageReader`, so that one rank can read the index for others."""
        return getattr(self.read_metadata, "__func__", None) is ByteStorageReader.read_metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set the metadata of the checkpoint to load, whose `storage_data` has the locations of items."""
        del is_coordinator, args, kwargs
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's load plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the load plans of all ranks unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read and verify all items of the plan, and pass them to the planner.

        Raises:
            CorruptCheckpointError: Bytes do not match their CRC; the message names file, key and offset.
            CheckpointNotFoundError: A data file is missing.
        """
        with collector_paused():
            prepared = self.prepare_read(plan, planner)
            try:
                stats = self._backend.read(prepared.requests)
            except Exception as error:
                prepared.note_changes(error)
                raise
        self.finish_read(stats)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def prepare_read(self, plan: LoadPlan, planner: LoadPlanner) -> PreparedRead:
        """Return the read requests of a plan, for whoever reads them instead of `read_data`: an `Exchange`."""
        self.bytes_read = 0
        backend = self._backend
        return PreparedRead(
            backend, self._requests(plan, planner), lambda error: _note_changes(error, backend.changed_keys)
        )

    def finish_read(self, stats: ReadStats) -> None:
        """Record what was read for the requests of `prepare_read`."""
        self.bytes_read += stats.bytes_read
        self.unverified_keys = set(stats.unverified_keys)

    @property
    def place(self) -> Place:
        """Where the checkpoint's files lie, as seen from several ranks; see `dcp_io.Place`."""
        return self._backend.store.place

    @property
    def reads_alone(self) -> str | None:
        """Reason why other ranks cannot read for this rank, as a clause; None if they can."""
        if self._backend.verify == "before":
            return "verify='before' checks all bytes before it delivers any"
        return None

    def _requests(self, plan: LoadPlan, planner: LoadPlanner) -> list[ReadRequest]:
        decoder = ItemDecoder(self._extensions)
        requests, items = split_whole_reads(plan, planner, self._known(), direct_memory)
        tensors: list[_Wanted] = []
        for item in items:
            stored = self._stored(item)
            if item.type is LoadItemType.BYTE_IO:
                requests.append(object_request(item, stored, planner, decoder))
            else:
                tensors.append(_Wanted(item, stored, *self._chunk(item)))
        keyed = ((one.item.storage_index.fqn, one.stored) for one in tensors)
        self.bytes_read += decoder.look_into(keyed, self._backend.read)
        copies = DeviceCopies()
        whole: dict[tuple[str, int, tuple[int, ...]], list[_Wanted]] = defaultdict(list)
        for one in tensors:
            part = decoder.in_parts(one.item.storage_index.fqn, one.stored, one.sizes)
            if part is None:
                whole[one.stored.file, one.stored.offset, one.sizes].append(one)
            else:
                requests.append(tensor_request(one.item, part, one.dtype, one.sizes, planner, copies))
        for several in whole.values():
            _, stored, dtype, sizes = several[0]
            requests.append(whole_request([one.item for one in several], stored, dtype, sizes, planner, decoder))
        return requests

    def _known(self) -> Metadata:
        if self._metadata is None:
            raise DcpError("set_up_storage_reader must be called before read_data")
        return self._metadata

    def _stored(self, item: ReadItem) -> StoredItem:
        index = item.storage_index
        self._known()
        info = None if self.storage_data is None else self.storage_data.get(index)
        if info is None:
            raise CorruptCheckpointError(
                f"the index names no stored data for the chunk at offset {tuple(index.offset or ())}; "
                "the checkpoint is incomplete, load an earlier one",
                key=index.fqn,
            )
        return stored_item(info, is_object=item.type is LoadItemType.BYTE_IO)

    def _chunk(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and sizes of the stored chunk that an item reads from."""
        entry = self._known().state_dict_metadata[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            raise CorruptCheckpointError("the index lists an object where a tensor is stored", key=item.dest_index.fqn)
        return entry.properties.dtype, _chunk_sizes(entry, item.storage_index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether this storage can read a checkpoint with this checkpoint id."""
        del checkpoint_id
        return True


def _note_changes(error: Exception, keys: Collection[str]) -> None:
    """Add a note to the error of a failed load: the values that may be partly overwritten, and must not be used."""
    if not keys or not hasattr(error, "add_note"):  # Python 3.11
        return
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    error.add_note(
        f"values that may have changed already: {', '.join(map(repr, names[:_SHOWN_KEYS]))}{more}; "
        "verify='before' checks everything first"
    )


def _chunk_sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...]:
    chunks = entry.chunks
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return tuple(chunks[index.index].sizes)
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    raise CorruptCheckpointError(f"the index has no chunk at offset {tuple(index.offset or ())}", key=index.fqn)
