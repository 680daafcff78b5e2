"""Choice of the storage reader or writer for a checkpoint id, by URI scheme, among the installed plug-ins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp_core.errors import DuplicatePluginError, NoCheckpointIdError, PluginLoadError, PluginNotFoundError
from dcp_core.records.protocols import CheckpointId, StorageReader, StorageWriter
from dcp_hooks import ANY_SCHEME, ErrorTypes, PluginInfo, StorageBackendSpec, installed, resolve
from dcp_manifest.schemes import file_path, scheme_of

__all__ = [
    "PLUGIN_ERRORS",
    "StorageBackend",
    "open_reader",
    "open_writer",
    "resolve_reader",
    "resolve_writer",
    "storage_for",
]

PLUGIN_ERRORS = ErrorTypes(PluginNotFoundError, DuplicatePluginError, PluginLoadError)
"""Exception classes of `dcp_core` that the search for a plug-in raises."""


@dataclass(frozen=True, slots=True)
class StorageBackend:
    """An installed storage for a URI scheme, and the plug-in that offers it."""

    spec: StorageBackendSpec
    plugin: PluginInfo

    def load_reader(self) -> Any:
        """Import and return the function that makes a storage reader from a checkpoint id. Raises PluginLoadError."""
        return resolve(self.spec.reader, self.plugin, errors=PLUGIN_ERRORS)

    def load_writer(self) -> Any:
        """Import and return the function that makes a storage writer from a checkpoint id. Raises PluginLoadError."""
        return resolve(self.spec.writer, self.plugin, errors=PLUGIN_ERRORS)


def storage_for(uri: str) -> StorageBackend:
    """Return the storage for a checkpoint id, by its URI scheme.

    Args:
        uri: Checkpoint id: a URI `scheme://…`, or a path, which selects the storage for the scheme `file`.

    Raises:
        PluginNotFoundError: No installed plug-in handles the scheme; the message names the package to install.
        PluginLoadError: No working plug-in handles the scheme, but a broken plug-in may.
        DuplicatePluginError: Two plug-ins handle the scheme.
        InvalidPlaceError: The checkpoint id is empty, or a URI with a missing slash.
    """
    scheme = scheme_of(uri)
    if scheme == "file":
        file_path(uri)
    try:
        spec, plugin = installed.find("storage", scheme, errors=PLUGIN_ERRORS)
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
    """Return a new storage writer for a checkpoint id, whose URI scheme selects the storage.

    Args:
        checkpoint_id: Id of the checkpoint: a folder, or a URI that an installed storage handles.
        storage_options: Options of the storage, such as an endpoint, which the package of the storage documents; None
            for no options.
        options: Further keyword arguments of the writer, such as `compression="auto"`.

    Raises:
        PluginNotFoundError, PluginLoadError, DuplicatePluginError, InvalidPlaceError: See `storage_for`.
        ValueError: `storage_options` were given for a folder in the file system, whose storage accepts none.
    """
    return _open(checkpoint_id, "writer", storage_options, options)  # type: ignore[no-any-return]


def open_reader(
    checkpoint_id: CheckpointId, *, storage_options: Mapping[str, Any] | None = None, **options: Any
) -> StorageReader:
    """Return a new storage reader for a checkpoint id; arguments and errors are those of `open_writer`."""
    return _open(checkpoint_id, "reader", storage_options, options)  # type: ignore[no-any-return]


def resolve_writer(storage_writer: StorageWriter | None, checkpoint_id: CheckpointId | None) -> StorageWriter:
    """Return the storage writer for a save: `storage_writer`, or a new writer for the checkpoint id.

    Args:
        storage_writer: Writer that the caller passed, which is reset to `checkpoint_id`; None for a new writer.
        checkpoint_id: Checkpoint id; None for the writer's own id.

    Raises:
        NoCheckpointIdError: Both arguments are None, or the checkpoint id is empty.
        PluginNotFoundError: No installed plug-in handles the URI scheme; the message names the package to install.
    """
    return _resolve(storage_writer, checkpoint_id, "writer")  # type: ignore[no-any-return]


def resolve_reader(storage_reader: StorageReader | None, checkpoint_id: CheckpointId | None) -> StorageReader:
    """Return the storage reader for a load: `storage_reader`, or a new reader for the checkpoint id.

    Args:
        storage_reader: Reader that the caller passed, which is reset to `checkpoint_id`; None for a new reader.
        checkpoint_id: Checkpoint id; None for the reader's own id.

    Raises:
        NoCheckpointIdError: Both arguments are None, or the checkpoint id is empty.
        PluginNotFoundError: No installed plug-in handles the URI scheme; the message names the package to install.
    """
    return _resolve(storage_reader, checkpoint_id, "reader")  # type: ignore[no-any-return]


def _resolve(storage: Any, checkpoint_id: CheckpointId | None, role: str) -> Any:
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if checkpoint_id is None or checkpoint_id == "":
        purpose = "save to" if role == "writer" else "load from"
        raise NoCheckpointIdError(
            f"there is no place to {purpose}: pass checkpoint_id=, a folder or URI such as 'run/step-100', or "
            f"storage_{role}="
        )
    return _open(checkpoint_id, role, None, {})


def _open(
    checkpoint_id: CheckpointId, role: str, storage_options: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> Any:
    place = os.fspath(checkpoint_id)
    backend = storage_for(place)
    factory = backend.load_writer() if role == "writer" else backend.load_reader()
    if not storage_options:
        return factory(checkpoint_id, **options)
    if backend.spec.scheme == "file":
        raise ValueError(f"{place}: a folder of the file system takes no storage_options, got {[*storage_options]}")
    return factory(checkpoint_id, storage_options=storage_options, **options)
