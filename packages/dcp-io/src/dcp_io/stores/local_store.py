"""`LocalStore`: a folder of the local (or a mounted) file system as a store. POSIX only."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence

from dcp_io.errors import NotAFolderError
from dcp_io.stores.durable_folders import make_folder, sync_folder
from dcp_io.stores.full_transfers import read_fully, write_fully
from dcp_io.stores.local_ranges import create_sized, open_sized, start_writeback
from dcp_io.stores.mounts import is_network_folder
from dcp_io.stores.naming import naming
from dcp_io.stores.store import (
    TEMPORARY_SUFFIX,
    Buffer,
    Entry,
    Place,
    RangeSink,
    Sink,
    Source,
    Store,
    check_name,
)
from dcp_manifest.descriptors import open_descriptor
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError

__all__ = ["LocalStore"]

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe in place of a file would block for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o666
# Errors of removing a folder that is not empty, is gone already, or is only a link to a folder.
_NOT_REMOVED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)


class LocalStore(Store):
    """A store in a folder of the local file system.

    Guarantees: those of `Store`. A published object appears by `os.replace` of a complete temporary file; new files are
    created exclusively and never through a symbolic link; with `sync`, file and folder are fsynced.

    Args:
        path: Path of the folder, which need not exist before `make`. Symbolic links in its path are followed; links
            inside it must not lead out of it.
        linked: Another folder to which symbolic links in this folder may lead, for reading; None for no other.

    Example:
        ```python
        from dcp_io import LocalStore

        store = LocalStore("settings")
        store.make()
        store.publish("current", b"version 2")  # atomic, and durable
        assert store.read("current") == b"version 2"
        ```
    """

    writes_ranges = True

    def __init__(self, path: str | os.PathLike[str], *, linked: str | os.PathLike[str] | None = None) -> None:
        self._path = os.path.abspath(os.fspath(path))
        self._linked = None if linked is None else os.path.realpath(linked)

    @property
    def url(self) -> str:
        """The folder's absolute path."""
        return self._path

    @property
    def path(self) -> str:
        """The folder's absolute path."""
        return self._path

    @property
    def place(self) -> Place:
        """`remote` in a network file system such as NFS or Lustre, otherwise `local`."""
        return "remote" if is_network_folder(self._path) else "local"

    def __fspath__(self) -> str:
        return self._path

    def make(self) -> None:
        """Make the folder and its missing parents, durably."""
        make_folder(self._path)

    def create(self, name: str) -> Sink:
        """Create a file for writing; folders within the name are made."""
        path = self._inside(name)
        if "/" in name:
            make_folder(os.path.dirname(path))
        return _LocalSink(name, path)

    def create_sized(self, name: str, size: int) -> RangeSink:
        """Create a file of `size` bytes, whose space on the disk is reserved if the file system can do so."""
        path = self._inside(name)
        if "/" in name:
            make_folder(os.path.dirname(path))
        return create_sized(name, path, size)

    def open_sized(self, name: str) -> RangeSink:
        """Open an existing file for writes of ranges."""
        with self._finding(name):
            return open_sized(name, self._inside(name))

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Replace the file atomically, by renaming a temporary file in the same folder; see `Store.publish`."""
        path = self._inside(name)
        folder, base = os.path.split(path)
        temporary = os.path.join(folder, f".{base}.{tag}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        sink = _LocalSink(name, temporary)
        try:
            sink.write([data])
            sink.close(sync=sync)
            with naming(path):
                os.replace(temporary, path)
        except BaseException:
            sink.abort()
            raise
        if sync:
            sync_folder(folder)

    def touch(self, name: str) -> None:
        """Set the modification time of the file to now, on the clock of the file system's host."""
        with self._finding(name):
            os.utime(self._readable(name))

    def read(self, name: str) -> bytes:
        """Read all bytes of the file."""
        source = self.open(name)
        try:
            size = source.size()
            try:
                data = bytearray(size)
            except MemoryError as error:  # a sparse file may have any size
                message = f"the file has {size:,} bytes, more than fits into memory: it is damaged or hostile"
                raise CorruptCheckpointError(message, file=name) from error
            source.read_into(0, [memoryview(data)])
            return bytes(data)
        finally:
            source.close()

    def open(self, name: str) -> Source:
        """Open the file for reading."""
        with self._finding(name):
            return _LocalSource(self, name, self._readable(name))

    def size(self, name: str) -> int:
        """Return the size of the file in bytes."""
        with self._finding(name):
            return os.stat(self._readable(name), follow_symlinks=False).st_size

    def exists(self, name: str) -> bool:
        """Whether a file, folder or device of that name exists."""
        return os.path.lexists(self._inside(name))

    def list(self) -> list[Entry]:
        """List the files in the folder; a file that another process replaces during the call is listed."""
        entries: dict[str, Entry] = {}
        try:
            # Twice: btrfs shows neither the old file nor the new one if a rename falls between opening and reading the
            # folder.
            self._scan_into(entries)
            self._scan_into(entries)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise NotAFolderError.of(self._path) from None
        return [*entries.values()]

    def _scan_into(self, entries: dict[str, Entry]) -> None:
        """Add the files in the folder that are not yet in the result."""
        with os.scandir(self._path) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):  # removed during the listing
                    if item.name not in entries and not _is_folder_entry(item):
                        status = item.stat(follow_symlinks=False)
                        entries[item.name] = Entry(item.name, status.st_size, status.st_mtime_ns / 1e9)

    def delete(self, name: str) -> None:
        """Unlink the file; for a symbolic link, the link itself is removed."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._inside(name))

    def sync_folder(self) -> None:
        """Fsync the folder."""
        sync_folder(self._path)

    def child(self, name: str) -> LocalStore:
        """Return a store for the subfolder of that name."""
        return LocalStore(self._inside(name))

    def folders(self) -> tuple[str, ...]:
        """Return the names of the subfolders, including empty ones; links are left out."""
        try:
            with os.scandir(self._path) as found:
                return tuple(sorted(item.name for item in found if item.is_dir(follow_symlinks=False)))
        except FileNotFoundError:
            return ()
        except NotADirectoryError:
            raise NotAFolderError.of(self._path) from None

    def remove_folder(self) -> None:
        """Remove the folder durably if it is empty; if its path is a symbolic link, nothing is removed."""
        try:
            os.rmdir(self._path)
        except OSError as error:
            if error.errno not in _NOT_REMOVED:
                raise
        else:
            sync_folder(os.path.dirname(self._path))

    def _inside(self, name: str) -> str:
        """Return the path of a name, after checking that its parent folders do not lead out of the store."""
        path = os.path.join(self._path, check_name(name))
        if "/" in name:
            self._check_inside(os.path.dirname(path), name)
        return path

    def _readable(self, name: str) -> str:
        """Return the path to read: links are resolved if they stay inside the store."""
        path = self._inside(name)
        if os.path.islink(path):
            real = os.path.realpath(path)
            if self._linked is None or os.path.dirname(real) != self._linked:
                self._check_inside(path, name)
            return real
        return path

    def _check_inside(self, path: str, name: str) -> None:
        root, real = os.path.realpath(self._path), os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise UnsafeCheckpointError(
                f"{name!r} in {self._path} leads out of that folder, to {real}; the checkpoint may be hostile: "
                "do not load it, or copy its files into one folder"
            )

    @contextlib.contextmanager
    def _finding(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError) as error:
            if isinstance(error, CheckpointNotFoundError):
                raise
            raise CheckpointNotFoundError(
                f"{os.path.join(self._path, name)} is missing; the checkpoint is incomplete or was removed"
            ) from error


class _LocalSink(Sink):
    """A new file; its write position is counted here, and the file descriptor's position is never used."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path
        self._position = 0
        self._sync_started = 0
        self._fd = -1
        self._exists = False
        try:
            with naming(path):
                self._fd = open_descriptor(path, _CREATE, _MODE)
                self._exists = True
        except BaseException:  # a KeyboardInterrupt after the file was opened
            self.abort()
            raise

    @property
    def name(self) -> str:
        """Name of the object."""
        return self._name

    def tell(self) -> int:
        """Return the bytes written so far."""
        return self._position

    def write(self, buffers: Sequence[Buffer]) -> None:
        """Append the buffers to the file."""
        with naming(self._path):
            self._position += write_fully(self._fd, buffers, self._position)

    def start_sync(self) -> None:
        """Ask the kernel to begin writing back the bytes since the last call."""
        start_writeback(self._fd, self._sync_started, self._position - self._sync_started)
        self._sync_started = self._position

    def wait_sync(self) -> bool:
        """Make the written bytes durable, and return True."""
        with naming(self._path):
            os.fdatasync(self._fd)
        return True

    def close(self, *, sync: bool) -> None:
        """Close the file, after an fsync if `sync`."""
        if self._fd < 0:
            return
        with naming(self._path):
            try:
                if sync:
                    os.fsync(self._fd)
            finally:
                self._release()
            if sync and "/" in self._name:
                sync_folder(os.path.dirname(self._path))

    def abort(self) -> None:
        """Close and unlink the file."""
        with contextlib.suppress(OSError):
            self._release()
        if self._exists:
            self._exists = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _LocalSource(Source):
    """An open file."""

    __slots__ = ("_fd",)

    def __init__(self, store: LocalStore, name: str, path: str) -> None:
        super().__init__(store, name)
        self._fd = -1
        try:
            fd = open_descriptor(path, _READ)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafeCheckpointError(f"{path} is a link that leads nowhere; do not load it") from error
            if error.errno == errno.ENXIO:
                raise _no_file(path) from error
            raise
        self._fd = fd
        try:
            is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        except BaseException:
            self.close()
            raise
        if not is_file:
            self.close()
            raise _no_file(path)

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self._fd).st_size

    def will_need(self, offset: int, size: int) -> None:
        """Ask the kernel to prefetch bytes that are not in the page cache."""
        with contextlib.suppress(OSError):
            if not self._is_held(offset):  # announcing cached bytes costs a twentieth of reading them
                os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def _is_held(self, offset: int) -> bool:
        """Whether a byte is in the page cache, so that it can be read without waiting for the disk."""
        try:
            return os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except OSError:  # not cached, or unknown to the file system
            return False

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers from the file."""
        wanted = sum(map(len, buffers))
        with naming(self._name):
            read = read_fully(self._fd, buffers, offset)
        if read < wanted:
            raise CorruptCheckpointError(
                f"the file ends at byte {offset + read}, but {wanted} more bytes are needed: it is truncated",
                file=self._name,
                offset=offset,
            )

    def close(self) -> None:
        """Close the file."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _is_folder_entry(item: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; a link that loops is neither."""
    try:
        return item.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _no_file(path: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file; the checkpoint may be hostile: do not load it")
