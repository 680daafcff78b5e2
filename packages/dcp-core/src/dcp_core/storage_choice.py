"""Choice of the reader or writer for a checkpoint id: by its URI scheme, among the plugins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from dcp_core.errors import DuplicatePluginError, NoCheckpointIdError, PluginLoadError, PluginNotFoundError
from dcp_core.records.protocols import CheckpointId, StorageReader, StorageWriter
from dcp_hooks import ANY_SCHEME, ErrorTypes, PluginInfo, StorageBackendSpec, installed, resolve
from dcp_manifest.schemes import file_path, scheme_of

__all__ = ["PLUGIN_ERRORS", "StorageBackend", "resolve_reader", "resolve_writer", "storage_for"]

PLUGIN_ERRORS = ErrorTypes(PluginNotFoundError, DuplicatePluginError, PluginLoadError)
"""Classes of the errors that looking for a plug-in raises."""


@dataclass(frozen=True, slots=True)
class StorageBackend:
    """A storage found by scheme, with the plug-in that offers it."""

    spec: StorageBackendSpec
    plugin: PluginInfo

    def load_reader(self) -> Any:
        """Import and return the factory of readers, which takes a checkpoint id. Raises PluginLoadError."""
        return resolve(self.spec.reader, self.plugin, errors=PLUGIN_ERRORS)

    def load_writer(self) -> Any:
        """Import and return the factory of writers, which takes a checkpoint id. Raises PluginLoadError."""
        return resolve(self.spec.writer, self.plugin, errors=PLUGIN_ERRORS)


def storage_for(uri: str) -> StorageBackend:
    """Return the storage for a checkpoint id, by its URI scheme.

    Args:
        uri: URI `scheme://…`, or a path.

    Raises:
        PluginNotFoundError: No installed package handles the scheme; the message names the one to install.
        PluginLoadError: No plug-in for the scheme works, and a broken one may handle it.
        DuplicatePluginError: Two plug-ins handle the scheme.
        InvalidPlaceError: The id is empty, or a URI with a missing slash.
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


def resolve_writer(storage_writer: StorageWriter | None, checkpoint_id: CheckpointId | None) -> StorageWriter:
    """Return the given writer, reset to `checkpoint_id` if there is one; else a new one for the id.

    Raises:
        NoCheckpointIdError: Neither a writer nor an id is given, or the id is empty.
        PluginNotFoundError: No installed package handles ids of this scheme; the message names the package to install.
    """
    return _resolve(storage_writer, checkpoint_id, "writer")  # type: ignore[no-any-return]


def resolve_reader(storage_reader: StorageReader | None, checkpoint_id: CheckpointId | None) -> StorageReader:
    """Return the given reader, reset to `checkpoint_id` if given; else a new one. Raises like `resolve_writer`."""
    return _resolve(storage_reader, checkpoint_id, "reader")  # type: ignore[no-any-return]


def _resolve(storage: Any, checkpoint_id: CheckpointId | None, role: str) -> Any:
    if storage is not None:
        if checkpoint_id is not None:
            storage.reset(checkpoint_id)
        return storage
    if checkpoint_id is None or checkpoint_id == "":
        raise NoCheckpointIdError(f"pass a checkpoint_id or a storage_{role}: there is nowhere to go to")
    backend = storage_for(os.fspath(checkpoint_id))
    factory = backend.load_writer() if role == "writer" else backend.load_reader()
    return factory(checkpoint_id)
