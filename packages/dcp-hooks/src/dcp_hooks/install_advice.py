"""Names of the packages of this project that open URI schemes. Does not check whether they are installed."""

from __future__ import annotations

__all__ = ["OBJECT_STORE_SCHEMES", "WEB_SCHEMES", "package_for"]

OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
WEB_SCHEMES = ("http", "https")
"""Schemes of web servers, from which checkpoints can be loaded."""


def package_for(scheme: str) -> str:
    """Return the distribution that opens ids of a scheme (`file` for plain paths); a guess for unknown schemes."""
    if scheme in ("file", "local"):
        return "dcp-fs"
    return "dcp-object" if scheme in (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES) else "dcp-fsspec"
