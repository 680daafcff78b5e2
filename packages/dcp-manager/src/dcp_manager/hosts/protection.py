"""`Protection`: copies of each host's part of a checkpoint on other hosts, after each save, in a thread of its own.

How parts are copied is the affair of the `dcp_io.HostCopies` of the root, such as `dcp_memory.partner()`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    settled: bool = False
    """Whether the save has ended on this rank."""
    saved: bool = False
    left_out: bool = False
    """Whether this rank wants a later save copied instead; all ranks leave the copy out, or none does."""
    cancelled: bool = False


class Protection:
    """Copies after each save, one at a time. A copy that fails, or is late, fails no save: the next save tries again.

    While a copy runs, the newest save waits for its turn, and those between are left out. So the last save of a run is
    copied, too, however slow the copies are.

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
        self._changed = threading.Condition()
        self._begun: list[_Copy] = []
        """The copy that runs or is the next one, then those that wait for it."""

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
        with self._changed:
            return frozenset(copy.step for copy in self._begun)

    def cancel(self, step: int) -> None:
        """Give up the copy of a step that is about to be saved again, and wait until it has ended."""
        with self._changed:
            there = [copy for copy in self._begun if copy.step == step and copy.settled]
            for copy in there:
                copy.cancelled = copy.left_out = True
            self._changed.notify_all()
            if there:
                self._changed.wait_for(lambda: not {*there} & {*self._begun}, self._ranks.timeout_seconds)

    def expect(self, step: int) -> None:
        """Prepare to copy the save of a step that is about to begin, in the thread that saves.

        Ranks: every rank, with the same step; does not wait for other ranks.
        """
        copy = _Copy(step, self._ranks.coordinator())
        with self._changed:
            # The first one may be of a save that is still running. If it waits, too, it would wait with every save.
            for waiting in self._begun[1:]:
                waiting.left_out = True
            self._begun.append(copy)
            self._changed.notify_all()
        threading.Thread(target=self._run, args=(copy,), name="dcp-protect", daemon=True).start()

    def settle(self, step: int, *, saved: bool) -> None:
        """Begin the copy of a save that has ended on this rank; without success, there is nothing to copy."""
        with self._changed:
            copy = next((copy for copy in self._begun if copy.step == step and not copy.settled), None)
            if copy is not None:
                copy.saved, copy.settled = saved, True
                self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until no copy runs, at most `seconds`; returns whether none does."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._begun, min(seconds, threading.TIMEOUT_MAX))

    def close(self, seconds: float) -> None:
        """Wait for the copies, at most `seconds`, and give up after that."""
        if self.wait(seconds):
            return
        with self._changed:
            given_up = [*self._begun]
            for copy in given_up:
                copy.cancelled = True
        if self._ranks.is_coordinator:
            for copy in given_up:
                _log.warning("step %d is not protected: the copy was given up after %.1f s", copy.step, seconds)

    def _run(self, copy: _Copy) -> None:
        """Wait for the end of the save and for earlier copies, and copy it, with the other ranks."""
        start = time.monotonic()
        try:
            with copy.coordinator as them:
                with self._changed:
                    self._changed.wait_for(lambda: copy.left_out or (copy.settled and self._begun[0] is copy))
                outcome = self._copy(copy, them)
        except BaseException as error:  # noqa: BLE001 - a copy that fails must not end training
            outcome = HostsCopied(f"{type(error).__name__}: {error}".partition("\n")[0])
        try:
            if outcome is not None:
                self._tell(copy, outcome, time.monotonic() - start)
        finally:
            with self._changed:
                self._begun.remove(copy)
                self._changed.notify_all()

    def _tell(self, copy: _Copy, outcome: HostsCopied, seconds: float) -> None:
        if outcome.reason is not None:
            self._report(copy.step, outcome.reason)
        elif self._ranks.is_coordinator:
            _log.info("step %d is protected: %d hosts, %.1f s", copy.step, self._places.count, seconds)
        self._copied(copy.step)

    def _copy(self, copy: _Copy, them: Coordinator) -> HostsCopied | None:
        """Copy a save that has succeeded on all ranks; returns None if it has not."""
        ends = them.all_gather("ends of a save", lambda: (copy.saved, copy.left_out))
        if any(left_out for _, left_out in ends):
            return HostsCopied("the copy of an earlier step was still running when a later one was saved")
        if not all(saved for saved, _ in ends):
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
