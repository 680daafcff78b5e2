"""Look up plug-ins: storages, transforms, state adapters and converters.

Unknown names raise PluginNotFoundError, PluginLoadError if a broken plug-in may offer them, or DcpError if
two plug-ins do. Importing this module reads no entry points.
"""

from __future__ import annotations

from typing import Any

from dcp_base import PluginInfo, installed
from dcp_core.arguments import StorageBackend, open_reader, open_writer, storage_for

__all__ = [
    "PluginInfo",
    "StorageBackend",
    "converter",
    "divert_events",
    "emit",
    "list",
    "names",
    "open_reader",
    "open_writer",
    "register",
    "state_adapter",
    "storage_for",
    "transform",
    "unregister",
]

divert_events, emit, names = installed.divert_events, installed.emit, installed.names
list = installed.list  # noqa: A001 - reads as `plugins.list()`


def transform(descriptor: str) -> Any:
    """Return a transform's factory by descriptor (`stream.zstd/1`) or name."""
    return installed.factory("transforms", descriptor.partition("/")[0])


def state_adapter(name: str) -> Any:
    """Return a state adapter."""
    return installed.factory("state_adapters", name)


def converter(name: str) -> Any:
    """Return a format's converter."""
    return installed.factory("converters", name)


def register(plugin: object, *, name: str) -> None:
    """Register a plug-in; PluginLoadError if its hooks are invalid."""
    installed.register(plugin, name=name)


def unregister(name: str) -> None:
    """Remove a registered plug-in, or raise PluginNotFoundError."""
    installed.unregister(name)
