"""Copies of hosts' parts of a checkpoint on other hosts, and which places have a checkpoint."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_base import DcpError
from dcp_base.hookspecs import CheckpointEvent
from dcp_base.logs import library_logger
from dcp_core import plugins
from dcp_core.hosts.host_places import HostPlaces
from dcp_io import HostStore
from dcp_io.roots.catalogue import Catalogue
from dcp_io.roots.copy_notes import CopyNote, CopyRequest, HostCopies, HostsCopied, JobHosts
from dcp_io.timed_call import TimedCall
from dcp_manager.together import Ranks
from dcp_ranks import Coordinator
from dcp_ranks.phases.collective_coordinator import CollectiveCoordinator

_log = library_logger(__name__)


@dataclass(eq=False, slots=True)
class _Copy:
    step: int
    coordinator: Coordinator
    settled: bool = False
    saved: bool = False
    left_out: bool = False
    """Whether this rank wants a later save copied instead; then all ranks leave the copy out."""
    cancelled: bool = False


class Protection:
    """Copies after each save, one at a time. A copy that fails or is late fails no save: the next save tries again.

    While a copy runs, only the newest save waits for its turn. `copied` is called with the step when a copy has ended,
    in the copy's thread.
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
        """The current or next copy, then waiting ones."""

    @classmethod
    def start(
        cls,
        copies: HostCopies,
        catalogue: Catalogue,
        ranks: Ranks,
        places: HostPlaces,
        copied: Callable[[int], object],
    ) -> Protection | None:
        """Note the hosts of this job in each place; return None, with a warning, if copies are impossible.

        Ranks: every rank; collective.
        """
        store = catalogue.store

        def own() -> str | None:
            return JobHosts(store).own_id() if places.leads else None

        with ranks.coordinator() as them:
            ids = [found for found in them.all_gather("ids of hosts", own) if found is not None]
            them.all_gather("hosts of the job", lambda: JobHosts(store).note(ids) if places.leads else None)
        obstacle = None if places.count > 1 else "this job has one host alone"
        if isinstance(them, CollectiveCoordinator):  # its phases would interfere with training's collectives
            obstacle = "the ranks have no store in common over which a copy in the background could agree"
        if obstacle is None:
            return cls(copies, catalogue, ranks, places, copied)
        if ranks.is_coordinator:
            _log.warning("checkpoints in %s are not copied to other hosts: %s", store.url, obstacle)
        return None

    @property
    def steps(self) -> frozenset[int]:
        """Steps that are or will be copied."""
        with self._changed:
            return frozenset(copy.step for copy in self._begun)

    def cancel(self, step: int) -> None:
        """Cancel a step's copy before the step is saved again, and wait for its end."""
        with self._changed:
            there = [copy for copy in self._begun if copy.step == step and copy.settled]
            for copy in there:
                copy.cancelled = copy.left_out = True
            self._changed.notify_all()
            if there:
                self._changed.wait_for(lambda: not {*there} & {*self._begun}, self._ranks.timeout_seconds)

    def expect(self, step: int) -> None:
        """Prepare to copy the save of a step that is about to begin, in the thread that saves.

        Ranks: every rank; does not wait.
        """
        copy = _Copy(step, self._ranks.coordinator())
        with self._changed:
            # The first copy stays, even if its save still runs: otherwise every save could displace it.
            for waiting in self._begun[1:]:
                waiting.left_out = True
            self._begun.append(copy)
            self._changed.notify_all()
        threading.Thread(target=self._run, args=(copy,), name="dcp-protect", daemon=True).start()

    def settle(self, step: int, *, saved: bool) -> None:
        """Begin the copy if the save has succeeded on this rank."""
        with self._changed:
            copy = next((copy for copy in self._begun if copy.step == step and not copy.settled), None)
            if copy is not None:
                copy.saved, copy.settled = saved, True
                self._changed.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """Return whether no copy runs any more, after at most `timeout_seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._begun, min(timeout_seconds, threading.TIMEOUT_MAX))

    def close(self, timeout_seconds: float) -> None:
        """Wait at most `timeout_seconds`, then cancel the copies."""
        if self.wait(timeout_seconds):
            return
        with self._changed:
            given_up = [*self._begun]
            for copy in given_up:
                copy.cancelled = True
        if self._ranks.is_coordinator:
            for copy in given_up:
                _log.warning("step %d is not protected: the copy was given up after %.1f s", copy.step, timeout_seconds)

    def _run(self, copy: _Copy) -> None:
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
        if self._ranks.is_coordinator:
            place = self._catalogue.store_of(step).url
            _log.warning("step %d is not protected by copies on other hosts: %s", step, reason)
            event = CheckpointEvent("protect", "skip", "failed", 0, place, error=reason, time=time.time())
            plugins.emit(event)


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Which places have a checkpoint, as one rank sees it."""

    step: int
    here: bool
    """Whether the nearest place has it; if each host has its own place, whether this host has its part."""
    protected: bool
    """Whether the loss of one host loses nothing: each host's part is on another host."""
    elsewhere: tuple[str, ...]
    """Paths or URIs of further places that have it, such as a slow tier."""

    def __str__(self) -> str:
        """Return one line for logs."""
        places = [*(["here"] if self.here else []), *(["protected"] if self.protected else [])]
        return f"step {self.step}: {', '.join([*places, *(f'in {url}' for url in self.elsewhere)]) or 'nowhere'}"


def find_step(catalogues: Sequence[Catalogue], step: int) -> Whereabouts:
    """Return which places have an undamaged checkpoint of a step; unreadable places are skipped."""
    found = [_has(catalogue, step) for catalogue in catalogues]
    protected = found[0] and CopyNote.read(catalogues[0].store_of(step)).protected
    further = zip(catalogues[1:], found[1:], strict=True)
    return Whereabouts(step, found[0], protected, tuple(each.store.url for each, has in further if has))


def _has(catalogue: Catalogue, step: int) -> bool:
    try:
        return TimedCall(catalogue.store.url, lambda: catalogue.is_good(step)).result()
    except (OSError, DcpError) as error:
        _log.warning("%s cannot be read: %s", catalogue.store.url, error)
        return False
