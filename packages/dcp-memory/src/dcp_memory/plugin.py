"""Hooks of the store and the storage in keepers. Imports nothing heavy."""

from importlib.util import find_spec

from dcp_base import StorageBackendSpec, StoreSpec, hookimpl

_SCHEME = "keeper"


@hookimpl
def dcp_register_stores() -> list[StoreSpec]:
    """Return the store in the memory of this host."""
    return [StoreSpec(_SCHEME, "dcp_memory.client.store:open_store")]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the storage per host, if dcp-core is installed."""
    if find_spec("dcp_core") is None:
        return []
    reader = "dcp_core.hosts.host_storage:HostStorageReader"
    writer = "dcp_core.hosts.host_storage:HostStorageWriter"
    return [StorageBackendSpec(_SCHEME, reader, writer, ("atomic publish", "verified reads", "ranged reads"))]
