"""Hooks of storages and stores for fsspec's URI schemes, used if no other package handles a scheme."""

from dcp_base import ANY_SCHEME, StorageBackendSpec, StoreSpec, hookimpl

_SCHEMES = (
    "memory",
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "tos"),
    *(
        "ftp",
        "sftp",
        "ssh",
        "smb",
        "hdfs",
        "webhdfs",
        "http",
        "https",
        "hf",
        "dbfs",
        "dropbox",
        "gdrive",
        "lakefs",
        "box",
    ),
    ANY_SCHEME,
)


@hookimpl
def dcp_register_storage() -> list[StorageBackendSpec]:
    """Return the storage for the schemes that fsspec knows."""
    return [
        StorageBackendSpec(
            scheme=scheme,
            reader="dcp_fsspec:FsspecReader",
            writer="dcp_fsspec:FsspecWriter",
            guarantees=("verified reads", "ranged reads"),
            fallback=True,
        )
        for scheme in _SCHEMES
    ]


@hookimpl
def dcp_register_stores() -> list[StoreSpec]:
    """Return stores for the schemes that fsspec knows."""
    return [StoreSpec(scheme, "dcp_fsspec.opening:open_store", fallback=True) for scheme in _SCHEMES]
