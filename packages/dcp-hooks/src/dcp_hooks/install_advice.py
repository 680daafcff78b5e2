"""URI schemes, and the package of this project that opens each. Looks no package up."""

from __future__ import annotations

__all__ = ["OBJECT_STORE_SCHEMES", "WEB_SCHEMES", "package_for"]

OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
WEB_SCHEMES = ("http", "https")
"""Schemes of web servers, from which checkpoints can be loaded."""


def package_for(scheme: str) -> str:
    """Return the distribution that opens ids of a scheme, `file` for plain paths; for unknown schemes the likeliest."""
    if scheme in ("file", "local"):
        return "dcp-fs"
    return "dcp-object" if scheme in (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES) else "dcp-fsspec"
