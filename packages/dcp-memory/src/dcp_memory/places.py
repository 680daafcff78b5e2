"""The folder with the sockets, locks and logs of this host's keepers. Imports the standard library alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from types import TracebackType

FOLDER_VARIABLE = "DCP_KEEPER_DIR"
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_CREDENTIALS = struct.Struct("3i")


def check_run(run: str) -> str:
    """Return a run's name; raise ValueError if it cannot be part of a file's name."""
    if not _RUN.fullmatch(run):
        raise ValueError(
            f"{run!r} is not a name for a keeper's run: use 1 to 64 letters, digits and ._- (not - or . first)"
        )
    return run


def folder_path() -> str:
    """Return the folder of this user's keepers: `$DCP_KEEPER_DIR`, or one in `/tmp`.

    It is not in `$XDG_RUNTIME_DIR`, which is removed at logout.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return os.path.abspath(given)
    return f"/tmp/dcp-keeper-{os.geteuid()}"  # noqa: S108 - the owner is checked


class KeeperFolder:
    """The open folder of keepers; a context manager. Paths through its descriptor are short and stay valid.

    Raises FileNotFoundError, or PermissionError if it belongs to another user, others may write to it, or it is a link.
    """

    def __init__(self, path: str, *, make: bool = False) -> None:
        self.path = path
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            raise self._refusal("is not a directory") from None
        except PermissionError:
            raise self._refusal("belongs to another user") from None
        status = os.fstat(self.descriptor)
        problem = None
        if status.st_uid != os.geteuid():
            problem = f"belongs to the user with the number {status.st_uid}, and this process to {os.geteuid()}"
        elif stat.S_IMODE(status.st_mode) & 0o022:
            problem = "can be written to by other users"
        if problem is not None:
            os.close(self.descriptor)
            raise self._refusal(problem)

    def _refusal(self, problem: str) -> PermissionError:
        return PermissionError(
            f"the directory of keepers {self.path} {problem}: remove it, or set {FOLDER_VARIABLE} to a directory that "
            "only you can write to"
        )

    def __enter__(self) -> KeeperFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def socket_path(self, run: str) -> str:
        """Return a short path of a socket, valid while the folder is open."""
        return f"/proc/self/fd/{self.descriptor}/{run}.sock"

    def remove(self, run: str) -> None:
        """Remove a keeper's socket and log. The caller holds the run's lock."""
        for name in (f"{run}.sock", f"{run}.log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.descriptor)

    def refresh(self, run: str) -> None:
        """Set file times to now: many machines remove old files from `/tmp`."""
        for name in (f"{run}.sock", f"{run}.lock", f"{run}.log"):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=self.descriptor, follow_symlinks=False)
        with contextlib.suppress(OSError):
            os.utime(self.descriptor)

    @contextlib.contextmanager
    def alone(self, run: str) -> Iterator[bool]:
        """Hold and finally remove the lock of a run; yield False if another process has it."""
        lock = self._locked(run)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{run}.lock", dir_fd=self.descriptor)
                os.close(lock)

    def _locked(self, run: str) -> int | None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            lock = os.open(f"{run}.lock", flags, 0o600, dir_fd=self.descriptor)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(f"{run}.lock", dir_fd=self.descriptor)):
                    return lock
            except FileNotFoundError:  # its last owner has removed it meanwhile
                pass
            except BlockingIOError:
                os.close(lock)
                return None
            except BaseException:
                os.close(lock)
                raise
            os.close(lock)

    def runs(self) -> list[str]:
        """Return the runs with a socket, sorted."""
        names = (name.removesuffix(".sock") for name in os.listdir(self.descriptor) if name.endswith(".sock"))
        return sorted(name for name in names if _RUN.fullmatch(name))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user number at the other end of a Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
