"""Checkpoints that further tiers need, and notes of arrival, which say to which tiers one was promoted.

A note is an empty file next to the checkpoint, because a far tier may be offline, and a full disk can store a note.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from dcp_io import CheckpointRecord, Entry, KeepBest, KeepPolicy, Store
from dcp_io.roots.catalogue import Catalogue, StepFolder
from dcp_manifest.folders.folder import METADATA_NAME
from dcp_tiers.tier import Tier


class TieredRoot(Protocol):
    """The part of `Tiers` that this module uses."""

    @property
    def tiers(self) -> Sequence[Tier]:
        """Nearest first."""
        ...

    @property
    def catalogues(self) -> Sequence[Catalogue]:
        """Catalogue per tier."""
        ...


def steps_to_send(tiers: TieredRoot, number: int, holder: int, folders: Sequence[StepFolder] | None = None) -> set[int]:
    """Return the steps in tier `holder` that tier `number` needs. Reads `holder` only."""
    catalogue = tiers.catalogues[holder]
    good = [folder for folder in (catalogue.folders() if folders is None else folders) if folder.is_good]
    return select_waiting(tiers.tiers[number], good, catalogue.records(good))


def select_waiting(tier: Tier, good: Sequence[StepFolder], records: Sequence[CheckpointRecord]) -> set[int]:
    """Return the steps that a tier needs from undamaged checkpoints; for one that it has refused, also another."""
    records, now = CheckpointRecord.by_creation(records), time.time()
    refused = {folder.step for folder in good if was_refused(folder.entries, tier.url)}
    wanted = tier.keep.keep(records, now)
    if refused & wanted:
        wanted = wanted | tier.keep.keep([record for record in records if record.step not in refused], now)
    return {folder.step for folder in good if folder.step in wanted and not has_arrived(folder.entries, tier.url)}


def steps_that_can_come(tiers: TieredRoot) -> set[int]:
    """Return the steps in the first tier that a further tier needs and has not refused."""
    folders = tiers.catalogues[0].folders()
    return {
        folder.step
        for number in range(1, len(tiers.tiers))
        for waiting in (steps_to_send(tiers, number, 0, folders),)
        for folder in folders
        if folder.step in waiting and not was_refused(folder.entries, tiers.tiers[number].url)
    }


class KeepWaiting(KeepPolicy):
    """Policy for the first tier that keeps each checkpoint that a further tier still needs.

    Combined with another policy, it protects the checkpoints that a slow or absent tier's policy selects. It reads only
    the first tier, so retention never waits for a far storage.

    Example:
        ```python
        from dcp_io import KeepLast
        from dcp_manager import CheckpointManager
        from dcp_tiers import KeepWaiting, Tier, Tiers
        from dcp_tiers.promote import promote

        tiers = Tiers([Tier("near"), Tier("far")])
        with CheckpointManager("near", keep_policy=KeepLast(1) | KeepWaiting(tiers)) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"step": step})
            assert len(manager.checkpoints()) == 3  # the far tier has none of them yet
            promote(tiers)
            manager.save(4, {"step": 4})
            assert [record.step for record in manager.checkpoints()] == [4]
        ```
    """

    def __init__(self, tiers: TieredRoot) -> None:
        self._tiers = tiers

    @property
    def metrics(self) -> frozenset[str]:
        """Names of the further tiers' metrics."""
        return frozenset[str]().union(*(tier.keep.metrics for tier in self._tiers.tiers[1:]))

    def best(self) -> tuple[KeepBest, ...]:
        """Return all tiers' `KeepBest` policies."""
        return tuple(dict.fromkeys(each for tier in self._tiers.tiers for each in tier.keep.best()))

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps that some further tier still needs."""
        del records, now_seconds
        further = range(1, len(self._tiers.tiers))
        folders = self._tiers.catalogues[0].folders() if further else ()
        return set().union(*(steps_to_send(self._tiers, number, 0, folders) for number in further))


_ARRIVED, _FORGONE, _REFUSED = ".dcp-promoted-", ".dcp-forgone-", ".dcp-refused-"


def note_arrival(store: Store, url: str) -> None:
    """Note that the tier at `url` has the checkpoint. Raises OSError."""
    _write(store, _ARRIVED, url, b"")


def note_forgone(store: Store, url: str) -> None:
    """Note that the tier at `url` will never have all of it."""
    _write(store, _FORGONE, url, b"")


def note_refusal(store: Store, url: str, reason: str) -> None:
    """Note that promotion to the tier at `url` is impossible."""
    _write(store, _REFUSED, url, json.dumps({"tier": url, "refused": reason}).encode())


def forget_arrival(store: Store, url: str) -> None:
    """Remove the note of an arrival."""
    for entry in store.list():
        if entry.name.startswith(_prefix(_ARRIVED, url)):
            store.delete(entry.name)


def has_arrived(entries: Iterable[Entry], url: str) -> bool:
    """Return whether a tier has this save or will not get it."""
    return _has_note(entries, _ARRIVED, url) or _has_note(entries, _FORGONE, url)


def arrival_is_noted(entries: Iterable[Entry], url: str) -> bool:
    """Return whether a tier has this save."""
    return _has_note(entries, _ARRIVED, url)


def was_refused(entries: Iterable[Entry], url: str) -> bool:
    """Return whether promotion of this save is impossible."""
    return _has_note(entries, _REFUSED, url)


def _write(store: Store, kind: str, url: str, data: bytes) -> None:
    entries = store.list()
    name = _name(entries, kind, url)
    if name is None:
        return
    store.publish(name, data, sync=False)
    for entry in entries:
        if entry.name.startswith(_prefix(kind, url)) and entry.name != name:  # of an earlier save of the step
            store.delete(entry.name)


def _has_note(entries: Iterable[Entry], kind: str, url: str) -> bool:
    entries = tuple(entries)
    name = _name(entries, kind, url)
    return name is not None and any(entry.name == name for entry in entries)


def _name(entries: Iterable[Entry], kind: str, url: str) -> str | None:
    index = next((entry for entry in entries if entry.name == METADATA_NAME), None)
    return None if index is None else f"{_prefix(kind, url)}{_digest(f'{index.bytes} {index.mtime!r}')}.json"


def _prefix(kind: str, url: str) -> str:
    return f"{kind}{_digest(url)}-"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()
