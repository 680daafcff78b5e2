"""The promoter process: `python -m dcp_tiers.promote RUN`. Copies to all further tiers at once, one thread for each.

With `--follow` it looks for new checkpoints whenever a line comes on its standard input, until the input ends: so it
ends after the trainer that started it, however that one ended, when everything has arrived.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from dcp_hooks import installed
from dcp_io import HostStore, LocalStore
from dcp_manifest import DcpError
from dcp_tiers.promoter_process import EventWriter
from dcp_tiers.promotion import Promotion
from dcp_tiers.tiers import Tiers

__all__ = ["main", "only_one", "promote"]

LOCK = ".dcp-promoter.lock"
_STEP_SECONDS = 0.5
_NICE = 10


class _Worker(threading.Thread):
    """Thread that promotes to one tier, each time it is woken, until it is ended."""

    def __init__(self, promotion: Promotion) -> None:
        super().__init__(name=f"dcp-tiers {promotion.url}", daemon=True)
        self.promotion = promotion
        self._woken = threading.Event()
        self._woken.set()
        self._ended: float | None = None
        self._patience_seconds = float("inf")

    def wake(self) -> None:
        """Look for waiting steps once more."""
        self._woken.set()

    def end(self, seconds: float) -> None:
        """End when nothing waits, or after `seconds` without progress."""
        self._ended, self._patience_seconds = time.monotonic(), seconds
        self._woken.set()

    @property
    def has_given_up(self) -> bool:
        """Whether the thread is to end, and has made no progress for longer than its patience."""
        last = max(self._ended or 0.0, self.promotion.progressed_seconds)
        return self._ended is not None and time.monotonic() - last > self._patience_seconds

    def run(self) -> None:
        """Promote until ended."""
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


def promote(tiers: Tiers, *, seconds: float | None = None) -> dict[str, list[int]]:
    """Promote all that waits, in this process, and return what has not arrived after that: tier → steps.

    Args:
        tiers: The tiers of the run.
        seconds: Time without progress after which to give up a tier whose storage fails or hangs; None never does.

    Ranks: one process.

    Example:
        ```python
        import dcp_all as dcp
        from dcp_tiers import Tier, Tiers
        from dcp_tiers.promote import promote

        tiers = Tiers([Tier("near"), Tier("far")])
        dcp.save({"step": 40}, checkpoint_id=tiers.step(40))
        assert promote(tiers) == {}
        assert tiers.steps()[0].complete_in == (0, 1)
        ```
    """
    workers = _start(tiers)
    return _finish(workers, float("inf") if seconds is None else seconds)


def _start(tiers: Tiers) -> list[_Worker]:
    workers = [_Worker(Promotion(tiers, number)) for number in range(1, len(tiers.tiers))]
    for worker in workers:
        worker.start()
    return workers


def _finish(workers: Sequence[_Worker], seconds: float) -> dict[str, list[int]]:
    for worker in workers:
        worker.end(seconds)
    for worker in workers:
        while worker.is_alive() and not worker.has_given_up:
            worker.join(_STEP_SECONDS)
    left = {}
    for worker in workers:
        if not worker.is_alive() and worker.promotion.problem is None:
            worker.promotion.run(lambda _: False)  # notes in the copies that other workers have made meanwhile
        if steps := sorted({*worker.promotion.waiting(), *worker.promotion.refused}):
            left[worker.promotion.url] = steps
    return left


@contextlib.contextmanager
def only_one(tiers: Tiers, *, wait: bool) -> Iterator[bool]:
    """Hold the lock of promoters of this run on this host; yields False if another one has it."""
    near = tiers.places[0]
    if isinstance(near, LocalStore):
        near.make()
        path = os.path.join(near.path, LOCK)
    elif isinstance(near, HostStore):
        path = _path_of_lock(f"{near.url} {tiers.host_id()}")
    else:  # shared: the lease in the further tier is what excludes others
        yield True
        return
    with open(path, "ab", opener=_open_own) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def _path_of_lock(name: str) -> str:
    """Return the path of a lock file of this user for a name, where the store itself is no folder."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).hexdigest()
    return os.path.join(tempfile.gettempdir(), f"dcp-promoter-{os.getuid()}-{digest}.lock")


def _open_own(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the promoter; returns the exit code: 0 if everything has arrived, 1 if not, 2 for wrong use.

    Example:
        ```python
        import dcp_all as dcp
        from dcp_tiers import Tier, Tiers
        from dcp_tiers.promote import main

        tiers = Tiers([Tier("near"), Tier("far")])
        tiers.write()
        dcp.save({"step": 40}, checkpoint_id=tiers.step(40))
        assert main(["near"]) == 0  # python -m dcp_tiers.promote near
        ```
    """
    parser = argparse.ArgumentParser("python -m dcp_tiers.promote", description="Promote checkpoints to further tiers.")
    parser.add_argument("run", help="run.tiers.toml, or the folder of a tier that has one")
    parser.add_argument("--seconds", type=float, help="give up a tier after so long without progress (default: never)")
    parser.add_argument("--events", action="store_true", help="write events to standard output, for the trainer")
    parser.add_argument("--follow", action="store_true", help="go on until standard input ends; each line: look again")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="dcp-tiers: %(message)s", level=logging.INFO)
    if given.events:
        installed.divert_events(EventWriter(sys.stdout.fileno()))
    try:
        tiers = Tiers.read(given.run)
        with only_one(tiers, wait=given.follow) as alone:
            if not alone:
                _say("another promoter of this run is at work on this host")
                return 1
            return _report(_promote_all(tiers, given.seconds, follow=given.follow))
    except (DcpError, OSError) as error:
        _say(str(error))
        return 2


def _promote_all(tiers: Tiers, seconds: float | None, *, follow: bool) -> dict[str, list[int]]:
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    if not follow:
        return promote(tiers, seconds=seconds)
    workers = _start(tiers)
    for _ in sys.stdin:
        for worker in workers:
            worker.wake()
    return _finish(workers, float("inf") if seconds is None else seconds)


def _report(left: dict[str, list[int]]) -> int:
    for url, steps in left.items():
        _say(f"not in {url}: steps {', '.join(map(str, steps))}")
    return 1 if left else 0


def _say(text: str) -> None:
    sys.stderr.write(f"dcp-tiers: {text}\n")


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread may hang in a storage
