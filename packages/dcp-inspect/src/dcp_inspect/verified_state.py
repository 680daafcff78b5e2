"""State file of `dcp verify --skip-verified`: found sound checkpoints, with digests of their indexes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Iterable

import click

from dcp_inspect.arguments import is_uri

_FORMAT = "dcp-verified/1"
_WRITE_SECONDS = 10.0


class VerifiedState:
    """The sound checkpoints in the file at `path`. Raises BadParameter for another kind of file, or without access."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._written = time.monotonic()
        self._sound: dict[str, dict[str, object]] = {}
        with contextlib.suppress(FileNotFoundError):
            self._sound = _parse(path)
        if problem := self.write():  # now, not after hours of reading
            raise click.BadParameter(problem)

    def has(self, place: str, digest: str) -> bool:
        """Whether this save was found sound."""
        return self._sound.get(_key(place), {}).get("index") == digest

    def add(self, place: str, digest: str) -> None:
        """Note a sound checkpoint; the file is written now and then."""
        self._sound[_key(place)] = {"index": digest, "verified_seconds": time.time()}
        if time.monotonic() - self._written > _WRITE_SECONDS:
            self.write()

    def drop(self, place: str) -> None:
        """Remove an entry."""
        self._sound.pop(_key(place), None)

    def drop_missing(self, above: str, found: Iterable[str]) -> None:
        """Remove the entries below a folder that were not found."""
        there, prefix = set(map(_key, found)), _key(above).rstrip("/") + "/"
        for place in [place for place in self._sound if place.startswith(prefix) and place not in there]:
            del self._sound[place]

    def write(self) -> str | None:
        """Write the file atomically, also in a crash; return why it cannot be written."""
        self._written = time.monotonic()
        try:
            self._replace_file()
        except OSError as error:
            return f"{self._path} cannot be written: {error.strerror or error}"
        return None

    def _replace_file(self) -> None:
        folder = os.path.dirname(os.path.abspath(self._path))
        descriptor, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(self._path)}.", dir=folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"format": _FORMAT, "checkpoints": self._sound}, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except BaseException:
            os.unlink(temporary)
            raise


def _parse(path: str) -> dict[str, dict[str, object]]:
    with open(path, "rb") as file:
        data = file.read()
    try:
        values = json.loads(data)
        known = {str(place): dict(entry) for place, entry in values["checkpoints"].items()}
        problem = None if values["format"] == _FORMAT else f"its format is {values['format']!r}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = str(error)
    if problem is not None:
        raise click.BadParameter(
            f"{path} was not written by `dcp verify --skip-verified` ({problem}): name another file, or remove it"
        )
    return known


def _key(place: str) -> str:
    return place if is_uri(place) else os.path.realpath(place)
