"""What the server holds: objects as the pieces in which they came, and uploads that are not complete."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["ConditionError", "MissingError", "Objects", "Stored"]

Pieces = list[memoryview]


class MissingError(Exception):
    """There is no such object or upload; the argument is S3's code."""


class ConditionError(Exception):
    """The object is not what the request was made on condition of."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object."""

    pieces: Pieces
    size: int
    etag: str
    seconds: float = field(default_factory=time.time)
    """When it was written."""

    def range(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes [start, stop)."""
        position = 0
        for piece in self.pieces:
            end = position + len(piece)
            if start < end and position < stop:
                yield piece[max(0, start - position) : stop - position]
            position = end


class Objects:
    """Keys → objects, for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[str, Stored] = {}
        self._uploads: dict[str, dict[int, Stored]] = {}
        self._numbers = itertools.count(1)

    def put(self, key: str, pieces: Pieces, *, match: str | None = None, none_match: bool = False) -> Stored:
        """Make or replace an object. Raises ConditionError, or MissingError where `match` finds none."""
        with self._lock:
            before = self._objects.get(key)
            if none_match and before is not None:
                raise ConditionError
            if match is not None:
                if before is None:
                    raise MissingError("NoSuchKey")
                if match != before.etag:
                    raise ConditionError
            self._objects[key] = made = self._stored(pieces)
            return made

    def get(self, key: str) -> Stored:
        """An object. Raises MissingError."""
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise MissingError("NoSuchKey")
        return found

    def delete(self, key: str) -> None:
        """Remove an object, if it is there."""
        with self._lock:
            self._objects.pop(key, None)

    def listed(self, prefix: str) -> list[tuple[str, Stored]]:
        """The objects whose keys begin so, in order."""
        with self._lock:
            return sorted((key, found) for key, found in self._objects.items() if key.startswith(prefix))

    def begin(self) -> str:
        """Begin an upload in parts; its id."""
        with self._lock:
            name = f"upload-{next(self._numbers)}"
            self._uploads[name] = {}
            return name

    def part(self, upload: str, number: int, pieces: Pieces) -> Stored:
        """Take a part. Raises MissingError."""
        with self._lock:
            if upload not in self._uploads:
                raise MissingError("NoSuchUpload")
            self._uploads[upload][number] = made = self._stored(pieces)
            return made

    def complete(self, upload: str, key: str, numbers: list[int]) -> Stored:
        """Make an object of parts. Raises MissingError."""
        with self._lock:
            parts = self._uploads.get(upload)
            if parts is None or any(number not in parts for number in numbers):
                raise MissingError("NoSuchUpload" if parts is None else "InvalidPart")
            del self._uploads[upload]
            self._objects[key] = made = self._stored([piece for number in numbers for piece in parts[number].pieces])
            return made

    def forget(self, upload: str) -> None:
        """Give up an upload, if it is there."""
        with self._lock:
            self._uploads.pop(upload, None)

    def _stored(self, pieces: Pieces) -> Stored:
        return Stored(pieces, sum(map(len, pieces)), f'"{next(self._numbers):032x}"')
