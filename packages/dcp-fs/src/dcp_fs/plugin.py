"""Hook of the storages for paths, `file://`, `local://` and `host://` URIs. No torch."""

from dcp_base import StorageBackendSpec, hookimpl


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the storages in folders, and in folders per host."""
    guarantees = ("atomic publish", "durable", "verified reads", "ranged reads")
    folder, own = "dcp_fs:FileSystem", "dcp_core.hosts.host_storage:HostStorage"
    return [
        StorageBackendSpec("host", f"{own}Reader", f"{own}Writer", guarantees),
        StorageBackendSpec("file", f"{folder}Reader", f"{folder}Writer", guarantees),
        StorageBackendSpec("local", f"{folder}Reader", f"{folder}Writer", guarantees),
    ]
