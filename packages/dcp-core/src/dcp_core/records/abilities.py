"""Optional attributes and methods of storages and planners, in addition to the required ones in `protocols`.

Storages and planners written for stock have none of them. `abilities` returns a record of an object's optional
attributes and methods, with None for each one that the object does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dcp_core.records.metadata import Metadata, StorageMeta
from dcp_core.records.plan import SavePlan
from dcp_manifest.index.columns import CheckpointIndex

__all__ = [
    "LoadPlannerAbilities",
    "ReaderAbilities",
    "SavePlannerAbilities",
    "WriterAbilities",
    "abilities",
    "set_up_save_planner",
    "takes",
]

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class WriterAbilities:
    """Optional attributes and methods of a `StorageWriter`; None for each one that a writer does not have."""

    checkpoint_id: Any
    """Checkpoint id to save to if `save` is called without a checkpoint id."""
    renew_save_id: Callable[[], None] | None
    """Method that chooses a new save id if the writer's save id was used by an earlier save."""
    placed_plans: Callable[[list[SavePlan]], list[SavePlan]] | None
    """Method that completes the plans from a subclass's `prepare_global_plan`. Called on the coordinator."""
    stores_aliases: bool | None
    """Whether tied tensors are stored once, with their names recorded by `finish` in `Metadata.aliases`."""
    published_metadata: Callable[[str | None], Metadata] | None
    """Method that reads from storage the metadata of the checkpoint with a save id. Called on every rank."""
    connect_ranks: Callable[[Any, SavePlan], None] | None
    """Method that gets the save's `dcp_ranks.Coordinator` and the rank's plan before `write_data`, to run phases of its
    own, such as an exchange of addresses. Called on every rank if the ranks plan together."""
    follow_commit: Callable[[Any], None] | None
    """Method that gets the save's coordinator after the checkpoint was published, to run phases of its own. Called on
    every rank if the ranks plan together."""
    lender: Callable[[], Any] | None
    """Method that returns the `dcp_io.MemoryLender` of the storage, in whose memory an asynchronous saver may stage, or
    None. Called on every rank, before the save has begun."""
    abort: Callable[[BaseException], None] | None
    """Method that cleans up after a save that failed with the error in its argument. Called on every rank."""


@dataclass(frozen=True, slots=True)
class SavePlannerAbilities:
    """Optional attributes and methods of a `SavePlanner`; None for each one that a planner does not have."""

    plain_values: Callable[[], Mapping[str, Any] | None] | None
    """Method that returns a mapping FQN → tensor or object to write; see `SavePlanner.plain_values`."""
    plan_key: Callable[[], Hashable] | None
    """Method that returns the planner's options as the key of the plan cache, or None to cache no plans."""
    adopt_global_plan: Callable[[list[SavePlan], Metadata], None] | None
    """Method that sets a cached global plan as the plan of this save. Called on the coordinator."""
    stands_for: Any
    """The custom planner that this planner replaces in the worker process of an asynchronous saver."""
    fed_tensors: Any
    """The `FedTensors` of the save, whose bytes are not in this process's memory; see `shards.fed_tensors`."""


@dataclass(frozen=True, slots=True)
class ReaderAbilities:
    """Optional attributes of a `StorageReader`, with their current values; None for each one that it does not have."""

    checkpoint_id: Any
    """Checkpoint id to load from if `load` is called without a checkpoint id."""
    bytes_read: int | None
    """Number of bytes that the last `read_data` read from storage."""
    unverified_keys: Collection[str] | None
    """FQNs whose bytes the last `read_data` could not check, because there is no CRC of the bytes that were read."""
    prepare_read: Callable[..., Any] | None
    """Method that returns the read requests of a plan, which an `Exchange` reads instead of `read_data`."""
    finish_read: Callable[..., None] | None
    """Method that records what an `Exchange` has read for the requests of `prepare_read`."""
    connect_ranks: Callable[[Any], None] | None
    """Method that gets the load's `dcp_ranks.Coordinator` before the metadata is read, to run phases of its own. Called
    on every rank."""
    place: Any
    """Where the checkpoint's files lie; see `dcp_io.Place`."""
    reads_alone: str | None
    """Reason why other ranks cannot read for this rank, as a clause; None if they can."""
    shares_index: bool | None
    """Whether one rank may call `read_index` for all, and the others `use_index` in place of `read_metadata`."""
    read_index: Callable[[], CheckpointIndex] | None
    """Method that reads the index of the checkpoint."""
    use_index: Callable[[CheckpointIndex], Metadata] | None
    """Method that returns the metadata of the checkpoint from its index."""


@dataclass(frozen=True, slots=True)
class LoadPlannerAbilities:
    """Optional attributes of a `LoadPlanner`, with their current values; None for each one that it does not have."""

    local_load: Any
    """The planner's `LocalLoadPlan`, with the matches and mismatches of template and checkpoint."""
    initialised: Collection[str] | None
    """FQNs of meta tensors of the template for which the planner has allocated memory."""


def abilities(value: object, kind: type[A]) -> A:
    """Return the optional attributes and methods of a storage or planner.

    Args:
        value: Storage writer or reader, or save or load planner.
        kind: Record class for that kind of object, such as `WriterAbilities`.
    """
    return kind(**{field.name: getattr(value, field.name, None) for field in fields(kind)})  # type: ignore[arg-type]


def takes(method: Callable[..., Any], parameter: str) -> bool:
    """Return whether a method has a parameter with this name; methods written for older versions of stock lack some."""
    return parameter in inspect.signature(method).parameters


def set_up_save_planner(
    planner: Any, state_dict: dict[str, Any], storage_meta: StorageMeta | None, *, is_coordinator: bool
) -> None:
    """Call `set_up_planner` of a save planner; omit `storage_meta` if the method has no such parameter."""
    if takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
