"""Adaptation of storages and planners of other libraries, such as stock, through an installed bridge.

A bridge is a plug-in that wraps objects of another library in classes of `dcp_core`; that for stock is `dcp_bridge`.

This module imports no other library: the library of an object is found from the modules of its base classes. An
argument that is None, an object of a `dcp_core` class, or an object of an unknown class with the required methods is
returned unchanged. The functions raise PluginNotFoundError for an object of `torch.distributed.checkpoint` if no bridge
is installed, and TypeError for a `dcp_core` object of the wrong kind, such as a reader passed as a writer.
"""

from __future__ import annotations

from typing import Any

from dcp_core import plugins
from dcp_core.errors import DcpError
from dcp_core.records.abilities import takes
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import LoadPlanner, SavePlanner, StorageReader, StorageWriter

__all__ = ["STOCK", "adopt_load_planner", "adopt_reader", "adopt_save_planner", "adopt_writer", "read_metadata"]

STOCK = "torch.distributed.checkpoint"
_ROLES: tuple[type[Any], ...] = (StorageWriter, StorageReader, SavePlanner, LoadPlanner)


def adopt_writer(value: StorageWriter | None) -> StorageWriter | None:
    """Return a storage writer as a `dcp_core.StorageWriter`, adapted by a bridge if it belongs to another library."""
    made: StorageWriter | None = _adopted(value, StorageWriter)
    return made


def adopt_reader(value: StorageReader | None) -> StorageReader | None:
    """Return a storage reader as a `dcp_core.StorageReader`, adapted by a bridge if it belongs to another library."""
    made: StorageReader | None = _adopted(value, StorageReader)
    return made


def adopt_save_planner(value: SavePlanner | None) -> SavePlanner | None:
    """Return a save planner as a `dcp_core.SavePlanner`, adapted by a bridge if it belongs to another library."""
    made: SavePlanner | None = _adopted(value, SavePlanner)
    return made


def adopt_load_planner(value: LoadPlanner | None) -> LoadPlanner | None:
    """Return a load planner as a `dcp_core.LoadPlanner`, adapted by a bridge if it belongs to another library."""
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
    """Return the package of the base class called `role`, if that package is torch or has a bridge."""
    modules = [base.__module__ for base in kind.__mro__ if base.__name__ == role]
    if not modules:
        return None
    for package in (STOCK, *plugins.names("bridges")):
        if any(f"{module}.".startswith(f"{package}.") for module in modules):
            return package
    return None


def read_metadata(reader: StorageReader, rank: int) -> Metadata:
    """Read the metadata; if a reader in stock's style finds none for the whole job, read that of one rank.

    Args:
        reader: Storage reader.
        rank: The rank whose metadata is read if need be.
    """
    try:
        return as_metadata(reader.read_metadata())
    except DcpError:
        raise
    except Exception:
        if not takes(reader.read_metadata, "kwargs"):
            raise
        return as_metadata(reader.read_metadata(rank=rank))
