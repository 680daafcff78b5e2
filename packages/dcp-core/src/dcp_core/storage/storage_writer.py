"""`ByteStorageWriter`, the base class of storage writers; requests and payloads of items."""

from __future__ import annotations

import functools
import io
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

import torch

from dcp_core.arguments import adopted
from dcp_core.encoding.compression import Compression, compression_policy
from dcp_core.errors import CheckpointNotFoundError, DcpError, UnsupportedValueError
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata, StorageMeta, dtype_of
from dcp_core.records.protocols import CheckpointId, SavePlan, SavePlanner, StorageWriter, WriteItem, WriteResult
from dcp_core.storage.byte_storage import ByteStorage, collector_paused
from dcp_core.tables.metadata_columns import metadata_from_index, written_index
from dcp_core.tables.plan_columns import PlanColumns, WrittenColumns, columns_of, object_item
from dcp_core.tables.value_table import is_plain
from dcp_core.tensors.kinds import archive_quantized, archive_wrapper, is_wrapper
from dcp_core.tensors.tensor_memory import TensorPieces, check_memory, contiguous, small_bytes, tensor_bytes
from dcp_io.lent_memory import MemoryLender, lender_of
from dcp_io.requests import Payload, Writable, WriteRequest
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.folders.folder import METADATA_NAME, RankIndexName, data_file_prefix
from dcp_manifest.index.columns import Framing, ManifestInfo
from dcp_manifest.index.stored_items import StoredItems
from dcp_ranks.phases.phases import check_fence

_OF_A_SAVE = {
    "_opened",
    "_is_coordinator",
    "_rank",
    "_world_size",
    "_rank_local",
    "_placement",
    "_begun",
    "state_dict_cache",
}


@dataclass(frozen=True, slots=True)
class SavePlacement:
    """The coordinator's message to a rank: save id, and names of data files.

    `generation` counts the saves that replaced each other.
    """

    save_id: str
    prefix: str
    generation: int
    world_size: int

    def info(self, created_ns: int, rank: int | None = None) -> ManifestInfo:
        """Return the index's information; pass `rank` for a rank-local index."""
        return ManifestInfo(self.save_id, self.world_size, _writer(), self.generation, rank, created_ns)


@functools.cache
def _writer() -> str:
    try:
        return f"dcp-core/{version('dcp-core')}"
    except PackageNotFoundError:  # not installed
        return "dcp-core/unknown"


class ByteStorageWriter(ByteStorage, StorageWriter):
    """Base class of storage writers, which write data files and publish the index in one atomic step.

    ```python
    import torch
    from dcp_core import ByteStorageWriter, save
    from dcp_io import LocalStore, StoreBackend

    class FolderWriter(ByteStorageWriter):
        def _open(self, checkpoint_id):
            return StoreBackend(LocalStore(checkpoint_id), threads=4)

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id):
            return True

    save({"weight": torch.ones(3)}, storage_writer=FolderWriter("step-1"))
    ```

    An existing checkpoint stays complete until the new one is published. `abort` on every rank removes a failed save's
    files; the next save to the id removes a killed save's.

    Args:
        overwrite: Whether an existing checkpoint may be replaced.
        interop: Whether to also write stock's index, if the layout permits it. None: up to 1,000,000 chunks.
        compression: `adaptive`, or a setting of `CompressionPolicy`.
    """

    stores_aliases = True
    reads_back = True

    def __init__(
        self,
        checkpoint_id: CheckpointId,
        *,
        overwrite: bool = True,
        interop: bool | None = None,
        compression: Compression = None,
    ) -> None:
        self._compression = compression_policy(compression)
        self.overwrite = overwrite
        self._interop = interop
        self._set_id(checkpoint_id)
        self._clear()

    def _clear(self) -> None:
        self._is_coordinator = False
        self._rank = 0
        self._world_size = 1
        self._rank_local = False
        self._placement: SavePlacement | None = None
        self._begun = False
        self.save_id = secrets.token_hex(8)
        """Id of the current or last save; after `reset`, of the next."""

    def lender(self) -> MemoryLender | None:
        """See `StorageWriter`."""
        return lender_of(self._backend.store) if self._compression.changes_nothing else None

    def __getstate__(self) -> dict[str, Any]:
        # The state of a running save stays in its process.
        return {name: value for name, value in vars(self).items() if name not in _OF_A_SAVE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._clear()

    def renew_save_id(self) -> None:
        """See `StorageWriter`."""
        if self._begun:
            self._begun, self.save_id = False, secrets.token_hex(8)

    @property
    def rank(self) -> int:
        """This process's rank in the save."""
        return self._rank

    @property
    def use_collectives(self) -> bool:
        """Whether the ranks plan together."""
        return not self._rank_local

    def storage_meta(self) -> StorageMeta | None:
        """Return both ids; the save id is equal on all ranks from `write_data` on."""
        return StorageMeta(checkpoint_id=self._checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """See `StorageWriter`."""
        del args
        self._reopen()
        self._placement = None
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank", 0)
        self._world_size = kwargs.get("world_size", 1)
        self._rank_local = not kwargs.get("use_collectives", True)
        if self._rank_local:
            save_id = kwargs.get("save_id")
            if save_id is None:
                raise DcpError(f"rank {self._rank}: a save without collectives needs a save id that all ranks agree on")
            self._backend.begin_rank_local_save(save_id, self._rank, overwrite=self.overwrite)
            self.save_id = save_id
            (self._placement,) = self._place([self._rank], [None])

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save in storage, and add a `SavePlacement` to each rank's plan.

        SaveInProgressError: another save to this id is running. CheckpointExistsError: the id exists, without
        `overwrite`.
        """
        return self._begin(plans, [None] * len(plans))

    def placed_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add missing `SavePlacement`s to a subclass's plans, beginning the save if necessary.

        A subclass in stock's style only sets a `prefix` for file names.

        Ranks: the coordinator, or every rank without one.
        """
        kind = type(self)
        if kind.write_data is not ByteStorageWriter.write_data and kind.finish is not ByteStorageWriter.finish:
            return plans  # the subclass does not write through this class
        prefixes = [getattr(plan.storage_data, "prefix", None) for plan in plans]
        placed = [isinstance(plan.storage_data, SavePlacement) for plan in plans]
        return plans if all(placed) or None in prefixes else self._begin(plans, prefixes)

    def _begin(self, plans: list[SavePlan], prefixes: Sequence[str | None]) -> list[SavePlan]:
        if self._rank_local:
            ranks: Sequence[int] = [self._rank]
        else:
            self.renew_save_id()
            self.save_id = self._backend.begin_save(overwrite=self.overwrite, save_id=self.save_id)
            self._world_size, ranks = len(plans), range(len(plans))
        placements = self._place(ranks, prefixes)
        if not self._rank_local:
            self._placement = placements[0]
        return [replace(plan, storage_data=placed) for plan, placed in zip(plans, placements, strict=True)]

    def _place(self, ranks: Sequence[int], prefixes: Sequence[str | None]) -> list[SavePlacement]:
        self._begun, generation = True, self._backend.session.generation
        return [
            SavePlacement(self.save_id, prefix or data_file_prefix(rank), generation, self._world_size)
            for rank, prefix in zip(ranks, prefixes, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write all items; they are durable when this returns."""
        placement = plan.storage_data
        if not isinstance(placement, SavePlacement):
            raise DcpError(
                f"rank {self._rank}: the plan lost its storage data ({type(placement).__name__}); a planner's "
                "finish_plan must keep SavePlan.storage_data"
            )
        begun_here = self._placement is not None and self._placement.save_id == placement.save_id
        self._placement, self.save_id, self._begun = placement, placement.save_id, True
        if not begun_here:
            self._backend.join_save(placement.save_id)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        columns = columns_of(plan.items)
        with collector_paused():
            # Stock may call this with its planner.
            requests = list(column_requests(columns, adopted(planner, SavePlanner)))
        done.set_result(LazyList(WrittenColumns(columns, self._write(requests, placement))))
        return done

    def _write(self, requests: Sequence[Writable], placement: SavePlacement) -> StoredItems:
        return self._compression.write(self._backend, requests, prefix=placement.prefix, save_id=placement.save_id)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the index, which creates the checkpoint; then remove a replaced one's files."""
        with collector_paused():
            index, ranks = written_index(metadata, results), len(results)
            del results  # the index needs the memory, unless a caller keeps them
            placement = self._placement
            if placement is None:  # a subclass may name its files without prepare_global_plan
                plan, *_ = self._begin([SavePlan([])] * ranks, [None] * ranks)
                placement = plan.storage_data
            metadata.storage_meta = StorageMeta(checkpoint_id=self._checkpoint_id, save_id=placement.save_id)
            index.info = placement.info(self._backend.session.created_ns(), self._rank if self._rank_local else None)
            data = encode(index, interop=self._interop)
        if self._rank_local:
            self._backend.publish(str(RankIndexName(self._rank, placement.save_id)), data)
            self._backend.publish(str(RankIndexName(self._rank, None)), data)
        else:
            check_fence()
            self._backend.publish(METADATA_NAME, data)
        self._backend.finish_save(index.files)

    def published_metadata(self, save_id: str | None = None) -> Metadata:
        """See `StorageWriter`. CheckpointNotFoundError if the save was replaced."""
        if save_id is None and self._placement is not None:
            save_id = self._placement.save_id
        index = self._open(self._id_to_open()).read_index()
        if index.info is None or index.info.save_id != save_id:
            raise CheckpointNotFoundError(
                f"{self._backend.url}: the checkpoint of save {save_id} has been replaced since; look at a save's "
                "metadata before the next save to the same place, or on the coordinator, which keeps it"
            )
        metadata = metadata_from_index(index)
        metadata.storage_meta = StorageMeta(checkpoint_id=self._checkpoint_id, save_id=save_id)
        return metadata

    @property
    def compresses(self) -> bool:
        """Whether transforms encode items, so that sizes are unknown before writing."""
        return not self._compression.changes_nothing

    def abort(self, error: BaseException) -> None:
        """Delete this rank's files."""
        del error
        if self._opened is not None:  # otherwise nothing was written
            self._opened.abort_save()


# Copying a smaller tensor is cheaper than a view.
_SMALL_BYTES = 4 << 10


def _item_request(item: WriteItem, planner: SavePlanner) -> WriteRequest:
    def resolve() -> Payload:
        if item.tensor_data is not None and (pieces := planner.resolve_pieces(item)) is not None:
            dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
            return Payload(pieces, Framing.RAW, dtype, tuple(item.tensor_data.chunk.sizes))
        data = planner.resolve_data(item)
        if isinstance(data, torch.Tensor):
            return _tensor_payload(item, data)
        if isinstance(data, io.BytesIO):
            return Payload(data.getbuffer(), Framing.OBJECT)
        raise UnsupportedValueError(
            f"the planner gave a {type(data).__qualname__} for {item.index.fqn!r}; it must be a tensor or a BytesIO"
        )

    return WriteRequest(item.index.fqn, item.chunk_bytes(), resolve)


def column_requests(columns: PlanColumns, planner: SavePlanner) -> Iterator[Writable]:
    """Yield a plan's write requests, without `WriteItem`s for `plain_values`."""
    values: Mapping[str, Any] = planner.plain_values() or {}
    table = columns.table
    dtypes = [dtype_of(name) for name in table.dtypes]
    rows = zip(table.tensor_names, table.tensor_dtype.tolist(), columns.shapes, columns.whole.tolist(), strict=True)
    forms: dict[tuple[int, tuple[int, ...]], tuple[int, _SmallTensors | None]] = {}
    for row, (name, dtype, shape, whole) in enumerate(rows):
        value = values.get(name) if whole else None
        if not is_plain(value) or value.is_quantized or value.dtype is not dtypes[dtype]:
            for item in columns.tensor_items(row):
                yield _item_request(item, planner)
            continue
        form = forms.get((dtype, shape))
        if form is None:
            nbytes = math.prod(shape) * dtypes[dtype].itemsize
            alike = _SmallTensors(table.dtypes[dtype], shape) if 0 < nbytes <= _SMALL_BYTES else None
            form = forms[dtype, shape] = nbytes, alike
        nbytes, alike = form
        yield _WholeTensor(name, nbytes, value, table.dtypes[dtype], shape, alike)
    for name, nbytes in zip(table.object_names, columns.object_bytes.tolist(), strict=True):
        yield _item_request(object_item(name, nbytes), planner)


@dataclass(slots=True, eq=False)
class _SmallTensors:
    dtype: str
    sizes: tuple[int, ...]

    def resolve(self, requests: Sequence[_WholeTensor]) -> bytes | memoryview:
        tensors = [request.tensor for request in requests]
        dtype, device = dtype_of(self.dtype), tensors[0].device
        if all(each.dtype is dtype and each.shape == self.sizes and each.device == device for each in tensors):
            with torch.no_grad():
                return tensor_bytes(torch.stack(tensors).cpu())
        return b"".join([cast("bytes", request.resolve().data) for request in requests])


@dataclass(slots=True)
class _WholeTensor:
    key: str
    cost_bytes: int
    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    alike: _SmallTensors | None

    def resolve(self) -> Payload:
        tensor, nbytes = self.tensor, self.cost_bytes
        if tensor.shape != self.shape or tensor.nbytes != nbytes:
            raise UnsupportedValueError(
                f"{self.key!r} was planned with sizes {self.shape} but has {tuple(tensor.shape)} now"
            )
        if nbytes <= _SMALL_BYTES and (data := small_bytes(tensor)) is not None:
            return Payload(data, Framing.RAW, self.dtype, self.shape)
        return tensor_payload(self.key, tensor)


def _tensor_payload(item: WriteItem, tensor: torch.Tensor) -> Payload:
    planned = item.tensor_data
    if planned is None:
        raise UnsupportedValueError(f"the planner gave a tensor for {item.index.fqn!r}, which was planned as an object")
    if tuple(tensor.shape) != tuple(planned.chunk.sizes):
        raise UnsupportedValueError(
            f"{item.index.fqn!r} was planned with sizes {tuple(planned.chunk.sizes)} but resolved to "
            f"{tuple(tensor.shape)}; change the plan's tensor_data together with the data"
        )
    # If resolve_data changed the dtype without the plan, the item records its dtype.
    return tensor_payload(item.index.fqn, tensor, self_describing=tensor.dtype != planned.properties.dtype)


# Smaller tensors are copied immediately: pieces would cost more than the memory.
_COPIED_BYTES = 64 << 10


def tensor_payload(key: str, tensor: torch.Tensor, *, self_describing: bool = False) -> Payload:
    """Return a strided tensor's payload.

    A contiguous CPU tensor is not copied and must not change before it is written. Quantized and wrapper tensors, and
    all with `self_describing`, become `torch.save` archives.
    """
    if is_wrapper(tensor):
        return Payload(archive_wrapper(key, tensor).getbuffer(), Framing.TORCH_ZIP)
    tensor = tensor.detach()
    if tensor.is_meta:
        raise UnsupportedValueError(f"{key!r} is a meta tensor: it has no values to save; materialise it first")
    if tensor.layout is not torch.strided:
        raise UnsupportedValueError(f"{key!r} has layout {tensor.layout}, not strided: save its `.to_dense()`")
    check_memory(key, tensor)
    if tensor.is_quantized or self_describing:
        return Payload(_archive(key, tensor).getbuffer(), Framing.TORCH_ZIP)
    if type(tensor) is not torch.Tensor:
        tensor = tensor.as_subclass(torch.Tensor)
    data: memoryview | TensorPieces
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        data = tensor_bytes(tensor)
    elif tensor.nbytes > _COPIED_BYTES:
        data = TensorPieces(tensor)
    else:
        data = tensor_bytes(contiguous(tensor.cpu().resolve_conj().resolve_neg()))
    return Payload(data, Framing.RAW, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _archive(key: str, tensor: torch.Tensor) -> io.BytesIO:
    if tensor.is_quantized:
        return archive_quantized(key, tensor)
    buffer = io.BytesIO()
    torch.save(tensor.cpu().clone(), buffer)
    return buffer
