"""Registers storages and stores of fsspec's schemes, where no specialised package does. Imports nothing heavy."""

from dcp_hooks import ANY_SCHEME, StorageBackendSpec, StoreSpec, hookimpl

__all__ = ["dcp_register_storage", "dcp_register_stores"]

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
    """File systems of fsspec: those that are named, and whatever else fsspec knows when it is asked."""
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
    """Their folders, for what needs no PyTorch."""
    return [StoreSpec(scheme, "dcp_fsspec.opening:open_store", fallback=True) for scheme in _SCHEMES]
