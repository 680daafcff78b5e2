"""What installed plugins offer: storages, transforms, savers, adapters, converters, observers.

The functions here ask one registry for the whole process. Importing this module reads no entry points.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dcp_core.errors import PluginNotFoundError
from dcp_core.hookspecs import ANY_SCHEME, CheckpointEvent
from dcp_core.plugin_registry import PluginInfo, PluginRegistry, StorageBackend
from dcp_manifest.schemes import file_path, package_for, scheme_of

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

_registry = PluginRegistry()
_diverted: Callable[[CheckpointEvent], object] | None = None


def list() -> tuple[PluginInfo, ...]:  # noqa: A001 - reads as `plugins.list()`
    """Every plugin of this process, broken ones included."""
    return _registry.infos()


def names(table: str) -> tuple[str, ...]:
    """What one of `storage`, `transforms`, `savers`, `state_adapters`, `converters`, `bridges` offers; sorted."""
    return _registry.names(table)


def storage_for(uri: str) -> StorageBackend:
    """The storage for a checkpoint id.

    Args:
        uri: `scheme://…`, or a path.

    Raises:
        PluginNotFoundError: No installed package handles the scheme; names the one to install.
        PluginLoadError: None works, but one that is broken may.
        DuplicatePluginError: Two do.
        InvalidPlaceError: It is empty, or a URI that has lost a slash.
    """
    scheme = scheme_of(uri)
    if scheme == "file":
        file_path(uri)
    remedy = f"install one that does (pip install {package_for(scheme)}), or pass a storage reader or writer"
    try:
        spec, plugin = _registry.find("storage", scheme, what=f"a storage for {scheme}:// ids", remedy=remedy)
    except PluginNotFoundError as error:
        for spec, plugin in _registry.offered("storage", ANY_SCHEME):
            backend = StorageBackend(spec, plugin)
            if backend.load_writer().validate_checkpoint_id(uri):
                return backend
        raise PluginNotFoundError(f"Cannot detect which storage to use for {uri!r}: {error}") from None
    return StorageBackend(spec, plugin)


def transform(descriptor: str) -> Any:
    """The factory of a transform, by its descriptor (`stream.zstd/1`) or registry name. Raises like `storage_for`."""
    name = descriptor.partition("/")[0]
    remedy = "install the package that wrote the checkpoint (for zstd and float planes: pip install dcp-transforms)"
    return _registry.factory("transforms", name, what=f"the transform {name!r}", remedy=remedy)


def saver(name: str) -> Any:
    """The factory of an asynchronous saver. Raises like `storage_for`."""
    return _registry.factory("savers", name, what=f"the saver {name!r}", remedy="pip install dcp-async")


def state_adapter(name: str) -> Any:
    """An adapter between modules or optimizers and tensors. Raises like `storage_for`."""
    return _registry.factory("state_adapters", name, what=f"the adapter {name!r}", remedy="pip install dcp-state")


def converter(name: str) -> Any:
    """The converter of a format. Raises like `storage_for`."""
    return _registry.factory("converters", name, what=f"the converter {name!r}", remedy="pip install dcp-format")


def bridge(package: str) -> Any:
    """What makes storages and planners of ours of another library's, by the name of its package.

    Raises like `storage_for`.
    """
    remedy = "pip install dcp-bridge, or change the import of its base class to dcp_core"
    return _registry.factory("bridges", package, what=f"a bridge to {package}", remedy=remedy)


def emit(event: CheckpointEvent) -> None:
    """Tell all observers of an event; never raises what an observer raises."""
    if _diverted is None:
        _registry.emit(event)
    else:
        _diverted(event)


def divert_events(to: Callable[[CheckpointEvent], object] | None) -> None:
    """Give events to one function instead of this process's observers; None ends that.

    For a process that saves on behalf of another one, whose observers are told.
    """
    global _diverted  # noqa: PLW0603 - there is one registry for the process, too
    _diverted = to


def register(plugin: object, *, name: str) -> None:
    """Add a plugin without an entry point, for this process. Raises PluginLoadError if it is not valid."""
    _registry.register(plugin, name)


def unregister(name: str) -> None:
    """Take away what `register` added. Raises PluginNotFoundError."""
    _registry.unregister(name)
