"""Schemes of URIs, and the paths of `file://` URIs. `dcp_hooks` has the package that opens a scheme."""

from __future__ import annotations

import os
import re

from dcp_manifest.errors import InvalidPlaceError

__all__ = ["PATH_SCHEMES", "file_path", "scheme_of"]

# What is left of a URI that went through a function for paths: `pathlib` makes s3:/bucket/x of s3://bucket/x.
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/")
_THIS_HOST = "localhost/"
PATH_SCHEMES = ("file", "local")


def scheme_of(place: str | os.PathLike[str]) -> str:
    """Return a URI's scheme in lower case; `file` for `local://`, and for paths, such as `./a://b`: a slash first."""
    head, found, _ = os.fspath(place).partition("://")
    scheme = head.lower() if found and "/" not in head else "file"
    return "file" if scheme in PATH_SCHEMES else scheme


def file_path(place: str | os.PathLike[str]) -> str:
    """Return the path in a path, or in a URI `file://`, `file://localhost` or `local://`, unchanged.

    Raises:
        InvalidPlaceError: It is empty, which would mean the current folder; or it is a URI of another scheme, or one
            that has lost a slash, which would become a folder named like the scheme.
    """
    text = path = os.fspath(place)
    if scheme_of(text) != "file":
        raise InvalidPlaceError(
            f"{text} is a URI, and a file or folder of this machine is needed here: use a path, and copy the file there"
        )
    head, found, rest = text.partition("://")
    if found and head.lower() in PATH_SCHEMES:
        path = rest
        path = path.removeprefix(_THIS_HOST[:-1]) if path.startswith(_THIS_HOST) else path
    if not path:
        raise InvalidPlaceError(f"{text!r} names no file or folder: write . for the current folder")
    lost = _LOST_SLASH.match(path)
    if lost is not None and not os.path.lexists(lost[1]):
        raise InvalidPlaceError(
            f"{text!r} looks like a URI that has lost a slash, as pathlib does it: write {lost[1]}//… as a string, or "
            f"./{lost[1]}/… for a folder of that name"
        )
    return path
