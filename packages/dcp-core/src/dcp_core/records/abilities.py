"""Optional abilities of storages and planners: what they may have beside the methods of `protocols`.

Objects written for stock have none of them. Each is asked for here alone: a record holds what an object has, and None
where it has nothing of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from dcp_core.records.metadata import Metadata
from dcp_core.records.plan import SavePlan

__all__ = [
    "LoadPlannerAbilities",
    "ReaderAbilities",
    "SavePlannerAbilities",
    "WriterAbilities",
    "abilities",
    "takes",
]

A = TypeVar("A")


@dataclass(frozen=True, slots=True)
class WriterAbilities:
    """Of a `StorageWriter`."""

    checkpoint_id: Any
    """Where it saves, if the caller of `save` does not say."""
    renew_save_id: Callable[[], None] | None
    """Take a new save id, if the present one is that of an earlier save."""
    placed_plans: Callable[[list[SavePlan]], list[SavePlan]] | None
    """Complete the plans that `prepare_global_plan` of a subclass gave. Coordinator."""
    stores_aliases: bool | None
    """Tied values are stored once, and `finish` gives the names in `Metadata.aliases` a place."""
    published_metadata: Callable[[str | None], Metadata] | None
    """Read the metadata of the save of that id back from storage. Every rank."""
    abort: Callable[[BaseException], None] | None
    """Clear up after a save that failed with that error. Every rank."""


@dataclass(frozen=True, slots=True)
class SavePlannerAbilities:
    """Of a `SavePlanner`."""

    plain_values: Callable[[], Mapping[str, Any] | None] | None
    """See `SavePlanner.plain_values`."""
    plan_key: Callable[[], Hashable] | None
    """What besides local plans decides on the global plan; None if it must be made for each save."""
    adopt_global_plan: Callable[[list[SavePlan], Metadata], None] | None
    """Take a global plan that is used again as that of this save. Coordinator."""
    stands_for: Any
    """The planner whose place it takes, in a worker that saves for a rank."""


@dataclass(frozen=True, slots=True)
class ReaderAbilities:
    """Of a `StorageReader`, as of now."""

    checkpoint_id: Any
    """Where it loads from, if the caller of `load` does not say."""
    bytes_read: int | None
    """Bytes that the last `read_data` read from storage."""
    unverified_keys: Collection[str] | None
    """FQNs that the last `read_data` read without any checksum."""


@dataclass(frozen=True, slots=True)
class LoadPlannerAbilities:
    """Of a `LoadPlanner`, as of now."""

    local_load: Any
    """What was matched and what was not: a `LocalLoadPlan`."""
    initialised: Collection[str] | None
    """FQNs of values that were made, as the template had none."""


def abilities(value: object, kind: type[A]) -> A:
    """What an object has of the abilities of `kind`."""
    return kind(**{field.name: getattr(value, field.name, None) for field in fields(kind)})  # type: ignore[arg-type]


def takes(method: Callable[..., Any], parameter: str) -> bool:
    """Whether a method has a parameter of that name; those written for older versions of stock lack some."""
    return parameter in inspect.signature(method).parameters
