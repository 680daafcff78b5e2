"""Registers storage and store of fsspec's schemes, as a fallback for specialised packages. Imports nothing heavy."""

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
    """Return the storage of fsspec's file systems: the listed schemes, and any other that fsspec knows."""
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
    """Return the stores of the same URI schemes, for tools that do not need PyTorch."""
    return [StoreSpec(scheme, "dcp_fsspec.opening:open_store", fallback=True) for scheme in _SCHEMES]
