"""`RootPlaces`: the places of a manager's root, with their catalogues, and the root's promoter.

After a crash, one host alone may have an index. It is repeated on the other hosts, which would otherwise take their
parts of the checkpoint for the remains of a killed save.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dcp_base import DcpError
from dcp_base.logs import library_logger
from dcp_base.schemes import without_end_slash
from dcp_core import StorageReader, StorageWriter, plugins
from dcp_core.arguments import absolute_id
from dcp_core.hosts.host_places import HostPlaces, find_places
from dcp_io import CheckpointRecord, HostStore, KeepAll, KeepPolicy, Store, SupportsFolders, open_store
from dcp_io.roots.catalogue import Catalogue, PromotingRoot
from dcp_io.roots.copy_notes import HostCopies
from dcp_io.saves.cleanup import read_current
from dcp_io.stores.root import Root, places_of
from dcp_io.timed_call import TimedCall
from dcp_manager.protection import Protection
from dcp_manager.together import Ranks
from dcp_manifest import read_index
from dcp_manifest.folders.folder import DATA_SUFFIX, METADATA_NAME, SAVE_MARKER_PREFIX

_log = library_logger(__name__)

_POLL_SECONDS, _PAUSE_SECONDS = 10.0, 0.1


class Places:
    """Factory of storage writers and readers."""

    def __init__(
        self,
        writer: Callable[[str], StorageWriter] | None,
        reader: Callable[[str], StorageReader] | None,
        storage_options: Mapping[str, Any],
    ) -> None:
        if storage_options:
            writer = writer or partial(plugins.open_writer, storage_options=storage_options)
            reader = reader or partial(plugins.open_reader, storage_options=storage_options)
        self._writer, self._reader = writer, reader

    def to_write(self, checkpoint_id: str) -> dict[str, Any]:
        """Return arguments of `dcp_core.save`."""
        if self._writer is None:
            return {"checkpoint_id": checkpoint_id}
        return {"storage_writer": self._writer(checkpoint_id)}

    def to_read(self, checkpoint_id: str) -> dict[str, Any]:
        """Return arguments of `dcp_core.load`."""
        if self._reader is None:
            return {"checkpoint_id": checkpoint_id}
        return {"storage_reader": self._reader(checkpoint_id)}


class RootPlaces:
    """Places of a root, the nearest first; checkpoints are saved to the first."""

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
        self._has_waited = False

    def checkpoint_id(self, catalogue: Catalogue, step: int) -> str:
        """Return the id of a step in a place."""
        url = self.url if catalogue is self.catalogues[0] else without_end_slash(catalogue.store.url)
        return f"{url}/{catalogue.folder_name(step)}"

    def reading_id(self, catalogue: Catalogue, step: int) -> str:
        """Return the id for loading a step; parts that no host has are read from the shared places."""
        near = catalogue.store
        if not isinstance(near, HostStore):
            return self.checkpoint_id(catalogue, step)
        also = [self.checkpoint_id(other, step) for other in self.catalogues[1:]]
        return near.child(catalogue.folder_name(step)).uri(also)

    @property
    def per_host(self) -> bool:
        """Whether each host saves to its own place."""
        return isinstance(self.catalogues[0].store, HostStore)

    @property
    def has_one_place(self) -> bool:
        """Whether checkpoints are in one place for all hosts, without further ones."""
        return len(self.catalogues) == 1 and not self.per_host

    def keeps(self, ranks: Ranks) -> bool:
        """Return whether this rank maintains its place: the coordinator, or one rank per host."""
        return ranks.is_coordinator if self._hosts is None else self._hosts.leads

    def keep_policy(self, given: KeepPolicy | None) -> KeepPolicy:
        """Return the first place's policy, which always keeps what another place must still get."""
        own = KeepAll() if self._promoting is None else self._promoting.keep_policy
        if given is None:
            return own
        return given if self._promoting is None else self._promoting.kept_by(given)

    @property
    def _run(self) -> str | None:
        shared = [catalogue.store.url for catalogue in self.catalogues[1:]]
        return hashlib.sha256("\n".join(shared).encode()).hexdigest()[:16] if shared else None

    def start(self, ranks: Ranks, *, compares: bool) -> None:
        """Find out which ranks share a place, and start the promoters.

        With `compares`, ask further places for their highest steps, for `higher_beyond`.

        Ranks: every rank; collective if each host has its own place.
        """
        if self.per_host:
            near = self.catalogues[0].store
            self._hosts = self._find_hosts(ranks, near)
            _repeat_indexes(self.catalogues[0], ranks, self._hosts)
        if compares and ranks.is_coordinator:
            self._beyond = [_HighestStep(catalogue) for catalogue in self.catalogues[1:]]
        if self._promoting is not None and self.keeps(ranks):
            self._promoting.start_promoter()

    def _find_hosts(self, ranks: Ranks, near: SupportsFolders) -> HostPlaces:
        with ranks.coordinator() as them:
            hosts = find_places(them, near, run=self._run, saves=False)
        if hosts.leads:
            with contextlib.suppress(OSError, DcpError):  # a save raises the error
                hosts.claim(near)
        return hosts

    def protection(self, ranks: Ranks, copied: Callable[[int], object]) -> Protection | None:
        """Return the root's `Protection`, if any, after `start`.

        Ranks: every rank; collective if the root copies hosts' parts.
        """
        if self._copies is None or self._hosts is None:
            return None
        return Protection.start(self._copies, self.catalogues[0], ranks, self._hosts, copied)

    def make_room(self, ranks: Ranks, step: int, *, hurry: bool) -> None:
        """Wait, in phases of a few seconds, until the first place has room for a step.

        If a disk was too full at the start to show which ranks share it, find that out again.

        Ranks: every rank; collective if the root has a promoter, or sharing is found out again.
        """
        if self._hosts is not None and not self._hosts.are_proved:
            self._hosts = self._find_hosts(ranks, self.catalogues[0].store)
        root = self._promoting
        if root is None:
            return
        seconds, started = min(_POLL_SECONDS, ranks.timeout_seconds / 4), time.monotonic()
        while not ranks.decide("make room", partial(_make_room, root, step, seconds, hurry=hurry)):
            waited = time.monotonic() - started
            if ranks.is_coordinator:
                _log.warning("step %d waits for room in %s, for %.0f s now", step, self.url, waited)

    def higher_beyond(self, step: int, *, surely: bool) -> tuple[int, str] | None:
        """Return the highest step above `step` in a further place, and its checkpoint id there. Coordinator only.

        With `surely`, wait for answers, once and at most half a minute in all, and confirm a higher step.
        """
        now = time.monotonic()
        until = now + TimedCall.SILENT_AFTER_SECONDS
        waits, self._has_waited = surely and not self._has_waited, self._has_waited or surely
        found = [
            (asked.above(step, again=surely, wait_until=until if waits else now, confirm_until=until), asked.catalogue)
            for asked in self._beyond
        ]
        higher = [(top, self.checkpoint_id(catalogue, top)) for top, catalogue in found if top is not None]
        return max(higher, default=None)

    def saved(self) -> None:
        """Wake the promoter after a save."""
        if self._promoting is not None:
            self._promoting.wake_promoter()

    def end(self, ranks: Ranks, timeout_seconds: float) -> None:
        """Wait for the promoter, at most `timeout_seconds`."""
        if self._promoting is not None and self.keeps(ranks):
            self._promoting.end_promoter(timeout_seconds)


def _make_room(root: PromotingRoot, step: int, seconds: float, *, hurry: bool) -> bool:
    end = time.monotonic() + seconds
    while not root.make_room(step, hurry=hurry):
        if time.monotonic() > end:
            root.wake_promoter()
            return False
        time.sleep(_PAUSE_SECONDS)
    return True


class _HighestStep:
    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self._call = self._ask()
        self._highest: int | None = None
        """-1 for none, None while unknown."""
        self._is_reported = False

    def _ask(self) -> TimedCall[CheckpointRecord | None]:
        return TimedCall(self.catalogue.store.url, self.catalogue.highest)

    def above(self, step: int, *, again: bool, wait_until: float, confirm_until: float) -> int | None:
        """Return the highest step if it is above `step`, known by `wait_until` and, with `again`, confirmed."""
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
            record = self._call.result(timeout_seconds=max(0.0, until - time.monotonic()))
        except Exception as error:  # noqa: BLE001 - clients of storages raise errors of all kinds, and the save goes on
            if not self._is_reported:
                what = "whether %s has checkpoints of higher steps is not known, and is asked again: %s"
                _log.warning(what, self._call.place, error)
            self._is_reported = True
            if self._call.is_done:
                self._call = self._ask()
        else:
            self._highest = -1 if record is None else record.step


_Asked = Mapping[int, frozenset[str]]
"""Step → data files that no index on a host names."""


def _repeat_indexes(catalogue: Catalogue, ranks: Ranks, places: HostPlaces) -> None:
    """Publish here other hosts' indexes for files without one. Collective."""

    def unnamed() -> _Asked:
        try:
            return _unnamed(catalogue) if places.leads else {}
        except OSError as error:
            _log.warning("%s cannot be read, and is left as it is: %s", catalogue.store.url, error)
            return {}

    asked = ranks.combine("ask for indexes", unnamed, _join)
    if not asked:
        return
    found = ranks.combine("find indexes", lambda: _find(catalogue, asked) if places.leads else {}, _newest)

    def publish() -> None:
        own = unnamed()
        for step, (_, data) in found.items():
            if own.get(step, frozenset()) & frozenset(read_index(data, file=METADATA_NAME).files):
                catalogue.store_of(step).publish(METADATA_NAME, data)
                _log.warning("step %d: the index that another host had is repeated in %s", step, catalogue.store.url)

    ranks.combine("repeat indexes", publish, lambda _: None)


def _unnamed(catalogue: Catalogue) -> dict[int, frozenset[str]]:
    found = {}
    for folder in catalogue.folders():
        names = {entry.name for entry in folder.entries}
        data = {name for name in names if name.endswith(DATA_SUFFIX)}
        if METADATA_NAME in names:
            if not any(name.startswith(SAVE_MARKER_PREFIX) for name in names):
                continue
            index = read_current(folder.store).index
            data -= set() if index is None else set(index.files)
        if data:
            found[folder.step] = frozenset(data)
    return found


def _join(asked: list[_Asked]) -> _Asked:
    steps = {step for one in asked for step in one}
    return {step: frozenset().union(*(one.get(step, frozenset()) for one in asked)) for step in steps}


def _find(catalogue: Catalogue, asked: _Asked) -> dict[int, tuple[int, bytes]]:
    found = {}
    for step, names in asked.items():
        with contextlib.suppress(DcpError, OSError):  # no index, or an unreadable one
            data = catalogue.store_of(step).read(METADATA_NAME)
            index = read_index(data, file=METADATA_NAME)
            if index.info is not None and names & frozenset(index.files):
                found[step] = index.info.created_ns, data
    return found


def _newest(found: list[dict[int, tuple[int, bytes]]]) -> dict[int, tuple[int, bytes]]:
    steps = {step for one in found for step in one}
    return {step: max(one[step] for one in found if step in one) for step in steps}
