"""The promoter process: `python -m dcp_tiers.promote RUN`. Copies to all further tiers at once, one thread for each.

With `--follow` it looks for new checkpoints whenever a line comes on its standard input, until the input ends: so it
ends after the trainer that started it, however that one ended, when everything has arrived. While another promoter of
the run is at work on the host, it waits, and passes on what it hears.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from dcp_hooks import installed
from dcp_manifest import DcpError
from dcp_tiers.promoter_lock import PromoterLock
from dcp_tiers.promoter_process import LOG_FORMAT, EventWriter
from dcp_tiers.promoting.following import Trainer, stand_by
from dcp_tiers.promoting.promotion import Promotion
from dcp_tiers.tiers import Tiers

__all__ = ["main", "only_one", "promote"]

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
def only_one(tiers: Tiers) -> Iterator[bool]:
    """Hold the lock of promoters of this run on this host; yields False if another one has it.

    Raises:
        OSError: The first tier cannot be accessed.
    """
    with PromoterLock(tiers.places[0], tiers.host_id) as lock:
        yield lock.take()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the promoter; returns the exit code: 0 if everything has arrived, 1 if not, 2 for wrong use, 130 for Ctrl-C.

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
    logging.basicConfig(format=LOG_FORMAT if given.events else "dcp-tiers: %(message)s", level=logging.INFO)
    if given.events:
        installed.divert_events(EventWriter(sys.stdout.fileno()))
        if stat.S_ISFIFO(os.fstat(sys.stderr.fileno()).st_mode):
            os.set_blocking(sys.stderr.fileno(), False)  # a trainer that is stopped must not hold the promoter up
    if given.seconds is not None and not given.seconds >= 0:  # NaN, too
        parser.error(f"argument --seconds: {given.seconds} is not a number of at least 0")
    seconds = float("inf") if given.seconds is None else given.seconds
    try:
        tiers = Tiers.read(given.run, own=not given.events)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        if given.follow:
            return _report(_follow(tiers, Trainer(sys.stdin.fileno(), is_parent=given.events), seconds))
        with only_one(tiers) as alone:
            if not alone:
                _say("another promoter of this run is at work on this host")
                return 1
            return _report(promote(tiers, seconds=seconds))
    except (DcpError, OSError) as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted; the next promoter goes on where this one was")
        return 130


def _follow(tiers: Tiers, trainer: Trainer, seconds: float) -> dict[str, list[int]]:
    """Promote what a trainer saves, until it has ended and everything has arrived; returns what has not."""
    with PromoterLock(tiers.places[0], tiers.host_id) as lock:
        if not stand_by(tiers, lock, trainer, seconds):
            return {}
        workers = _start(tiers)
        while not trainer.has_ended:
            if trainer.wait(_STEP_SECONDS) or lock.is_asked():
                for worker in workers:
                    worker.wake()
        return _finish(workers, seconds)


def _report(left: dict[str, list[int]]) -> int:
    for url, steps in left.items():
        _say(f"not in {url}: steps {', '.join(map(str, steps))}")
    return 1 if left else 0


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # of a trainer that has ended
        sys.stderr.write(f"dcp-tiers: {text}\n")


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code)  # a thread may hang in a storage
