"""Command-line arguments that name a path, `file://…`, or a URI of an installed storage. Sends no request.

An invalid argument, such as an empty one or `s3:/bucket`, is reported as wrong use before a command does anything.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from dcp_io import LocalStore, Store, open_store, scheme_of
from dcp_manifest import CheckpointNotFoundError, InvalidPlaceError, file_path

__all__ = ["LOCAL_FILE", "PLACE", "existing_folder", "is_uri", "open_folder"]


class _LocalFile(click.Path):
    """Parameter type of a path on this machine."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument to a path, without `file://`."""
        try:
            return super().convert(file_path(value), param, ctx)
        except InvalidPlaceError as error:
            self.fail(str(error), param, ctx)


class _Place(_LocalFile):
    """Parameter type of a path or a URI."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert an argument to the text of the path or URI."""
        return value if is_uri(value) else super().convert(value, param, ctx)


PLACE = _Place()
LOCAL_FILE = _LocalFile(dir_okay=False)


def is_uri(place: str | os.PathLike[str]) -> bool:
    """Whether an argument is a URI that a storage package opens, rather than a path."""
    return scheme_of(place) != "file"


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """Return the path of an existing folder.

    Raises:
        CheckpointNotFoundError: There is no checkpoint; the message names what was found instead.
    """
    place = Path(path)
    if place.is_dir():
        return place
    if place.exists():
        raise CheckpointNotFoundError(f"{path} is a file, not a folder: checkpoints are folders")
    raise CheckpointNotFoundError(f"there is no folder {path}: check the path")


def open_folder(place: str) -> Store:
    """Open the store of a folder that exists, or of a URI.

    Raises:
        CheckpointNotFoundError: There is no such folder in the file system.
        InvalidPlaceError: The storage rejects the URI.
        StoreNotFoundError: No installed package opens the URI; the message names the one to install.
    """
    return open_store(place) if is_uri(place) else LocalStore(existing_folder(place))
