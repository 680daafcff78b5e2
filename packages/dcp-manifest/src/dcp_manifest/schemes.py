"""Parsing of URI schemes, and of the paths of `file://` URIs. `dcp_hooks` finds the package that opens a scheme."""

from __future__ import annotations

import os
import re

from dcp_manifest.errors import InvalidPlaceError

__all__ = ["PATH_SCHEMES", "file_path", "scheme_of", "without_end_slash"]

# A URI that was treated as a path: `pathlib` turns s3://bucket/x into s3:/bucket/x.
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/")
_THIS_HOST = "localhost/"
PATH_SCHEMES = ("file", "local")


def scheme_of(place: str | os.PathLike[str]) -> str:
    """Return the scheme of a URI in lower case. It is `file` for `local://` URIs and for paths, even for `./a://b`."""
    head, found, _ = os.fspath(place).partition("://")
    scheme = head.lower() if found and "/" not in head else "file"
    return "file" if scheme in PATH_SCHEMES else scheme


def without_end_slash(place: str) -> str:
    """Return a path or URI without slashes at its end, but for `/` and `memory://`: `memory:` would be a folder."""
    bare = place.rstrip("/") or "/"
    return place if "://" in place and "://" not in bare else bare


def file_path(place: str | os.PathLike[str]) -> str:
    """Return the path of a URI `file://`, `file://localhost` or `local://`; a path is returned unchanged.

    Raises:
        InvalidPlaceError: The text is empty, is a URI of another scheme, or looks like a URI that lost a slash.
    """
    text = path = os.fspath(place)
    if scheme_of(text) != "file":
        raise InvalidPlaceError(
            f"{text} is a URI, but a local file or folder is needed here: copy the file, and pass its path"
        )
    head, found, rest = text.partition("://")
    if found and head.lower() in PATH_SCHEMES:
        path = rest
        path = path.removeprefix(_THIS_HOST[:-1]) if path.startswith(_THIS_HOST) else path
    if not path:
        raise InvalidPlaceError(f"{text!r} is not a file or folder: write . for the current folder")
    lost = _LOST_SLASH.match(path)
    if lost is not None and not os.path.lexists(lost[1]):
        raise InvalidPlaceError(
            f"{text!r} looks like a URI that lost a slash, as in a pathlib.Path: write {lost[1]}//… as a string, or "
            f"./{lost[1]}/… for a folder of that name"
        )
    return path
