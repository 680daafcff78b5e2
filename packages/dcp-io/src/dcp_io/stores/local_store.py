"""`LocalStore`: a folder of a local or mounted file system. POSIX only."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shlex
import stat
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path

from dcp_base.descriptors import kernel_call, open_descriptor, read_fully, write_fully
from dcp_io.stores.store import (
    TEMPORARY_SUFFIX,
    Entry,
    Place,
    RangeSink,
    Sink,
    Source,
    Store,
    SupportsFolders,
    SupportsRanges,
    check_name,
    raise_named,
)
from dcp_manifest.errors import CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError
from dcp_manifest.folders.folder import check_inside, followed
from dcp_manifest.types import Buffer

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a pipe in place of a file would block for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_MODE = 0o666
# Write-back is started each time after this many bytes. Measured: with less, the disk waits for calls; with much more,
# too much is left to the final fsync.
_SYNC_STEP_BYTES = 32 << 20
# Errors of removing a folder that is not empty, is gone already, or is only a link to a folder.
_NOT_REMOVED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR)


class LocalStore(SupportsFolders, SupportsRanges):
    """A store in a folder of the local file system.

    Guarantees: those of `Store`. `publish` renames a complete temporary file. New files are created exclusively and
    never through a symbolic link. With `sync`, file and folder are fsynced.

    Args:
        path: Path of the folder, which need not exist before `make`. Symbolic links in it are followed; inside the
            folder, see `dcp_manifest.folders.folder.followed`.

    Example:
        ```python
        from dcp_io import LocalStore

        store = LocalStore("settings")
        store.make()
        store.publish("current", b"version 2")  # atomic, and durable
        assert store.read("current") == b"version 2"
        ```
    """

    read_piece_bytes = 512 << 10  # half of a usual L2 cache; with smaller pieces, waiting for the GIL costs more

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.path.abspath(os.fspath(path))

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
        """`remote` in a network file system (NFS, Lustre), otherwise `local`."""
        return "remote" if file_system_of(self._path).removeprefix("fuse.").lower() in _NETWORK.split() else "local"

    @property
    def file_system(self) -> str:
        """Type of the file system in Linux, such as `ext4`, `nfs4` or `fuse.sshfs`; empty if unknown."""
        return file_system_of(self._path)

    def free_space(self) -> tuple[int | None, int | None, int]:
        """Return the bytes and files that are free for this user, None if without a limit, and the bytes of a block.

        If the folder does not exist, these are of the place where it will be. May raise OSError.
        """
        place = self._path
        while not os.path.exists(place) and place != os.path.dirname(place):
            place = os.path.dirname(place)
        found = os.statvfs(place)
        return (
            found.f_bavail * found.f_frsize if found.f_blocks else None,  # some network file systems do not know
            found.f_favail if found.f_files else None,
            found.f_frsize or 1,
        )

    def __fspath__(self) -> str:
        return self._path

    def make(self) -> None:
        """Make the folder and its parents."""
        make_folder(self._path)

    def create(self, name: str, *, sync: bool = True) -> Sink:
        """Create a file."""
        path = self._inside(name)
        if "/" in name:
            make_folder(os.path.dirname(path))
        return _LocalSink(name, path, sync=sync)

    def create_sized(self, name: str, size: int) -> RangeSink:
        """Create a file of zeros."""
        path = self._inside(name)
        if "/" in name:
            make_folder(os.path.dirname(path))
        return create_sized(name, path, size)

    def open_sized(self, name: str) -> RangeSink:
        """Open an existing file."""
        with self._finding(name):
            return open_sized(name, self._inside(name))

    def publish(self, name: str, data: Buffer, *, tag: str = "", sync: bool = True) -> None:
        """Rename a temporary file."""
        path = self._inside(name)
        folder, base = os.path.split(path)
        temporary = os.path.join(folder, f".{base}.{tag}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        sink = _LocalSink(name, temporary, sync=sync)
        try:
            sink.write([data])
            sink.close()
            os.replace(temporary, path)
        except BaseException:
            sink.abort()
            raise
        if sync:
            sync_folder(folder)

    def touch(self, name: str) -> None:
        """Set the modification time, on the file system's clock."""
        with self._finding(name):
            os.utime(followed(self._path, check_name(name)))

    def read(self, name: str) -> bytes:
        """Read the whole file."""
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
        """Open the file."""
        with self._finding(name):
            return _LocalSource(name, followed(self._path, check_name(name)))

    def size(self, name: str) -> int:
        """Return the size."""
        with self._finding(name):
            return os.stat(followed(self._path, check_name(name)), follow_symlinks=False).st_size

    def exists(self, name: str) -> bool:
        """Whether a file, folder or device of that name exists."""
        return os.path.lexists(self._inside(name))

    def list(self) -> list[Entry]:
        """List the files, including those replaced during the call."""
        entries: dict[str, Entry] = {}
        try:
            # Twice: btrfs shows neither the old file nor the new one if a rename falls between opening and reading the
            # folder.
            self._scan_into(entries)
            self._scan_into(entries)
        except FileNotFoundError:
            return []
        except NotADirectoryError:
            raise not_a_folder(self._path) from None
        return [*entries.values()]

    def _scan_into(self, entries: dict[str, Entry]) -> None:
        with os.scandir(self._path) as found:
            for item in found:
                with contextlib.suppress(FileNotFoundError):  # removed during the listing
                    if item.name not in entries and not _is_folder_entry(item):
                        status = item.stat(follow_symlinks=False)
                        entries[item.name] = Entry(item.name, status.st_size, status.st_mtime_ns / 1e9)

    def delete(self, name: str) -> None:
        """Unlink the file, or the link itself."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self._inside(name))

    def sync_folder(self) -> None:
        """Fsync the folder."""
        sync_folder(self._path)

    def child(self, name: str) -> LocalStore:
        """Return a subfolder's store."""
        return LocalStore(self._inside(name))

    def folders(self) -> tuple[str, ...]:
        """Return the subfolders' names, without links."""
        try:
            with os.scandir(self._path) as found:
                return tuple(sorted(item.name for item in found if item.is_dir(follow_symlinks=False)))
        except FileNotFoundError:
            return ()
        except NotADirectoryError:
            raise not_a_folder(self._path) from None

    def remove_folder(self) -> None:
        """Remove an empty folder durably, unless it is a link."""
        try:
            os.rmdir(self._path)
        except OSError as error:
            if error.errno not in _NOT_REMOVED:
                raise
        else:
            sync_folder(os.path.dirname(self._path))

    def parent(self) -> LocalStore:
        """Return the parent folder."""
        return LocalStore(os.path.dirname(self._path))

    def identity(self, name: str) -> Hashable:
        """Return device and inode."""
        with self._finding(name):
            facts = os.stat(followed(self._path, check_name(name)), follow_symlinks=False)
        return facts.st_dev, facts.st_ino

    def sync(self, names: Sequence[str]) -> None:
        """Fsync all files after the disk has begun to write them."""
        for begin in (True, False):
            for name in names:
                fd = open_descriptor(self._inside(name), _READ)
                try:
                    if begin:
                        start_writeback(fd, 0, os.fstat(fd).st_size)
                    else:
                        os.fsync(fd)
                finally:
                    os.close(fd)
        sync_folder(self._path)

    def link(self, name: str, source: Store, source_name: str, *, tag: str = "", sync: bool = True) -> None:
        """Rename a hard link."""
        if not isinstance(source, LocalStore):
            raise OSError(errno.EXDEV, "a file cannot be a link of an object", source.url)
        path = self._inside(name)
        folder, base = os.path.split(path)
        temporary = os.path.join(folder, f".{base}.{tag}.{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
        os.link(followed(source.path, check_name(source_name)), temporary, follow_symlinks=False)
        try:
            if sync:
                fd = open_descriptor(temporary, _READ)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
            os.replace(temporary, path)
        finally:
            with contextlib.suppress(FileNotFoundError):  # renaming one link over another of the file does nothing
                os.unlink(temporary)

    def _inside(self, name: str) -> str:
        path = os.path.join(self._path, check_name(name))
        if "/" in name:
            check_inside(self._path, os.path.dirname(name))
        return path

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
    def __init__(self, name: str, path: str, *, sync: bool) -> None:
        self._name = name
        self._path = path
        self._sync = sync
        self._position = 0
        self._sync_started = 0
        self._fd = -1
        self._exists = False
        try:
            self._fd = open_descriptor(path, _CREATE, _MODE)
            self._exists = True
        except BaseException:  # a KeyboardInterrupt after the file was opened
            self.abort()
            raise

    @property
    def name(self) -> str:
        return self._name

    def write(self, buffers: Sequence[Buffer]) -> None:
        """With `sync`, the disk begins to write early (see decision 8)."""
        if self._fd < 0:
            raise ValueError(f"{self._path} has been closed")
        try:
            self._position += write_fully(self._fd, buffers, self._position)
        except OSError as error:
            raise_named(error, self._path)
        if self._sync and self._position - self._sync_started >= _SYNC_STEP_BYTES:
            start_writeback(self._fd, self._sync_started, self._position - self._sync_started)
            self._sync_started = self._position

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            try:
                if self._sync:
                    os.fsync(self._fd)
            finally:
                self._release()
        except OSError as error:
            raise_named(error, self._path)
        if self._sync and "/" in self._name:
            sync_folder(os.path.dirname(self._path))

    def abort(self) -> None:
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
    __slots__ = ("_fd", "_name", "_tells_held")

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._fd = -1
        self._tells_held = True
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
        return os.fstat(self._fd).st_size

    def will_need(self, offset: int, size: int) -> None:
        with contextlib.suppress(OSError):
            if not self._is_held(offset):  # announcing cached bytes costs a twentieth of reading them
                os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def _is_held(self, offset: int) -> bool:
        try:
            return self._tells_held and os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
        except BlockingIOError:  # not cached
            return False
        except OSError:  # unknown to the file system
            self._tells_held = False
            return False

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        wanted = sum(map(len, buffers))
        try:
            read = read_fully(self._fd, buffers, offset)
        except OSError as error:
            raise_named(error, self._name)
        if read < wanted:
            raise CorruptCheckpointError(
                f"the file ends at byte {offset + read}, but {wanted} more bytes are needed: it is truncated",
                file=self._name,
                offset=offset,
            )

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _is_folder_entry(item: os.DirEntry[str]) -> bool:
    """A link that loops is not a folder."""
    try:
        return item.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _no_file(path: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file; the checkpoint may be hostile: do not load it")


# Without O_NONBLOCK, opening a pipe in place of a file would block for ever.
_WRITE = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_SYNC_FILE_RANGE_WRITE = 2
# Errors of file systems that cannot reserve space.
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def create_sized(name: str, path: str, size: int) -> RangeSink:
    """Create a file of zeros."""
    if size < 0:
        raise ValueError(f"{path} cannot have {size} bytes")
    fd = open_descriptor(path, _CREATE, _MODE)
    try:
        _reserve(fd, size)
    except BaseException as error:
        os.close(fd)
        os.unlink(path)
        if isinstance(error, OSError):
            raise_named(error, path)
        raise
    return _LocalRangeSink(name, path, fd, size)


def open_sized(name: str, path: str) -> RangeSink:
    """Open a file; UnsafeCheckpointError for a link or a special file."""
    try:
        fd = open_descriptor(path, _WRITE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _missing_file(path) from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _missing_file(path)
    return _LocalRangeSink(name, path, fd, status.st_size)


class _LocalRangeSink(RangeSink):
    def __init__(self, name: str, path: str, fd: int, size: int) -> None:
        self._name = name
        self._path = path
        self._fd = fd
        self._size = size

    @property
    def name(self) -> str:
        return self._name

    @property
    def size(self) -> int:
        return self._size

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        stop = offset + sum(map(len, buffers))
        if offset < 0 or stop > self._size:
            raise ValueError(f"bytes {offset} to {stop} are not within {self._path}, which has {self._size} bytes")
        try:
            write_fully(self._fd, buffers, offset)
        except OSError as error:
            raise_named(error, self._path)

    def start_sync(self, offset: int, size: int) -> None:
        start_writeback(self._fd, offset, size)

    def close(self, *, sync: bool) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if sync:
                os.fsync(fd)
        except OSError as error:
            raise_named(error, self._path)
        finally:
            os.close(fd)


def _missing_file(path: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(f"{path} is not a file that a save made; do not write to it")


def _reserve(fd: int, size: int) -> None:
    # `os.posix_fallocate` would write to every block if the file system cannot reserve space.
    call = _fallocate()
    if call is None or size == 0:
        os.ftruncate(fd, size)
    elif call(fd, 0, 0, size) != 0:
        code = ctypes.get_errno()
        if code not in _NO_RESERVATION:
            raise OSError(code, os.strerror(code))
        os.ftruncate(fd, size)


def _fallocate() -> Callable[..., int] | None:
    return kernel_call("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing a range; only fsync reports errors."""
    call = kernel_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None and length > 0:
        call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


# Errors of file systems that cannot fsync a folder.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
# On a shared file system a folder made by another process may become visible late.
_SECONDS_TO_BE_SEEN = 5.0


def not_a_folder(path: str) -> NotADirectoryError:
    """Return the error for a path that is, or leads through, a file or a dangling link."""
    file = path
    while not os.path.lexists(file) and os.path.dirname(file) != file:
        file = os.path.dirname(file)
    if os.path.islink(file) and not os.path.exists(file):
        return NotADirectoryError(
            f"there can be no checkpoint at {path}: {file} is a link to {os.readlink(file)}, where there is nothing. "
            "Create that directory, mount its file system, or remove the link"
        )
    if file != path:
        return NotADirectoryError(
            f"there can be no checkpoint at {path}: {file} is a file, and a checkpoint is a directory"
        )
    return NotADirectoryError(
        f"{path} is a file, and a checkpoint is a directory: save to another place. To load a torch.save or "
        f"safetensors file, convert it first: `dcp convert {shlex.quote(path)} FOLDER` in a shell, or "
        f"dcp_format.convert({path!r}, 'FOLDER') in Python; both come with dcp-all, or dcp-format and dcp-inspect"
    )


def make_folder(path: str) -> None:
    """Make a folder and its parents, durably; NotADirectoryError if one is a file."""
    missing: list[str] = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:  # another rank made it first, or it is not a folder
            if not _is_folder(folder):
                raise not_a_folder(folder) from None
        with contextlib.suppress(PermissionError):  # a parent that may be entered but not read cannot be fsynced
            sync_folder(os.path.dirname(folder))


def _is_folder(path: str) -> bool:
    """A shared file system may show a new folder late."""
    deadline = time.monotonic() + _SECONDS_TO_BE_SEEN
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.isdir(path)


def sync_folder(path: str) -> None:
    """Make the names in a folder durable, if the file system can."""
    fd = open_descriptor(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise OSError(error.errno, os.strerror(error.errno or 0), path) from error
    finally:
        os.close(fd)


# Source: Linux `proc_pid_mountinfo(5)`.
_MOUNTS = Path("/proc/self/mountinfo")
# Types of file systems whose bytes come over a network. A FUSE file system counts if its name is one of these.
_NETWORK = (
    "9p afs beegfs blobfuse2 ceph cifs gcsfuse glusterfs goofys gpfs juicefs lustre mountpoint-s3 nfs nfs4 ocfs2 "
    "orangefs panfs pvfs2 rclone s3fs smb3 smbfs sshfs virtiofs weka wekafs"
)


def file_system_of(path: str) -> str:
    """Return the type of an absolute path's file system; empty if unknown."""
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    real = os.path.realpath(path)
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(" "), after.partition(" ")[0]
        if len(fields) < 5:
            continue
        mount = _unescaped(fields[4])
        is_above = mount in ("/", real) or real.startswith(f"{mount}/")
        if is_above and len(mount) >= longest:
            found, longest = kind, len(mount)  # of two mounts on one folder, the later one hides the other
    return found


def _unescaped(text: str) -> str:
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text
