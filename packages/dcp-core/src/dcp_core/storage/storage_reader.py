"""`ByteStorageReader`, the base class of storage readers, and the contract of dcp-exchange."""

from __future__ import annotations

import io
import math
import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.autograd.graph import increment_version

from dcp_core.arguments import adopted
from dcp_core.encoding.compression import ExtensionRegistry
from dcp_core.errors import CorruptCheckpointError, DcpError
from dcp_core.records.foreign_records import as_index
from dcp_core.records.lazy import LazyDict, LazyList
from dcp_core.records.metadata import Metadata, TensorStorageMetadata, note_checkpoint_id, stored_item
from dcp_core.records.protocols import CheckpointId, LoadItemType, LoadPlan, LoadPlanner, ReadItem, StorageReader
from dcp_core.shards.shards import box_view
from dcp_core.storage.byte_storage import ByteStorage, collector_paused
from dcp_core.storage.item_decoder import ItemDecoder, PartialItem
from dcp_core.tables.metadata_columns import StorageRecords, metadata_from_index, records_of
from dcp_core.tables.value_table import ReadColumns
from dcp_core.tensors.kinds import copy_quantized, copy_wrapper, is_wrapper
from dcp_core.tensors.tensor_memory import BoxCopy, DeviceCopies, copy_elements, tensor_bytes
from dcp_io.engine import StoreBackend
from dcp_io.requests import ReadRequest, ReadStats
from dcp_io.stores.store import Place, place_of
from dcp_manifest.index.columns import CheckpointIndex, Framing, ItemKind, StoredItem
from dcp_manifest.index.runs import box_runs
from dcp_ranks import Coordinator, PeerOptions


@dataclass(frozen=True, slots=True)
class PreparedRead:
    """One rank's read requests, and the backend to read them alone."""

    backend: StoreBackend
    requests: Sequence[ReadRequest]
    note_changes: Callable[[Exception], None]
    """Notes on an error which values may have changed."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Result of an exchange on one rank."""

    stats: ReadStats
    alone: str | None = None
    """Reason why each rank read alone, as a clause; None if they read together."""
    replaced: bool = False
    """Whether a newer save replaced the checkpoint, so that the load must be planned again; equal on all ranks."""


class Exchange(Protocol):
    """Function of dcp-exchange that reads the plans of all ranks together."""

    def __call__(
        self,
        coordinator: Coordinator,
        prepare: Callable[[], PreparedRead],
        *,
        timeout_seconds: float,
        peers: PeerOptions | None,
    ) -> Exchanged:
        """Read and deliver the requests of all ranks.

        `prepare` returns this rank's; it is called in a phase, and again for each attempt. A rank fails after
        `timeout_seconds` without a message. CheckpointException: a read failed; raised on all ranks.

        Ranks: every rank; collective.
        """
        ...


_SHOWN_KEYS = 20


class _Wanted(NamedTuple):
    item: ReadItem
    stored: StoredItem
    dtype: torch.dtype
    sizes: tuple[int, ...]


class ByteStorageReader(ByteStorage, StorageReader):
    """Base class of storage readers for checkpoints of this library, in any layout, and of stock.

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

    A subclass implements `_open`, which returns a `dcp_io.StoreBackend`; its `verify` says how CRCs are checked.
    `extensions` is a registry of transforms, None for the installed ones.
    """

    def __init__(self, checkpoint_id: CheckpointId, *, extensions: ExtensionRegistry | None = None) -> None:
        self._extensions = extensions or ExtensionRegistry()
        self._set_id(checkpoint_id)
        self._clear()

    def _clear(self) -> None:
        self._metadata: Metadata | None = None
        self.storage_data: Any = {}
        self.load_id = secrets.token_hex(8)
        """Id of this load; new with each `reset`."""
        self.unverified_keys: set[str] = set()
        self.bytes_read: int = 0

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the newest complete checkpoint in the directory, with rank-local indexes merged.

        CheckpointNotFoundError: there is none. CorruptCheckpointError: the index is damaged.
        """
        del args, kwargs
        return self.use_index(self.read_index())

    def read_index(self) -> CheckpointIndex:
        """Read the index for `use_index`, on one rank for all."""
        self._reopen()
        return self._backend.read_index()

    def read_part(self, boxes: Callable[[], Mapping[str, Any] | None] | None) -> CheckpointIndex:
        """As `read_index`; a large index may lack chunks that no box overlaps."""
        kind, own = type(self), ByteStorageReader
        mine = (kind.read_index, kind.set_up_storage_reader, kind.prepare_local_plan, kind.read_data)
        theirs = (own.read_index, own.set_up_storage_reader, own.prepare_local_plan, own.read_data)
        if boxes is None or mine != theirs or type(self._backend).read_index is not StoreBackend.read_index:
            return self.read_index()  # a subclass may look at other chunks
        self._reopen()
        return self._backend.read_index(boxes)

    def use_index(self, index: CheckpointIndex) -> Metadata:
        """Return the metadata of an index, which must not change afterwards."""
        self._backend.use_index(index)
        metadata = metadata_from_index(index)
        note_checkpoint_id(metadata, self.checkpoint_id).load_id = self.load_id
        return metadata

    @property
    def shares_index(self) -> bool:
        """Whether one rank can read the index for others, because `read_metadata` is not overridden."""
        return getattr(self.read_metadata, "__func__", None) is ByteStorageReader.read_metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageReader`."""
        del is_coordinator, args, kwargs
        self._metadata = metadata
        self.storage_data = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """See `StorageReader`."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """See `StorageReader`."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read and verify all items, and pass them to the planner.

        Raises:
            CorruptCheckpointError: Bytes do not match their CRC; names file, key and offset.
            CheckpointNotFoundError: A data file is missing.
        """
        with collector_paused():
            prepared = self.prepare_read(plan, planner)
            try:
                stats = self._backend.read(prepared.requests)
            except Exception as error:
                prepared.note_changes(error)
                raise
            del prepared  # or the collector looks at all requests when it goes on
        self.finish_read(stats)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def prepare_read(self, plan: LoadPlan, planner: LoadPlanner) -> PreparedRead:
        """Return the requests for an `Exchange`, which replaces `read_data`."""
        planner = adopted(planner, LoadPlanner)  # stock may call this
        self.bytes_read = 0
        backend = self._backend
        return PreparedRead(
            backend, self._requests(plan, planner), lambda error: _note_changes(error, backend.changed_keys)
        )

    def finish_read(self, stats: ReadStats) -> None:
        """Record statistics of `prepare_read`."""
        self.bytes_read += stats.bytes_read
        self.unverified_keys = set(stats.unverified_keys)

    @property
    def place(self) -> Place:
        """Location of the files; see `dcp_io.Place`."""
        return place_of(self._backend.store)

    @property
    def reads_alone(self) -> str | None:
        """Reason why other ranks cannot read for this rank, as a clause, or None."""
        if self._backend.verify == "before":
            return "verify='before' checks all bytes before it delivers any"
        return None

    def _requests(self, plan: LoadPlan, planner: LoadPlanner) -> list[ReadRequest]:
        decoder = ItemDecoder(
            self._extensions, allow_globals=planner.allow_globals, trust_objects=planner.trust_objects
        )
        if self._metadata is None:
            raise DcpError("set_up_storage_reader must be called before read_data")
        overlapping = () if planner.local_load is None else planner.local_load.overlapping
        apart = frozenset([name for pair in overlapping for name in pair])
        requests, items = split_whole_reads(plan, planner, self._metadata, apart)
        tensors: list[_Wanted] = []
        for item in items:
            stored = self._stored(item)
            if item.type == LoadItemType.BYTE_IO:
                requests.append(object_request(item, stored, planner, decoder))
            else:
                tensors.append(_Wanted(item, stored, *_chunk(self._metadata, item)))
        archives = [(one.item.storage_index.fqn, one.stored) for one in tensors if one.stored.kind is ItemKind.ARCHIVE]
        if archives:
            self.bytes_read += decoder.look_into(archives, self._backend.read)
        copies = DeviceCopies()
        whole: dict[tuple[str, int, tuple[int, ...]], list[_Wanted]] = defaultdict(list)
        for one in tensors:
            part = decoder.in_parts(one.item.storage_index.fqn, one.stored, one.sizes)
            if part is None:
                whole[one.stored.file, one.stored.offset, one.sizes].append(one)
            else:
                requests.append(tensor_request(one.item, part, one.dtype, one.sizes, planner, copies, apart))
        for several in whole.values():
            _, stored, dtype, sizes = several[0]
            requests.append(whole_request([one.item for one in several], stored, dtype, sizes, planner, decoder))
        return requests

    def _stored(self, item: ReadItem) -> StoredItem:
        index = as_index(item.storage_index)
        info = None if self.storage_data is None else self.storage_data.get(index)
        if info is None:
            raise CorruptCheckpointError(
                f"the index names no stored data for the chunk at offset {tuple(index.offset or ())}; "
                "the checkpoint is incomplete, load an earlier one",
                key=index.fqn,
            )
        return stored_item(info, is_object=item.type == LoadItemType.BYTE_IO)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """See `Storage`."""
        del checkpoint_id
        return True


def _note_changes(error: Exception, keys: Collection[str]) -> None:
    if not keys or not hasattr(error, "add_note"):  # Python 3.11
        return
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    error.add_note(
        f"values that may have changed already: {', '.join(map(repr, names[:_SHOWN_KEYS]))}{more}; "
        "verify='before' checks everything first"
    )


def _chunk(metadata: Metadata, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
    index, records = item.storage_index, records_of(metadata, item.storage_index.fqn)
    if records is not None and (row := records.tensors.get(index.fqn)) is not None:
        box, known = records.box(row, index.index), records.dtypes[row]
        if box is not None and known is not None and box[0] == index.offset:
            return known, tuple(box[1])
    entry = metadata.state_dict_metadata[index.fqn]
    if not isinstance(entry, TensorStorageMetadata):
        raise CorruptCheckpointError("the index lists an object where a tensor is stored", key=item.dest_index.fqn)
    chunks, dtype = entry.chunks, entry.properties.dtype
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return dtype, tuple(chunks[index.index].sizes)
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return dtype, tuple(chunk.sizes)
    raise CorruptCheckpointError(f"the index has no chunk at offset {tuple(index.offset or ())}", key=index.fqn)


def tensor_request(
    item: ReadItem,
    stored: PartialItem,
    dtype: torch.dtype,
    sizes: Sequence[int],
    planner: LoadPlanner,
    copies: DeviceCopies,
    apart: Collection[str],
) -> ReadRequest:
    """Return the request for a box of a stored chunk of `sizes`; see `split_whole_reads` for `apart`."""
    dtype, decoder = stored.dtype or dtype, stored.decoder
    target = filled = _target(item, planner)
    if is_wrapper(target):  # wrapper classes copy whole boxes only
        filled = torch.empty(tuple(item.lengths), dtype=dtype, device="cpu")
    runs = box_runs(sizes, item.storage_offsets, item.lengths, dtype.itemsize)
    key = item.storage_index.fqn
    nbytes = math.prod(sizes) * dtype.itemsize
    into = None if runs.counts or item.dest_index.fqn in apart else direct_memory(filled, dtype)

    def done(_: memoryview) -> None:
        if into is None:
            copies.finish(filled.device)
        else:
            increment_version(filled)
        if filled is not target:
            copy_wrapper(item.dest_index.fqn, target, filled)
        planner.commit_tensor(item, target)

    if into is not None:
        return ReadRequest(key, stored.item, runs.start, runs.stop, into, done, decoder=decoder, decoded_bytes=nbytes)
    copies.prepare(filled)
    box = BoxCopy(sizes, dtype, item.storage_offsets, filled, copies.copy)
    return ReadRequest(key, stored.item, runs.start, runs.stop, None, done, box.piece, runs, decoder, nbytes)


def direct_memory(target: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return memory for reading `dtype` directly, or None."""
    if not (target.is_cpu and target.dtype is dtype and target.is_contiguous() and type(target) is torch.Tensor):
        return None
    return None if target.is_conj() or target.is_neg() else tensor_bytes(target)


def object_request(item: ReadItem, stored: StoredItem, planner: LoadPlanner, decoder: ItemDecoder) -> ReadRequest:
    """Return the request for an object."""
    key = item.storage_index.fqn

    def done(data: memoryview) -> None:
        try:
            planner.load_bytes(item, io.BytesIO(decoder.object(key, stored, data)))
        except CorruptCheckpointError as error:
            if error.file is not None:
                raise
            # The object's decoder does not know file and offset.
            message = str(error).removesuffix(f" (key {key!r})")
            raise CorruptCheckpointError(message, file=stored.file, key=key, offset=stored.offset) from error

    return ReadRequest(key, stored, 0, stored.stored_bytes, None, done)


def whole_request(
    items: Sequence[ReadItem],
    stored: StoredItem,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    planner: LoadPlanner,
    decoder: ItemDecoder,
) -> ReadRequest:
    """Return one request for all items of a chunk."""
    key = items[0].storage_index.fqn

    def done(data: memoryview) -> None:
        tensor = decoder.tensor(key, stored, data, dtype, sizes)
        for item in items:
            _copy_part(tensor, item, planner)

    return ReadRequest(key, stored, 0, stored.stored_bytes, None, done)


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item)
    # A detached quantized tensor has a separate quantizer; a detached wrapper tensor may be a copy.
    if not (target.is_quantized or is_wrapper(target)):
        target = target.detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise DcpError(
            f"the planner resolved {item.dest_index.fqn!r} to a tensor of sizes {tuple(target.shape)}; "
            f"the read item has {tuple(item.lengths)}"
        )
    return target


def _copy_part(tensor: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    if is_wrapper(tensor) and planner.adopt_tensor(item, tensor):
        return
    target = _target(item, planner)
    part = box_view(tensor, item.storage_offsets, item.lengths, key=item.dest_index.fqn)
    with torch.inference_mode(target.is_inference()):  # inference tensors can only be changed in inference mode
        if is_wrapper(target) or is_wrapper(part):
            copy_wrapper(item.dest_index.fqn, target, part)
        elif tensor.is_quantized:
            fqn = item.dest_index.fqn
            copy_quantized(fqn, target, part, is_whole=target is getattr(planner, "state_dict", {}).get(fqn))
        else:
            copy_elements(target, part)
    planner.commit_tensor(item, target)


_NO_CRCS = np.zeros(0, np.uint32)
_RAW = int(ItemKind.RAW)


def split_whole_reads(
    plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, apart: Collection[str] = ()
) -> tuple[list[ReadRequest], list[ReadItem]]:
    """Return requests for tensors to read whole, and other items.

    Tensors in `apart` share memory: bytes that were read there would fail their check after the other tensor's.
    """
    columns = plan.items.source if isinstance(plan.items, LazyList) else None
    places = metadata.storage_data
    untouched = isinstance(places, LazyDict) and isinstance(places.source, StorageRecords) and not places.touched
    # Looked up on the class, so that a planner that forwards missing attributes to another is not bypassed.
    targets = type(planner).plain_targets(planner)
    if not isinstance(columns, ReadColumns) or not untouched or targets is None:
        return [], plan.items
    records, stored = columns.records, columns.records.index.chunk_items
    if stored is None:
        return [], plan.items
    rows = np.array([records.tensors[name] for name in columns.names], np.int64)
    chunks = np.array(records.chunk_starts, np.int64)[rows]
    borders = stored.running_counts()
    first = np.cumsum(borders) - borders
    table = zip(
        columns.names,
        [records.dtypes[row] for row in rows.tolist()],
        *[
            column[chunks].tolist()
            for column in (
                *(stored.file, stored.offset, stored.length, stored.lead, stored.stored_bytes),
                *(stored.kinds(), stored.checked, stored.crc32, first, borders),
            )
        ],
        strict=True,
    )
    requests: list[ReadRequest] = []
    filled: list[torch.Tensor] = []
    others: list[ReadItem] = []
    files = records.index.files
    for name, dtype, file, offset, length, lead, size, kind, checked, crc, start, count in table:
        target = targets[name]
        if target.requires_grad or type(target) is not torch.Tensor:
            target = target.detach()
        into = None if kind != _RAW or dtype is None or name in apart else direct_memory(target, dtype)
        if into is None or len(into) != size:
            others.append(columns.whole(name))
            continue
        running = stored.running_crcs[start : start + count] if count else _NO_CRCS
        item = StoredItem(
            files[file], offset, length, lead, size, Framing.RAW, crc if checked else None, running if checked else None
        )
        requests.append(ReadRequest(name, item, 0, len(into), into))
        filled.append(target)
    increment_version(filled)  # autograd must notice that memory was filled without torch
    return requests, others + columns.others
