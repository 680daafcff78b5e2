"""Stock's `FileSystem` interface on fsspec, for code that uses this interface.

Source: torch 2.13 `torch.distributed.checkpoint._fsspec_filesystem.FileSystem`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from fsspec.core import url_to_fs

from dcp_fsspec.opening import is_fsspec_id

AnyPath = str | os.PathLike[str]


class FileSystem:
    """Stock's file-system interface on an fsspec file system, which `init_path` selects.

    Example:
        ```python
        from dcp_fsspec import FileSystem

        fs = FileSystem()
        path = fs.init_path("memory://logs/run.txt")
        with fs.create_stream(path, "wb") as stream:
            stream.write(b"started")
        assert fs.exists(path)
        ```
    """

    def __init__(self) -> None:
        self.fs: Any = None

    @contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Generator[io.IOBase, None, None]:
        """Open a stream, as a context manager that closes it.

        If the block raises an error, a file that was created by opening it (modes `w`, `x`) is removed.
        """
        path = os.fspath(path)
        opened = self._chosen().open(path, mode)  # outside: if this fails, what is there is not ours
        try:
            with opened as stream:
                yield stream
        except BaseException:
            if any(letter in mode for letter in "wx"):
                with contextlib.suppress(Exception):
                    self.rm_file(path)
            raise

    def concat_path(self, path: AnyPath, suffix: str) -> AnyPath:
        """Return the path of `suffix` below `path`."""
        return f"{os.fspath(path).rstrip('/')}/{suffix}"

    def init_path(self, path: AnyPath, **kwargs: Any) -> AnyPath:
        """Select the fsspec file system for the scheme of `path`, with its options; returns the path unchanged."""
        self.fs, _ = url_to_fs(os.fspath(path), **kwargs)
        return path

    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        """Rename a file; atomic only if the file system renames atomically."""
        self._chosen().rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: AnyPath) -> None:
        """Make a folder and its missing parents."""
        self._chosen().makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: AnyPath) -> bool:
        """Return whether fsspec has a file system for an id."""
        return is_fsspec_id(checkpoint_id)

    def exists(self, path: AnyPath) -> bool:
        """Return whether a file or folder exists."""
        return bool(self._chosen().exists(os.fspath(path)))

    def rm_file(self, path: AnyPath) -> None:
        """Remove a file."""
        self._chosen().rm(os.fspath(path))

    def ls(self, path: AnyPath) -> list[str]:
        """Return the paths in a folder."""
        return [str(each) for each in self._chosen().ls(os.fspath(path), detail=False)]

    def _chosen(self) -> Any:
        if self.fs is None:
            raise ValueError("no file system is chosen yet: call init_path first")
        return self.fs


def made_file_system(path: AnyPath, options: Mapping[str, Any]) -> FileSystem:
    """Return a `FileSystem` for a path or URI, with these options."""
    made = FileSystem()
    made.init_path(path, **options)
    return made


def init_path(fs: Any, path: AnyPath, options: Mapping[str, Any]) -> Any:
    """Return `fs.init_path(path)`; a `FileSystem` also gets the options."""
    return fs.init_path(path, **options) if isinstance(fs, FileSystem) else fs.init_path(path)
