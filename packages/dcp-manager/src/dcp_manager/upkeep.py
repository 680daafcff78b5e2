"""Maintenance of a manager's root folder: prepares each save; after a save, updates `latest`, removes checkpoints.

The root is the folder that holds a folder for each checkpoint. Its file `latest` has the folder name of the checkpoint
that was published last.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from dcp_core import DcpError
from dcp_manager.background import BackgroundSaves
from dcp_manager.hosts.protection import Protection
from dcp_manager.policies.lower_steps import StepGuard
from dcp_manager.policies.retention import Retention, tell_removed
from dcp_manager.root_places import RootPlaces
from dcp_manager.together import Ranks
from dcp_manifest import library_logger

__all__ = ["Upkeep"]

_log = library_logger(__name__)


class Upkeep:
    """Maintenance of the manager's root before and after saves.

    Args:
        where: Places of the root; only the first is maintained.
        retention: Retention, which removes checkpoints that are not to be kept after a save.
        guard: Check of the step to be saved against the highest existing step.
        background: This rank's saves that have not ended.
        ranks: The ranks that save; only the coordinator accesses the storage.
    """

    def __init__(
        self,
        where: RootPlaces,
        retention: Retention,
        guard: StepGuard,
        background: BackgroundSaves,
        ranks: Ranks,
    ) -> None:
        self._where = where
        self._catalogue = where.catalogues[0]
        self._retention = retention
        self._guard = guard
        self._background = background
        self._ranks = ranks
        self._protection: Protection | None = None
        self._published: int | None = None
        """The step that was published last by this manager."""
        self._lock = threading.RLock()
        self._preparing: set[int] = set()
        self._doubtful: set[int] = set()
        """Steps whose saves failed here, but may be published on another host; the next start looks into them."""

    def protect(self) -> None:
        """Have the saves from now on copied to other hosts, if the root says so. Ranks: every rank; collective."""
        self._protection = self._where.protection(self._ranks, self._retain)

    def close(self, seconds: float) -> None:
        """Wait for a copy to other hosts, at most `seconds`."""
        if self._protection is not None:
            self._protection.close(seconds)

    def take_state(
        self,
        step: int,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        metrics: Mapping[str, float],
        *,
        hurry: bool = False,
    ) -> dict[str, Any]:
        """Return the state to save, and prepare the step's folder on the coordinator.

        Args:
            step: The step to be saved.
            state: The state, or a function that returns it.
            metrics: Metrics of the save, by name.
            hurry: Whether the save cannot wait for room in the root.

        Raises:
            CheckpointException: A rank failed; raised on all ranks.

        Ranks: every rank; collective.
        """
        values: dict[str, Any] = {}
        if self._where.per_host:  # the notes on all hosts have the coordinator's metrics
            metrics = self._ranks.decide("metrics of a save", lambda: dict(metrics))

        def own() -> None:
            values.update(state() if callable(state) else state)
            if self._where.keeps(self._ranks) and not self._ranks.is_coordinator:
                self.prepare(step, metrics)

        self._where.make_room(self._ranks, step, hurry=hurry)
        if self._protection is not None:
            self._protection.cancel(step)
        self._ranks.combine("prepare a save", own, lambda _: self.prepare(step, metrics))
        if self._protection is not None:
            self._protection.expect(step)
        return values

    def prepare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prepare the folder of a step for a save.

        Raises:
            StepWentBackError: The step is lower than the highest checkpoint, and `lower_steps` is `raise`.

        Ranks: those that look after a place.
        """
        with self._lock:
            highest = self._catalogue.highest()
            near, beyond = (None if highest is None else highest.step), None
            if self._ranks.is_coordinator:
                beyond = self._where.higher_beyond(step, surely=near is None or self._guard.policy == "raise")
            self._guard.check(step, near, self._background.steps, beyond)
            # Until the saver has it, an earlier save may end and look for leftovers.
            self._preparing.add(step)
            self._retention.sweep({*self._background.steps, step})
            self._catalogue.prepare(step, metrics, after=highest)

    def begun(self, number: int, step: int, future: Future[Any]) -> None:
        """Register a save in the background, after whose end `latest` is published and retention runs.

        Args:
            number: Number of the save, from `BackgroundSaves.begin`.
            step: Training step of the save.
            future: Future of the save.
        """
        with self._lock:
            self._preparing.discard(step)
            self._background.add(number, step, future, lambda saved: self._settle(step, saved=saved))

    def ended(self, step: int, *, saved: bool) -> None:
        """Register the end of a save that is not in the background, or of a save that did not begin.

        Args:
            step: Training step of the save.
            saved: Whether the save succeeded: if so, `latest` is published and retention runs; if not, leftovers of
                the save are removed.
        """
        self._preparing.discard(step)
        self._settle(step, saved=saved)

    def _settle(self, step: int, *, saved: bool) -> None:
        """Publish `latest` and apply retention after a save, where this rank looks after a place; never raises."""
        if self._protection is not None:
            self._protection.settle(step, saved=saved)
        if not self._where.keeps(self._ranks):
            return
        with self._lock:
            try:
                running = self._running(step)
                if saved:
                    self._catalogue.published(step)
                    self._published = step
                    self._remove_old(step)
                    self._where.saved()
                elif not self._ranks.is_coordinator:
                    self._doubtful.add(step)
                else:
                    self._catalogue.failed(step)
                    self._retention.sweep(running, always=True)
            except (OSError, DcpError):  # what stays too long is removed after the next save
                _log.warning("step %d: looking after the other checkpoints failed", step, exc_info=True)

    def _running(self, step: int) -> set[int]:
        """Return the steps that are being saved or copied, or may be, but for one whose save has just ended."""
        copied = frozenset[int]() if self._protection is None else self._protection.steps
        others = {other for other in self._background.steps if other != step}
        return self._preparing | self._doubtful | copied | others

    def _remove_old(self, published: int) -> None:
        removed = self._retention.apply(
            self._running(published), published=published, spares_higher=self._guard.spares_higher(published)
        )
        tell_removed(self._where.checkpoint_id(self._catalogue, other) for other in removed)

    def _retain(self, copied: int) -> None:
        """Apply retention after a copy to other hosts, where this rank looks after a place; never raises."""
        if not self._where.keeps(self._ranks):
            return
        with self._lock:
            try:
                self._remove_old(copied if self._published is None else self._published)
            except (OSError, DcpError):
                _log.warning("step %d: looking after the other checkpoints failed", copied, exc_info=True)
