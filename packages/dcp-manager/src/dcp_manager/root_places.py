"""`RootPlaces`: the places of a manager's root, with a catalogue of each, and the root's promoter if it has one."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dcp_core.toolkit import HostPlaces, absolute_id, find_places
from dcp_io import (
    Catalogue,
    CheckpointRecord,
    HostCopies,
    HostStore,
    KeepAll,
    KeepPolicy,
    PromotingRoot,
    Root,
    Store,
    TimedCall,
    open_store,
    places_of,
    timed_call,
)
from dcp_manager.hosts.host_indexes import repeat_indexes
from dcp_manager.hosts.protection import Protection
from dcp_manager.together import Ranks
from dcp_manifest import DcpError, library_logger, without_end_slash

__all__ = ["RootPlaces"]

_log = library_logger(__name__)

_LOOK_SECONDS, _PAUSE_SECONDS = 10.0, 0.1


class RootPlaces:
    """Places of a root, the nearest first; checkpoints are saved to the first.

    Args:
        root: Path, URI or `Root`.
        storage_options: Options of the storage of a path or URI.
        stale_after_seconds: See `CheckpointManager`.
        folder_prefix: Prefix of folder names; a root with a prefix of its own uses that.
    """

    def __init__(
        self,
        root: Root | str | os.PathLike[str],
        storage_options: Mapping[str, Any],
        stale_after_seconds: float,
        folder_prefix: str,
    ) -> None:
        self._hosts: HostPlaces | None = None
        copies = getattr(root, "copies", None)
        self._copies = copies if isinstance(copies, HostCopies) else None
        self._promoting = root if isinstance(root, PromotingRoot) else None
        if isinstance(root, str | os.PathLike):
            self.url = without_end_slash(os.fspath(absolute_id(root)))
            stores: tuple[Store, ...] = (open_store(self.url, storage_options=storage_options),)
        else:
            stores = places_of(root)
            self.url = without_end_slash(stores[0].url)
        if self._promoting is not None:
            folder_prefix = self._promoting.folder_prefix
        self.catalogues = tuple(
            Catalogue(store, stale_after_seconds=stale_after_seconds, folder_prefix=folder_prefix) for store in stores
        )
        self._beyond: list[_HighestStep] = []
        """The highest step of each further place, on the coordinator."""
        self._has_waited = False
        """Whether a save has waited for these."""

    def checkpoint_id(self, catalogue: Catalogue, step: int) -> str:
        """Return the id of a step's checkpoint in the place of a catalogue."""
        url = self.url if catalogue is self.catalogues[0] else without_end_slash(catalogue.store.url)
        return f"{url}/{catalogue.folder_name(step)}"

    def reading_id(self, catalogue: Catalogue, step: int) -> str:
        """Return the id by which a step is loaded; what no host has is read from the places that all hosts share."""
        near = catalogue.store
        if not isinstance(near, HostStore):
            return self.checkpoint_id(catalogue, step)
        also = [self.checkpoint_id(other, step) for other in self.catalogues[1:]]
        return near.child(catalogue.folder_name(step)).uri(also)

    @property
    def per_host(self) -> bool:
        """Whether each host has a place of its own to which it saves."""
        return isinstance(self.catalogues[0].store, HostStore)

    def keeps(self, ranks: Ranks) -> bool:
        """Whether this rank looks after its place: the coordinator or, where each host has one, a rank of each."""
        return ranks.is_coordinator if self._hosts is None else self._hosts.leads

    def keep_policy(self, given: KeepPolicy | None) -> KeepPolicy:
        """Return the policy for the first place: the given one; None is the root's own, or to keep all.

        What another place must still get is kept even if the given policy does not select it.
        """
        own = KeepAll() if self._promoting is None else self._promoting.keep_policy
        if given is None:
            return own
        return given if self._promoting is None else given | self._promoting.keep_waiting

    @property
    def _run(self) -> str | None:
        """Id of the run, where its hosts have none yet: of the places that all hosts share; None if there are none.

        So all hosts of a run get the same one, also those that are never in one job with those before.
        """
        shared = [catalogue.store.url for catalogue in self.catalogues[1:]]
        return hashlib.sha256("\n".join(shared).encode()).hexdigest()[:16] if shared else None

    def start(self, ranks: Ranks, *, compares: bool) -> None:
        """Find out which ranks share a place, where each host has its own, and start the promoter of each place.

        Args:
            ranks: The ranks of the run.
            compares: Whether further places are asked for their highest steps, for `higher_beyond`.

        Ranks: every rank; collective where each host has a place of its own.
        """
        if self.per_host:
            near = self.catalogues[0].store
            self._hosts = self._find_hosts(ranks, near)
            repeat_indexes(self.catalogues[0], ranks, self._hosts)
        if compares and ranks.is_coordinator:
            self._beyond = [_HighestStep(catalogue) for catalogue in self.catalogues[1:]]
        if self._promoting is not None and self.keeps(ranks):
            self._promoting.start_promoter()

    def _find_hosts(self, ranks: Ranks, near: Store) -> HostPlaces:
        with ranks.coordinator() as them:
            hosts = find_places(them, near, run=self._run, saves=False)
        if hosts.leads:
            with contextlib.suppress(OSError, DcpError):  # a save says what is wrong
                hosts.claim(near)
        return hosts

    def protection(self, ranks: Ranks, copied: Callable[[int], object]) -> Protection | None:
        """Return the copies of each host's part on other hosts, after `start`; None if there are none to be made.

        Args:
            ranks: The ranks.
            copied: Function that is called with the step when a copy has ended, in another thread.

        Ranks: every rank; collective if the root has such copies.
        """
        if self._copies is None or self._hosts is None:
            return None
        return Protection.start(self._copies, self.catalogues[0], ranks, self._hosts, copied)

    def make_room(self, ranks: Ranks, step: int, *, hurry: bool) -> None:
        """Wait until the first place has room for a step. The ranks decide together, in phases of a few seconds.

        If at the start a disk was too full to show which ranks share it, that is found out again.

        Args:
            ranks: The ranks that save.
            step: The step that is about to be saved.
            hurry: Whether the save cannot wait.

        Ranks: every rank; collective, if the root has a promoter, or that is found out again.
        """
        if self._hosts is not None and not self._hosts.are_proved:
            self._hosts = self._find_hosts(ranks, self.catalogues[0].store)
        root = self._promoting
        if root is None:
            return
        seconds, started = min(_LOOK_SECONDS, ranks.timeout_seconds / 4), time.monotonic()
        while not ranks.decide("make room", partial(_make_room, root, step, seconds, hurry=hurry)):
            waited = time.monotonic() - started
            if ranks.is_coordinator:
                _log.warning("step %d waits for room in %s, for %.0f s now", step, self.url, waited)

    def higher_beyond(self, step: int, *, surely: bool) -> tuple[int, str] | None:
        """Return the highest step above `step` in a further place, and its checkpoint id there; None if there is none.

        Each place is asked when the manager starts, and again if it fails. Until it has answered, it has none.

        Args:
            step: The step that is about to be saved.
            surely: Whether to wait for the answers, half a minute at most in all and once, and to ask again before a
                place is said to have a higher step. Otherwise an answer that has not come yet does not count.

        Ranks: the coordinator.
        """
        now = time.monotonic()
        until = now + timed_call.SILENT_AFTER_SECONDS
        waits, self._has_waited = surely and not self._has_waited, self._has_waited or surely
        found = [
            (asked.above(step, again=surely, wait_until=until if waits else now, confirm_until=until), asked.catalogue)
            for asked in self._beyond
        ]
        higher = [(top, self.checkpoint_id(catalogue, top)) for top, catalogue in found if top is not None]
        return max(higher, default=None)

    def saved(self) -> None:
        """Wake the promoter after a save. Ranks: those that look after a place."""
        if self._promoting is not None:
            self._promoting.wake_promoter()

    def end(self, ranks: Ranks, seconds: float) -> None:
        """Wait for the promoter of this rank's place, at most `seconds`."""
        if self._promoting is not None and self.keeps(ranks):
            self._promoting.end_promoter(seconds)


def _make_room(root: PromotingRoot, step: int, seconds: float, *, hurry: bool) -> bool:
    """Wait at most `seconds` for room; returns whether there is room. Coordinator only."""
    end = time.monotonic() + seconds
    while not root.make_room(step, hurry=hurry):
        if time.monotonic() > end:
            root.wake_promoter()
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


class _HighestStep:
    """Highest step in a place that may be slow or away, asked in a thread until there is an answer."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._call = self._ask()
        self._highest: int | None = None
        """The step; -1 if there is none, None while it is not known."""
        self._is_reported = False
        """Whether it was said that the step is not known."""

    def _ask(self) -> TimedCall[CheckpointRecord | None]:
        return TimedCall(self.catalogue.store.url, self.catalogue.highest)

    def above(self, step: int, *, again: bool, wait_until: float, confirm_until: float) -> int | None:
        """Return the highest step if it is above `step`; None if it is not, or is not known.

        Args:
            step: The step that is about to be saved.
            again: Whether to ask again before the place is said to have a higher step.
            wait_until: Time of `time.monotonic()` until which to wait for the first answer, seconds.
            confirm_until: Time until which to wait if it is asked again.
        """
        if self._highest is None and self._call.is_done:
            self._take_answer(0.0)
        if self._highest is None and time.monotonic() < wait_until:
            self._take_answer(wait_until)
        if again and self._highest is not None and self._highest > step:
            self._call = self._ask()
            self._take_answer(confirm_until)
        return self._highest if self._highest is not None and self._highest > step else None

    def _take_answer(self, until: float) -> None:
        try:
            record = self._call.result(seconds=max(0.0, until - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - clients of storages raise errors of all kinds, and the save goes on
            if not self._is_reported:
                what = "whether %s has checkpoints of higher steps is not known, and is asked again: %s"
                _log.warning(what, self._call.place, error)
            self._is_reported = True
            if self._call.is_done:
                self._call = self._ask()
        else:
            self._highest = -1 if record is None else record.step
