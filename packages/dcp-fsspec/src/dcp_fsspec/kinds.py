"""Capabilities of fsspec's file systems, known by their protocols: exclusive create, conditional put, atomic rename."""

from __future__ import annotations

from typing import Any, Literal

Kind = Literal["objects", "process", "files"]
"""`objects`: one PUT creates or replaces an object; folders are prefixes of names. `process`: the same in this
process. `files`: incomplete files are visible, so new contents are written to a temporary file, which is renamed.
"""

_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "cosn", "obs", "tos", "r2"})
_S3 = frozenset({"s3", "s3a"})
_SSH = frozenset({"sftp", "ssh"})
_EXCLUSIVE = _S3 | {"memory", "file", "local"}


def _protocols(fs: Any) -> frozenset[str]:
    names = fs.protocol
    return frozenset((names,) if isinstance(names, str) else names)


def kind_of(fs: Any) -> Kind:
    """Return the kind of a file system."""
    names = _protocols(fs)
    return "process" if "memory" in names else "objects" if names & _OBJECTS else "files"


def takes_exclusive_mode(fs: Any) -> bool:
    """Return whether opening with mode `xb` fails atomically if the file exists."""
    return bool(_protocols(fs) & _EXCLUSIVE)


def supports_conditions(fs: Any) -> bool:
    """Return whether `pipe_file` passes a condition (`IfMatch`) to the service."""
    return bool(_protocols(fs) & _S3)


def is_local(fs: Any) -> bool:
    """Return whether paths are those of Python's `open`."""
    return bool(_protocols(fs) & {"file", "local"})


def renames_by_options(fs: Any) -> bool:
    """Return whether renaming over a file needs an option that `mv` cannot pass (WebHDFS)."""
    return "webhdfs" in _protocols(fs) and hasattr(fs, "_call")


def takes_listings_option(protocol: str) -> bool:
    """Return whether the constructor accepts `use_listings_cache`; False for SSH."""
    return protocol not in _SSH
