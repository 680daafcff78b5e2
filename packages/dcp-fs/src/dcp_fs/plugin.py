"""Registers the local folder as the storage of plain paths, `file://` and `local://` URIs. Imports nothing heavy."""

from dcp_hooks import StorageBackendSpec, hookimpl

__all__ = ["dcp_register_storage"]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the storage of local and mounted folders."""
    return [
        StorageBackendSpec(
            scheme=scheme,
            reader="dcp_fs:FileSystemReader",
            writer="dcp_fs:FileSystemWriter",
            guarantees=("atomic publish", "durable", "verified reads", "ranged reads"),
        )
        for scheme in ("file", "local")
    ]
