"""Optional abilities of storages and planners: attributes and methods that they may have besides those of `protocols`.

Objects written for stock have none of them. This is the only module that looks for them: a record holds the abilities
of an object, and None for each ability that the object lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dcp_core.records.metadata import Metadata, StorageMeta
from dcp_core.records.plan import SavePlan

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
    """Optional abilities of a `StorageWriter`."""

    checkpoint_id: Any
    """Checkpoint id to save to, if the caller of `save` passes none."""
    renew_save_id: Callable[[], None] | None
    """Choose a new save id, if the present one was used by an earlier save."""
    placed_plans: Callable[[list[SavePlan]], list[SavePlan]] | None
    """Complete the plans that `prepare_global_plan` of a subclass returned. Coordinator."""
    stores_aliases: bool | None
    """Whether tied values are stored once, and `finish` records the names in `Metadata.aliases`."""
    published_metadata: Callable[[str | None], Metadata] | None
    """Read the metadata of the save with this id back from storage. Every rank."""
    abort: Callable[[BaseException], None] | None
    """Clean up after a save that failed with that error. Every rank."""


@dataclass(frozen=True, slots=True)
class SavePlannerAbilities:
    """Optional abilities of a `SavePlanner`."""

    plain_values: Callable[[], Mapping[str, Any] | None] | None
    """See `SavePlanner.plain_values`."""
    plan_key: Callable[[], Hashable] | None
    """Return the options that the global plan depends on, the key of the plan cache; None plans every save anew."""
    adopt_global_plan: Callable[[list[SavePlan], Metadata], None] | None
    """Use a cached global plan as the plan of this save. Called on the coordinator."""
    stands_for: Any
    """The planner that this one replaces in a worker process, which saves on behalf of a rank."""


@dataclass(frozen=True, slots=True)
class ReaderAbilities:
    """Optional abilities of a `StorageReader` at this moment."""

    checkpoint_id: Any
    """Checkpoint id to load from, if the caller of `load` passes none."""
    bytes_read: int | None
    """Bytes that the last `read_data` read from storage."""
    unverified_keys: Collection[str] | None
    """FQNs that the last `read_data` read without any checksum."""


@dataclass(frozen=True, slots=True)
class LoadPlannerAbilities:
    """Optional abilities of a `LoadPlanner` at this moment."""

    local_load: Any
    """The matches and mismatches: a `LocalLoadPlan`."""
    initialised: Collection[str] | None
    """FQNs of values that were allocated, as the template had none."""


def abilities(value: object, kind: type[A]) -> A:
    """Return the abilities of an object, as a record of type `kind`."""
    return kind(**{field.name: getattr(value, field.name, None) for field in fields(kind)})  # type: ignore[arg-type]


def takes(method: Callable[..., Any], parameter: str) -> bool:
    """Whether a method has a parameter of that name; methods written for older versions of stock lack some."""
    return parameter in inspect.signature(method).parameters


def set_up_save_planner(
    planner: Any, state_dict: dict[str, Any], storage_meta: StorageMeta | None, *, is_coordinator: bool
) -> None:
    """Call `set_up_planner` of a save planner, with `storage_meta` unless it was written for an older stock."""
    if takes(planner.set_up_planner, "storage_meta"):
        planner.set_up_planner(state_dict=state_dict, storage_meta=storage_meta, is_coordinator=is_coordinator)
    else:
        planner.set_up_planner(state_dict, is_coordinator=is_coordinator)
