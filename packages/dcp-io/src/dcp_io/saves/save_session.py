"""Session of one save in a folder: begin, publish, finish or abort. The write engine writes the data files.

Only the owner of a save marker has a `SaveSession`: the coordinator, or every rank of a save without a coordinator.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from dcp_io.errors import CheckpointExistsError, SaveInProgressError, SaveLostError
from dcp_io.saves.cleanup import remove_dead_saves, remove_leftovers, remove_orphans, remove_replaced, replaced_names
from dcp_io.saves.current_checkpoint import Current, read_current
from dcp_io.saves.marker_owner import this_process
from dcp_io.saves.marker_renewal import Renewal
from dcp_io.saves.save_markers import FoundMarker, Marker, belongs_to, check_save_id, find_markers, marker_name
from dcp_io.stores.store import Entry, Store
from dcp_manifest.errors import DcpError
from dcp_manifest.file.manifest import read_index
from dcp_manifest.folders.file_names import (
    METADATA_NAME,
    RankIndexName,
    data_file_prefix,
    rank_index_name,
    rank_prefix,
)
from dcp_manifest.logs import library_logger

__all__ = ["STALE_AFTER_SECONDS", "SaveSession", "new_save_id"]

_log = library_logger(__name__)

STALE_AFTER_SECONDS = 3600.0
_SETTLE_SECONDS = 10.0
_SETTLE_STEP_SECONDS = 0.05

# Markers of the saves running in this process, by store and name: the marker of a thread that died looks alive, since
# its process is.
_running: set[tuple[str, str]] = set()
_running_lock = threading.RLock()  # reentrant: a finalizer may acquire it in any thread, at any allocation


def _forget(renewal: Renewal, key: tuple[str, str]) -> None:
    renewal.cancel()
    with _running_lock:
        _running.discard(key)


def new_save_id() -> str:
    """Return a new random save id."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True)
class _Scene:
    """Snapshot of the folder at one moment: listing, markers, and time."""

    entries: list[Entry]
    markers: list[FoundMarker]
    own: Entry | None

    @property
    def now(self) -> float:
        """Current time on the storage's clock: the modification time of the marker just written."""
        return self.own.mtime if self.own is not None else time.time()


class SaveSession:
    """One running save, from `begin` to `finish` or `abort`.

    Until the index is published, loading from the folder gives the old checkpoint, afterwards the new one, no matter
    when a process is killed. All steps other than publishing the index may be repeated or skipped without harm.

    Example:
        ```python
        from dcp_io import LocalStore, SaveSession

        session = SaveSession.begin(LocalStore("step-1"))
        try:
            session.publish("notes", b"what a storage writes before its index")
        finally:
            session.abort()  # or `finish`, after the index was published
        ```
    """

    def __init__(
        self, store: Store, save_id: str, rank: int | None, *, stale_after_seconds: float, sync: bool = True
    ) -> None:
        self._store = store
        self._stale_after_seconds = stale_after_seconds
        self._sync = sync
        self._marker = Marker(check_save_id(save_id), rank, this_process(), "starting", time.time_ns())
        self._renewal = Renewal(store, self._marker.name, stale_after_seconds)
        self._leave: Callable[[], object] = self._renewal.cancel
        self._marker_is_ours = False
        self._publishing = False
        self._published = False
        self._world_size = 1
        self.generation = 1
        """Generation of this save: that of the checkpoint found at the start, plus one."""

    @property
    def save_id(self) -> str:
        """Id of this save."""
        return self._marker.save_id

    @property
    def rank(self) -> int | None:
        """Rank that owns this session, in a save without a coordinator; otherwise None."""
        return self._marker.rank

    @classmethod
    def begin(
        cls,
        store: Store,
        *,
        overwrite: bool = True,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        save_id: str | None = None,
        rank: int | None = None,
        sync: bool = True,
    ) -> SaveSession:
        """Claim the folder for a new save, unless another live save owns it, and return the session of the new save.

        Leftovers of dead saves are removed.

        Args:
            store: The checkpoint's folder, which is made if it is missing.
            overwrite: Whether this save may replace an existing checkpoint.
            stale_after_seconds: A save on another host, whose process cannot be checked, counts as dead when it has not
                renewed its marker for this long.
            save_id: Id of a save without a coordinator, on which all ranks have agreed; never used before in this
                folder. None generates an id.
            rank: Number of this rank in a save without a coordinator; otherwise None.
            sync: Whether markers and published objects are durable.

        Raises:
            SaveInProgressError: Another save is alive in the folder; the message has its process, host and marker.
            CheckpointExistsError: The folder has a checkpoint and `overwrite` is False, or the save id was used before.
            OSError: The storage failed.

        Ranks: the coordinator; every rank in a save without one.
        """
        store.make()
        session = cls(store, save_id or new_save_id(), rank, stale_after_seconds=stale_after_seconds, sync=sync)
        session._enter(overwrite=overwrite)
        return session

    def publish(self, name: str, data: bytes) -> None:
        """Publish an object: write `data` to `name` atomically, and durably if the session has `sync`.

        Raises:
            SaveLostError: The marker of this save is gone: another save considered it dead.
            OSError: The storage failed, and whether `name` was replaced is unknown; `abort` handles both cases.
        """
        if self._renewal.lost or not self._store.exists(self._marker.name):
            raise SaveLostError(
                f"save {self.save_id} in {self._store.url} lost its marker {self._marker.name}: another save "
                "considered it dead (see stale_after_seconds) or it was removed by hand; nothing was published: "
                "save again"
            )
        if self.rank is not None:
            info = read_index(data, file=name).info
            self._world_size = info.world_size if info is not None else 1
        self._publishing = True
        self._store.publish(name, data, tag=self.save_id, sync=self._sync)
        self._published = self._published or name == METADATA_NAME

    def finish(self, keep: Collection[str]) -> None:
        """End a published save: remove the files that it replaced, then its marker. Failures are logged, not raised.

        In a save without a coordinator, the last rank to publish removes the files.

        Args:
            keep: Names of the data files in the new index.
        """
        self._renewal.stop()
        try:
            if self.rank is None:
                done = self._published and self._remove_replaced(keep)
                if self._published and self._store.place == "host":
                    self._remove_dead(self._look(), read_current(self._store))
            else:
                self._mark_ended()  # before looking: so the last rank to look sees all others' ends
                done = self._is_complete() and self._remove_replaced_by_all()
            if not done:
                self._mark_ended()
        except (OSError, DcpError) as error:
            _log.warning(
                "cleanup after save %s in %s failed and is left to the next save: %s",
                self.save_id,
                self._store.url,
                error,
            )
            self._mark_ended()
        finally:
            self._leave()

    def abort(self) -> None:
        """End a failed save: remove its files and its marker, unless its index was published after all.

        Published files stay. Failures are not raised: the next save removes the files that could not be removed.
        """
        self._renewal.stop()
        try:
            if self._may_be_published():
                self._mark_ended()
            elif self._remove_own():
                if self._sync:
                    self._store.sync_folder()
                self._store.delete(self._marker.name)
        except (OSError, DcpError):
            self._mark_ended()
        finally:
            self._leave()

    def leave(self) -> None:
        """End a save that failed here, whose index another host may have published: its files stay."""
        self._renewal.stop()
        self._mark_ended()
        self._leave()

    def _enter(self, *, overwrite: bool) -> None:
        """Write the marker, wait until this save owns the folder, and clean up."""
        self._register()
        try:
            self._refuse_used_id()
            self._marker_is_ours = True
            self._write_marker(sync=False)
            self._take_over(self._settle(), overwrite=overwrite)
            self._renewal.start()
        except BaseException:
            self._leave()
            if self._marker_is_ours:
                with contextlib.suppress(OSError):
                    self._store.delete(self._marker.name)
            raise

    def _take_over(self, scene: _Scene, *, overwrite: bool) -> None:
        """Remove the leftovers of dead saves, and record the files that this save will replace."""
        current = read_current(self._store)
        if current.exists and not overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists in {self._store.url}, and overwrite=False; "
                "choose another id, or allow overwriting"
            )
        if self._store.place != "host":  # where another host may have published the dead save: see `finish`
            self._remove_dead(scene, current)
        remove_orphans(self._store, scene.entries, now=scene.now, stale_after_seconds=self._stale_after_seconds)
        self.generation = current.generation + 1
        replaced = replaced_names(self.save_id, self.rank, current, self._store.list())
        self._marker = replace(self._marker, phase="saving", replaced=replaced)
        self._write_marker(sync=self._sync)

    def _remove_dead(self, scene: _Scene, current: Current) -> None:
        dead = [found for found in scene.markers if self._is_dead(found, scene.now)]
        remove_dead_saves(self._store, dead, current, scene.entries)

    def _register(self) -> None:
        """Register this save as running in this process, until `_leave` or until the session is garbage-collected."""
        key = (self._store.url, self._marker.name)
        with _running_lock:
            if key in _running:
                raise self._used_before(self._marker.name)
            _running.add(key)
        self._leave = weakref.finalize(self, _forget, self._renewal, key)

    def _refuse_used_id(self) -> None:
        if self.rank is None:
            return
        for entry in self._store.list():
            is_file = entry.name.startswith(_own_prefixes(self.rank)) and belongs_to(entry.name, self.save_id)
            if is_file or entry.name == self._marker.name:
                raise self._used_before(entry.name)

    def _used_before(self, name: str) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"rank {self.rank}: save id {self.save_id!r} was used before in {self._store.url} ({name}); "
            "every save needs a new id"
        )

    def _settle(self) -> _Scene:
        """Wait until this save is the only live one in the folder; returns the folder's snapshot.

        Two saves that start at the same time see each other's markers: the later save raises SaveInProgressError, and
        the earlier one waits until it has. A save in a later phase never ends for this reason.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        while True:
            scene = self._look()
            rivals = self._rivals(scene)
            if not rivals:
                return scene
            for rival in rivals:
                if rival.marker.phase != "starting" or self._is_earlier(rival, scene) or time.monotonic() > deadline:
                    raise SaveInProgressError(
                        f"{self._store.url} is being written by {rival.describe(scene.now)}; wait for it, or if it "
                        f"is certainly dead remove {rival.marker.name} (by itself it counts as dead after "
                        f"stale_after_seconds={self._stale_after_seconds:g})"
                    )
            time.sleep(_SETTLE_STEP_SECONDS)

    def _look(self) -> _Scene:
        entries = self._store.list()
        own = next((entry for entry in entries if entry.name == self._marker.name), None)
        others = [entry for entry in entries if entry.name != self._marker.name]
        return _Scene(entries, find_markers(self._store, others), own)

    def _rivals(self, scene: _Scene) -> list[FoundMarker]:
        """Return the markers of other saves that may be alive and have yet to publish."""
        alive = [
            found
            for found in scene.markers
            if found.marker.save_id != self.save_id and not self._is_dead(found, scene.now)
        ]
        if not any(found.marker.rank is None for found in alive):
            return alive
        published = read_current(self._store).save_id
        return [found for found in alive if found.marker.rank is not None or found.marker.save_id != published]

    def _is_dead(self, found: FoundMarker, now: float) -> bool:
        if found.marker.save_id == self.save_id:
            return False
        if found.marker.process == this_process():
            with _running_lock:
                if (self._store.url, found.marker.name) not in _running:
                    return True
        return found.is_dead(now=now, stale_after_seconds=self._stale_after_seconds)

    def _is_earlier(self, rival: FoundMarker, scene: _Scene) -> bool:
        own = (scene.now, self.save_id)
        return (rival.entry.mtime, rival.marker.save_id) < own

    def _write_marker(self, *, sync: bool) -> None:
        self._store.publish(self._marker.name, self._marker.to_bytes(), tag=self.save_id, sync=sync)

    def _mark_ended(self) -> None:
        """Mark the save as ended in its marker, so that it blocks no other save."""
        self._marker = replace(self._marker, phase="ended")
        with contextlib.suppress(OSError, DcpError):
            if self._store.exists(self._marker.name):
                self._write_marker(sync=self._sync)  # durable, as it replaces the list of files to remove

    def _is_complete(self) -> bool:
        """Whether every rank of a save without a coordinator has published."""
        names = (rank_index_name(entry.name) for entry in self._store.list())
        ranks = {parts.rank for parts in names if parts is not None and parts.save_id == self.save_id}
        return ranks >= set(range(self._world_size))

    def _remove_replaced(self, keep: Collection[str], world_size: int = 0) -> bool:
        if not remove_replaced(self._store, self._marker, keep=keep, world_size=world_size):
            return False
        if self._sync and self._marker.replaced:
            self._store.sync_folder()  # a disk that loses a removal must keep the marker, which repeats it
        self._store.delete(self._marker.name)
        return True

    def _remove_replaced_by_all(self) -> bool:
        """Remove the replaced files, and the markers of all ranks, once every rank has published."""
        current = read_current(self._store)
        if current.index is None or current.save_id != self.save_id:
            return False
        if not self._remove_replaced(current.index.files, self._world_size):
            return False
        for found in self._look().markers:
            if found.marker.save_id == self.save_id and found.marker.phase == "ended":
                self._store.delete(found.marker.name)
        return True

    def _may_be_published(self) -> bool:
        """Whether a published index may already depend on the files of this save."""
        if not self._publishing:
            return False
        if self.rank is not None:
            return self._store.exists(str(RankIndexName(self.rank, self.save_id)))
        current = read_current(self._store)
        return current.save_id == self.save_id or current.damage is not None

    def _remove_own(self) -> bool:
        """Remove the files of this save; without a coordinator, only those of this rank."""
        entries = self._store.list()
        if self.rank is not None:
            own = (
                *_own_prefixes(self.rank),
                f".{rank_prefix(self.rank)}.",
                f".{marker_name(self.save_id, self.rank)}.",
            )
            entries = [entry for entry in entries if entry.name.startswith(own)]
        return remove_leftovers(self._store, self.save_id, entries)


def _own_prefixes(rank: int) -> tuple[str, str]:
    """Return the prefixes of the names of a rank's data files and indexes."""
    return data_file_prefix(rank), f"{rank_prefix(rank)}."
