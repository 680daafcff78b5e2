"""Retention: removal of checkpoints that the keeping policy does not select, after a new checkpoint was published."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

from dcp_core import plugins
from dcp_core.hookspecs import CheckpointEvent
from dcp_io import Catalogue, KeepPolicy, by_creation, keeps_all, newest_protected
from dcp_manifest import library_logger

__all__ = ["Retention", "tell_removed"]

_log = library_logger(__name__)


class Retention:
    """Retention of checkpoints: applies a keeping policy to a catalogue.

    Args:
        catalogue: Catalogue of the root.
        policy: Policy that selects the checkpoints to keep. The undamaged checkpoint that was made last, the last one
            that copies on other hosts protect, and checkpoints that a process reads or saves, are kept as well.

    Ranks: the coordinator.
    """

    def __init__(self, catalogue: Catalogue, policy: KeepPolicy) -> None:
        self._catalogue = catalogue
        self._policy = policy
        self._swept = False

    def sweep(self, running: Collection[int], *, always: bool = False) -> None:
        """Remove leftovers of killed processes, on the first call and on calls with `always`.

        Args:
            running: Steps that this process is saving.
            always: Whether to search for leftovers even if an earlier call has done so.
        """
        if always or not self._swept:
            self._catalogue.sweep(running=running)
            self._swept = True

    def apply(self, running: Collection[int], *, published: int, spares_higher: bool = False) -> list[int]:
        """Remove the checkpoints that the policy does not select; returns their steps.

        Args:
            running: Steps that this process is saving.
            published: The step that was just published. Its checkpoint is kept even if others have a higher step or
                creation time: training may have gone back to an earlier step.
            spares_higher: Whether undamaged checkpoints of higher steps than `published` are kept as well.
        """
        if keeps_all(self._policy):
            return []
        folders = self._catalogue.folders()
        records = by_creation(self._catalogue.records(folders))
        good = [record for record in records if record.quarantined is None]
        now = time.time()
        keep = {*self._policy.keep(good, now), *running, published}
        keep |= {record.step for record in good[-1:]}
        protected = newest_protected(folders, good)
        keep |= set() if protected is None else {protected}
        keep |= {record.step for record in good if spares_higher and record.step > published}
        # A damaged one stays as long as a good one of its step would, for inspection.
        damaged = {record.step for record in records if record.quarantined is not None}
        keep |= damaged & self._policy.keep(records, now)
        removed = [record.step for record in records if record.step not in keep and self._remove(record.step)]
        left = [folder for folder in folders if folder.step not in removed]
        self._catalogue.sweep(left, running=running)
        return removed

    def _remove(self, step: int) -> bool:
        try:
            return self._catalogue.remove(step)
        except OSError as error:
            _log.warning("step %d could not be removed; it is tried again after the next save: %s", step, error)
            return False


def tell_removed(checkpoint_ids: Iterable[str]) -> None:
    """Notify observers (`dcp_on_event`) of removed checkpoints."""
    for place in checkpoint_ids:
        plugins.emit(CheckpointEvent("manage", "remove", "finished", 0, place))
