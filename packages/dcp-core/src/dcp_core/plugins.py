"""Plug-ins for saves and loads, looked up through `dcp_hooks`, with the error classes of this package.

The functions here use one registry for the whole process. Importing this module reads no entry points.
"""

from __future__ import annotations

from typing import Any

from dcp_core.storage_choice import PLUGIN_ERRORS, StorageBackend, storage_for
from dcp_hooks import PluginInfo, installed

__all__ = [
    "PluginInfo",
    "StorageBackend",
    "bridge",
    "converter",
    "divert_events",
    "emit",
    "list",
    "names",
    "register",
    "saver",
    "state_adapter",
    "storage_for",
    "transform",
    "unregister",
]

divert_events, emit, names = installed.divert_events, installed.emit, installed.names
list = installed.list  # noqa: A001 - reads as `plugins.list()`


def transform(descriptor: str) -> Any:
    """Return a transform's factory by descriptor (`stream.zstd/1`) or registry name. Raises like `storage_for`."""
    return installed.factory("transforms", descriptor.partition("/")[0], errors=PLUGIN_ERRORS)


def saver(name: str) -> Any:
    """Return the factory of an asynchronous saver. Raises like `storage_for`."""
    return installed.factory("savers", name, errors=PLUGIN_ERRORS)


def state_adapter(name: str) -> Any:
    """Return an adapter between modules or optimizers and tensors. Raises like `storage_for`."""
    return installed.factory("state_adapters", name, errors=PLUGIN_ERRORS)


def converter(name: str) -> Any:
    """Return the converter of a format. Raises like `storage_for`."""
    return installed.factory("converters", name, errors=PLUGIN_ERRORS)


def bridge(package: str) -> Any:
    """Return the bridge that adapts storages and planners of another library, by the name of its package.

    Raises like `storage_for`.
    """
    return installed.factory("bridges", package, errors=PLUGIN_ERRORS)


def register(plugin: object, *, name: str) -> None:
    """Register a plug-in without an entry point, for this process. Raises PluginLoadError if it is not valid."""
    installed.register(plugin, name=name, errors=PLUGIN_ERRORS)


def unregister(name: str) -> None:
    """Remove a plug-in that `register` added. Raises PluginNotFoundError if there is none."""
    installed.unregister(name, errors=PLUGIN_ERRORS)
