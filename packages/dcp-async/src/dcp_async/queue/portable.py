"""Custom planners, and keys of unknown classes, in a form for a worker process.

Planner methods that access tensors run in the trainer, on the staged copy; the others run in the worker, on a copy of
the planner. A checkpoint stores keys as text, so a portable key keeps only `str` and `repr`.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcp_async.errors import WorkerError
from dcp_async.staging.skeleton import Skeleton
from dcp_core import MetadataIndex, SavePlan, SavePlanner, StorageMeta, WriteItem
from dcp_core.objects.object_bytes import DumpedObject
from dcp_core.records.protocols import set_up_save_planner
from dcp_core.shards.shards import box_view


@dataclass(frozen=True, slots=True)
class PlannedElsewhere:
    """The trainer's local plan, and the names of its items' staged data."""

    plan: SavePlan
    names: dict[MetadataIndex, str]


def plan_here(
    planner: SavePlanner, state_dict: dict[str, Any], *, is_coordinator: bool
) -> tuple[PlannedElsewhere, dict[str, Any]]:
    """Run a custom planner's local planning; return the plan, and name → tensor or serialized object."""
    set_up_save_planner(planner, state_dict, None, is_coordinator=is_coordinator)
    plan = planner.create_local_plan()
    names: dict[MetadataIndex, str] = {}
    values: dict[str, Any] = {}
    for number, item in enumerate(plan.items):
        value = planner.resolve_data(item)
        names[item.index] = name = str(number)
        values[name] = DumpedObject(value.getvalue()) if isinstance(value, io.BytesIO) else value
    return PlannedElsewhere(plan, names), values


class StagedPlanner(SavePlanner):
    """Planner of the worker process, with a custom planner's local plan from the trainer.

    `planner` is a copy without tensors; `values` are staged tensors and objects by their names in `planned`.
    """

    def __init__(self, planner: SavePlanner, planned: PlannedElsewhere, values: Mapping[str, Any]) -> None:
        self._planner = planner
        self._planned = planned
        self._values = values

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Do nothing: the trainer has set up the custom planner."""

    def create_local_plan(self) -> SavePlan:
        """Return the local plan from the trainer."""
        return self._planned.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        """Return the copy's final plans and metadata."""
        return self._planner.create_global_plan(all_plans)

    def plan_key(self) -> Hashable | None:
        """Return the custom planner's plan key."""
        return self._planner.plan_key()

    def plan_family(self) -> str:
        """Return the custom planner's family."""
        return self._planner.plan_family()

    def adopt_global_plan(self, plans: list[SavePlan], metadata: Any) -> None:
        """Pass a reused global plan to the custom planner."""
        self._planner.adopt_global_plan(plans, metadata)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the custom planner's final plan."""
        return self._planner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the staged tensor (only the item's chunk) or serialized object."""
        name = self._planned.names.get(write_item.index)
        planned = write_item.tensor_data
        if name is not None:
            value = self._values[name]
            if isinstance(value, DumpedObject):
                return io.BytesIO(value.data)
            if planned is None or tuple(value.shape) == tuple(planned.chunk.sizes):
                found: torch.Tensor = value
                return found
        if planned is None:
            raise WorkerError(
                f"{write_item.index.fqn!r} was not in the plan that the trainer made; use the thread saver"
            )
        return self._part(write_item, planned.chunk.offsets, planned.chunk.sizes)

    def _part(self, item: WriteItem, offsets: torch.Size, sizes: torch.Size) -> torch.Tensor:
        for one in self._planned.plan.items:
            data = one.tensor_data
            if one.index.fqn != item.index.fqn or data is None:
                continue
            within = [begin - start for begin, start in zip(offsets, data.chunk.offsets, strict=True)]
            if all(at >= 0 and at + n <= all_ for at, n, all_ in zip(within, sizes, data.chunk.sizes, strict=True)):
                value: torch.Tensor = self._values[self._planned.names[one.index]]
                return box_view(value, within, sizes, key=item.index.fqn)
        raise WorkerError(f"{item.index.fqn!r}: no staged value holds the box at {tuple(offsets)} of {tuple(sizes)}")


def pickled(what: str, value: object) -> bytes:
    """Pickle `value`, or raise WorkerError, which names `what` and a remedy."""
    try:
        return pickle.dumps(value, protocol=5)
    except Exception as error:
        raise WorkerError(
            f"{what} cannot be given to the saver's process: {type(error).__name__}: {error}. Make it picklable (a "
            "class of an importable module, no open files or locks), or use the thread saver"
        ) from error


_ANYWHERE = {str, int, float, complex, bool, bytes, type(None)}


class _Named:
    """Key with the `str()` and `repr()` of an object of another class."""

    _name: str
    _repr: str

    def __str__(self) -> str:
        return self._name

    def __repr__(self) -> str:
        return self._repr

    def __reduce__(self) -> tuple[Any, ...]:
        text = str.__str__(self) if isinstance(self, str) else None
        return _stand_in, (type(self).__qualname__, self._name, self._repr, text)


class NamedText(_Named, str):  # noqa: SLOT000 - there are few, and mypy knows no slots of text
    """Key for a `str` subclass: equal to the same text."""


class NamedKey(_Named):
    """Key for any other class: equal only to itself."""


@functools.cache
def _class_named(name: str, base: type) -> type:
    return type(name, (base,), {})


def _stand_in(class_name: str, name: str, described: str, text: str | None) -> NamedText | NamedKey:
    made: Any = _class_named(class_name, NamedKey)() if text is None else _class_named(class_name, NamedText)(text)
    vars(made).update(_name=name, _repr=described)
    return made  # type: ignore[no-any-return]


def portable(skeleton: Skeleton) -> Skeleton:
    """Return a skeleton with portable keys; unchanged if any process can unpickle its keys."""
    kind = skeleton[0]
    if kind == "l":
        below = _all_portable(skeleton[1])
        return skeleton if below is skeleton[1] else (kind, below)
    if kind != "d":
        return skeleton
    _, keys, nodes, *types = skeleton
    below = _all_portable(nodes)
    if types and not all(map(_is_known_anywhere, keys)):
        keys = tuple([_portable_key(key) for key in keys])
        types = [(object,) * len(keys)]  # types distinguish keys in the trainer only
    return skeleton if below is nodes and keys is skeleton[1] else (kind, keys, below, *types)


def _all_portable(nodes: tuple[Skeleton, ...]) -> tuple[Skeleton, ...]:
    found = tuple([portable(node) for node in nodes])
    return nodes if all(one is other for one, other in zip(found, nodes, strict=True)) else found


def _is_known_anywhere(key: Any) -> bool:
    return type(key) in _ANYWHERE or (type(key) is tuple and all(map(_is_known_anywhere, key)))


def _portable_key(key: Any) -> Any:
    if _is_known_anywhere(key):
        return key
    text = str.__str__(key) if isinstance(key, str) else None
    return _stand_in(type(key).__qualname__, str(key), repr(key), text)
