"""Installed plug-ins: one registry for the whole process. Importing this module reads no entry points.

from dcp_hooks import installed

installed.names("converters")
installed.factory("converters", "safetensors")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_hooks.errors import ERROR_TYPES, ErrorTypes
from dcp_hooks.hookspecs import CheckpointEvent
from dcp_hooks.registry import PluginInfo, PluginRegistry

__all__ = [
    "divert_events",
    "emit",
    "factory",
    "find",
    "import_offers",
    "list",
    "names",
    "offered",
    "register",
    "unregister",
]

_registry = PluginRegistry()
_diverted: Callable[[CheckpointEvent], object] | None = None


def list() -> tuple[PluginInfo, ...]:  # noqa: A001 - reads as `installed.list()`
    """Return every plug-in of this process, broken ones included."""
    return _registry.infos()


def names(table: str) -> tuple[str, ...]:
    """Return the names that plug-ins offer in one table, sorted.

    Args:
        table: `storage`, `stores`, `transforms`, `savers`, `state_adapters`, `converters` or `bridges`.
    """
    return _registry.names(table)


def find(table: str, name: str, *, errors: ErrorTypes = ERROR_TYPES) -> tuple[Any, PluginInfo]:
    """Find the entry of a name in a table, and its plug-in: see `PluginRegistry.find`."""
    return _registry.find(table, name, errors=errors)


def offered(table: str, name: str) -> tuple[tuple[Any, PluginInfo], ...]:
    """Return every entry of a table under a name, each with its plug-in, in the order of discovery."""
    return _registry.offered(table, name)


def factory(table: str, name: str, *, errors: ErrorTypes = ERROR_TYPES) -> Any:
    """Import the `module:attribute` of an entry and return it. Raises like `PluginRegistry.find`."""
    return _registry.factory(table, name, errors=errors)


def import_offers(info: PluginInfo) -> None:
    """Import everything that a plug-in names as `module:attribute`. Raises PluginLoadError."""
    _registry.import_offers(info)


def emit(event: CheckpointEvent) -> None:
    """Notify all observers of an event; never raises an observer's error."""
    if _diverted is None:
        _registry.emit(event)
    else:
        _diverted(event)


def divert_events(to: Callable[[CheckpointEvent], object] | None) -> None:
    """Redirect events to one function instead of this process's observers; None ends that.

    For a process that saves on behalf of another one, which notifies its own observers.
    """
    global _diverted  # noqa: PLW0603 - there is one registry for the process, too
    _diverted = to


def register(plugin: object, *, name: str, errors: ErrorTypes = ERROR_TYPES) -> None:
    """Register a plug-in without an entry point, for this process. Raises PluginLoadError if it is not valid."""
    _registry.register(plugin, name, errors=errors)


def unregister(name: str, *, errors: ErrorTypes = ERROR_TYPES) -> None:
    """Remove a plug-in that `register` added. Raises PluginNotFoundError."""
    _registry.unregister(name, errors=errors)
