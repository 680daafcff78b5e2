"""Registers the storage of fsspec's schemes, as a fallback for schemes without a specialised package.

Imports nothing heavy.
"""

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
    """Return the storage of fsspec's file systems: the listed schemes, and any other that fsspec knows."""
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
