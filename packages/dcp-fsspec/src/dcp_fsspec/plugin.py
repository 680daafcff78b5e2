"""Registers the storage of fsspec's schemes, for what no specialised package handles. Imports nothing heavy."""

from dcp_core.hookspecs import ANY_SCHEME, StorageBackendSpec, hookimpl

__all__ = ["dcp_register_storage"]

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
        for scheme in (*_SCHEMES, ANY_SCHEME)
    ]
