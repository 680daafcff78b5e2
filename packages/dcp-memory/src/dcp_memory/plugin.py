"""Registration of the store and the storage in keepers, and of `dcp keeper`, by hooks. Imports nothing heavy."""

from dcp_hooks import CommandSpec, StorageBackendSpec, StoreSpec, hookimpl

__all__ = ["dcp_register_commands", "dcp_register_storage", "dcp_register_stores"]

_SCHEME = "keeper"


@hookimpl
def dcp_register_stores() -> list[StoreSpec]:
    """Return the store in the memory of this host."""
    return [StoreSpec(_SCHEME, "dcp_memory.client.store:open_store")]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the storage in the memory of each host, which is that of any store of each host; it needs dcp-core."""
    reader, writer = "dcp_core.toolkit:HostStorageReader", "dcp_core.toolkit:HostStorageWriter"
    return [StorageBackendSpec(_SCHEME, reader, writer, ("atomic publish", "verified reads", "ranged reads"))]


@hookimpl
def dcp_register_commands() -> list[CommandSpec]:
    """Return the command that starts, stops and shows keepers."""
    summary = "Start, stop and show keepers, which hold checkpoints in memory."
    return [CommandSpec("keeper", "dcp_memory.commands.keeper:command", summary)]
