"""Storages and planners of other libraries, made ours by an installed bridge.

Nothing here imports such a library: what an object is, the modules of its base classes tell.
"""

from __future__ import annotations

from typing import TypeVar

from dcp_core import plugins
from dcp_core.protocols import LoadPlanner, SavePlanner, StorageReader, StorageWriter

__all__ = ["STOCK", "adopted"]

STOCK = "torch.distributed.checkpoint"
_ROLES = (StorageWriter, StorageReader, SavePlanner, LoadPlanner)

R = TypeVar("R", StorageWriter, StorageReader, SavePlanner, LoadPlanner)


def adopted(value: R | None, role: type[R]) -> R | None:
    """What a caller passed as a storage or planner, as one of ours.

    Args:
        value: One of ours, or of another library, or something that has the methods.
        role: The contract that it should satisfy.

    Returns:
        `value` itself, unless one of its base classes is another library's contract of that name.

    Raises:
        PluginNotFoundError: It is of `torch.distributed.checkpoint`, and no bridge is installed.
        TypeError: It has another role than the one that it was passed for.
    """
    if value is None or isinstance(value, role):
        return value
    wrong = next((other for other in _ROLES if isinstance(value, other)), None)
    if wrong is not None:
        raise TypeError(f"{type(value).__qualname__} is a {wrong.__name__}, and a {role.__name__} is needed here")
    package = _home(type(value), role.__name__)
    if package is None:
        return value
    made: R = plugins.bridge(package)(value)
    if not isinstance(made, role):
        raise TypeError(
            f"the bridge to {package} made a {type(made).__qualname__}, and a {role.__name__} is needed here"
        )
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
