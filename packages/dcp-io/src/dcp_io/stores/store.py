"""Base classes of stores for checkpoint files: a store is a folder of named byte objects.

A new kind of storage implements `Store`, `Sink` and `Source`, without rename or append. The `Supports…` classes and
protocols are for stores that can do more.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Literal, NoReturn, Protocol, runtime_checkable

from dcp_manifest.errors import UnsafeCheckpointError
from dcp_manifest.folders.folder import Entry
from dcp_manifest.types import Buffer

__all__ = [
    "TEMPORARY_SUFFIX",
    "Entry",
    "Place",
    "RangeSink",
    "RequestSource",
    "Sink",
    "Source",
    "Store",
    "SupportsFetch",
    "SupportsFolders",
    "SupportsLinks",
    "SupportsPlace",
    "SupportsRanges",
    "SupportsReadAhead",
    "SupportsReadPieces",
    "SupportsReadSizes",
    "check_name",
    "place_of",
    "raise_named",
    "with_folders",
]


Place = Literal["local", "remote", "host"]
"""Where objects lie. `local`: on this machine, where reading again is cheap. `remote`: behind a network that all
processes share. `host`: each machine has other objects under the same names.
"""

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of temporary objects of `Store.publish`."""


class Sink(ABC):
    """Writer of a new object, used by one thread. `close` or `abort` ends it; both may be called again.

    A `with` block ends it: by `close`, or after an error by `abort`.
    """

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.close()
        except BaseException:
            self.abort()
            raise

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the object, which may differ from the name that `create` got."""

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of the buffers, in order.

        Args:
            buffers: One-dimensional contiguous buffers. The sink may keep a read-only buffer, which does not change
                before `close` or `abort` returns. A writable buffer may change right after the call.

        Raises:
            OSError: The storage failed; the message names the object. The sink can only be aborted.
            ValueError: The sink was closed or aborted.
        """

    @abstractmethod
    def close(self) -> None:
        """Complete the object. After an error, only `abort` is allowed.

        If the object was created with `sync`, its bytes survive a crash of the machine; its *name* only after
        `Store.sync_folder`.
        """

    @abstractmethod
    def abort(self) -> None:
        """End the write and remove the object, even if `close` has completed it. Storage errors are not raised.

        Another writer's object is never removed, such as after a `close` that raised FileExistsError.
        """


class Source(ABC):
    """An open object of a store, which several threads may read at the same time.

    Example:
        ```python
        from contextlib import closing
        from dcp_io import LocalStore

        store = LocalStore("step-1")
        store.make()
        store.publish("weights", b"01234567")
        buffer = bytearray(3)
        with closing(store.open("weights")) as source:
            source.read_into(2, [memoryview(buffer)])
        assert buffer == b"234"
        ```
    """

    __slots__ = ()

    @abstractmethod
    def size(self) -> int:
        """Return the object's size in bytes."""

    @abstractmethod
    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order with the object's bytes from `offset` on.

        Raises:
            CheckpointNotFoundError: The object does not exist; the message has its name.
            CorruptCheckpointError: The object is too short; `file` is its name, `offset` the requested one.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files or connections. May be called again."""


class RequestSource(Source):
    """A source of a storage without open objects: each read is its own request.

    `read` fills one buffer from an offset on, with the errors of `read_into`.

    Example:
        ```python
        from dcp_io import RequestSource

        data = b"01234567"

        def read(offset, buffer):
            buffer[:] = data[offset : offset + len(buffer)]

        source = RequestSource(lambda: len(data), read)
        buffer = bytearray(3)
        source.read_into(2, [memoryview(buffer)])
        assert buffer == b"234"
        ```
    """

    __slots__ = ("_read", "_size")

    def __init__(self, size: Callable[[], int], read: Callable[[int, memoryview], None]) -> None:
        self._size, self._read = size, read

    def size(self) -> int:
        """Return the size."""
        return self._size()

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill each buffer by one request."""
        for buffer in buffers:
            self._read(offset, buffer)
            offset += len(buffer)

    def close(self) -> None:
        """Do nothing."""


class Store(ABC):
    """Base class of stores: a store is a folder of named byte objects.

    Names are relative paths with `/`, which every method checks with `check_name`. A name that leads out of the folder,
    also through a symbolic link, raises UnsafeCheckpointError. `touch`, `read`, `open` and `size` raise
    CheckpointNotFoundError for a missing object.

    Several threads may call methods at the same time. Reads are atomic against `delete`: a read of a whole object, or
    of an open `Source`, returns the bytes of the object or raises, and never returns other bytes.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """The folder's path or URI, for messages and as a checkpoint id."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder and its missing parents, durably, unless it exists."""

    @abstractmethod
    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Create an object for writing, and folders within its name.

        Until `Sink.close` returns, readers may see no object, or only its first bytes. With `sync`, the bytes are then
        durable.

        Raises:
            FileExistsError: An object of that name exists, and is not changed. `Sink.close` may raise it instead.
        """

    @abstractmethod
    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Create or replace the object `name`, atomically.

        Readers see the old object (or none) or the whole new object, also after a crash. With `sync`, the new object
        survives a crash of the machine on return. A temporary name contains `.<tag>.` and ends in `.tmp`, so that
        cleanup recognises it.
        """

    @abstractmethod
    def touch(self, name: str) -> None:
        """Set the object's modification time to now."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read all bytes of the object."""

    @abstractmethod
    def open(self, name: str) -> Source:
        """Open the object for reading. If it is missing, the first read may raise the error instead.

        A storage without open objects returns a `RequestSource`.
        """

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the object's size in bytes."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether the object exists."""

    @abstractmethod
    def list(self) -> list[Entry]:
        """List the objects directly in the folder; empty if the folder does not exist.

        An object that exists during the whole call is always listed.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object, if it exists."""

    @abstractmethod
    def sync_folder(self) -> None:
        """Make names of closed objects, and removals, survive a crash of the machine."""


class SupportsFolders(Store):
    """Base class of stores with subfolders, such as several checkpoints under one root."""

    @abstractmethod
    def child(self, name: str) -> SupportsFolders:
        """Return a store for a subfolder, which need not exist; its object `x` is the object `name/x` of this store."""

    @abstractmethod
    def folders(self) -> tuple[str, ...]:
        """Return the subfolders' names, sorted. Folders without objects may be left out."""

    def remove_folder(self) -> None:
        """Remove the folder if it exists and is empty."""


def with_folders(store: Store) -> SupportsFolders:
    """Return the store; NotImplementedError if it lacks subfolders."""
    if not isinstance(store, SupportsFolders):
        raise NotImplementedError(
            f"{store.url}: a {type(store).__name__} does not support directories; name the directory of one checkpoint"
        )
    return store


@runtime_checkable
class SupportsPlace(Protocol):
    """Protocol of a store that reports its `place`."""

    @property
    def place(self) -> Place:
        """Ranks share reads of a `remote` store, and read a `host` store on the host with the bytes."""
        ...


def place_of(store: Store) -> Place:
    """Return a store's `place`; `local` if it reports none."""
    return store.place if isinstance(store, SupportsPlace) else "local"


@runtime_checkable
class SupportsReadSizes(Protocol):
    """Protocol of a store that needs other read sizes than disks."""

    read_gap_bytes: int
    """Largest gap between two wanted ranges that is cheaper to read than to skip; -1 joins no ranges."""
    read_step_bytes: int
    """Size of the pieces of a larger range, if memory allows."""


@runtime_checkable
class SupportsReadPieces(Protocol):
    """Protocol of a store with a page cache, whose small reads cost no more per byte than large ones."""

    read_piece_bytes: int
    """Size of one call of `read_into` while CRCs are checked."""


@runtime_checkable
class SupportsReadAhead(Protocol):
    """Protocol of a source that can prefetch."""

    def will_need(self, offset: int, size: int) -> None:
        """Hint that these bytes will be read soon. Returns immediately, without errors."""
        ...


@runtime_checkable
class SupportsFetch(Protocol):
    """Protocol of a source with bytes in its own memory."""

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes from `offset` on as a read-only view, without a copy."""
        ...


@runtime_checkable
class SupportsLinks(Protocol):
    """Protocol of a store that can give an object a second name, in this or another folder, without a copy.

    The bytes stay until the last name is deleted.
    """

    def parent(self) -> SupportsFolders:
        """Return the folder that contains this one."""
        ...

    def identity(self, name: str) -> Hashable:
        """Return a value that is equal for two names of the same bytes only. Raises CheckpointNotFoundError."""
        ...

    def link(self, name: str, source: Store, source_name: str, *, tag: str = "", sync: bool = True) -> None:
        """Give an object of `source` the name `name`, as if `publish` had written the bytes.

        Raises OSError if that is impossible, such as on another file system.
        """
        ...

    def sync(self, names: Sequence[str]) -> None:
        """Make objects that were created without `sync` durable, and the folder."""
        ...


class SupportsRanges(Store):
    """Base class of stores in which several processes may write one object."""

    @abstractmethod
    def create_sized(self, name: str, size: int) -> RangeSink:
        """Create an object of `size` zero bytes. This and other processes write its ranges in any order.

        If the storage can, it reserves the space now. Other processes use `open_sized`. After a failed write, call
        `delete`.

        Raises:
            FileExistsError: An object of that name exists, and is not changed.
            OSError: The storage failed or is full; the object was removed.
        """

    @abstractmethod
    def open_sized(self, name: str) -> RangeSink:
        """Open an object of another process's `create_sized`; raises CheckpointNotFoundError."""


class RangeSink(ABC):
    """Writer of ranges of an object with a fixed size.

    Several threads may use one, and several processes may each have one for the same object, if no two of them write
    the same bytes. Processes of several hosts must not write into the same aligned block of `shared_block_bytes`:
    network file systems lose one of two changes to a block.
    """

    shared_block_bytes = 1 << 20
    """Size of the aligned blocks that only one host may write."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the object."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Its size in bytes."""

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write the buffers, in order, from `offset` of the object on.

        They are one-dimensional and contiguous, and may change after the call.

        Raises:
            ValueError: The range is not within the object; nothing was written.
            OSError: The storage failed; the message names the object.
        """

    def start_sync(self, offset: int, size: int) -> None:  # noqa: B027 - a hint, which a storage may have no use for
        """Begin to make a range durable; a hint."""

    @abstractmethod
    def close(self, *, sync: bool) -> None:
        """Release the object; may be called again. With `sync`, this sink's writes are durable on return."""


def check_name(name: str) -> str:
    """Return `name`, after checking that it stays inside the folder on any storage.

    Raises UnsafeCheckpointError if it is absolute, or has an empty component, `.`, `..`, a backslash or a NUL.
    """
    parts = name.split("/")
    if "\\" in name or "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
        raise UnsafeCheckpointError(
            f"{name!r} is not a name inside the checkpoint's directory; the checkpoint may be hostile: do not load it"
        )
    return name


def raise_named(error: OSError, path: str) -> NoReturn:
    """Raise an error of a call on a descriptor, with the file's path."""
    if error.errno is not None and error.filename is None:
        raise OSError(error.errno, os.strerror(error.errno), path) from error
    raise error
