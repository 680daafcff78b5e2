"""Stock's `FileSystem` interface on local paths, for code that uses this interface.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem.{FileSystemBase,FileSystem}`.
"""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from dcp_base import InvalidPlaceError
from dcp_base.schemes import file_path, scheme_of

AnyPath = str | os.PathLike[str]


class FileSystemBase(ABC):
    """Stock's file-system interface: operations on the paths of one file system."""

    @contextmanager
    @abstractmethod
    def create_stream(self, path: AnyPath, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a stream on a file, as a context manager that closes it."""
        raise NotImplementedError
        yield

    @abstractmethod
    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:
        """Return the path of `suffix` below `path`."""

    @abstractmethod
    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """Rename a file, and replace an existing one."""

    @abstractmethod
    def init_path(self, path: AnyPath) -> AnyPath:
        """Return `path` in this file system's type for paths."""

    @abstractmethod
    def mkdir(self, path: AnyPath) -> None:
        """Make a folder and its missing parents, if missing."""

    @classmethod
    @abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Return whether an id is a path in such a file system."""

    @abstractmethod
    def exists(self, path: AnyPath) -> bool:
        """Return whether a file or folder exists."""

    @abstractmethod
    def rm_file(self, path: AnyPath) -> None:
        """Remove a file."""


class FileSystem(FileSystemBase):
    """Stock's file-system interface on the local file system.

    Example:
        ```python
        from dcp_fs import FileSystem

        fs = FileSystem()
        fs.mkdir("logs")
        with fs.create_stream("logs/run.txt", "wb") as stream:
            stream.write(b"started")
        assert fs.exists("logs/run.txt")
        ```
    """

    @contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Generator[io.IOBase, None, None]:
        """See `FileSystemBase.create_stream`; with mode `rb` or `wb`."""
        with Path(path).open(mode) as stream:
            yield cast(io.IOBase, stream)

    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:
        """Return `path / suffix`."""
        return Path(path) / suffix

    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """See `FileSystemBase.rename`; atomic within one file system."""
        os.replace(path, new_path)

    def init_path(self, path: AnyPath) -> AnyPath:
        """Return a `Path`."""
        return Path(path)

    def mkdir(self, path: AnyPath) -> None:
        """See `FileSystemBase.mkdir`."""
        Path(path).mkdir(parents=True, exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Return whether an id is a local folder that can be written."""
        return is_local_id(checkpoint_id)

    def exists(self, path: AnyPath) -> bool:
        """See `FileSystemBase.exists`."""
        return Path(path).exists()

    def rm_file(self, path: AnyPath) -> None:
        """Remove a file."""
        Path(path).unlink()

    def ls(self, path: AnyPath) -> list[str]:
        """Return the sorted paths in a folder."""
        return [str(entry) for entry in sorted(Path(path).iterdir())]


def is_local_id(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether an id is a path or URI below an existing folder that can be written.

    Source: torch 2.13 `FileSystem.validate_checkpoint_id` (same result for paths, but False for URIs).
    """
    if isinstance(checkpoint_id, Path):
        return True
    if scheme_of(checkpoint_id) != "file":
        return False
    try:
        path = Path(file_path(checkpoint_id)).absolute()
    except InvalidPlaceError:
        return False
    return any(os.access(parent, os.W_OK) for parent in (path, *path.parents) if parent.exists())
