"""Look-up of plug-ins (storages, transforms, savers, converters, bridges), with the exceptions of `dcp_core`.

The look-up functions raise PluginNotFoundError for a name that no plug-in offers, PluginLoadError if a broken plug-in
may offer it, and DuplicatePluginError if two plug-ins offer it. All functions use one registry for the whole process.
Importing this module reads no entry points.
"""

from __future__ import annotations

from typing import Any

from dcp_core.storage_choice import PLUGIN_ERRORS, StorageBackend, open_reader, open_writer, storage_for
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
    "open_reader",
    "open_writer",
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
    """Return the factory of a transform by its descriptor (`stream.zstd/1`) or name. Raises as the module says."""
    return installed.factory("transforms", descriptor.partition("/")[0], errors=PLUGIN_ERRORS)


def saver(name: str) -> Any:
    """Return the factory of an asynchronous saver by its name, such as `thread`. Raises as the module says."""
    return installed.factory("savers", name, errors=PLUGIN_ERRORS)


def state_adapter(name: str) -> Any:
    """Return the state adapter with this name, which turns modules or optimizers into state dicts and back.

    Raises as the module says.
    """
    return installed.factory("state_adapters", name, errors=PLUGIN_ERRORS)


def converter(name: str) -> Any:
    """Return the converter of a checkpoint format by the format's name. Raises as the module says."""
    return installed.factory("converters", name, errors=PLUGIN_ERRORS)


def bridge(package: str) -> Any:
    """Return the bridge that adapts storages and planners of another library, by that library's import name.

    Raises as the module says.
    """
    return installed.factory("bridges", package, errors=PLUGIN_ERRORS)


def register(plugin: object, *, name: str) -> None:
    """Register a plug-in object in this process, without an entry point. Raises PluginLoadError for invalid hooks."""
    installed.register(plugin, name=name, errors=PLUGIN_ERRORS)


def unregister(name: str) -> None:
    """Remove the plug-in that `register` added under this name. Raises PluginNotFoundError if there is none."""
    installed.unregister(name, errors=PLUGIN_ERRORS)
