"""`PromoterLock`: lock of a run's promoters on one host. Those without it make the one that has it look again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from dcp_io import HostStore, LocalStore, Store
from dcp_manifest import library_logger

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LOCK", "PromoterLock"]

_log = library_logger(__name__)

LOCK = ".dcp-promoter.lock"
"""Name of the file in the first tier."""
# A folder that may only be read, and file systems without locks: leases in the further tiers keep promoters apart.
_WITHOUT_LOCKS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class PromoterLock:
    """Lock of the promoters of a run on this host. It is released when it is closed, or the process ends.

    It is a file in the first tier, if that is a folder, and in the folder for temporary files, if each host has a store
    of another kind. Of a tier of yet another kind, any number of promoters have the lock: leases keep them apart.

    Args:
        place: Store of the first tier.
        host_id: Function that returns the id of this host's place in it.

    Raises:
        OSError: The lock file cannot be opened.
    """

    def __init__(self, place: Store, host_id: Callable[[], str]) -> None:
        self._file: int | None = None
        self._seen = 0
        try:
            path = _path_of_lock(place, host_id)
            if path is not None:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            _log.warning("promoters of %s cannot exclude each other by a lock: %s", place.url, error)

    def take(self) -> bool:
        """Take the lock, if no other process has it; returns whether this one has it now."""
        if self._file is None:
            return True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
        self._seen = self._changed()
        return True

    def ask(self) -> None:
        """Make the process that has the lock look for new checkpoints."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def is_asked(self) -> bool:
        """Whether another process has called `ask` since the last call."""
        seen, self._seen = self._seen, self._changed()
        return seen != self._seen

    def close(self) -> None:
        """Release the lock, if this process has it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _changed(self) -> int:
        return 0 if self._file is None else os.fstat(self._file).st_mtime_ns


def _path_of_lock(place: Store, host_id: Callable[[], str]) -> str | None:
    if isinstance(place, LocalStore):
        place.make()
        return os.path.join(place.path, LOCK)
    if isinstance(place, HostStore):
        digest = hashlib.blake2b(f"{place.url} {host_id()}".encode(), digest_size=8).hexdigest()
        return os.path.join(tempfile.gettempdir(), f"dcp-promoter-{os.getuid()}-{digest}.lock")
    return None
