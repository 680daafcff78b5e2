"""Plug-ins for saves and loads, looked up through `dcp_hooks`, with the error classes of this package.

The functions here use one registry for the whole process. Importing this module reads no entry points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dcp_core.errors import DuplicatePluginError, PluginLoadError, PluginNotFoundError
from dcp_hooks import ANY_SCHEME, ErrorTypes, PluginInfo, StorageBackendSpec, installed, resolve
from dcp_manifest.schemes import file_path, scheme_of

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
_ERRORS = ErrorTypes(PluginNotFoundError, DuplicatePluginError, PluginLoadError)


@dataclass(frozen=True, slots=True)
class StorageBackend:
    """A storage found by scheme, with the plug-in that offers it."""

    spec: StorageBackendSpec
    plugin: PluginInfo

    def load_reader(self) -> Any:
        """Import and return the factory of readers, which takes a checkpoint id. Raises PluginLoadError."""
        return resolve(self.spec.reader, self.plugin, errors=_ERRORS)

    def load_writer(self) -> Any:
        """Import and return the factory of writers, which takes a checkpoint id. Raises PluginLoadError."""
        return resolve(self.spec.writer, self.plugin, errors=_ERRORS)


def storage_for(uri: str) -> StorageBackend:
    """Return the storage for a checkpoint id, by its URI scheme.

    Args:
        uri: `scheme://…`, or a path.

    Raises:
        PluginNotFoundError: No installed package handles the scheme; names the one to install.
        PluginLoadError: No plug-in for the scheme works, and a broken one may handle it.
        DuplicatePluginError: Two plug-ins handle the scheme.
        InvalidPlaceError: The id is empty, or a URI that has lost a slash.
    """
    scheme = scheme_of(uri)
    if scheme == "file":
        file_path(uri)
    try:
        spec, plugin = installed.find("storage", scheme, errors=_ERRORS)
    except PluginNotFoundError as error:
        for spec, plugin in installed.offered("storage", ANY_SCHEME):
            backend = StorageBackend(spec, plugin)
            if backend.load_writer().validate_checkpoint_id(uri):
                return backend
        raise PluginNotFoundError(f"Cannot detect which storage to use for {uri!r}: {error}") from None
    return StorageBackend(spec, plugin)


def transform(descriptor: str) -> Any:
    """Return a transform's factory by descriptor (`stream.zstd/1`) or registry name. Raises like `storage_for`."""
    return installed.factory("transforms", descriptor.partition("/")[0], errors=_ERRORS)


def saver(name: str) -> Any:
    """Return the factory of an asynchronous saver. Raises like `storage_for`."""
    return installed.factory("savers", name, errors=_ERRORS)


def state_adapter(name: str) -> Any:
    """Return an adapter between modules or optimizers and tensors. Raises like `storage_for`."""
    return installed.factory("state_adapters", name, errors=_ERRORS)


def converter(name: str) -> Any:
    """Return the converter of a format. Raises like `storage_for`."""
    return installed.factory("converters", name, errors=_ERRORS)


def bridge(package: str) -> Any:
    """Return the bridge that adapts storages and planners of another library, by the name of its package.

    Raises like `storage_for`.
    """
    return installed.factory("bridges", package, errors=_ERRORS)


def register(plugin: object, *, name: str) -> None:
    """Register a plug-in without an entry point, for this process. Raises PluginLoadError if it is not valid."""
    installed.register(plugin, name=name, errors=_ERRORS)


def unregister(name: str) -> None:
    """Remove a plug-in that `register` added. Raises PluginNotFoundError."""
    installed.unregister(name, errors=_ERRORS)
