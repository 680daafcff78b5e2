"""`open_store`: opens the store of a URI through fsspec. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from dcp_base.errors import InvalidPlaceError, PluginNotFoundError
from dcp_fsspec.kinds import takes_listings_option
from dcp_fsspec.store import BLOCK_BYTES, FsspecStore
from dcp_io import StorageError


def open_store(
    uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None, block_bytes: int = BLOCK_BYTES
) -> FsspecStore:
    """Open the folder that a URI names, through the fsspec file system of its scheme.

    Args:
        uri: URI of the folder, `scheme://…`; also a chained URI, if its file system can write.
        storage_options: Arguments of the file system's constructor, or None; never logged.
        block_bytes: Size of the parts of an upload.

    Raises:
        InvalidPlaceError: fsspec does not know the scheme, or the file system does not accept the options.
        PluginNotFoundError: The file system needs a package that is not installed; the message names it.
        StorageError: The file system connects to its server when it is created, and the connection failed.
    """
    text = os.fspath(uri)
    # Each rank changes the folder behind the others' backs: a listing that is remembered is a wrong one.
    uncached = {"use_listings_cache": False} if takes_listings_option(get_protocol(text)) else {}
    options = {**uncached, **(storage_options or {})}
    try:
        fs, path = url_to_fs(text, **options)
    except ImportError as error:
        raise PluginNotFoundError(f"{text}: fsspec opens it with a package that is not installed: {error}") from error
    except (ValueError, TypeError) as error:
        names = ", ".join(sorted(storage_options or {})) or "none"
        raise InvalidPlaceError(f"{text} cannot be opened (options given: {names}): {error}") from error
    except OSError as error:  # some file systems connect at once
        raise StorageError(f"{text} cannot be reached: {error}; check the address and the connection") from error
    return FsspecStore(fs, path, text, block_bytes=block_bytes)


def is_fsspec_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether fsspec has a file system for an id.

    Source: torch 2.13 `_fsspec_filesystem.FileSystem.validate_checkpoint_id` (same result).
    """
    if not isinstance(checkpoint_id, str):
        return False
    try:
        url_to_fs(checkpoint_id)
    except (ImportError, ValueError):
        return False
    return True
