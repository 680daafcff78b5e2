"""The storage reader over any byte engine: read items become byte ranges, bytes become values of the template.

Bytes go straight into the destination's memory where the wanted box is one run of bytes on both sides; otherwise they
come in pieces, of which the box's elements are copied out.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from dcp_core.box_copy import BoxCopy
from dcp_core.byte_backend import ByteBackend
from dcp_core.collector import collector_paused
from dcp_core.columns import metadata_from_index
from dcp_core.device_copy import DeviceCopies
from dcp_core.errors import CorruptCheckpointError, DcpError, UnsupportedFormatError
from dcp_core.metadata import Metadata, MetadataIndex, StorageInfo, TensorStorageMetadata
from dcp_core.payloads import tensor_bytes
from dcp_core.plan import LoadItemType, LoadPlan, ReadItem
from dcp_core.protocols import CheckpointId, LoadPlanner, StorageReader
from dcp_core.whole_reads import split_whole_reads
from dcp_manifest.items import Framing, StoredItem
from dcp_manifest.requests import ReadRequest
from dcp_manifest.runs import box_runs

__all__ = ["ByteStorageReader"]

_SHOWN_KEYS = 20


class ByteStorageReader(StorageReader):
    """Reads checkpoints through a `ByteBackend`: ours in any layout, and those that stock wrote.

    Every byte that reaches a value is checked against the checkpoint's CRCs as the backend's `verify` setting says;
    what has none is listed in `unverified_keys`.
    """

    def __init__(self, checkpoint_id: CheckpointId) -> None:
        self._checkpoint_id = checkpoint_id
        self._backend = self._open(checkpoint_id)
        self._clear()

    def _clear(self) -> None:
        self._metadata: Metadata | None = None
        self.unverified_keys: set[str] = set()
        """Keys read by the last `read_data` whose bytes no CRC vouches for."""
        self.bytes_read = 0
        """Bytes that the last `read_data` took from storage."""

    @abstractmethod
    def _open(self, checkpoint_id: CheckpointId) -> ByteBackend:
        """The backend for one checkpoint id. Must not touch storage."""

    @property
    def checkpoint_id(self) -> CheckpointId:
        """The id of the checkpoint that is read."""
        return self._checkpoint_id

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new load, from `checkpoint_id` if given."""
        if checkpoint_id is not None:
            self._checkpoint_id = checkpoint_id
        self._backend = self._open(self._checkpoint_id)
        self._clear()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the newest complete checkpoint in the folder.

        Rank-local indexes that a save without collectives left are merged, so every rank sees the whole checkpoint.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: The index is damaged.
        """
        del args, kwargs
        return metadata_from_index(self._backend.read_index())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take the metadata whose `storage_data` says where items lie."""
        del is_coordinator, args, kwargs
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read, verify and hand over every item of the plan.

        Raises:
            CorruptCheckpointError: Bytes are not what was written; names file, key and offset.
            CheckpointNotFoundError: A data file is missing.
        """
        with collector_paused():
            requests = self._requests(plan, planner)
            try:
                stats = self._backend.read(requests)
            except Exception as error:
                _note_changes(error, self._backend.changed_keys)
                raise
        self.bytes_read = stats.bytes_read
        self.unverified_keys = set(stats.unverified_keys)
        done: torch.futures.Future[None] = torch.futures.Future()
        done.set_result(None)
        return done

    def _requests(self, plan: LoadPlan, planner: LoadPlanner) -> list[ReadRequest]:
        copies = DeviceCopies()
        archives: dict[tuple[str, int], list[ReadItem]] = defaultdict(list)
        requests, items = split_whole_reads(plan, planner, self._known(), _direct_memory)
        for item in items:
            stored = self._stored(item)
            if item.type is LoadItemType.BYTE_IO:
                requests.append(_object_request(item, stored, planner))
            elif stored.framing is Framing.RAW:
                requests.append(self._tensor_request(item, stored, planner, copies))
            else:
                archives[stored.file, stored.offset].append(item)
        requests.extend(self._archive_request(items, planner) for items in archives.values())
        return requests

    def _known(self) -> Metadata:
        if self._metadata is None:
            raise DcpError("set_up_storage_reader must be called before read_data")
        return self._metadata

    def _stored(self, item: ReadItem) -> StoredItem:
        index = item.storage_index
        places = self._known().storage_data
        info = None if places is None else places.get(index)
        if info is None:
            raise CorruptCheckpointError(
                f"the index names no stored data for the chunk at offset {tuple(index.offset or ())}; "
                "the checkpoint is incomplete, load an earlier one",
                key=index.fqn,
            )
        stored = _stored_item(info, item)
        if stored.chain:
            raise UnsupportedFormatError(
                f"{index.fqn!r} in {stored.file} is stored through transforms ({', '.join(map(repr, stored.chain))}) "
                "that this version cannot undo: load it with the version that saved it"
            )
        return stored

    def _sizes(self, item: ReadItem) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and sizes of the stored chunk that an item reads from."""
        entry = self._known().state_dict_metadata[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            raise CorruptCheckpointError("the index lists an object where a tensor is stored", key=item.dest_index.fqn)
        return entry.properties.dtype, _chunk_sizes(entry, item.storage_index)

    def _tensor_request(
        self, item: ReadItem, stored: StoredItem, planner: LoadPlanner, copies: DeviceCopies
    ) -> ReadRequest:
        target = _target(item, planner)
        dtype, sizes = self._sizes(item)
        runs = box_runs(sizes, item.storage_offsets, item.lengths, dtype.itemsize)
        key = item.storage_index.fqn
        into = None if runs.counts else _direct_memory(target, dtype)
        if into is not None:

            def commit(_: memoryview) -> None:
                planner.commit_tensor(item, target)

            return ReadRequest(key, stored, runs.start, runs.stop, into, commit)
        device = target.device
        copies.prepare(device)
        box = BoxCopy(sizes, dtype, item.storage_offsets, target, copies.copy)

        def done(_: memoryview) -> None:
            copies.finish(device)
            planner.commit_tensor(item, target)

        return ReadRequest(key, stored, runs.start, runs.stop, None, done, box.piece, runs)

    def _archive_request(self, items: Sequence[ReadItem], planner: LoadPlanner) -> ReadRequest:
        """One read of a whole archive serves every item that wants a part of it."""
        stored = self._stored(items[0])
        key = items[0].storage_index.fqn
        sizes = {self._sizes(item)[1] for item in items}

        def done(data: memoryview) -> None:
            tensor = _load_archive(data, stored, key)
            if sizes != {tuple(tensor.shape)}:
                raise CorruptCheckpointError(
                    f"the stored tensor has sizes {tuple(tensor.shape)}, not {' or '.join(map(str, sizes))} as indexed",
                    file=stored.file,
                    key=key,
                    offset=stored.offset,
                )
            for item in items:
                _copy_part(tensor, item, planner)

        return ReadRequest(key, stored, 0, stored.stored_bytes, None, done)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage can read that id."""
        del checkpoint_id
        return True


def _note_changes(error: Exception, keys: Collection[str]) -> None:
    """Say which values a failed load may have left half new: they must not be used."""
    if not keys or not hasattr(error, "add_note"):  # Python 3.11
        return
    names = sorted(keys)
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    error.add_note(
        f"values that may have changed already: {', '.join(map(repr, names[:_SHOWN_KEYS]))}{more}; "
        "verify='before' checks everything first"
    )


def _stored_item(info: Any, item: ReadItem) -> StoredItem:
    """The place of an item, also from records of other writers (stock's, or a ported one's)."""
    if isinstance(info, StorageInfo) and info.stored is not None:
        return info.stored
    framing = Framing.OBJECT if item.type is LoadItemType.BYTE_IO else Framing.TORCH_ZIP
    return StoredItem(
        file=str(info.relative_path),
        offset=int(info.offset),
        length=int(info.length),
        lead=0,
        stored_bytes=int(info.length),
        framing=framing,
        chain=tuple(getattr(info, "transform_descriptors", None) or ()),
    )


def _chunk_sizes(entry: TensorStorageMetadata, index: MetadataIndex) -> tuple[int, ...]:
    chunks = entry.chunks
    if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
        return tuple(chunks[index.index].sizes)
    for chunk in chunks:
        if chunk.offsets == index.offset:
            return tuple(chunk.sizes)
    raise CorruptCheckpointError(f"the index has no chunk at offset {tuple(index.offset or ())}", key=index.fqn)


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target = planner.resolve_tensor(item).detach()
    if tuple(target.shape) != tuple(item.lengths):
        raise DcpError(
            f"the planner resolved {item.dest_index.fqn!r} to a tensor of sizes {tuple(target.shape)}; "
            f"the read item has {tuple(item.lengths)}"
        )
    return target


def _direct_memory(target: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """The target's memory, if stored elements of `dtype` can be read into it as they are."""
    if not (target.is_cpu and target.dtype is dtype and target.is_contiguous() and type(target) is torch.Tensor):
        return None
    return None if target.is_conj() or target.is_neg() else tensor_bytes(target)


def _object_request(item: ReadItem, stored: StoredItem, planner: LoadPlanner) -> ReadRequest:
    key = item.storage_index.fqn

    def done(data: memoryview) -> None:
        try:
            planner.load_bytes(item, io.BytesIO(data))
        except CorruptCheckpointError as error:
            if error.file is not None:
                raise
            # Whoever decodes the object cannot know where it lies.
            message = str(error).removesuffix(f" (key {key!r})")
            raise CorruptCheckpointError(message, file=stored.file, key=key, offset=stored.offset) from error

    return ReadRequest(key, stored, 0, stored.stored_bytes, None, done)


def _load_archive(data: memoryview, stored: StoredItem, key: str) -> torch.Tensor:
    load: Callable[..., Any] = torch.load
    try:
        tensor = load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptCheckpointError(
            f"the stored tensor cannot be read: {error}", file=stored.file, key=key, offset=stored.offset
        ) from error
    if not isinstance(tensor, torch.Tensor):
        raise CorruptCheckpointError(
            f"a {type(tensor).__qualname__} is stored where a tensor should be",
            file=stored.file,
            key=key,
            offset=stored.offset,
        )
    return tensor.detach()


def _copy_part(tensor: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    target = _target(item, planner)
    target.copy_(tensor)
    planner.commit_tensor(item, target)
