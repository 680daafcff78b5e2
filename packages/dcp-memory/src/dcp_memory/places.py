"""Places of keepers on this host: the folder with their sockets, locks and logs, and who may use it.

Imports the standard library alone, since a keeper uses it, too.
"""

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

__all__ = ["FOLDER_VARIABLE", "KeeperFolder", "check_run", "folder_path", "peer_of"]

FOLDER_VARIABLE = "DCP_KEEPER_DIR"
_RUN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_CREDENTIALS = struct.Struct("3i")


def check_run(run: str) -> str:
    """Return the name of a run unchanged, after checking that it can be part of a file's name.

    Raises:
        ValueError: The name is empty, too long, begins with a dot or a dash, or has other characters than letters,
            digits and `._-`.
    """
    if not _RUN.fullmatch(run):
        raise ValueError(
            f"{run!r} is not a name for a keeper's run: use 1 to 64 letters, digits and ._- (not - or . first)"
        )
    return run


def folder_path() -> str:
    """Return the folder of this user's keepers: `$DCP_KEEPER_DIR`, or one in `/tmp`.

    Not in `$XDG_RUNTIME_DIR`, which comes and goes with the sessions of the user: a trainer that is started again after
    the user has logged out, or by a scheduler, would look for its keeper elsewhere.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return os.path.abspath(given)
    return f"/tmp/dcp-keeper-{os.geteuid()}"  # noqa: S108 - the owner is checked


class KeeperFolder:
    """The open folder of keepers; a context manager. Paths lead through its descriptor: they are short, and it stays.

    Args:
        path: Path of the folder.
        make: Whether to make the folder if it is missing.

    Raises:
        FileNotFoundError: There is no such folder, or no folder above it.
        PermissionError: The folder is not this user's alone: it belongs to another user, others may write to it, or it
            is a link. The message says what to do.
    """

    def __init__(self, path: str, *, make: bool = False) -> None:
        self.path = path
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            raise self._refusal("is not a folder") from None
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
            f"the folder of keepers {self.path} {problem}: remove it, or set {FOLDER_VARIABLE} to a folder that only "
            "you can write to"
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
        """Return a path of the socket of a keeper, short enough for a socket, and valid while the folder is open."""
        return f"/proc/self/fd/{self.descriptor}/{run}.sock"

    def remove(self, run: str) -> None:
        """Remove socket and log of a keeper; only for the process that is alone with the run."""
        for name in (f"{run}.sock", f"{run}.log"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self.descriptor)

    def refresh(self, run: str) -> None:
        """Set the times of the files of a keeper to now: what is old in `/tmp` is removed on many machines."""
        for name in (f"{run}.sock", f"{run}.lock", f"{run}.log"):
            with contextlib.suppress(OSError):
                os.utime(name, dir_fd=self.descriptor, follow_symlinks=False)
        with contextlib.suppress(OSError):
            os.utime(self.descriptor)

    @contextlib.contextmanager
    def alone(self, run: str) -> Iterator[bool]:
        """Context manager that holds the lock of a run, and removes it at the end; yields False if another has it."""
        lock = self._locked(run)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{run}.lock", dir_fd=self.descriptor)
                os.close(lock)

    def _locked(self, run: str) -> int | None:
        """Return the descriptor of a locked file; None if another process has locked it."""
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
        """Return the names of the runs whose keepers have left a socket here, sorted."""
        names = (name.removesuffix(".sock") for name in os.listdir(self.descriptor) if name.endswith(".sock"))
        return sorted(name for name in names if _RUN.fullmatch(name))


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return process and user number of the process at the other end of a Unix socket."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
