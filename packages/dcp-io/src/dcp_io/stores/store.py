"""Base classes of stores for checkpoint files, `Store`, `Sink` and `Source`: a store is a folder of named byte objects.

A new kind of storage implements `Store` and `Sink`; saving, verification and cleanup call only their methods. The
storage needs neither rename nor append.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import ClassVar, Literal

from dcp_io.lent_memory import MemoryLender
from dcp_manifest.errors import UnsafeCheckpointError
from dcp_manifest.folders.folder import Entry

__all__ = [
    "SHARED_BLOCK_BYTES", "TEMPORARY_SUFFIX",
    "Entry", "Place", "RangeSink", "Sink", "Source", "Store", "check_name",
]  # fmt: skip

Buffer = bytes | bytearray | memoryview

Place = Literal["local", "remote", "host"]
"""Where the objects of a store lie, as seen from several processes: `local`, on a disk or in memory of this machine,
where reading the same bytes again costs little; `remote`, behind a network that all processes share, such as an object
store or a network file system; `host`, on each machine other objects under the same names."""

TEMPORARY_SUFFIX = ".tmp"
"""Suffix of the temporary objects that `Store.publish` may make."""


SHARED_BLOCK_BYTES = 1 << 20
"""Size of the aligned blocks of an object of which each has one writing host; see `RangeSink`."""


class Sink(ABC):
    """Writer of a new object in a store, used by one thread. `close` or `abort` ends it; both may be called again."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the object in its store."""

    @abstractmethod
    def tell(self) -> int:
        """Return the number of bytes written so far: the position of the next `write`."""

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append all bytes of the buffers, in order.

        Args:
            buffers: One-dimensional contiguous buffers of bytes, any number and size. They may change after the call.

        Raises:
            OSError: The storage failed (full, disconnected, …); the message names the object. After that, the sink can
                only be aborted.
        """

    def start_sync(self) -> None:  # noqa: B027 - a hint, which most storages have no use for
        """Begin to make the written bytes durable, without waiting; a hint that `close` with `sync` will follow."""

    def wait_sync(self) -> bool:
        """Make the written bytes durable before the object is complete; returns False if the storage cannot."""
        return False

    keeps_stable: ClassVar[bool] = False
    """Whether `write_stable` avoids a copy of the buffer."""

    def write_stable(self, buffer: Buffer) -> None:
        """Append one buffer, which the caller does not change before the sink is closed or aborted; avoids a copy."""
        self.write([buffer])

    refers: ClassVar[bool] = False
    """Whether `write` refers to buffers in memory that the store has lent (see `Store.lender`) instead of copying them.

    Such buffers must not change any more, and should not be joined with others before they are written."""

    @abstractmethod
    def close(self, *, sync: bool) -> None:
        """Complete the object. With `sync`, its bytes are durable on return: they survive a crash of the machine.

        The object's *name* survives a crash only after `Store.sync_folder`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the write: remove the object. No error if the object is gone already."""


class RangeSink(ABC):
    """Writer of ranges of an object whose size is fixed; see `Store.create_sized`.

    Several threads may use one, and several processes may each have one for the same object, if no two of them write
    the same bytes. Processes of several hosts must not write into the same aligned block of `SHARED_BLOCK_BYTES`:
    network file systems lose one of two changes to a block.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the object in its store."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Size of the object in bytes."""

    @abstractmethod
    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all bytes of the buffers, in order, from `offset` of the object on.

        Args:
            offset: Position of the first byte in the object.
            buffers: One-dimensional contiguous buffers of bytes, any number and size. They may change after the call.

        Raises:
            ValueError: The range is not within the object; nothing was written.
            OSError: The storage failed (full, disconnected, …); the message names the object.
        """

    def start_sync(self, offset: int, size: int) -> None:  # noqa: B027 - a hint, which a storage may have no use for
        """Begin to make a range durable, without waiting; a hint that `close` with `sync` will follow."""

    @abstractmethod
    def close(self, *, sync: bool) -> None:
        """Release the object; may be called again. With `sync`, what this sink has written is durable on return."""


class Source:
    """An open object of a store, which several threads may read at once.

    The default implementation calls `Store.read_into` for each read. A store with open files or connections overrides
    `Store.open` to return a `Source` class of its own.

    Args:
        store: Store of the object.
        name: Name of the object.

    Example:
        ```python
        from contextlib import closing
        from dcp_io import LocalStore

        store = LocalStore("step-1")
        store.make()
        store.publish("weights", b"01234567")
        with closing(store.open("weights")) as source:
            assert bytes(source.fetch(2, 3)) == b"234"
        ```
    """

    __slots__ = ("_name", "_store")

    brings_memory: ClassVar[bool] = False
    """Whether `fetch` returns memory that the storage's client has allocated, without a copy."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return self._store.size(self._name)

    def will_need(self, offset: int, size: int) -> None:
        """Give a prefetch hint: these bytes will be read soon. Returns at once, without errors."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order with the object's bytes from `offset` on. Errors: see `Store.read_into`."""
        for buffer in buffers:
            self._store.read_into(self._name, offset, buffer)
            offset += len(buffer)

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return `size` bytes of the object from `offset` on, as a read-only view. Errors: see `Store.read_into`."""
        memory = memoryview(bytearray(size))
        self.read_into(offset, [memory])
        return memory.toreadonly()

    def close(self) -> None:
        """Close the object: release the files or connections that `Store.open` opened."""


class Store(ABC):
    """Base class of stores: a store is a folder of named byte objects.

    Names are relative paths with `/`. Every method raises UnsafeCheckpointError for a name that leads out of the
    folder, by `..` or through a symbolic link. Methods may be called from several threads at once.
    """

    read_gap_bytes: int | None = None
    """Largest gap between two wanted ranges that is cheaper to read than to skip, bytes; None for the default for
    disks."""
    read_step_bytes: int | None = None
    """Size in bytes of the pieces in which a larger range is read, if memory allows; None for the default for disks."""

    writes_ranges: ClassVar[bool] = False
    """Whether the store has `create_sized` and `open_sized`, so that several processes may write one object."""

    @property
    def place(self) -> Place:
        """Where the objects lie; see `Place`.

        Loads of several ranks read the bytes of a `remote` store only once, and those of a `host` store where they are.
        """
        return "local"

    @property
    @abstractmethod
    def url(self) -> str:
        """Path or URI of the folder, for messages and as a checkpoint id."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder and its missing parents, durably. Does nothing if the folder exists."""

    @abstractmethod
    def create(self, name: str) -> Sink:
        """Create an object for writing.

        Until `Sink.close` returns, readers may see no object, or only its first bytes.

        Raises:
            FileExistsError: An object of that name exists, and is not changed.
        """

    def create_sized(self, name: str, size: int) -> RangeSink:
        """Create an object of `size` zero bytes, whose ranges this and other processes write in any order.

        An optional ability: see `writes_ranges`. The space is reserved now, if the storage can do so: a full disk is
        an error here rather than after the work. Other processes use `open_sized`; `delete` ends a failed write.

        Args:
            name: Name of the new object.
            size: Size of the object in bytes; 0 or more.

        Raises:
            FileExistsError: An object of that name exists, and is not changed.
            OSError: The storage failed or has no space; no object is left.
        """
        raise NotImplementedError(f"{type(self).__name__} does not write ranges of objects in {self.url}")

    def open_sized(self, name: str) -> RangeSink:
        """Open an object that `create_sized` made, for writing; used by the ranks that did not create it.

        Raises:
            CheckpointNotFoundError: There is no such object; the message has its name.
        """
        raise NotImplementedError(f"{type(self).__name__} does not write ranges of objects in {self.url}")

    @abstractmethod
    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Create or replace the object `name` with the contents `data`, atomically.

        Readers see the old object (or none) or the whole new object, also after a crash. With `sync`, the new object is
        durable on return: it survives a crash of the machine.

        Args:
            name: Name of the object, which may exist.
            data: All bytes of the object.
            tag: Part of the name of a temporary object, if one is needed: the name contains `.<tag>.` and ends in
                `.tmp`, so that cleanup recognises it.
            sync: Whether to wait until the object is durable.
        """

    @abstractmethod
    def touch(self, name: str) -> None:
        """Set the object's modification time to now. Raises CheckpointNotFoundError if the object is missing."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read all bytes of the object. Raises CheckpointNotFoundError if it is missing."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill all of `buffer` with the object's bytes from `offset` on.

        A store must override `read_into` or `open`, or both: each default calls the other method.

        Raises:
            CheckpointNotFoundError: There is no such object; the message has its name.
            CorruptCheckpointError: The object is too short; `file` is its name, `offset` the one asked for.
        """
        if type(self).open is Store.open:
            raise NotImplementedError(f"{type(self).__name__} overrides neither read_into nor open: it cannot be read")
        with closing(self.open(name)) as source:
            source.read_into(offset, [buffer])

    def open(self, name: str) -> Source:
        """Open the object for reading. If it is missing, `open` or the first read raises CheckpointNotFoundError."""
        return Source(self, name)

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of the object in bytes. Raises CheckpointNotFoundError if it is missing."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether the object exists."""

    def holding(self, names: Collection[str]) -> set[str]:
        """Return which of the objects this store has; one listing, unless names have a `/`.

        Ranks ask each other this for a store whose `place` is `host`, so that each object is read where it is.
        """
        listed = {entry.name for entry in self.list()}
        return {name for name in names if name in listed or ("/" in name and self.exists(name))}

    @abstractmethod
    def list(self) -> list[Entry]:
        """List the objects directly in the folder, not those in subfolders; empty if the folder does not exist.

        An object that exists during the whole call is always listed.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object. Does nothing if it is missing."""

    @abstractmethod
    def sync_folder(self) -> None:
        """Make the names of all closed objects, and all removals, durable: they survive a crash of the machine."""

    def lender(self) -> MemoryLender | None:
        """Return the lender of this store's memory, in which savers may stage what they save; None if there is none."""
        return None

    def child(self, name: str) -> Store:
        """Return a store for the subfolder `name`, which need not exist.

        Only code that handles several checkpoints under one root, such as the manager, calls `child` and `folders`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not open folders within {self.url}")

    def folders(self) -> tuple[str, ...]:
        """Return the names of the subfolders, sorted. Folders without objects may be left out."""
        raise NotImplementedError(f"{type(self).__name__} does not list folders within {self.url}")

    def remove_folder(self) -> None:  # noqa: B027 - where folders are but beginnings of names there is nothing to do
        """Remove the folder itself if it is empty. No error if the folder is missing or not empty."""


def check_name(name: str) -> str:
    """Return `name` unchanged, after checking that it stays inside the folder on any storage.

    Raises:
        UnsafeCheckpointError: The name is absolute, or has an empty component, `.`, `..`, a backslash or a NUL.
    """
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UnsafeCheckpointError(
            f"{name!r} is not a name inside the checkpoint's folder; the checkpoint may be hostile: do not load it"
        )
    return name
