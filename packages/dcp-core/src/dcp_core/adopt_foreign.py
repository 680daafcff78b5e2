"""Storages and planners of other libraries, made ours by an installed bridge.

Nothing here imports such a library: what an object is, the modules of its base classes tell. Each function gives back
what is ours already, None, and what only has the methods; it raises PluginNotFoundError for an object of
`torch.distributed.checkpoint` where no bridge is installed, and TypeError for one of ours that has another role.
"""

from __future__ import annotations

from typing import Any

from dcp_core import plugins
from dcp_core.records.protocols import LoadPlanner, SavePlanner, StorageReader, StorageWriter

__all__ = ["STOCK", "adopt_load_planner", "adopt_reader", "adopt_save_planner", "adopt_writer"]

STOCK = "torch.distributed.checkpoint"
_ROLES: tuple[type[Any], ...] = (StorageWriter, StorageReader, SavePlanner, LoadPlanner)


def adopt_writer(value: StorageWriter | None) -> StorageWriter | None:
    """What a caller passed as a storage writer, as one of ours."""
    made: StorageWriter | None = _adopted(value, StorageWriter)
    return made


def adopt_reader(value: StorageReader | None) -> StorageReader | None:
    """What a caller passed as a storage reader, as one of ours."""
    made: StorageReader | None = _adopted(value, StorageReader)
    return made


def adopt_save_planner(value: SavePlanner | None) -> SavePlanner | None:
    """What a caller passed as the planner of a save, as one of ours."""
    made: SavePlanner | None = _adopted(value, SavePlanner)
    return made


def adopt_load_planner(value: LoadPlanner | None) -> LoadPlanner | None:
    """What a caller passed as the planner of a load, as one of ours."""
    made: LoadPlanner | None = _adopted(value, LoadPlanner)
    return made


def _adopted(value: Any, role: type[Any]) -> Any:
    if value is None or isinstance(value, role):
        return value
    wrong = next((other for other in _ROLES if isinstance(value, other)), None)
    if wrong is not None:
        raise TypeError(f"{type(value).__qualname__} is a {wrong.__name__}, and a {role.__name__} is needed here")
    package = _home(type(value), role.__name__)
    if package is None:
        return value
    made = plugins.bridge(package)(value)
    if not isinstance(made, role):
        raise TypeError(f"the bridge to {package} made a {type(made).__qualname__}; a {role.__name__} is needed here")
    return made


def _home(kind: type, role: str) -> str | None:
    """The package of the base class called `role`, if it is stock or has a bridge."""
    modules = [base.__module__ for base in kind.__mro__ if base.__name__ == role]
    if not modules:
        return None
    for package in (STOCK, *plugins.names("bridges")):
        if any(f"{module}.".startswith(f"{package}.") for module in modules):
            return package
    return None
