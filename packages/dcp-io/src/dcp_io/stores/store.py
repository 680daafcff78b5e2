"""Contract of a store for checkpoint files: a folder of named byte objects. No implementation lives here.

A new kind of storage implements `Store` (and `Sink`); saving, verification and cleanup are built on these methods
alone. Neither rename nor append is needed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import closing
from typing import ClassVar

from dcp_manifest.errors import UnsafeCheckpointError
from dcp_manifest.folders.folder import Entry

__all__ = ["TEMPORARY_SUFFIX", "Entry", "Sink", "Source", "Store", "check_name"]

Buffer = bytes | bytearray | memoryview

TEMPORARY_SUFFIX = ".tmp"
"""End of the names of temporary objects that `Store.publish` may make."""


class Sink(ABC):
    """A new object while it is being written, by one thread. `close` or `abort` ends it; both may be repeated."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the object in its store."""

    @abstractmethod
    def tell(self) -> int:
        """Return the bytes written so far: the position at which the next `write` begins."""

    @abstractmethod
    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers in order: all of their bytes, or an exception.

        Args:
            buffers: One-dimensional contiguous buffers of bytes, any number and size. They are not kept.

        Raises:
            OSError: The storage refused (full, gone, broken); it names the object. The sink can only be aborted.
        """

    def start_sync(self) -> None:  # noqa: B027 - a hint, which most storages have no use for
        """Begin to make durable what has been written, without waiting: `close` will be called with `sync`."""

    keeps_stable: ClassVar[bool] = False
    """Whether `write_stable` saves a copy."""

    def write_stable(self, buffer: Buffer) -> None:
        """Write one buffer that does not change until the sink has ended: it may be kept until then."""
        self.write([buffer])

    @abstractmethod
    def close(self, *, sync: bool) -> None:
        """Complete the object. With `sync`, its bytes survive a crash of the machine once this has returned.

        Its *name* does only after `Store.sync_folder`.
        """

    @abstractmethod
    def abort(self) -> None:
        """Abort the write: remove the object. Does not raise if it is gone already."""


class Source:
    """An object opened for reading, by any number of threads.

    This plain one reads each range through the store; stores with open files or connections override `Store.open`.

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
    """Whether a request returns its bytes in memory of its own, which `fetch` passes on."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._name = name

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return self._store.size(self._name)

    def will_need(self, offset: int, size: int) -> None:
        """Announce that these bytes will be read soon (a hint). Returns at once, and never raises."""

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers in order with the bytes from `offset` on; errors as in `Store.read_into`."""
        for buffer in buffers:
            self._store.read_into(self._name, offset, buffer)
            offset += len(buffer)

    def fetch(self, offset: int, size: int) -> memoryview:
        """Return that many bytes from `offset` on, not to be changed; errors as in `Store.read_into`."""
        memory = memoryview(bytearray(size))
        self.read_into(offset, [memory])
        return memory.toreadonly()

    def close(self) -> None:
        """Release the resources that `open` took."""


class Store(ABC):
    """A folder of named byte objects.

    Names are relative, with `/` between parts; a name that leaves the folder, by `..` or through a symbolic link, is
    refused with UnsafeCheckpointError by every method. Methods may be called from several threads at once.
    """

    read_gap_bytes: int | None = None
    """Unwanted bytes between two wanted ranges of a file that cost less than another read; None as for disks."""
    read_step_bytes: int | None = None
    """Bytes of one read where more are wanted, as far as memory allows; None as for disks."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The folder, as messages and users name it."""

    @abstractmethod
    def make(self) -> None:
        """Make the folder, and what is above it, durably; nothing happens if it is there."""

    @abstractmethod
    def create(self, name: str) -> Sink:
        """Begin a new object.

        Until `Sink.close` returns, readers may see nothing of it or a part of it, never something else.

        Raises:
            FileExistsError: There is an object of that name. It is left alone.
        """

    @abstractmethod
    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Make `name` hold exactly `data`, in one step.

        Readers and crashes see the old object (or none) or the whole new one. Once this has returned with `sync`, the
        new one survives a crash of the machine.

        Args:
            name: Of the object; it may exist.
            data: All of its bytes.
            tag: If a temporary object is needed, its name contains `.<tag>.` and ends in `.tmp`: cleanup can
                then tell whose it is.
            sync: Whether to wait for durability.
        """

    @abstractmethod
    def touch(self, name: str) -> None:
        """Set the object's `mtime` to now. Raises CheckpointNotFoundError if it is missing; never makes it."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Read all bytes of the object. Raises CheckpointNotFoundError if it is missing."""

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the object's bytes from `offset` on: all of it, or an exception.

        A store overrides this, `open` or both: this opens the object for one read, and the plain source of `open` comes
        here for each.

        Raises:
            CheckpointNotFoundError: There is no such object; names it.
            CorruptCheckpointError: The object ends before; names it and the offset.
        """
        if type(self).open is Store.open:
            raise NotImplementedError(f"{type(self).__name__} overrides neither read_into nor open: it cannot be read")
        with closing(self.open(name)) as source:
            source.read_into(offset, [buffer])

    def open(self, name: str) -> Source:
        """Open the object for many reads; missing ones may raise here or at the first read."""
        return Source(self, name)

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of the object in bytes. Raises CheckpointNotFoundError if it is missing."""

    @abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is such an object."""

    @abstractmethod
    def list(self) -> list[Entry]:
        """List the objects directly in the folder, not those in folders below it; none if there is no folder.

        An object that was there before the call and is not removed during it is listed.
        """

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove the object; nothing happens if it is missing."""

    @abstractmethod
    def sync_folder(self) -> None:
        """Make the names of all closed objects, and removals, survive a crash of the machine."""

    def child(self, name: str) -> Store:
        """Return a store for the folder `name` in this one, which need not exist.

        Only keepers of several checkpoints under one root need this and `folders`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not open folders within {self.url}")

    def folders(self) -> tuple[str, ...]:
        """Return the names of the folders directly in this one, sorted. Those that hold no object may be left out."""
        raise NotImplementedError(f"{type(self).__name__} does not list folders within {self.url}")

    def remove_folder(self) -> None:  # noqa: B027 - where folders are but beginnings of names there is nothing to do
        """Remove the folder itself if nothing is in it. Does not raise for one that is missing or not empty."""


def check_name(name: str) -> str:
    """Return `name`, if it stays inside a folder whatever the storage is.

    Raises:
        UnsafeCheckpointError: It is absolute, has an empty, `.` or `..` part, a backslash or a NUL.
    """
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise UnsafeCheckpointError(
            f"{name!r} is not a name inside the checkpoint's folder; the checkpoint may be hostile: do not load it"
        )
    return name
