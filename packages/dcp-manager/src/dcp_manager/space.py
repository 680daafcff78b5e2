"""Space for checkpoints: a check before training, the save at which space ends, and what a full disk means for a run.

Free space is what `statvfs` says for this user, which includes quotas of projects, but not those of users.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from dcp_base.escaping import printable_bytes
from dcp_base.logs import library_logger
from dcp_base.schemes import scheme_of
from dcp_core import Estimate, estimate
from dcp_core.records.protocols import with_states
from dcp_core.state_dict.flatten import flatten
from dcp_io import (
    STALE_AFTER_SECONDS,
    CheckpointRecord,
    Entry,
    KeepAll,
    KeepPolicy,
    LocalStore,
    Root,
    StorageError,
    Store,
)
from dcp_io.checkpoints.drop_parts import SmallerCheckpoint
from dcp_io.roots.catalogue import Catalogue
from dcp_manager.root_places import RootPlaces
from dcp_manager.save_policies import EverySeconds, EverySteps, SavePolicy, parts_of
from dcp_manager.together import Ranks
from dcp_manifest.folders.folder import DATA_SUFFIX
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

_log = library_logger(__name__)

OnFull = Literal["fail", "pause", "drop_oldest"]

_HORIZON = 2000
"""Saves of which a forecast thinks."""
_LOOK_SECONDS, _PAUSE_SECONDS = 10.0, 0.5
_MEMORY, _CONTAINER = ("tmpfs", "ramfs"), ("overlay",)


@dataclass(frozen=True, slots=True)
class Preflight:
    """Result of `preflight`, the same on all ranks."""

    bytes_per_save: int
    """Bytes of one checkpoint, including its index; an upper bound if the writer compresses."""
    files_per_save: int
    free_bytes: int | None
    """In the root, for this user; None if the storage has no such limit."""
    free_files: int | None
    """Inodes; None if the storage has no such limit."""
    saves: int | None
    """Number of saves for which there is space; None if it does not end."""
    full_at_step: int | None
    """Step whose save finds no space; None if it does not end, or if the steps of saves are not known."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spacing:
    """Distance of saves by a save policy: in steps or in seconds, as far as known."""

    steps: int | None = None
    first: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, policy: SavePolicy) -> Spacing:
        """Return the shortest distances of the combined policies."""
        parts = parts_of(policy)
        by_step = min((part for part in parts if isinstance(part, EverySteps)), key=lambda one: one.steps, default=None)
        seconds = min((part.seconds for part in parts if isinstance(part, EverySeconds)), default=0.0)
        if by_step is None:
            return cls(seconds=seconds)
        return cls(by_step.steps, -(-max(by_step.first, 1) // by_step.steps) * by_step.steps, seconds)

    def step(self, number: int, after: int | None) -> int | None:
        """Return the step of the save with this number, from 0; `after` is the last step that was saved."""
        if self.steps is None:
            return None
        first = self.first if after is None else max(self.first, (after // self.steps + 1) * self.steps)
        return first + number * self.steps


def preflight(
    state: Mapping[str, Any],
    root: Root | str | os.PathLike[str],
    *,
    save_policy: SavePolicy | None = None,
    keep_policy: KeepPolicy | None = None,
    steps: int | None = None,
    storage_options: Mapping[str, Any] | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> Preflight:
    """Check, before the first step, that a run's checkpoints can be saved, and find out when space ends.

    Plans a save of `state`, writes a small object into each place of `root`, replaces it, reads it and removes it, and
    compares free space with what the policies will hold, including the save that is being written.

    Args:
        state: State that the run will save; its values are not read. Tensors may be on the meta device.
        root: As for `CheckpointManager`. Space is compared in the first place.
        save_policy: When the run saves. Without `EverySteps`, no step can be named.
        keep_policy: What the run keeps; None for the root's policy, or all. `KeepBest` counts as if the first were the
            best, and `KeepFor` uses the time of `EverySeconds`.
        steps: Last step of the run; a later end of space is not reported. None for no end.
        storage_options: As for `CheckpointManager`.
        process_group: The ranks of the run; None for all.
        no_dist: Whether this process works alone.
        timeout_seconds: Limit of the time that ranks wait for each other in one phase.

    Raises:
        StorageError: The first save lacks room, or the root cannot be written; with several ranks, in a
            CheckpointException on all ranks.

    Ranks: every rank; collective. The coordinator warns in its log.

    Example:
        ```python
        import torch
        from dcp_manager import EverySteps, KeepLast, preflight

        state = {"weight": torch.ones(1000), "step": 0}
        report = preflight(state, "run", save_policy=EverySteps(100), keep_policy=KeepLast(2))
        assert report.full_at_step is None and report.bytes_per_save > 4000
        ```
    """
    ranks = Ranks(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds)
    where = RootPlaces(root, storage_options or {}, STALE_AFTER_SECONDS, "step-")
    values = with_states(state)
    needed = estimate(
        values,
        checkpoint_id=where.checkpoint_id(where.catalogues[0], 0),
        process_group=process_group,
        no_dist=no_dist,
        timeout_seconds=timeout_seconds,
    )
    spacing = Spacing() if save_policy is None else Spacing.of(save_policy)

    def look() -> Preflight:
        for catalogue in where.catalogues:
            _probe(catalogue.store)
        policy = where.keep_policy(keep_policy)
        return _look(where.catalogues[0], policy, spacing, needed, steps, _share_of_state(values))

    found = ranks.decide("check the space for checkpoints", look)
    if ranks.is_coordinator:
        for warning in found.warnings:
            _log.warning("%s", warning)
    return found


def _look(
    catalogue: Catalogue, policy: KeepPolicy, spacing: Spacing, save: Estimate, steps: int | None, share: _Share
) -> Preflight:
    free, where, size, files = _Free.of(catalogue.store), catalogue.store.url, save.bytes, save.files
    for room, needed, what in ((free.bytes, size, "bytes"), (free.files, files, "files")):
        if room is not None and room < needed:
            raise StorageError(
                f"{where} has room for {room:,} {what}, and one checkpoint needs {needed:,}: free space there, or "
                "choose another place"
            )
    blocks = files * free.block_bytes  # the last one of each file is not full
    # The manager's note is a file, too.
    needs = _Needs(size + blocks, files + 1, save.index_bytes + blocks + free.block_bytes, share)
    saves = _saves(catalogue, policy, spacing, free, needs)
    highest = catalogue.highest()
    full_at = None if saves is None else spacing.step(saves, None if highest is None else highest.step)
    if steps is not None and full_at is not None and full_at > steps:
        saves = full_at = None
    warnings = [*_doubts(catalogue.store)]
    if saves is not None:
        warnings.insert(0, _warning(catalogue.store.url, policy, size, free.bytes, saves, full_at))
    return Preflight(size, files, free.bytes, free.files, saves, full_at, tuple(warnings))


def _warning(where: str, policy: KeepPolicy, size: int, free: int | None, saves: int, full_at: int | None) -> str:
    when = f"at step {full_at}" if full_at is not None else f"after {saves} more save{'s' * (saves != 1)}"
    room = "" if free is None else f", of which {printable_bytes(free)} are free"
    return (
        f"space for checkpoints ends {when}: one has {printable_bytes(size)} in {where}{room}, and {policy!r} keeps "
        "more than fits. Keep fewer, free space, or let the manager wait (on_full='pause') or remove the oldest "
        "(on_full='drop_oldest')"
    )


@dataclass(frozen=True, slots=True)
class _Free:
    bytes: int | None = None
    files: int | None = None
    block_bytes: int = 1

    @classmethod
    def of(cls, store: Store) -> _Free:
        return cls(*store.free_space()) if isinstance(store, LocalStore) else cls()


@dataclass(frozen=True, slots=True)
class _Needs:
    bytes: int
    files: int
    fixed_bytes: int
    """Of index, notes and the ends of files, which a removal of parts leaves."""
    share: _Share

    def left(self, parts: tuple[str, ...]) -> int:
        return self.fixed_bytes + math.ceil(self.share(parts) * (self.bytes - self.fixed_bytes))


_Share = Callable[[tuple[str, ...]], float]
"""Returns the share of the values' bytes that some parts take; 1 if a checkpoint stays whole."""


def _share_of_state(values: Mapping[str, Any]) -> _Share:
    flat = flatten(values).values
    sizes = {name: each.numel() * each.element_size() for name, each in flat.items() if isinstance(each, torch.Tensor)}

    def share(parts: tuple[str, ...]) -> float:
        kept = [{name for name in sizes if f"{name}.".startswith(f"{part}.")} for part in parts]
        whole = sum(sizes.values())
        return sum(sizes[name] for name in set().union(*kept)) / whole if whole and all(kept) else 1.0

    return share


def _share_of_checkpoint(store: Store, values_bytes: int) -> _Share:
    def share(parts: tuple[str, ...]) -> float:
        smaller = SmallerCheckpoint(store, keep=parts)
        return 1.0 if smaller.unknown or smaller.is_empty else 1 - smaller.bytes / values_bytes

    return share


def _taken(entries: Collection[Entry], block_bytes: int) -> int:
    return sum(-(-entry.bytes // block_bytes) * block_bytes for entry in entries)


def _saves(catalogue: Catalogue, policy: KeepPolicy, spacing: Spacing, free: _Free, needs: _Needs) -> int | None:
    """Return how many saves fit before one finds no room for its bytes or files; None if space does not end."""
    # Where all stay, those that are there free nothing.
    folders = [] if isinstance(policy, KeepAll) and policy.parts is None else catalogue.folders()
    bytes_held = {folder.step: _taken(folder.entries, free.block_bytes) for folder in folders}
    files_held = {folder.step: len(folder.entries) for folder in folders}
    records = catalogue.records(folders)
    found = [
        _forecast(records, held, policy, spacing, needed, room, left)
        for held, needed, room, left in (
            (bytes_held, needs.bytes, free.bytes, functools.cache(needs.left)),
            (files_held, needs.files, free.files, None),  # a smaller checkpoint may have as many
        )
        if room is not None
    ]
    return min((saves for saves in found if saves is not None), default=None)


def _forecast(
    existing: Collection[CheckpointRecord],
    held: Mapping[int, int],
    policy: KeepPolicy,
    spacing: Spacing,
    needed: int,
    free: int,
    left: Callable[[tuple[str, ...]], int] | None,
) -> int | None:
    records, held = {record.step: record for record in existing}, dict(held)
    now, last = time.time(), max(records, default=None)
    for number in range(_HORIZON):
        if free < needed:
            return number
        step = spacing.step(number, last)
        step = (0 if last is None else last) + number + 1 if step is None else step
        now += spacing.seconds
        # The first ones count as the best, so that the best and the newest are never the same.
        metrics = {each.metric: float(number if each.mode == "min" else -number) for each in policy.best()}
        records[step], held[step], free = CheckpointRecord(step, now, metrics), needed, free - needed
        kept = policy.select([*records.values()], {step}, lambda _: True, now)
        for gone in records.keys() - kept.keys():
            free += held[gone]
            del records[gone]
        for smaller, parts in kept.items():
            if left is not None and parts is not None and left(parts) <= free:  # what stays is copied first
                freed = max(0, held[smaller] - left(parts))
                free, held[smaller] = free + freed, held[smaller] - freed
    return None


def _probe(store: Store) -> None:
    name, doing = f".dcp-probe-{secrets.token_hex(8)}", "create a directory"
    try:
        store.make()
        doing = "create a file"
        with store.create(name) as sink:
            sink.write([b"created"])
            sink.close()
            doing = "replace a file"
            store.publish(name, b"replaced", tag="probe")
            store.sync_folder()
            doing = "read a file"
            found = store.read(name)
            doing = "remove a file"
            store.delete(name)
    except OSError as error:
        raise StorageError(f"{store.url}: it is not possible to {doing} there: {error}") from error
    if found != b"replaced":
        raise StorageError(f"{store.url}: a file that was replaced is read with other bytes")


def _doubts(store: Store) -> Collection[str]:
    found = []
    if isinstance(store, LocalStore):
        kind = store.file_system
        if kind in _MEMORY:
            found.append(f"{store.url} is memory ({kind}): a reboot removes its checkpoints")
        if kind in _CONTAINER:
            found.append(f"{store.url} is a container's own disk ({kind}): it is removed with the container")
    expiry = os.environ.get("AWS_CREDENTIAL_EXPIRATION")
    if expiry is not None and store.url.startswith("s3:"):
        with contextlib.suppress(ValueError):
            end = datetime.fromisoformat(expiry.replace("Z", "+00:00"))
            hours = (end - datetime.now(timezone.utc)).total_seconds() / 3600
            found.append(f"{store.url}: the credentials in the environment end in {hours:.1f} h, and are not renewed")
    return found


def say_when_space_ends(catalogue: Catalogue, policy: KeepPolicy, spacing: Spacing, step: int) -> None:
    """Warn if one of the saves after `step`, which was published, will find no room. Coordinator only."""
    entries, free = catalogue.store_of(step).list(), _Free.of(catalogue.store)
    data = [entry for entry in entries if entry.name.endswith(DATA_SUFFIX)]
    size, values_bytes = sum(entry.bytes for entry in entries), sum(entry.bytes for entry in data)
    taken = _taken(entries, free.block_bytes)
    share = _share_of_checkpoint(catalogue.store_of(step), values_bytes)
    saves = _saves(catalogue, policy, spacing, free, _Needs(taken, len(entries), taken - values_bytes, share))
    if saves is not None:
        full_at = spacing.step(saves, step)
        _log.warning("%s", _warning(catalogue.store.url, policy, size, free.bytes, saves, full_at))


class Room:
    """Room for the next save in a local root. Made on every rank.

    `pause` lets the ranks wait until there is room; `drop_oldest` removes the oldest checkpoints, but never one without
    which the run could lose progress.
    """

    def __init__(self, on_full: OnFull, catalogue: Catalogue, ranks: Ranks, *, is_exact: bool) -> None:
        self._is_exact = is_exact
        self._drops = on_full == "drop_oldest"
        self._catalogue = catalogue
        self._ranks = ranks
        self._bytes: int | None = None
        self._before: CheckpointRecord | None = None  # the newest checkpoint before the last save

    def make(self, state: dict[str, Any], checkpoint_id: str, running: Collection[int], *, hurry: bool) -> None:
        """Return when a save of the state fits in addition to the `running` saves; immediately in a `hurry`.

        Raises StorageError if no checkpoint may be removed.

        Ranks: every rank; collective.
        """
        group, alone = self._ranks.process_group, self._ranks.no_dist
        if self._bytes is None:
            self._bytes = estimate(state, checkpoint_id=checkpoint_id, process_group=group, no_dist=alone).bytes
        started, seconds, told_after = time.monotonic(), min(_LOOK_SECONDS, self._ranks.timeout_seconds / 4), 0.0
        while needed := self._ranks.decide("make room", partial(self._look, running, 0.0 if hurry else seconds)):
            waited = time.monotonic() - started
            if hurry:
                return
            if self._ranks.is_coordinator and waited >= told_after:
                told_after = 2 * waited
                _log.warning(
                    "%s is full: training waits for %s of room, for %.0f s now",
                    self._catalogue.store.url,
                    printable_bytes(needed),
                    waited,
                )

    def _needed_bytes(self, saves: int) -> int:
        # The estimate has no links and no compression, but the newest checkpoint has. A failed save may have had fewer.
        estimated = self._bytes or 0
        newest = None if self._is_exact else self._catalogue.highest()
        if newest is not None and (newest != self._before or saves > 1):
            estimated = min(estimated, _freed_bytes([self._catalogue.store_of(newest.step)]) or estimated)
        return estimated * saves

    def _look(self, running: Collection[int], seconds: float) -> int:  # 0 if there is room
        end, needed = time.monotonic() + seconds, self._needed_bytes(1 + len(running))
        while True:
            free = _Free.of(self._catalogue.store).bytes
            if free is None or free >= needed:
                self._before = self._catalogue.highest()
                return 0
            if self._drops:
                if not self._drop(running, needed - free):
                    raise StorageError(
                        f"{self._catalogue.store.url} is full: {free:,} bytes are free, a save needs {needed:,}, and "
                        "no older checkpoint can be removed that would free enough; free space there"
                    )
            elif time.monotonic() > end:
                return needed
            else:
                time.sleep(_PAUSE_SECONDS)

    def _drop(self, running: Collection[int], wanted: int) -> bool:
        folders = self._catalogue.folders()
        records = CheckpointRecord.by_creation(self._catalogue.records(folders))
        good = [record for record in records if record.quarantined is None]
        spared = {*running, *self._catalogue.steps_to_resume_from(folders, good)}
        old = [record for record in good if record.step not in spared]
        if _freed_bytes([self._catalogue.store_of(record.step) for record in old]) < wanted:
            return False
        for record in old:
            if self._catalogue.remove(record.step):
                _log.warning("%s is full: step %d was removed", self._catalogue.store.url, record.step)
                return True
        return False


def _freed_bytes(stores: Collection[Any]) -> int:
    facts = []
    for item in [item for store in stores if os.path.isdir(store) for item in os.scandir(store)]:
        with contextlib.suppress(FileNotFoundError):  # somebody has removed or renamed it
            facts.append(item.stat(follow_symlinks=False))
    names = Counter(one.st_ino for one in facts)
    return sum(one.st_size for one in {one.st_ino: one for one in facts}.values() if names[one.st_ino] >= one.st_nlink)


def check_on_full(on_full: object, root: Any) -> None:
    """Raise ValueError for a wrong policy, or for a root that is no directory."""
    if on_full not in get_args(OnFull):
        raise ValueError(f"on_full is {on_full!r}; choose 'fail', 'pause' or 'drop_oldest'")
    if on_full != "fail" and not (isinstance(root, str | os.PathLike) and scheme_of(root) == "file"):
        shown = os.fspath(root) if isinstance(root, os.PathLike) else root
        raise ValueError(
            f"on_full is {on_full!r}, and only a directory has free space that is known: {shown!r:.200} is none; for a "
            "place per host or a further tier, pass Tiers with Tier(max_bytes=…, when_full=…)"
        )
