"""Attributes `fs` (file system) and `path` of file storages, which subclasses written for stock read and set.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem.{_FileSystemWriter,FileSystemReader}` (the attributes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dcp_core.records.protocols import CheckpointId

__all__ = ["FileAttributes"]


class FileAttributes:
    """Mixin with stock's attributes `fs` and `path`, for storage readers and writers of files in a folder.

    The default `fs` is only for callers that inspect it: data is read and written without it. An `fs` that a subclass
    or caller has set, or whose methods were replaced, is used to read and write all data.
    """

    if TYPE_CHECKING:  # the storage's own, which comes after this one among the bases
        _checkpoint_id: CheckpointId
        absolute_id: CheckpointId

        def _set_id(self, checkpoint_id: CheckpointId) -> None: ...
        def _reopen(self) -> None: ...

    _fs: Any = None
    _fs_as_made: dict[str, Any] | None = None
    _set_path: Any = None

    def _make_fs(self) -> Any:
        """Return the file system of the storage itself."""
        raise NotImplementedError

    @property
    def fs(self) -> Any:
        """File system object with the methods of stock's `FileSystemBase`."""
        if self._fs is None:
            self._fs = self._make_fs()
            self._fs_as_made = dict(_variables(self._fs))
        return self._fs

    @fs.setter
    def fs(self, value: Any) -> None:
        self._fs, self._fs_as_made = value, None
        self._reopen()

    @property
    def foreign_fs(self) -> Any:
        """File system object that must be used for all data; None if the default `fs` was not replaced."""
        if self._fs is None or (self._fs_as_made is not None and _is_same(_variables(self._fs), self._fs_as_made)):
            return None
        return self._fs

    @property
    def path(self) -> Any:
        """Path of the checkpoint's folder, of the type that the methods of `fs` use."""
        return self._path_of(self._checkpoint_id)

    @path.setter
    def path(self, value: Any) -> None:
        self._set_path = value
        self._set_id(value)

    def _id_to_open(self) -> CheckpointId:
        # A relative name in a file system that was set belongs to that file system, not to the working folder.
        return self.absolute_id if self.foreign_fs is None else self._checkpoint_id

    def _path_of(self, checkpoint_id: CheckpointId) -> Any:
        """Return the folder that an id names, in the type of the file system."""
        if self.foreign_fs is None:
            return self._own_path(checkpoint_id)
        # A path that was set is in that type already, and its file system may be one with settings.
        return checkpoint_id if checkpoint_id is self._set_path else self._init_path(checkpoint_id)

    def _own_path(self, checkpoint_id: CheckpointId) -> Any:
        """Return the folder that an id names in the storage's own file system."""
        return checkpoint_id

    def _init_path(self, checkpoint_id: CheckpointId) -> Any:
        """Return the folder that an id names in a file system that was set."""
        return self._fs.init_path(checkpoint_id)


def _variables(value: object) -> dict[str, Any]:
    found: dict[str, Any] = getattr(value, "__dict__", {})
    return found


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)
