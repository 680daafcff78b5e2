"""Hooks of storages and stores for object stores' URI schemes. Does not import torch."""

from dcp_base import StorageBackendSpec, StoreSpec, hookimpl
from dcp_base.schemes import OBJECT_STORE_SCHEMES, WEB_SCHEMES

_READING = ("verified reads", "ranged reads")
_ALL = ("atomic publish", "durable", *_READING, "parallel uploads")


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return storages in object stores and, read-only, on web servers."""
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


@hookimpl
def dcp_register_stores() -> list[StoreSpec]:
    """Return stores in object stores and on web servers."""
    return [StoreSpec(scheme, "dcp_object.opening:open_store") for scheme in (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES)]
