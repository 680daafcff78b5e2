"""Modification times of files, which fsspec's file systems report under different keys and in different types."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["modified_seconds"]

_NAMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created")
_FTP = re.compile(r"(\d{14})(\.\d+)?")


def modified_seconds(info: Mapping[str, Any], fs: Any, *, otherwise: float) -> float:
    """Return a file's modification time in seconds since the epoch.

    Args:
        info: Result of `fs.info` for the file.
        fs: The file system, whose method `modified` is called if `info` has no time.
        otherwise: Result if the file system reports no time, in seconds since the epoch.
    """
    found = _time_of(info)
    if found is None:
        with contextlib.suppress(Exception):
            found = _seconds(fs.modified(info["name"]))
    return otherwise if found is None else found


def _time_of(info: Mapping[str, Any]) -> float | None:
    if info.get("modificationTime") is not None:  # WebHDFS; its `modified` gives the hour of this machine's zone
        return float(info["modificationTime"]) / 1000
    if (of_ftp := _FTP.fullmatch(str(info.get("modify")))) is not None:  # RFC 3659: UTC
        return _seconds(dt.datetime.strptime(of_ftp[1], "%Y%m%d%H%M%S").replace(tzinfo=dt.timezone.utc))
    return _seconds(next((info[name] for name in _NAMES if info.get(name) is not None), None))


def _seconds(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = dt.datetime.fromisoformat(re.sub("[Zz]$", "+00:00", value))
        except ValueError:
            return None
    if isinstance(value, dt.datetime):
        return (value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)).timestamp()
    return None if value is None else float(value)
