"""Contracts (protocols and abstract base classes) of planners, storage readers and writers, and stateful objects.

Method names, order of calls and meanings are as in stock: a subclass written for `torch.distributed.checkpoint` works
after a change of its imports. Each method's docstring names where it is called: on every rank, or only on the
coordinator.
An exception that a method raises on one rank is reported to all ranks, and raised on each of them.

Source: torch 2.13 `torch.distributed.checkpoint.{planner,storage,stateful}` (names and semantics).
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.records.abilities import WriterAbilities, abilities
from dcp_core.records.metadata import Metadata, MetadataIndex, StorageMeta
from dcp_core.records.plan import LoadPlan, ReadItem, SavePlan, WriteItem

__all__ = [
    "STATE_DICT_TYPE",
    "LoadPlanner",
    "SavePlanner",
    "Stateful",
    "StatefulT",
    "StorageReader",
    "StorageWriter",
    "WriteResult",
    "in_shared_order",
    "is_stateful",
    "placed_plans",
    "with_states",
]

STATE_DICT_TYPE = dict[str, Any]
CheckpointId = str | os.PathLike[str]
# A state dict may hold thousands of tensors, and looking for methods of a tensor is slow.
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@runtime_checkable
class Stateful(Protocol):
    """An object with methods `state_dict` and `load_state_dict`, which `save` and `load` call for top-level objects."""

    def state_dict(self) -> dict[str, Any]:
        """Return the object's state dict: to be saved, or as the template of a load."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the loaded state dict as the object's state. Called after all tensors have been read."""
        ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Return whether an object is `Stateful`; for tensors 100 times as fast as `isinstance(value, Stateful)`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def in_shared_order(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the (key, value) pairs of a mapping sorted by key, an order that is the same on all ranks.

    Methods that may be collective (`state_dict()`, `load_state_dict()`) are called in this order; with different
    orders, ranks would deadlock.
    """
    return sorted(values.items(), key=lambda item: _sort_key(item[0]))


def _sort_key(key: Any) -> tuple[str, int, str]:
    # Numbers by their value: Python refuses to print very long ones.
    return type(key).__qualname__, key if type(key) is int else 0, "" if type(key) is int else str(key)


def with_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which each `Stateful` is replaced by its `state_dict()`; the order of keys is unchanged.

    Raises:
        UnsupportedValueError: `state_dict` is no mapping; the message says what to pass instead.

    Ranks: every rank; `state_dict()` may be collective, and is called in the same order on all ranks.
    """
    check_state_dict(state_dict)
    stateful = {key: value for key, value in state_dict.items() if type(value) not in _TENSORS and is_stateful(value)}
    states = {key: value.state_dict() for key, value in in_shared_order(stateful)}
    return {key: states.get(key, value) for key, value in state_dict.items()}


def check_state_dict(value: object) -> None:
    """Raise UnsupportedValueError for a value that is no mapping; the message says what to pass instead."""
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
    """Result of writing one item, which is sent to the coordinator.

    Attributes:
        index: Key of the item.
        size_in_bytes: Number of bytes that the item takes in storage.
        storage_data: Location of the item, which the storage writer adds to the metadata.
    """

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class SavePlanner(ABC):
    """Contract of a save planner, which decides which items each rank writes, and provides the data of the items.

    Call order: `set_up_planner` and `create_local_plan` on every rank, `create_global_plan` on the coordinator,
    `finish_plan` on every rank, then `resolve_data` once per item, possibly from several threads.
    """

    @abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state dict of this save. Called on every rank."""

    @abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return the local plan: all items that this rank could write, also replicated items. Called on every rank."""

    @abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the final plans of all ranks, in rank order, and the checkpoint's metadata. Called on the coordinator.

        Args:
            all_plans: Local plans of all ranks, in rank order.
        """

    @abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan that this rank will write, from the plan that the coordinator sent. Called on every rank."""

    @abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor (on any device) or the serialized object that an item writes. Called on every rank."""

    def plain_values(self) -> Mapping[str, Any] | None:
        """Return a mapping FQN → tensor or object to write, or None if `resolve_data` must be called for each item.

        A storage may take tensors directly from the mapping, which is faster for many small tensors. Called on every
        rank.
        """
        return None


class LoadPlanner:
    """Contract of a load planner, which decides which items each rank reads, and provides the tensors to fill.

    Call order: `set_up_planner` and `create_local_plan` on every rank, `create_global_plan` on the coordinator,
    `finish_plan` on every rank, then per read item `load_bytes`, or `resolve_tensor` and `commit_tensor`.
    """

    @abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the template to load into, and the checkpoint's metadata. Called on every rank."""

    @abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return the local plan, the read items of this rank. Called on every rank."""

    @abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the final load plans of all ranks, in rank order. Called on the coordinator.

        Args:
            global_plan: Local plans of all ranks, in rank order.
        """

    @abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan that this rank will read, from the plan that the coordinator sent. Called on every rank."""

    @abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load an object from its stored bytes, and put it into the template. Called on every rank.

        Args:
            read_item: Item of the object.
            value: Stored bytes of the object.
        """

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return a buffer into which the stored bytes of an object are read; called only by some storages."""
        raise NotImplementedError(f"{type(self).__name__} gives no buffer for object items; use load_bytes")

    @abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor, of shape `read_item.lengths`, into which the item is read.

        This is a view of the template's tensor, or a buffer. Called on every rank.
        """

    @abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Complete the load of an item after its tensor has been filled. Called on every rank.

        Args:
            read_item: Item that was read.
            tensor: Tensor that `resolve_tensor` returned, now filled; a planner copies it if it is a buffer.
        """


class StorageWriter(ABC):
    """Contract of a storage writer, which writes items to storage and publishes the checkpoint.

    Call order: `reset` (only if `save` was called with a `checkpoint_id`), `storage_meta`, `set_up_storage_writer`,
    `prepare_local_plan`, `write_data` on every rank; `prepare_global_plan` and `finish` on the coordinator. Optional
    attributes and methods of writers are described in `dcp_core.records.abilities.WriterAbilities`.
    """

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new save; a `checkpoint_id` replaces the one of the constructor. Called on every rank."""

    @abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the writer for the save. Called on every rank.

        Args:
            is_coordinator: Whether this rank is the coordinator.
            args: Not used.
            kwargs: `rank` and `use_collectives`; for a save without a coordinator also `world_size`, and the `save_id`
                that all ranks use. Passed only if the method accepts `**kwargs`.
        """

    @abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's local plan with the additions of this storage. Called on every rank."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks with the additions of this storage. Called on the coordinator."""

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write all items of the plan. The data must be durable when the future completes. Called on every rank."""

    @abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, which must not exist before `finish` returns. Called on the coordinator.

        Args:
            metadata: Metadata of the checkpoint.
            results: Write results of each rank, in rank order.
        """

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage can hold a checkpoint of that id."""

    def storage_meta(self) -> StorageMeta | None:
        """Return the ids that this storage records (checkpoint, save), for planners; None if it records none."""
        return None


def placed_plans(writer: StorageWriter, plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans of all ranks with the additions of a storage writer, from its `prepare_global_plan`.

    A writer whose subclasses may return plans without all additions has the optional method `placed_plans`, which is
    then called with these plans and completes them.

    Ranks: the coordinator; every rank in a save without a coordinator.
    """
    plans = writer.prepare_global_plan(plans)
    complete = abilities(writer, WriterAbilities).placed_plans
    return plans if complete is None else complete(plans)


class StorageReader(ABC):
    """Contract of a storage reader, which reads the metadata and items of a checkpoint from storage.

    Call order: `reset` (only if `load` was called with a `checkpoint_id`), `read_metadata`, `set_up_storage_reader`,
    `prepare_local_plan` on every rank, `prepare_global_plan` on the coordinator, `read_data` on every rank.
    """

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new load; a `checkpoint_id` replaces the one of the constructor. Called on every rank."""

    @abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata of the checkpoint from storage and return it. Called on every rank."""

    @abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare the reader for a load with this metadata. Called on every rank."""

    @abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return this rank's local plan with the additions of this storage. Called on every rank."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks with the additions of this storage. Called on the coordinator."""

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read all items of the plan and pass them to the planner. Called on every rank."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage can hold a checkpoint of that id."""
