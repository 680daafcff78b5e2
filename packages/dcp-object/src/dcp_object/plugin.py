"""Registers the storage of object stores by URI scheme. Imports nothing heavy."""

from dcp_core.hookspecs import StorageBackendSpec, hookimpl
from dcp_manifest.schemes import OBJECT_STORE_SCHEMES

__all__ = ["dcp_register_storage"]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Object stores, through obstore."""
    return [
        StorageBackendSpec(
            scheme=scheme,
            reader="dcp_object:ObjectStoreReader",
            writer="dcp_object:ObjectStoreWriter",
            guarantees=("atomic publish", "durable", "verified reads", "ranged reads", "parallel uploads"),
        )
        for scheme in OBJECT_STORE_SCHEMES
    ]
