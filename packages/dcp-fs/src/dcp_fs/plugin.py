"""Registration of the storages for paths, `file://`, `local://` and `host://` URIs by a hook. No torch."""

from dcp_hooks import StorageBackendSpec, hookimpl

__all__ = ["dcp_register_storage"]


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the specifications of the storages in local and mounted folders, and in folders of each host."""
    guarantees = ("atomic publish", "durable", "verified reads", "ranged reads")
    hosts = StorageBackendSpec("host", "dcp_fs.hosts:HostReader", "dcp_fs.hosts:HostWriter", guarantees)
    return [
        hosts,
        *(
            StorageBackendSpec(
                scheme=scheme,
                reader="dcp_fs:FileSystemReader",
                writer="dcp_fs:FileSystemWriter",
                guarantees=guarantees,
            )
            for scheme in ("file", "local")
        ),
    ]
