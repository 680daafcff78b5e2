"""Common base of `ByteStorageReader` and `ByteStorageWriter`.

Source: torch 2.13 `torch.distributed.checkpoint.filesystem.{_FileSystemWriter,FileSystemReader,SerializationFormat}`.
"""

from __future__ import annotations

import gc
import itertools
import threading
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from dcp_core.arguments import absolute_id
from dcp_core.records.metadata import StockEnum
from dcp_core.records.protocols import CheckpointId, Storage

if TYPE_CHECKING:
    from dcp_io import StoreBackend


class ByteStorage(Storage):
    """Base class of storages with a backend that opens on first use.

    Subclasses for stock may set `fs` after the id.
    """

    ids_are_paths = False
    """Whether an id without a URI scheme is a path, which becomes absolute."""

    _checkpoint_id: CheckpointId
    absolute_id: CheckpointId
    """The id; paths are resolved at assignment."""
    _opened: StoreBackend | None = None

    def _set_id(self, checkpoint_id: CheckpointId) -> None:
        self._checkpoint_id = checkpoint_id
        self.absolute_id = absolute_id(checkpoint_id) if self.ids_are_paths else checkpoint_id
        self._opened = None

    @abstractmethod
    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        """Return the backend, without accessing storage."""

    @property
    def _backend(self) -> StoreBackend:
        if self._opened is None:
            self._opened = self._open(self._id_to_open())
        return self._opened

    def _id_to_open(self) -> CheckpointId:
        return self.absolute_id

    @abstractmethod
    def _clear(self) -> None:
        """Forget the last save or load."""

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """See `Storage`."""
        if checkpoint_id is not None:
            self._set_id(checkpoint_id)
        self._reopen()
        self._clear()

    def _reopen(self) -> None:
        self._opened = None

    @property
    def checkpoint_id(self) -> CheckpointId:
        """Id of the current or last save or load, as passed."""
        return self._checkpoint_id


class SerializationFormat(StockEnum):
    """Format of items, as in stock."""

    TORCH_SAVE = "torch_save"
    SAFETENSORS = "safetensors"


def check_format(serialization_format: Enum) -> None:
    """Raise ValueError unless the format is `TORCH_SAVE`."""
    if serialization_format.value != SerializationFormat.TORCH_SAVE.value:
        raise ValueError(
            f"serialization_format={serialization_format} is not supported: such files cannot be loaded; "
            "use layout='raw' for plain bytes"
        )


class FileAttributes(ByteStorage):
    """Mixin with stock's attributes `fs` and `path`.

    The default `fs` is only for inspection; another, or replaced methods, read and write all data.
    """

    _fs: Any = None
    _fs_as_made: dict[str, Any] | None = None
    _set_path: Any = None

    def _make_fs(self) -> Any:
        raise NotImplementedError

    @property
    def fs(self) -> Any:
        """Like stock's."""
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
        """The `fs` for all data, or None."""
        if self._fs is None or (self._fs_as_made is not None and _is_same(_variables(self._fs), self._fs_as_made)):
            return None
        return self._fs

    @property
    def path(self) -> Any:
        """The checkpoint's directory, in `fs`'s type."""
        return self._path_of(self._checkpoint_id)

    @path.setter
    def path(self, value: Any) -> None:
        self._set_path = value
        self._set_id(value)

    def _id_to_open(self) -> CheckpointId:
        # A relative name belongs to the file system that was set, not to the working directory.
        return self.absolute_id if self.foreign_fs is None else self._checkpoint_id

    def _path_of(self, checkpoint_id: CheckpointId) -> Any:
        if self.foreign_fs is None:
            return self._own_path(checkpoint_id)
        # A path that was set has that type already, and its file system may have settings.
        return checkpoint_id if checkpoint_id is self._set_path else self._init_path(checkpoint_id)

    def _own_path(self, checkpoint_id: CheckpointId) -> Any:
        return checkpoint_id

    def _init_path(self, checkpoint_id: CheckpointId) -> Any:
        return self._fs.init_path(checkpoint_id)


def _variables(value: object) -> dict[str, Any]:
    found: dict[str, Any] = getattr(value, "__dict__", {})
    return found


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return now.keys() == before.keys() and all(now[name] is before[name] for name in now)


_lock = threading.Lock()
_numbers = itertools.count()
_pauses: dict[int, bool] = {}


@contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector until the last concurrent block ends.

    After `import torch`, a full collection takes longer than creating 100,000 records.
    """
    number = next(_numbers)
    try:
        with _lock:
            _pauses[number] = gc.isenabled() or any(_pauses.values())
            gc.disable()
        yield
    finally:
        try:
            _end(number)
        finally:  # completes a pause that an interrupt ended
            _end(number)


def _end(number: int) -> None:
    with _lock:
        if _pauses.get(number) and len(_pauses) == 1:
            gc.enable()
        _pauses.pop(number, None)
