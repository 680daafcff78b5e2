"""Registers the storage of object stores by URI scheme. Imports nothing heavy."""

from dcp_core.hookspecs import StorageBackendSpec, hookimpl
from dcp_manifest.schemes import OBJECT_STORE_SCHEMES, WEB_SCHEMES

__all__ = ["dcp_register_storage"]

_READING = ("verified reads", "ranged reads")
_ALL = ("atomic publish", "durable", *_READING, "parallel uploads")


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the storage of object stores, and of web servers (read only), through obstore."""
    guarantees = {**dict.fromkeys(OBJECT_STORE_SCHEMES, _ALL), **dict.fromkeys(WEB_SCHEMES, _READING)}
    return [
        StorageBackendSpec(
            scheme=scheme,
            reader="dcp_object:ObjectStoreReader",
            writer="dcp_object:ObjectStoreWriter",
            guarantees=promised,
        )
        for scheme, promised in guarantees.items()
    ]
