"""Registers the storage of `http+dcp://` ids. Imports nothing heavy."""

from dcp_base import StorageBackendSpec, hookimpl

__all__ = ["dcp_register_storage"]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """The storage of objects on the example's HTTP server."""
    return [
        StorageBackendSpec(
            scheme="http+dcp",
            reader="dcp_http_example:HttpReader",
            writer="dcp_http_example:HttpWriter",
            guarantees=("atomic publish", "verified reads", "ranged reads"),
        )
    ]
