"""URIs of folders in keepers: `keeper://RUN/folder`."""

from __future__ import annotations

from urllib.parse import quote, unquote

from dcp_io import check_name
from dcp_manifest import InvalidPlaceError
from dcp_memory.places import check_run

__all__ = ["SCHEME", "keeper_uri", "parse_uri"]

SCHEME = "keeper"


def keeper_uri(run: str, folder: str = "") -> str:
    """Return the URI of a folder in the keeper of a run."""
    path = "/" + quote(folder, errors="surrogatepass") if folder else ""
    return f"{SCHEME}://{run}{path}"


def parse_uri(uri: str) -> tuple[str, str]:
    """Return run and folder of a URI.

    Raises:
        InvalidPlaceError: It names no run.
        UnsafeCheckpointError: The folder leads out of the run.
    """
    place = uri.partition("://")[2]
    run, _, folder = place.partition("/")
    try:
        check_run(run)
    except ValueError as error:
        raise InvalidPlaceError(f"{uri!r} names no run of a keeper: {error}") from None
    folder = "/".join(part for part in unquote(folder, errors="surrogatepass").split("/") if part)
    return run, check_name(folder) if folder else ""
