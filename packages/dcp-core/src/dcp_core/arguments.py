"""Arguments of saves and loads: checkpoint ids, and the storages and planners to use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dcp_base import ANY_SCHEME, PluginInfo, StorageBackendSpec, installed, resolve
from dcp_base.imports import import_part
from dcp_base.schemes import PATH_SCHEMES, file_path, scheme_of
from dcp_core.errors import CheckpointNotFoundError, DcpError, PluginNotFoundError
from dcp_core.records.foreign_records import as_metadata
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import (
    CheckpointId,
    LoadPlanner,
    SavePlanner,
    Storage,
    StorageReader,
    StorageWriter,
    takes,
)


def absolute_id(checkpoint_id: CheckpointId) -> CheckpointId:
    """Make a path absolute, also in `file://` and `local://` URIs; other ids are unchanged.

    Empty paths and `~` in URIs stay. CheckpointNotFoundError: the working directory was removed. InvalidPlaceError: a
    URI lost a slash.
    """
    text = os.fspath(checkpoint_id)
    scheme, separator, path = text.rpartition("://")
    local = not separator or scheme.rpartition("::")[2].lower() in PATH_SCHEMES
    if not local or not path or os.path.isabs(path) or (separator and path.startswith("~")):
        return checkpoint_id
    path = file_path(f"file://{path}" if separator else path)  # an absolute path no longer shows the mistyped URI
    if os.path.isabs(path):  # `file://localhost/…`
        return checkpoint_id
    try:
        absolute = f"{scheme}{separator}{os.path.abspath(path)}"
    except FileNotFoundError as error:
        raise CheckpointNotFoundError(
            f"{text!r} is relative to a working directory that was removed; pass an absolute path"
        ) from error
    return Path(absolute) if isinstance(checkpoint_id, Path) else absolute


def absolute_id_for(storage: Storage | None, checkpoint_id: CheckpointId | None) -> CheckpointId | None:
    """Return the absolute id, by default the storage's.

    An id without a URI scheme is a path unless `storage.ids_are_paths` is false.
    """
    if checkpoint_id is None:
        return None if storage is None else storage.absolute_id or storage.checkpoint_id
    if storage is None or storage.ids_are_paths:
        return absolute_id(checkpoint_id)
    return checkpoint_id


@dataclass(frozen=True, slots=True)
class StorageBackend:
    """A storage for a URI scheme, and its plug-in."""

    spec: StorageBackendSpec
    plugin: PluginInfo

    def load_reader(self) -> Any:
        """Import the factory of readers."""
        return resolve(self.spec.reader, self.plugin)

    def load_writer(self) -> Any:
        """Import the factory of writers."""
        return resolve(self.spec.writer, self.plugin)


def storage_for(uri: str) -> StorageBackend:
    """Return the storage for a URI `scheme://…`, or for a path (scheme `file`).

    PluginNotFoundError: no plug-in handles the scheme. PluginLoadError: a broken plug-in may. DcpError: two
    do. InvalidPlaceError: the id is empty or lost a slash.
    """
    scheme = scheme_of(uri)
    if scheme == "file":
        file_path(uri)
    try:
        spec, plugin = installed.find("storage", scheme)
    except PluginNotFoundError as error:
        for spec, plugin in installed.offered("storage", ANY_SCHEME):
            backend = StorageBackend(spec, plugin)
            if backend.load_writer().validate_checkpoint_id(uri):
                return backend
        raise PluginNotFoundError(f"Cannot detect which storage to use for {uri!r}: {error}") from None
    return StorageBackend(spec, plugin)


def open_writer(
    checkpoint_id: CheckpointId, *, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> StorageWriter:
    """Return a new storage writer for a checkpoint id; raises like `storage_for`.

    `storage_options` are the storage's, such as an endpoint (ValueError for a local directory); `options` the writer's.
    """
    return _open(checkpoint_id, "writer", storage_options, options)  # type: ignore[no-any-return]


def open_reader(
    checkpoint_id: CheckpointId, *, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> StorageReader:
    """Return a new storage reader; see `open_writer`."""
    return _open(checkpoint_id, "reader", storage_options, options)  # type: ignore[no-any-return]


def resolve_storage(storage: Any, checkpoint_id: CheckpointId | None, role: Literal["writer", "reader"]) -> Any:
    """Return the storage, reset to a given id, or a new one."""
    if storage is None:
        if checkpoint_id is None or checkpoint_id == "":
            purpose = "save to" if role == "writer" else "load from"
            raise PluginNotFoundError(
                f"there is no place to {purpose}: pass checkpoint_id=, a directory or URI such as 'run/step-100', or "
                f"storage_{role}="
            )
        return _open(checkpoint_id, role, None, {})
    if checkpoint_id is not None:
        storage.reset(checkpoint_id)
    return storage


def _open(
    checkpoint_id: CheckpointId, role: str, storage_options: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Any:
    place = os.fspath(checkpoint_id)
    backend = storage_for(place)
    factory = backend.load_writer() if role == "writer" else backend.load_reader()
    if not storage_options:
        return factory(checkpoint_id, **options)
    if backend.spec.scheme == "file":
        raise ValueError(f"{place}: a directory of the file system takes no storage_options, got {[*storage_options]}")
    return factory(checkpoint_id, storage_options=storage_options, **options)


STOCK = "torch.distributed.checkpoint"
_ROLES: tuple[type[Any], ...] = (StorageWriter, StorageReader, SavePlanner, LoadPlanner)


def adopted(value: Any, role: type[Any]) -> Any:
    """Return a storage or planner, adapted if necessary; `role` is one of the four base classes.

    Objects of unknown classes get missing methods from the base class. PluginNotFoundError: `dcp_bridge` is needed.
    TypeError: the object has another role.
    """
    if value is None or isinstance(value, role):
        return value
    wrong = next((other for other in _ROLES if isinstance(value, other)), None)
    if wrong is not None:
        raise TypeError(f"{type(value).__qualname__} is a {wrong.__name__}, and a {role.__name__} is needed here")
    if not _is_stocks(type(value), role.__name__):
        return _FOREIGN[role](value)
    return import_part("bridge")(value)


# Ways around methods of a planner. One that forwards what it lacks to another planner has these of the other one, which
# would pass by its own methods: they count only if its class has them.
_SHORTCUTS = frozenset(
    (
        "adopt_global_plan",
        "adopt_tensor",
        "plain_targets",
        "plain_values",
        "plan_key",
        "resolve_pieces",
        "without_values",
    )
)


class _Foreign:
    """An object with a `dcp_core` class's optional members; pickled as the object itself."""

    def __init__(self, value: object) -> None:
        object.__setattr__(self, "_value", value)

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, "_value")
        if name in _SHORTCUTS and not hasattr(type(value), name):
            return object.__getattribute__(self, name)
        try:
            return getattr(value, name)
        except AttributeError:
            found = object.__getattribute__(self, name)
            if getattr(found, "__isabstractmethod__", False):  # a required method that does nothing would lose data
                raise
            return found

    def __setattr__(self, name: str, value: object) -> None:
        setattr(object.__getattribute__(self, "_value"), name, value)


def _foreign(role: type) -> type:
    kind = type(f"Foreign{role.__name__}", (_Foreign, role), {})
    kind.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return kind


_FOREIGN = {role: _foreign(role) for role in _ROLES}


def _is_stocks(kind: type, role: str) -> bool:
    modules = [base.__module__ for base in kind.__mro__ if base.__name__ == role]
    return any(f"{module}.".startswith(f"{STOCK}.") for module in modules)


def read_metadata(reader: StorageReader, rank: int) -> Metadata:
    """Read the metadata, or this rank's in stock's style without global metadata."""
    try:
        return as_metadata(reader.read_metadata())
    except DcpError:
        raise
    except Exception:
        if not takes(reader.read_metadata, "kwargs"):
            raise
        return as_metadata(reader.read_metadata(rank=rank))
