"""Install advice for error messages: which package to install for a URI scheme. Does not check what is installed."""

from __future__ import annotations

__all__ = ["OBJECT_STORE_SCHEMES", "WEB_SCHEMES", "package_for"]

OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
WEB_SCHEMES = ("http", "https")
"""URI schemes of web servers; checkpoints can be loaded from them but not saved to them."""


def package_for(scheme: str) -> str:
    """Return the distribution to install for checkpoint ids with this URI scheme (`file` for plain paths).

    For schemes that this project does not know, the result is `dcp-fsspec`, which may support the scheme.
    """
    if scheme in ("file", "local"):
        return "dcp-fs"
    if scheme == "keeper":
        return "dcp-memory"
    return "dcp-object" if scheme in (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES) else "dcp-fsspec"
