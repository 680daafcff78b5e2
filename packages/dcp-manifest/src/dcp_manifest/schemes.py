"""Which package opens the checkpoints of a URI scheme: what messages tell users to install. Looks nothing up."""

from __future__ import annotations

__all__ = ["OBJECT_STORE_SCHEMES", "WEB_SCHEMES", "package_for"]

OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
WEB_SCHEMES = ("http", "https")
"""Of web servers, from which checkpoints can be loaded."""


def package_for(scheme: str) -> str:
    """The distribution of this project that handles ids of a scheme (`file` for plain paths); one that may, if any."""
    if scheme == "file":
        return "dcp-fs"
    return "dcp-object" if scheme in (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES) else "dcp-fsspec"
