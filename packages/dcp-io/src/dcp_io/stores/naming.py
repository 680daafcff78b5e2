"""Context manager that names the file in an error of a system call on its descriptor."""

from __future__ import annotations

import os

__all__ = ["naming"]


class naming:  # noqa: N801 - used like a function; a generator would cost as much as a small read
    """Context manager that adds the file's path to an OSError of a call on its descriptor."""

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            raise OSError(error.errno, os.strerror(error.errno), self._path) from error
