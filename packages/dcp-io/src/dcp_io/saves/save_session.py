"""One save in a folder: alone, per host or per rank, or joined."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from dcp_base.errors import DcpError
from dcp_base.logs import library_logger
from dcp_io.errors import CheckpointExistsError, SaveInProgressError
from dcp_io.saves.cleanup import (
    STALE_AFTER_SECONDS,
    Current,
    read_current,
    remove_dead_saves,
    remove_leftovers,
    remove_orphans,
    remove_replaced,
    replaced_names,
)
from dcp_io.saves.save_files import (
    LAST_NS,
    FoundMarker,
    Marker,
    Renewal,
    belongs_to,
    check_save_id,
    find_markers,
    marker_name,
    this_process,
)
from dcp_io.stores.host_store import HostStore
from dcp_io.stores.store import Entry, Store
from dcp_manifest.file.manifest_read import read_index
from dcp_manifest.folders.folder import (
    METADATA_NAME,
    RankIndexName,
    data_file_prefix,
    rank_index_name,
    rank_prefix,
)
from dcp_manifest.types import Buffer

_log = library_logger(__name__)

_SETTLE_TIMEOUT_SECONDS = 10.0
_SETTLE_POLL_SECONDS = 0.05

# Markers of the saves running in this process, by store and name. Without them, the marker of a dead thread would look
# alive, since its process is.
_running: set[tuple[str, str]] = set()
_running_lock = threading.RLock()  # reentrant: a finalizer may acquire it in any thread, at any allocation


def _forget(renewal: Renewal, key: tuple[str, str]) -> None:
    renewal.stopping.set()
    with _running_lock:
        _running.discard(key)


@dataclass(frozen=True, slots=True)
class Scene:
    """Snapshot of the folder."""

    entries: list[Entry]
    markers: list[FoundMarker]
    now: float
    """On the storage's clock."""


class SaveSession:
    """One running save, from `begin` to `finish` or `abort`.

    Whenever a process is killed, loading gives the old checkpoint until the index is published, and then the new one.
    """

    def __init__(
        self, store: Store, save_id: str, *, stale_after_seconds: float, sync: bool = True, rank: int | None = None
    ) -> None:
        self._store = store
        self._stale_after_seconds = stale_after_seconds
        self._sync = sync
        self.save_id = check_save_id(save_id)
        self._marker = Marker(save_id, rank, this_process(), "starting", time.time_ns())
        self._name = marker_name(save_id, rank)
        self._renewal = Renewal(store, self._name, stale_after_seconds)
        self._leave: Callable[[], object] = self._renewal.stopping.set
        self._marker_is_ours = False
        self._publishing = False
        self._published = False
        self.generation = 1
        self._replaced_ns = 0

    @classmethod
    def begin(
        cls,
        store: Store,
        *,
        overwrite: bool = True,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        save_id: str | None = None,
        sync: bool = True,
    ) -> SaveSession:
        """Claim the folder for a new save, unless another live save owns it; removes leftovers of dead saves.

        The session of a `HostStore` is a `HostSaveSession`.

        Args:
            store: The checkpoint's folder, which is made if it is missing.
            overwrite: Whether this save may replace a checkpoint.
            stale_after_seconds: A save on another host counts as dead if it has not renewed its marker for this long.
            save_id: Id that was never used in this folder; None generates one.
            sync: Whether markers and published objects are durable.

        Raises:
            SaveInProgressError: Another save is alive in the folder; the message has its process, host and marker.
            CheckpointExistsError: The folder has a checkpoint, readable or not, and `overwrite` is False.
            OSError: The storage failed.

        Ranks: the coordinator.
        """
        kind = HostSaveSession if isinstance(store, HostStore) else cls
        session = kind(store, save_id or secrets.token_hex(8), stale_after_seconds=stale_after_seconds, sync=sync)
        session._enter(overwrite=overwrite)  # noqa: SLF001 - of this class
        return session

    def publish(self, name: str, data: Buffer) -> None:
        """Write `data` to `name` atomically, and durably if the session has `sync`.

        Raises:
            SaveInProgressError: Another save considered this one dead, and removed its marker.
            OSError: The storage failed, and whether `name` was replaced is unknown; `abort` handles both cases.
        """
        if self._renewal.lost or not self._store.exists(self._name):
            raise SaveInProgressError(
                f"save {self.save_id} in {self._store.url} lost its marker {self._name}: another save "
                "considered it dead (see stale_after_seconds) or it was removed by hand; nothing was published: "
                "save again"
            )
        self._publishing = True
        self._store.publish(name, data, tag=self.save_id, sync=self._sync)
        self._published = self._published or name == METADATA_NAME

    def wrote(self, files: Iterable[str]) -> None:
        """Do nothing: file names contain the save id."""

    def finish(self, keep: Collection[str]) -> None:
        """End a published save: remove the files that it replaced, then its marker. Failures are only logged.

        `keep` are the new index's data files.
        """
        self._renewal.stop()
        try:
            if not self._clean_up(keep):
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
        """End a failed save: remove its files and marker, unless its index was published after all.

        Failures are not raised: the next save removes the rest.
        """
        self._renewal.stop()
        try:
            if self._may_be_published():
                self._mark_ended()
            elif self._remove_own():
                if self._sync:
                    self._store.sync_folder()
                self._store.delete(self._name)
        except (OSError, DcpError):
            self._mark_ended()
        finally:
            self._leave()

    def _enter(self, *, overwrite: bool) -> None:
        self._store.make()
        try:
            self._register()
            self._marker_is_ours = True
            self._write_marker(sync=False)
            self._take_over(self._settle(), overwrite=overwrite)
            self._renewal.begin()
        except BaseException:
            self._leave()
            if self._marker_is_ours:
                with contextlib.suppress(OSError):
                    self._store.delete(self._name)
            raise

    def _take_over(self, scene: Scene, *, overwrite: bool) -> None:
        entries = self._store.list()  # again: another save may have ended since
        current = read_current(self._store, entries)
        if current.exists and not overwrite:
            raise CheckpointExistsError(
                f"Checkpoint already exists in {self._store.url}, and overwrite=False; "
                "choose another id, or allow overwriting"
            )
        if scene.markers:
            self._remove_dead(scene, current)
            entries = self._store.list()
        remove_orphans(self._store, scene.entries, now=scene.now, stale_after_seconds=self._stale_after_seconds)
        self.generation = current.generation + 1
        info = None if current.index is None else current.index.info
        self._replaced_ns = 0 if info is None else info.created_ns
        replaced = replaced_names(self.save_id, self._marker.rank, current, entries)
        self._marker = replace(self._marker, phase="saving", replaced=replaced)
        self._write_marker(sync=self._sync)

    def created_ns(self) -> int:
        """Return the index's time, later than the replaced save's even if clocks differ."""
        return max(time.time_ns(), min(self._replaced_ns + 1, LAST_NS))

    def _remove_dead(self, scene: Scene, current: Current) -> None:
        dead = [found for found in scene.markers if self._is_dead(found, scene.now)]
        remove_dead_saves(self._store, dead, current, scene.entries)

    def _register(self) -> None:
        """The save runs in this process until `_leave` or garbage collection."""
        key = (self._store.url, self._name)
        with _running_lock:
            if key in _running:
                raise self._used_before(self._name)
            _running.add(key)
        self._leave = weakref.finalize(self, _forget, self._renewal, key)

    def _used_before(self, name: str) -> CheckpointExistsError:
        return CheckpointExistsError(
            f"save id {self.save_id!r} was used before in {self._store.url} ({name}); every save needs a new id"
        )

    def _settle(self) -> Scene:
        """Wait until this save is the only live one; the later of two simultaneous saves raises SaveInProgressError."""
        deadline = time.monotonic() + _SETTLE_TIMEOUT_SECONDS
        while True:
            scene = self._look()
            rivals = self._rivals(scene) if scene.markers else []
            if not rivals:
                return scene
            for rival in rivals:
                if rival.marker.phase != "starting" or self._is_earlier(rival, scene) or time.monotonic() > deadline:
                    raise SaveInProgressError(
                        f"{self._store.url} is being written by {rival.describe(scene.now)}; wait for it, or if it "
                        f"is certainly dead remove {rival.marker.name} (by itself it counts as dead after "
                        f"stale_after_seconds={self._stale_after_seconds:g})"
                    )
            time.sleep(_SETTLE_POLL_SECONDS)

    def _look(self) -> Scene:
        entries = self._store.list()
        own = [entry for entry in entries if entry.name == self._name]
        others = [entry for entry in entries if entry.name != self._name]
        return Scene(entries, find_markers(self._store, others), own[0].mtime if own else time.time())

    def _rivals(self, scene: Scene) -> list[FoundMarker]:
        alive = [
            found
            for found in scene.markers
            if found.marker.save_id != self.save_id and not self._is_dead(found, scene.now)
        ]
        if None not in {found.marker.rank for found in alive}:
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

    def _is_earlier(self, rival: FoundMarker, scene: Scene) -> bool:
        own = (scene.now, self.save_id)
        return (rival.entry.mtime, rival.marker.save_id) < own

    def _write_marker(self, *, sync: bool) -> None:
        self._store.publish(self._name, self._marker.to_bytes(), tag=self.save_id, sync=sync)

    def _mark_ended(self) -> None:
        self._marker = replace(self._marker, phase="ended")
        with contextlib.suppress(OSError, DcpError):
            if self._store.exists(self._name):
                self._write_marker(sync=self._sync)  # durable, as it replaces the list of files to remove

    def _clean_up(self, keep: Collection[str]) -> bool:
        return self._published and self._remove_replaced(keep)

    def _remove_replaced(self, keep: Collection[str], world_size: int = 0) -> bool:
        if self._marker.replaced:
            if not remove_replaced(self._store, self._marker, keep=keep, world_size=world_size):
                return False
            if self._sync:
                self._store.sync_folder()  # a disk that loses a removal must keep the marker, which repeats it
        self._store.delete(self._name)
        return True

    def _may_be_published(self) -> bool:
        if not self._publishing:
            return False
        current = read_current(self._store)
        return current.save_id == self.save_id or current.damage is not None

    def _remove_own(self) -> bool:
        return remove_leftovers(self._store, self.save_id, self._store.list())


class HostSaveSession(SaveSession):
    """A save in the store of one host: its index counts when some host has published it."""

    may_be_published_elsewhere = False
    """Whether another host may have published this save; its files then stay."""

    def _remove_dead(self, scene: Scene, current: Current) -> None:
        """Another host may have published dead saves, so they stay for now."""

    def _clean_up(self, keep: Collection[str]) -> bool:
        done = super()._clean_up(keep)
        if self._published:
            super()._remove_dead(self._look(), read_current(self._store))
        return done

    def _may_be_published(self) -> bool:
        return self.may_be_published_elsewhere or super()._may_be_published()


class JoinedSave:
    """Files that this rank has written, for cleanup."""

    def __init__(self, store: Store, save_id: str) -> None:
        self._store = store
        self._files: set[str] = set()
        self.save_id = save_id

    def publish(self, name: str, data: Buffer) -> None:
        """Raise DcpError: only the coordinator publishes."""
        del data
        raise DcpError(f"only the coordinator of save {self.save_id} may publish {name!r}")

    def finish(self, keep: Collection[str]) -> None:
        """Do nothing: the coordinator does."""

    def wrote(self, files: Iterable[str]) -> None:
        """Record data files."""
        self._files.update(files)

    def abort(self) -> None:
        """Remove this rank's files if the coordinator certainly will not publish them; never raises.

        While the save's marker exists, the coordinator or the next save does.
        """
        with contextlib.suppress(OSError, DcpError):
            if self._store.exists(marker_name(self.save_id, None)):
                return
            current = read_current(self._store)
            if current.damage is not None:
                return
            kept = current.index.files if current.index is not None else ()
            for name in self._files.difference(kept):
                self._store.delete(name)
            # Without the marker no later save removes what a loss of power brings back.
            self._store.sync_folder()


class RankSaveSession(SaveSession):
    """The part of one rank in a save without a coordinator."""

    def __init__(self, store: Store, save_id: str, rank: int, *, stale_after_seconds: float, sync: bool) -> None:
        super().__init__(store, save_id, stale_after_seconds=stale_after_seconds, sync=sync, rank=rank)
        self._rank = rank
        self._world_size = 1
        self._own = (data_file_prefix(rank), f"{rank_prefix(rank)}.")

    @classmethod
    def begin_rank(
        cls,
        store: Store,
        save_id: str,
        rank: int,
        *,
        overwrite: bool = True,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        sync: bool = True,
    ) -> RankSaveSession:
        """Claim the folder for this rank; see `SaveSession.begin`.

        All ranks have agreed on the save id. An id that was used before raises CheckpointExistsError.

        Ranks: every rank.
        """
        session = cls(store, save_id, rank, stale_after_seconds=stale_after_seconds, sync=sync)
        session._enter(overwrite=overwrite)
        return session

    def publish(self, name: str, data: Buffer) -> None:
        """Publish this rank's index."""
        info = read_index(data, file=name).info
        self._world_size = info.world_size if info is not None else 1
        super().publish(name, data)

    def _register(self) -> None:
        super()._register()
        for entry in self._store.list():
            is_file = entry.name.startswith(self._own) and belongs_to(entry.name, self.save_id)
            if is_file or entry.name == self._name:
                raise self._used_before(entry.name)

    def _used_before(self, name: str) -> CheckpointExistsError:
        return CheckpointExistsError(f"rank {self._rank}: {super()._used_before(name)}")

    def _clean_up(self, keep: Collection[str]) -> bool:
        """Remove nothing until every rank has published."""
        del keep  # of this rank alone
        self._mark_ended()  # before looking: so the last rank to look sees all others' ends
        names = (rank_index_name(entry.name) for entry in self._store.list())
        ranks = {parts.rank for parts in names if parts is not None and parts.save_id == self.save_id}
        if not ranks >= set(range(self._world_size)):
            return False
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
        return self._publishing and self._store.exists(str(RankIndexName(self._rank, self.save_id)))

    def _remove_own(self) -> bool:
        own = (*self._own, f".{rank_prefix(self._rank)}.", f".{marker_name(self.save_id, self._rank)}.")
        entries = [entry for entry in self._store.list() if entry.name.startswith(own)]
        return remove_leftovers(self._store, self.save_id, entries)
