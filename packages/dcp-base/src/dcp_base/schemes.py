"""URI schemes: parsing, the paths of `file://` URIs, and the package to install for a scheme."""

from __future__ import annotations

import os
import re

from dcp_base.errors import InvalidPlaceError

# A URI that was treated as a path: `pathlib` turns s3://bucket/x into s3:/bucket/x.
_LOST_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:)/")
_THIS_HOST = "localhost/"
PATH_SCHEMES = ("file", "local")


def scheme_of(place: str | os.PathLike[str]) -> str:
    """Return the scheme of a URI in lower case; `file` for `local://` URIs and for paths, even for `./a://b`."""
    head, found, _ = os.fspath(place).partition("://")
    scheme = head.lower() if found and "/" not in head else "file"
    return "file" if scheme in PATH_SCHEMES else scheme


def without_end_slash(place: str) -> str:
    """Remove slashes at the end, except of `/` and `memory://`: `memory:` would be a directory.

    Raises InvalidPlaceError for an empty text, which would become the root directory.
    """
    if not place:
        raise _no_place(place)
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
            f"{text} is a URI, but a local file or directory is needed here: copy the file, and pass its path"
        )
    head, found, rest = text.partition("://")
    if found and head.lower() in PATH_SCHEMES:
        path = rest
        path = path[len(_THIS_HOST) - 1 :] if path.lower().startswith(_THIS_HOST) else path
    if not path:
        raise _no_place(text)
    lost = _LOST_SLASH.match(path)
    if lost is not None and not os.path.lexists(lost[1]):
        raise InvalidPlaceError(
            f"{text!r} looks like a URI that lost a slash, as in a pathlib.Path: write {lost[1]}//… as a string, or "
            f"./{lost[1]}/… for a directory of that name"
        )
    return path


def _no_place(text: str) -> InvalidPlaceError:
    return InvalidPlaceError(f"{text!r} is not a file or directory: write . for the current directory")


OBJECT_STORE_SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "azure", "abfs", "abfss", "adl")
WEB_SCHEMES = ("http", "https")
"""URI schemes of web servers, for loads only."""


def package_for(scheme: str) -> str:
    """Return the distribution for a scheme; `dcp-fsspec`, which may support it, for unknown ones."""
    if scheme in ("file", "local"):
        return "dcp-fs"
    if scheme == "keeper":
        return "dcp-memory"
    return "dcp-object" if scheme in (*OBJECT_STORE_SCHEMES, *WEB_SCHEMES) else "dcp-fsspec"
