"""`Protection`: copies of each host's part of a checkpoint on other hosts, after each save, in a thread of its own.

How parts are copied is the affair of the `dcp_io.HostCopies` of the root, such as `dcp_memory.partner()`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent
from dcp_core.toolkit import HostPlaces
from dcp_io import Catalogue, CopyRequest, HostCopies, HostsCopied, HostStore, host_id, note_hosts
from dcp_manager.together import Ranks
from dcp_manifest import library_logger
from dcp_ranks import CollectiveCoordinator, Coordinator

__all__ = ["Protection"]

_log = library_logger(__name__)


@dataclass(eq=False, slots=True)
class _Copy:
    """The copy of one save, from before the save until the copy has ended."""

    step: int
    coordinator: Coordinator
    settled: threading.Event = field(default_factory=threading.Event)
    """Set when the save has ended on this rank."""
    saved: bool = False
    cancelled: bool = False
    ended: threading.Event = field(default_factory=threading.Event)


class Protection:
    """Copies after each save, one at a time. A copy that fails, or is late, fails no save: the next save tries again.

    Args:
        copies: Way to copy.
        catalogue: Catalogue of this rank's place.
        ranks: The ranks that save.
        places: Which ranks share a place.
        copied: Function that is called with the step when a copy has ended, in the thread of the copy.
    """

    def __init__(
        self,
        copies: HostCopies,
        catalogue: Catalogue,
        ranks: Ranks,
        places: HostPlaces,
        copied: Callable[[int], object],
    ) -> None:
        self._copies = copies
        self._catalogue = catalogue
        self._ranks = ranks
        self._places = places
        self._copied = copied
        self._running: _Copy | None = None

    @classmethod
    def start(
        cls,
        copies: HostCopies,
        catalogue: Catalogue,
        ranks: Ranks,
        places: HostPlaces,
        copied: Callable[[int], object],
    ) -> Protection | None:
        """Note the hosts of this job in each place; returns None, with a warning, if there is one host alone.

        Ranks: every rank; collective.
        """
        store = catalogue.store

        def own() -> str | None:
            return host_id(store) if places.leads else None

        with ranks.coordinator() as them:
            ids = [found for found in them.all_gather("ids of hosts", own) if found is not None]
            them.all_gather("hosts of the job", lambda: note_hosts(store, ids) if places.leads else None)
        obstacle = None if places.count > 1 else "this job has one host alone"
        if isinstance(them, CollectiveCoordinator):  # whose phases would get in the way of training's collectives
            obstacle = "the ranks have no store in common over which a copy in the background could agree"
        if obstacle is None:
            return cls(copies, catalogue, ranks, places, copied)
        if ranks.is_coordinator:
            _log.warning("checkpoints in %s are not copied to other hosts: %s", store.url, obstacle)
        return None

    @property
    def steps(self) -> frozenset[int]:
        """Steps that are being copied, or will be when their save has ended."""
        running = self._running
        return frozenset() if running is None else frozenset((running.step,))

    @property
    def is_busy(self) -> bool:
        """Whether a copy runs, or waits for the end of its save."""
        return self._running is not None

    def cancel(self, step: int) -> None:
        """Give up the copy of a step that is about to be saved again, and wait until it has ended."""
        running = self._running
        if running is not None and running.step == step and running.settled.is_set():
            running.cancelled = True
            running.ended.wait(self._ranks.timeout_seconds)

    def expect(self, step: int, *, busy: bool) -> None:
        """Prepare to copy the save of a step that is about to begin, in the thread that saves.

        Args:
            step: The step.
            busy: Whether the copy of an earlier save still runs on some rank: then this save is not copied.

        Ranks: every rank, with the same arguments; does not wait for other ranks.
        """
        if busy:
            self._report(step, "the copy of an earlier step still runs")
            return
        copy = self._running = _Copy(step, self._ranks.coordinator())
        threading.Thread(target=self._run, args=(copy,), name="dcp-protect", daemon=True).start()

    def settle(self, step: int, *, saved: bool) -> None:
        """Begin the copy of a save that has ended on this rank; without success, there is nothing to copy."""
        copy = self._running
        if copy is not None and copy.step == step and not copy.settled.is_set():
            copy.saved = saved
            copy.settled.set()

    def wait(self, seconds: float) -> bool:
        """Wait until no copy runs, at most `seconds`; returns whether none does."""
        running = self._running
        if running is None:
            return True
        return running.ended.wait(min(seconds, threading.TIMEOUT_MAX))

    def close(self, seconds: float) -> None:
        """Wait for a copy that runs, at most `seconds`, and give it up after that."""
        running = self._running
        if running is not None and not self.wait(seconds):
            running.cancelled = True
            if self._ranks.is_coordinator:
                _log.warning("step %d is not protected: the copy was given up after %.1f s", running.step, seconds)

    def _run(self, copy: _Copy) -> None:
        """Wait for the end of the save, and copy it, with the other ranks."""
        start = time.monotonic()
        try:
            with copy.coordinator as them:
                copy.settled.wait()
                outcome = self._copy(copy, them)
        except BaseException as error:  # noqa: BLE001 - a copy that fails must not end training
            outcome = HostsCopied(f"{type(error).__name__}: {error}".partition("\n")[0])
        try:
            if outcome is not None:
                self._tell(copy, outcome, time.monotonic() - start)
        finally:
            self._running = None
            copy.ended.set()

    def _tell(self, copy: _Copy, outcome: HostsCopied, seconds: float) -> None:
        if outcome.reason is not None:
            self._report(copy.step, outcome.reason)
        elif self._ranks.is_coordinator:
            _log.info("step %d is protected: %d hosts, %.1f s", copy.step, self._places.count, seconds)
        self._copied(copy.step)

    def _copy(self, copy: _Copy, them: Coordinator) -> HostsCopied | None:
        """Copy a save that has succeeded on all ranks; returns None if it has not."""
        if not all(them.all_gather("ends of a save", lambda: copy.saved)):
            return None
        store = self._catalogue.store_of(copy.step)
        if not isinstance(store, HostStore):
            return HostsCopied(f"{store.url} is no store of each host")
        request = CopyRequest(store, self._places.leaders, lambda: copy.cancelled, self._ranks.peers)
        return self._copies.copy(them, request)

    def _report(self, step: int, reason: str) -> None:
        """Report that a step is not protected, by a warning and an event of the coordinator."""
        if self._ranks.is_coordinator:
            place = self._catalogue.store_of(step).url
            _log.warning("step %d is not protected by copies on other hosts: %s", step, reason)
            event = CheckpointEvent("protect", "skip", "failed", 0, place, error=reason, time=time.time())
            plugins.emit(event)
