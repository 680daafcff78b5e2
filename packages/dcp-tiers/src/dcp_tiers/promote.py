"""The promoter process, `python -m dcp_tiers.promote RUN`: copy to all further tiers in parallel, one thread each.

With `--follow`, it looks for new checkpoints after each line on standard input, and exits once the input has ended and
all have arrived. If another promoter of the run works on the host, it waits and forwards the requests.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import select
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from dcp_base import DcpError, installed
from dcp_base.logs import library_logger
from dcp_io import HostStore, LocalStore, Store
from dcp_manifest import CheckpointNotFoundError
from dcp_tiers.promoter_process import END, LOG_FORMAT, EventWriter
from dcp_tiers.promotion import Promotion
from dcp_tiers.removal import retain_in_first
from dcp_tiers.tier import DESCRIPTION
from dcp_tiers.tiers import Tiers
from dcp_tiers.waiting import steps_that_can_come

_STEP_SECONDS = 0.5
_NICE = 10


class _Worker(threading.Thread):
    def __init__(self, promotion: Promotion) -> None:
        super().__init__(name=f"dcp-tiers {promotion.url}", daemon=True)
        self.promotion = promotion
        self._woken = threading.Event()
        self._woken.set()
        self._ended: float | None = None
        self._progress_timeout_seconds = float("inf")

    def wake(self) -> None:
        self._woken.set()

    def end(self, seconds: float) -> None:
        self._ended, self._progress_timeout_seconds = time.monotonic(), seconds
        self._woken.set()

    @property
    def has_given_up(self) -> bool:
        last = max(self._ended or 0.0, self.promotion.progressed_seconds)
        return self._ended is not None and time.monotonic() - last > self._progress_timeout_seconds

    def run(self) -> None:
        while self._woken.wait():
            self._woken.clear()
            finished = self.promotion.run(self._pause)
            if not self._woken.is_set() and (self._ended is not None or not finished):
                return

    def _pause(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if self.has_given_up:
                return False
            time.sleep(min(_STEP_SECONDS, end - now))
        return True


def promote(tiers: Tiers, *, progress_timeout_seconds: float | None = None) -> dict[str, list[int]]:
    """Promote all pending checkpoints in this process; return tier → steps that have not arrived.

    A failing tier is abandoned after `progress_timeout_seconds` without progress. Raises TiersError like
    `Tiers.check_trusted`.

    Ranks: one process.
    """
    workers = _start(tiers)
    return _finish(workers, float("inf") if progress_timeout_seconds is None else progress_timeout_seconds)


def _start(tiers: Tiers) -> list[_Worker]:
    tiers.check_trusted()
    workers = [_Worker(Promotion(tiers, number)) for number in range(1, len(tiers.tiers))]
    for worker in workers:
        worker.start()
    return workers


def _finish(workers: Sequence[_Worker], progress_timeout_seconds: float) -> dict[str, list[int]]:
    for worker in workers:
        worker.end(progress_timeout_seconds)
    for worker in workers:
        while worker.is_alive() and not worker.has_given_up:
            worker.join(_STEP_SECONDS)
    left = {}
    for worker in workers:
        if not worker.is_alive() and worker.promotion.problem is None:
            worker.promotion.run(lambda _: False)  # notes in copies from other workers
        if steps := sorted({*worker.promotion.waiting(), *worker.promotion.refused}):
            left[worker.promotion.url] = steps
    return left


def tiers_to_promote(place: str, *, trust: bool) -> Tiers:
    """Return a file's tiers. Raises CheckpointNotFoundError without the first tier, else as `Tiers.read`."""
    tiers = Tiers.read(place, own=True, trust=trust)
    first = tiers.places[0]
    if not first.exists(DESCRIPTION):
        raise CheckpointNotFoundError(
            f"{first.url}, the first tier, has no {DESCRIPTION} on this machine, so nothing is known of what waits "
            "there: promote on a machine that has the directory, or mount it under that path"
        )
    return tiers


@contextlib.contextmanager
def only_one(tiers: Tiers) -> Iterator[bool]:
    """Hold this host's promoter lock; yield False if another process has it. Raises OSError."""
    with PromoterLock(tiers.places[0], tiers.host_id) as lock:
        yield lock.take()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the promoter. Return 0 if all checkpoints arrived, 1 if not, 2 for wrong use, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser("python -m dcp_tiers.promote", description="Promote checkpoints to further tiers.")
    parser.add_argument("run", help="run.tiers.toml, or the directory of a tier that has one")
    parser.add_argument(
        "--progress-timeout-seconds", type=float, help="give up a tier after so long without progress (default: never)"
    )
    parser.add_argument("--events", action="store_true", help="write events to standard output, for the trainer")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends; each line: look again")
    parser.add_argument("--description", help="the tiers as TOML, instead of the file")
    parser.add_argument(
        "--trust-description",
        action="store_true",
        help="take the file of another user, or of a bucket: you have read it",
    )
    given = parser.parse_args(arguments)
    logging.basicConfig(format=LOG_FORMAT if given.events else "dcp-tiers: %(message)s", level=logging.INFO)
    if given.events:
        installed.divert_events(EventWriter(sys.stdout.fileno()))
        if stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
            os.set_blocking(sys.stderr.fileno(), False)  # a stopped trainer must not delay the promoter
    if given.progress_timeout_seconds is not None and not given.progress_timeout_seconds >= 0:  # NaN, too
        parser.error(
            f"argument --progress-timeout-seconds: {given.progress_timeout_seconds} is not a number of at least 0"
        )
    seconds = float("inf") if given.progress_timeout_seconds is None else given.progress_timeout_seconds
    try:
        if given.description is None:
            tiers = tiers_to_promote(given.run, trust=given.trust_description)
        else:
            tiers = Tiers.decode(given.description.encode(), given.run)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        if given.follow:
            return _report(_follow(tiers, Trainer(sys.stdin.fileno(), is_parent=given.events), seconds))
        with only_one(tiers) as alone:
            if not alone:
                _say("another promoter of this run is at work on this host")
                return 1
            left = promote(tiers, progress_timeout_seconds=seconds)
            retain_in_first(tiers)
            return _report(left)
    except (DcpError, OSError) as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted; the next promoter goes on where this one was")
        return 130


def _follow(tiers: Tiers, trainer: Trainer, progress_timeout_seconds: float) -> dict[str, list[int]]:
    with PromoterLock(tiers.places[0], tiers.host_id) as lock:
        if not stand_by(tiers, lock, trainer, progress_timeout_seconds):
            return {}
        workers = _start(tiers)
        while not trainer.has_ended:
            if trainer.wait(_STEP_SECONDS) or lock.is_asked():
                for worker in workers:
                    worker.wake()
        left = _finish(workers, progress_timeout_seconds)
        retain_in_first(tiers)  # the trainer, which asks after each save, has ended
        return left


def _report(left: dict[str, list[int]]) -> int:
    for url, steps in left.items():
        _say(f"not in {url}: steps {', '.join(map(str, steps))}")
    return 1 if left else 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a trainer that has ended
        sys.stderr.write(f"dcp-tiers: {text}\n")


_POLL_SECONDS, _ASK_SECONDS = 0.5, 10.0


class Trainer:
    """The trainer at the other end of a pipe, which forked children may hold longer."""

    def __init__(self, descriptor: int, *, is_parent: bool) -> None:
        self._descriptor = descriptor
        self._parent = os.getppid() if is_parent else None
        self.has_ended = False
        self.has_saved = False

    def wait(self, seconds: float) -> bool:
        """Return whether a line or the trainer's end came."""
        if select.select([self._descriptor], [], [], seconds)[0]:
            heard = os.read(self._descriptor, 1 << 16)
            self.has_ended = not heard or END in heard
            self.has_saved = self.has_saved or heard not in (b"", END)
            return True
        self.has_ended = self._parent is not None and os.getppid() != self._parent
        return self.has_ended


def stand_by(tiers: Tiers, lock: PromoterLock, trainer: Trainer, seconds: float) -> bool:
    """Wait for the lock and forward requests; return whether this process got it.

    After the trainer's end, stop after `seconds` without progress, or if there is nothing to do.
    """
    left: set[int] | None = None
    changed = asked = time.monotonic()
    while not lock.take():
        if not trainer.has_ended:
            if trainer.wait(_POLL_SECONDS):
                lock.ask()
                changed = asked = time.monotonic()
            continue
        if not trainer.has_saved:  # the other promoter brings the rest, and nobody waits for it here
            return False
        now, before, left = time.monotonic(), left, steps_that_can_come(tiers)
        changed = now if left != before else changed
        if not left or now - changed > seconds:
            return False
        if now - asked > _ASK_SECONDS:
            lock.ask()
            asked = now
        time.sleep(_POLL_SECONDS)
    return True


_log = library_logger(__name__)

LOCK = ".dcp-promoter.lock"
# Leases in the further tiers separate promoters if the directory is read-only or has no locks.
_WITHOUT_LOCKS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}


class PromoterLock:
    """Lock of a run's promoters on this host, released by `close` or the end of the process. Raises OSError.

    It is a file in the first tier if that is a directory, or in the temporary directory for a per-host store. For other
    tiers every promoter gets the lock; leases separate them.
    """

    def __init__(self, place: Store, host_id: Callable[[], str]) -> None:
        self._file: int | None = None
        self._seen = 0
        try:
            path = _path_of_lock(place, host_id)
            if path is not None:
                self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                if not isinstance(place, LocalStore) and os.fstat(self._file).st_uid != os.geteuid():
                    # Any user may create files in the temporary directory, and hold a lock forever.
                    self.close()
                    raise PermissionError(errno.EPERM, "it belongs to another user, who is not waited for", path)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            _log.warning("promoters of %s cannot exclude each other by a lock: %s", place.url, error)

    def take(self) -> bool:
        """Take the lock if it is free."""
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
        """Ask the holder to look for new checkpoints."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def is_asked(self) -> bool:
        """Return whether another process has called `ask` since the last call."""
        seen, self._seen = self._seen, self._changed()
        return seen != self._seen

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> PromoterLock:
        return self

    def __exit__(self, *_: object) -> None:
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


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # a thread may hang in a storage
