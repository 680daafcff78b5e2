"""Values of arguments and options: paths, `file://…` and URIs; sizes, rates and times."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from dcp_base import InvalidPlaceError
from dcp_base.schemes import file_path, scheme_of
from dcp_io import LocalStore, Store, open_store
from dcp_manifest import CheckpointNotFoundError


class _LocalFile(click.Path):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(file_path(value), param, ctx)
        except InvalidPlaceError as error:
            self.fail(str(error), param, ctx)


class _Place(_LocalFile):
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if is_uri(value) else super().convert(value, param, ctx)


# Whether a place can be read is found out by reading it: then the exit code says so, and the error names the cause.
PLACE = _Place(readable=False)
LOCAL_FILE = _LocalFile(dir_okay=False, readable=False)


def is_uri(place: str | os.PathLike[str]) -> bool:
    """Whether a storage package opens this argument."""
    return scheme_of(place) != "file"


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """Return an existing directory."""
    place = Path(path)
    if place.is_dir():
        return place
    if place.exists():
        raise CheckpointNotFoundError(f"{path} is a file, not a directory: checkpoints are directories")
    raise CheckpointNotFoundError(f"there is no directory {path}: check the path")


def open_folder(place: str) -> Store:
    """Open the store of an existing directory, or of a URI."""
    return open_store(place) if is_uri(place) else LocalStore(existing_folder(place))


_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|h|d|w)\s*", re.IGNORECASE)
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_size(text: str) -> int:
    """Parse a size such as `5GB` (powers of 1000) or `512MiB` (powers of 1024) to bytes."""
    found = _SIZE.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise click.BadParameter(f"{text!r} is not a size; write it like 5GB or 512MiB")
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** " KMGT".index(found[2].upper() or " "))


def parse_rate(text: str) -> int:
    """Parse a rate such as `200MB/s` to bytes per second."""
    try:
        return max(1, parse_size(text.strip().removesuffix("/s")))
    except click.BadParameter as error:
        raise click.BadParameter(f"{text!r} is not a rate; write it like 200MB/s") from error


def parse_seconds(text: str) -> float:
    """Parse a time span such as `1d`, `12h`, `30min` or `2w`."""
    found = _TIME.fullmatch(text)
    if found is None or float(found[1]) <= 0:
        raise click.BadParameter(f"{text!r} is not a time span; write it like 30min, 12h, 1d or 2w")
    return float(found[1]) * _SECONDS[found[2].lower()]
