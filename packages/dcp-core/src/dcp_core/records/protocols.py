"""Contracts of planners, storages and stateful objects, and the plans that they exchange.

Names, fields, call order and meanings are stock's. Methods are called on every rank unless a docstring names the
coordinator. An exception on one rank is raised on every rank.

Source: torch 2.13 `torch.distributed.checkpoint.{planner,storage,stateful}`.
"""

from __future__ import annotations

import functools
import inspect
import io
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.records.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StockEnum,
    StorageMeta,
    TensorProperties,
)

if TYPE_CHECKING:
    from dcp_io.lent_memory import MemoryLender
    from dcp_io.requests import PiecewiseData
    from dcp_ranks import Coordinator


class WriteItemType(StockEnum):
    """Whole tensor, shard, or serialized object."""

    TENSOR = 1
    SHARD = 2
    BYTE_IO = 3


class LoadItemType(StockEnum):
    """Box of a tensor, or object."""

    TENSOR = 1
    BYTE_IO = 2


@dataclass(frozen=True)
class BytesIOWriteData:
    """Size of a serialized object."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """Chunk to write, with the tensor's properties and global shape (`size`)."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """Write request for an object or a chunk."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """Return the global tensor's bytes, as in stock; None for objects."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.size) * self.tensor_data.properties.dtype.itemsize

    def chunk_bytes(self) -> int:
        """Return the bytes that this item writes; 0 if unknown."""
        if self.tensor_data is None:
            return 0 if self.bytes_io_data is None else self.bytes_io_data.nbytes
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """Read request for an object or a box of a stored chunk.

    `storage_index` names the stored item, `dest_index` the item in the template. The box of `lengths` elements starts
    at `storage_offsets` in the chunk and `dest_offsets` in the shard.
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


ReplicaKey = str | tuple[str, tuple[int, ...]]
"""FQN of a whole value, or FQN and offsets of a shard."""


@dataclass(frozen=True)
class SavePlan:
    """The items that one rank writes.

    Attributes:
        usable: False means "use the plan of the last save", as in stock.
        aliases: FQN of a tied tensor → FQN that stores its data.
        digests: FQN, with the offsets of a shard → checksum to compare between ranks.
        splittable: Whether ranks with the same box may each write a part, which the planner can resolve.
    """

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True
    aliases: dict[str, str] | None = None
    digests: dict[ReplicaKey, int] | None = None
    splittable: bool = False


@dataclass
class LoadPlan:
    """The items that one rank reads."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


STATE_DICT_TYPE = dict[str, Any]
CheckpointId = str | os.PathLike[str]
# Attribute look-up on a tensor is slow, and a state dict may hold thousands of tensors.
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@runtime_checkable
class Stateful(Protocol):
    """Top-level value with methods that `save` and `load` call."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, or the template of a load."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Apply the loaded state, after all tensors were read."""
        ...


class PartialState(dict[Any, Any]):
    """Loaded state; `absent` has the paths of missing values."""

    def __init__(self, state: dict[Any, Any], absent: list[tuple[Any, ...]]) -> None:
        super().__init__(state)
        self.__dict__.update(getattr(state, "__dict__", {}))  # torch keeps module versions there
        self.absent = absent


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether an object is `Stateful`, faster than `isinstance`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def in_shared_order(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the (key, value) pairs in the same order on all ranks, for collective calls."""
    return sorted(values.items(), key=_sort_key)


def _sort_key(item: tuple[Any, Any]) -> tuple[str, int, str]:
    key = item[0]  # Python refuses to convert very long ints to str
    return type(key).__qualname__, key if type(key) is int else 0, "" if type(key) is int else str(key)


def with_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Replace each `Stateful` by its `state_dict()`, called in the same order on all ranks.

    Ranks: every rank; collective if a `state_dict()` is.
    """
    check_state_dict(state_dict)
    stateful = {key: value for key, value in state_dict.items() if type(value) not in _TENSORS and is_stateful(value)}
    for key, value in stateful.items():
        _refuse_local_parameters(key, value)
    if not stateful:
        return dict(state_dict.items())
    states = {key: value.state_dict() for key, value in in_shared_order(stateful)}
    return {key: states.get(key, value) for key, value in state_dict.items()}


def _refuse_local_parameters(key: object, value: object) -> None:
    """Raise for tensor parallelism inside DDP: the module's `state_dict()` hides that parameters are shards."""
    if "torch.distributed.tensor.parallel.ddp" not in sys.modules or not isinstance(value, torch.nn.Module):
        return
    for name, parameter in value.named_parameters():
        if "_st_info" in parameter.__dict__:
            raise UnsupportedValueError(
                f"{key!r} has the parameter {name!r}, of which this rank holds a part (tensor parallelism in DDP), and "
                "its state_dict() does not say so: save app_state(model, optimizer) or get_model_state_dict(model)"
            )


def check_state_dict(value: object) -> None:
    """Raise UnsupportedValueError if `value` is not a mapping."""
    if callable(getattr(value, "items", None)):
        return
    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        raise UnsupportedValueError(
            f"the first argument is the state dict, and {path!r} is a path: pass it as checkpoint_id={path!r}"
        )
    remedy = (
        "pass {'model': model}, or model.state_dict()"
        if is_stateful(value)
        else "pass a dict, such as {'model': model}"
    )
    raise UnsupportedValueError(f"a state dict is a dict of names and values, not a {type(value).__name__}: {remedy}")


StatefulT = TypeVar("StatefulT", bound=Stateful)


@dataclass(frozen=True)
class WriteResult:
    """Key, stored bytes and location of a written item."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class SavePlanner(ABC):
    """Decides which rank writes which item, and provides the data.

    Call order: `set_up_planner` and `create_local_plan` on every rank, `create_global_plan` on the coordinator,
    `finish_plan` on every rank, then `resolve_data` once per item, possibly from several threads.
    """

    @abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state dict to save."""

    @abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return all items that this rank could write, including replicas."""

    @abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the final plans and the metadata, from local plans; both in rank order."""

    @abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan to write, from the coordinator's."""

    @abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return an item's tensor (on any device) or serialized object."""

    def resolve_pieces(self, write_item: WriteItem) -> PiecewiseData | None:
        """Return a non-contiguous tensor's row-major bytes, or None; byte storages call this before `resolve_data`."""
        del write_item
        return None

    def plain_values(self) -> Mapping[str, Any] | None:
        """Return FQN → value, from which storages may take tensors directly; None if `resolve_data` must be called."""
        return None

    def without_values(self) -> SavePlanner:
        """Return this planner, or a copy without values."""
        return self

    def plan_key(self) -> Hashable | None:
        """Return the planner's options as a key of the plan cache, or None to disable caching."""
        return None

    def adopt_global_plan(self, plans: list[SavePlan], metadata: Metadata) -> None:
        """Use a cached global plan (in rank order) instead of `create_global_plan`. Called on the coordinator."""
        del plans, metadata

    def plan_family(self) -> str:
        """Return the class name on which ranks must agree."""
        kinds = [cls for cls in type(self).__mro__ if issubclass(cls, SavePlanner) and cls is not SavePlanner]
        return (kinds or [type(self)])[-1].__qualname__


class LoadPlanner:
    """Decides which items each rank reads, and provides the tensors to fill.

    Call order: `set_up_planner` and `create_local_plan` on every rank, `create_global_plan` on the coordinator,
    `finish_plan` on every rank, then per read item `load_bytes`, or `resolve_tensor` and `commit_tensor`.
    """

    local_load: Any = None
    initialised: Collection[str] = ()
    """FQNs of meta tensors for which the planner allocated memory."""
    allow_globals: Sequence[Any] = ()
    trust_objects: bool = False

    @abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the template and the checkpoint's metadata."""

    @abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return this rank's read items."""

    @abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the final plans from local plans, both in rank order."""

    @abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan to read, from the coordinator's."""

    @abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Deserialize an object into the template."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return a buffer for an object's stored bytes; only some storages call this."""
        raise NotImplementedError(f"{type(self).__name__} has no buffer for object items; use load_bytes")

    @abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return a view of the template's tensor, or a buffer, of shape `read_item.lengths`, to fill."""

    @abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Complete a filled item: copy a buffer into the template."""

    def adopt_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> bool:
        """Set a stored wrapper tensor itself in the template; return False to use `resolve_tensor`."""
        del read_item, tensor
        return False

    def plain_targets(self) -> Mapping[str, Any] | None:
        """Return FQN → tensor that storages may fill directly, or None if `resolve_tensor` must be called."""
        return None


class Storage(ABC):
    """Base class of storage readers and writers."""

    checkpoint_id: Any = None
    """Default id of a `save` or `load`."""
    absolute_id: Any = None
    """Id for a save or load that runs later or in another process, if it differs from `checkpoint_id`."""

    @property
    def ids_are_paths(self) -> bool:
        """Whether ids without a URI scheme are paths."""
        return isinstance(getattr(self, "path", None), Path)

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new save or load. `checkpoint_id` replaces the constructor's."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether this storage accepts the id."""


class StorageWriter(Storage):
    """Writes items and publishes the checkpoint.

    Call order: `reset` (only if `save` got a `checkpoint_id`), `renew_save_id`, `storage_meta`,
    `set_up_storage_writer`, `prepare_local_plan`, `connect_ranks`, `write_data`, `follow_commit` on every rank;
    `prepare_global_plan`, `placed_plans` and `finish` on the coordinator.
    """

    stores_aliases = False
    """Whether tied tensors are stored once and `finish` records their names in `Metadata.aliases`."""
    reads_back = False
    """Whether ranks read a finished save's metadata with `published_metadata`; otherwise the coordinator sends it."""

    def renew_save_id(self) -> None:
        """Choose a new save id if the current one was used."""

    @abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the writer.

        A method with `**kwargs` gets `rank` and `use_collectives`, and without a coordinator also `world_size` and the
        common `save_id`.
        """

    @abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with the storage's additions."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return all ranks' plans with the storage's additions."""

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write all items. The data must be durable when the future completes."""

    @abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, which must not exist earlier."""

    def placed_plans(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Complete the plans of a subclass's `prepare_global_plan`."""
        return plans

    def connect_ranks(self, coordinator: Coordinator, plan: SavePlan) -> None:
        """Run phases before `write_data`, if the ranks plan together."""

    def follow_commit(self, coordinator: Coordinator) -> None:
        """Run phases after `finish`, if the ranks plan together."""

    def published_metadata(self, save_id: str | None = None) -> Metadata:
        """Read the metadata of the checkpoint with this save id. Called if `reads_back`."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot read back the checkpoint that it saved (save id {save_id})"
        )

    def lender(self) -> MemoryLender | None:
        """Return a lender of memory for staging, or None. Called before the save."""
        return None

    def abort(self, error: BaseException) -> None:
        """Clean up after a failed save."""

    def storage_meta(self) -> StorageMeta | None:
        """Return the ids that this storage records, or None."""
        return None


class StorageReader(Storage):
    """Reads a checkpoint's metadata and items.

    Call order: `reset` (only if `load` got a `checkpoint_id`), `connect_ranks`, `read_metadata`,
    `set_up_storage_reader`, `prepare_local_plan` on every rank, `prepare_global_plan` on the coordinator, `read_data`
    on every rank.
    """

    bytes_read: int | None = None
    """Bytes that the last `read_data` read from storage; None if unknown."""
    unverified_keys: Collection[str] = ()
    """FQNs that the last `read_data` read without a CRC."""

    def connect_ranks(self, coordinator: Coordinator) -> None:
        """Run phases before the metadata is read."""

    @abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checkpoint's metadata."""

    @abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the reader for this metadata."""

    @abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan with the storage's additions."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return all ranks' plans with the storage's additions."""

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read all items and pass them to the planner."""


_signature = functools.lru_cache(maxsize=64)(inspect.signature)


def takes(method: Callable[..., Any], parameter: str) -> bool:
    """Return whether a method has a parameter, which older stock may lack."""
    signature = _signature(method.__func__) if inspect.ismethod(method) else inspect.signature(method)
    return parameter in signature.parameters


def set_up_save_planner(
    planner: Any, state_dict: dict[str, Any], storage_meta: StorageMeta | None, *, is_coordinator: bool
) -> None:
    """Call `set_up_planner`, with `storage_meta` if it takes that."""
    if takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
