"""State, planners and storages that fail on one rank at a chosen place, and what every rank then says of it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute

__all__ = [
    "LOAD_PLACES",
    "SAVE_PLACES",
    "Told",
    "full",
    "listed",
    "load",
    "load_failing",
    "loaded",
    "save",
    "save_failing",
    "state",
]

# Place → (phase that it belongs to, whether it happens on the coordinator alone)
SAVE_PLACES = {
    "state_dict": ("plan", False),
    "storage_meta": ("plan", False),
    "set_up_planner": ("plan", False),
    "set_up_storage_writer": ("plan", False),
    "create_local_plan": ("plan", False),
    "prepare_local_plan": ("plan", False),
    "create_global_plan": ("plan", True),
    "prepare_global_plan": ("plan", True),
    "finish_plan": ("write", False),
    "resolve_data": ("write", False),
    "write_data": ("write", False),
    "finish": ("write", True),
}
LOAD_PLACES = {
    "state_dict": ("state_dict", False),
    "read_metadata": ("plan", False),
    "set_up_planner": ("plan", False),
    "set_up_storage_reader": ("plan", False),
    "create_local_plan": ("plan", False),
    "prepare_local_plan": ("plan", False),
    "create_global_plan": ("plan", True),
    "prepare_global_plan": ("plan", True),
    "finish_plan": ("read", False),
    "read_data": ("read", False),
    "resolve_tensor": ("read", False),
    "load_bytes": ("read", False),
    "load_state_dict": ("load_state_dict", False),
}


class UnpicklableError(Exception):
    """An exception that cannot travel between processes."""

    def __reduce__(self) -> Any:
        raise TypeError("stays here")


@dataclass(frozen=True)
class Told:
    """What one rank saw of a failure."""

    error: str
    failures: list[int]
    text: str
    seconds: float


def full(value: float) -> torch.Tensor:
    """The whole tensor of which each rank holds rows."""
    return torch.arange(1, 41, dtype=torch.float32).reshape(8, 5) * value


class _Counter:
    """A part of the state that gives and takes its own state, and may refuse."""

    def __init__(self, value: float, fails: str | None) -> None:
        self.value = value
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        _fail_if(self.fails == "state_dict")
        return {"value": self.value, "name": "counter"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _fail_if(self.fails == "load_state_dict")
        self.value = state_dict["value"]


def state(value: float, *, fails: str | None = None, group: Any = None) -> dict[str, Any]:
    """Rows by rank, a replica, and a stateful part; all zero for a template."""
    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (size,)) if group is None else DeviceMesh.from_group(group, "cpu")
    rows = distribute(full(value), mesh, [Shard(0)])
    return {"rows": rows, "all": torch.full((3,), value), "counter": _Counter(value, fails)}


def loaded(value: float, held: dict[str, Any]) -> bool:
    """Whether a state holds what `state(value)` holds."""
    wanted = full(value).chunk(held["rows"].device_mesh.size())[held["rows"].device_mesh.get_local_rank()]
    local = held["rows"].to_local() if isinstance(held["rows"], DTensor) else held["rows"]
    return bool(
        torch.equal(local, wanted)
        and torch.equal(held["all"], torch.full((3,), value))
        and held["counter"].value == value
    )


def listed(folder: str) -> list[str]:
    """The names in a folder, sorted; empty if there is none."""
    return sorted(os.listdir(folder)) if os.path.isdir(folder) else []


def save(folder: str, value: float) -> None:
    """A save in which nothing goes wrong."""
    dcp.save(state(value), checkpoint_id=folder)


def load(folder: str, value: float) -> bool:
    """Whether the folder's checkpoint holds what `save` saved with this value."""
    template = state(0.0)
    dcp.load(template, checkpoint_id=folder)
    return loaded(value, template)


def _fail_if(condition: bool) -> None:
    if condition:
        raise UnpicklableError("failed on purpose")


def _failing(base: type, places: list[str], place: str | None) -> type:
    """A subclass of `base` whose method `place` fails: after its work, but for `finish`, which would publish."""
    made = type(f"Failing{base.__name__}", (base,), {})

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _fail_if(place == "finish")
        result = getattr(super(made, self), str(place))(*args, **kwargs)
        _fail_if(True)
        return result

    if place in places:
        setattr(made, str(place), call)
    return made


_PLANNER_PLACES = [
    "set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data", "resolve_tensor",
    "load_bytes",
]  # fmt: skip
_STORAGE_PLACES = [
    "storage_meta", "set_up_storage_writer", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan",
    "write_data", "finish", "read_metadata", "read_data",
]  # fmt: skip


def _tell(action: Callable[[], Any]) -> Told:
    start = time.monotonic()
    try:
        action()
    except (dcp.DcpError, UnpicklableError) as error:
        failures = sorted(getattr(error, "failures", {}))
        return Told(type(error).__name__, failures, str(error), time.monotonic() - start)
    return Told("nothing", [], "", time.monotonic() - start)


def save_failing(folder: str, place: str, bad_rank: int, value: float) -> tuple[Told, list[str], bool]:
    """A save in which one rank fails: what this rank saw, what is in the folder, whether the next save works."""
    fails = place if dist.get_rank() == bad_rank else None
    writer = _failing(dcp.FileSystemWriter, _STORAGE_PLACES, fails)(folder)
    planner = _failing(dcp.DefaultSavePlanner, _PLANNER_PLACES, fails)()
    told = _tell(lambda: dcp.save(state(value, fails=fails), storage_writer=writer, planner=planner))
    dist.barrier()
    left = listed(folder)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.save(state(value), checkpoint_id=f"{folder}-next")
        template = state(0.0)
        dcp.load(template, checkpoint_id=f"{folder}-next")
    return told, left, loaded(value, template)


def load_failing(folder: str, place: str, bad_rank: int, value: float) -> tuple[Told, list[str], bool]:
    """A load in which one rank fails: what this rank saw, what is in the folder, whether the next load works."""
    fails = place if dist.get_rank() == bad_rank else None
    reader = _failing(dcp.FileSystemReader, _STORAGE_PLACES, fails)(folder)
    planner = _failing(dcp.DefaultLoadPlanner, _PLANNER_PLACES, fails)()
    told = _tell(lambda: dcp.load(state(0.0, fails=fails), storage_reader=reader, planner=planner))
    template = state(0.0)
    dcp.load(template, checkpoint_id=folder)
    return told, listed(folder), loaded(value, template)
