"""Registration of the storage for paths, `file://` and `local://` URIs by a hook. Does not import torch."""

from dcp_hooks import StorageBackendSpec, hookimpl

__all__ = ["dcp_register_storage"]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the specification of the storage in local and mounted folders."""
    return [
        StorageBackendSpec(
            scheme=scheme,
            reader="dcp_fs:FileSystemReader",
            writer="dcp_fs:FileSystemWriter",
            guarantees=("atomic publish", "durable", "verified reads", "ranged reads"),
        )
        for scheme in ("file", "local")
    ]
