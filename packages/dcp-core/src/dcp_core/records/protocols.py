"""Contracts that planners, storages and stateful values satisfy; nothing here does any work.

Method names, order of calls and meanings are stock's, so that a subclass written for
`torch.distributed.checkpoint` ports by changing an import. Each contract says what runs where: *every rank* or the
*coordinator* only. Whatever a method raises is collected and raised on every rank of the job.

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
    """A value with its own state; replaced by its `state_dict()` at the top level of a state dict."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save, or the template to load into."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the loaded state. Called after every tensor has been read."""
        ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether a value is `Stateful`; for the tensors of a large state dict 100 times as fast as `isinstance`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def in_shared_order(values: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the items of a mapping sorted by key, an order that is the same on all ranks.

    Methods of values that may be collective (`state_dict()`, `load_state_dict()`) are called in this order: if each
    rank used its own order, ranks would deadlock.
    """
    return sorted(values.items(), key=lambda item: _sort_key(item[0]))


def _sort_key(key: Any) -> tuple[str, int, str]:
    # Numbers by their value: Python refuses to print very long ones.
    return type(key).__qualname__, key if type(key) is int else 0, "" if type(key) is int else str(key)


def with_states(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict in which each `Stateful` value is replaced by its state; the order of keys is unchanged.

    Ranks: every rank; `state_dict()` is called in an order that all ranks share, as it may be collective.
    """
    stateful = {key: value for key, value in state_dict.items() if type(value) not in _TENSORS and is_stateful(value)}
    states = {key: value.state_dict() for key, value in in_shared_order(stateful)}
    return {key: states.get(key, value) for key, value in state_dict.items()}


StatefulT = TypeVar("StatefulT", bound=Stateful)


@dataclass(frozen=True)
class WriteResult:
    """The result of writing one item: sent to the coordinator, and added to the metadata."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any


class SavePlanner(ABC):
    """Decides which values of a state dict each rank writes, and returns their bytes when they are written.

    Call order: `set_up_planner` and `create_local_plan` on every rank, `create_global_plan` on the coordinator,
    `finish_plan` on every rank, then `resolve_data` once per item, possibly from several threads.
    """

    @abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the state dict of this save. Every rank."""

    @abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return the items that this rank could write, replicated ones included. Every rank."""

    @abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return one plan for each rank, in the order of `all_plans`, and the checkpoint's metadata. Coordinator."""

    @abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan that this rank will write, made from what the coordinator sent. Every rank."""

    @abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor (on any device) or the bytes of one item of the final plan. Every rank."""

    def plain_values(self) -> Mapping[str, Any] | None:
        """Return the values by FQN, if they are written as they are; None if `resolve_data` must be called.

        A storage may then read tensors from the mapping itself, which is faster for many small tensors. Every rank.
        """
        return None


class LoadPlanner:
    """Decides which items each rank reads, and the memory that they fill.

    Call order: `set_up_planner` and `create_local_plan` on every rank, `create_global_plan` on the coordinator,
    `finish_plan` on every rank, then per read item `load_bytes`, or `resolve_tensor` and `commit_tensor`.
    """

    @abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Set the template to load into, and the checkpoint's metadata. Every rank."""

    @abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return the read items of this rank. Every rank."""

    @abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return one plan for each rank, in the same order. Coordinator."""

    @abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan that this rank will read. Every rank."""

    @abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Accept the stored bytes of an object item. Every rank."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return a buffer to read an object item into; only some storages call this."""
        raise NotImplementedError(f"{type(self).__name__} gives no buffer for object items; use load_bytes")

    @abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that receives the data, of shape `lengths`: memory of the template or a buffer."""

    @abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Accept the data; called when the tensor that `resolve_tensor` returned contains them."""


class StorageWriter(ABC):
    """Writes items to storage and publishes the checkpoint.

    Call order: `reset` (only when `save` got a `checkpoint_id`), `storage_meta`, `set_up_storage_writer`,
    `prepare_local_plan`, `write_data` on every rank; `prepare_global_plan` and `finish` on the coordinator.
    Optional abilities of a writer: `dcp_core.records.abilities.WriterAbilities`.
    """

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new save; `checkpoint_id`, if given, replaces that of the constructor. Every rank."""

    @abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this instance. `kwargs` hold `rank` and `use_collectives` when the method takes `**kwargs`."""

    @abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the local plan, with the additions of this storage. Every rank."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans of all ranks, with the additions of this storage. Coordinator."""

    @abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write every item of the plan. Data must be durable when the future completes. Every rank."""

    @abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish: the checkpoint exists after this, and not before. `results` has one list per rank. Coordinator."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage can hold a checkpoint of that id."""

    def storage_meta(self) -> StorageMeta | None:
        """Return this storage's metadata, for planners."""
        return None


def placed_plans(writer: StorageWriter, plans: list[SavePlan]) -> list[SavePlan]:
    """Return the plans with the additions of a storage; a writer may complete the additions of its subclass.

    Ranks: the coordinator; every rank in a save without one.
    """
    plans = writer.prepare_global_plan(plans)
    complete = abilities(writer, WriterAbilities).placed_plans
    return plans if complete is None else complete(plans)


class StorageReader(ABC):
    """Finds a checkpoint in storage and reads items of it.

    Call order: `reset` (only when `load` got a `checkpoint_id`), `read_metadata`, `set_up_storage_reader`,
    `prepare_local_plan` on every rank, `prepare_global_plan` on the coordinator, `read_data` on every rank.
    """

    @abstractmethod
    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new load; `checkpoint_id`, if given, replaces that of the constructor. Every rank."""

    @abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read and return the metadata of the checkpoint. Every rank."""

    @abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare this instance. Every rank."""

    @abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the local plan, with the additions of this storage. Every rank."""

    @abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks, with the additions of this storage. Coordinator."""

    @abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        """Read every item of the plan and hand it to the planner. Every rank."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Whether this storage can hold a checkpoint of that id."""
