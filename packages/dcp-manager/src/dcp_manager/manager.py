"""`CheckpointManager`: saves, retains and restores the checkpoints of a training run.

`dcp_core` and the storages write and read checkpoints; `dcp_io.Catalogue` lists and removes the folders of the root.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dcp_core import LoadPlanner, Metadata, PeerOptions, StorageReader, StorageWriter, save
from dcp_io import STALE_AFTER_SECONDS, CheckpointRecord, KeepPolicy, Root
from dcp_manager.background import BackgroundSaves
from dcp_manager.errors import UnfinishedSaveError
from dcp_manager.failures import Tolerance
from dcp_manager.hosts.whereabouts import Whereabouts, find_step
from dcp_manager.loading import load_from
from dcp_manager.places import Places
from dcp_manager.policies.lower_steps import LowerSteps, StepGuard
from dcp_manager.policies.on_signal import SignalWatch
from dcp_manager.policies.retention import Retention
from dcp_manager.policies.saving_rules import EverySteps, Moment, SavePolicy
from dcp_manager.restoring import Restored, Wanted, restore_newest, restore_step
from dcp_manager.root_places import RootPlaces
from dcp_manager.savers import Saver, future_of
from dcp_manager.time_limits import TimeLimits
from dcp_manager.together import Ranks
from dcp_manager.upkeep import Upkeep
from dcp_ranks import DEFAULT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CheckpointManager"]

State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class CheckpointManager:
    """Manager of the checkpoints of one training run: when to save, which to keep, from which to resume.

    Every rank makes a manager, and calls the same methods in the same order. At the end of a `with` block, the manager
    waits for saves in the background.

    Args:
        root: Path of a folder, or a URI that an installed storage handles. Each checkpoint is a subfolder. A relative
            path is resolved at the time of this call. A `Root` of several places, such as `dcp_tiers.Tiers`, is saved
            to its first; its promoter is started, woken after each save, and waited for by `close`.
        save_policy: Policy that decides when `maybe_save` saves; None saves at every step.
        keep_policy: Policy that selects the checkpoints to keep; None: the root's, or all.
        saver: Saver for saves in the background (`dcp_async.AsyncSaver("process")`, …), which the caller closes. Its
            policy decides on a save that is due while another save runs. None saves while the caller waits.
        writer: Function that makes the storage writer for a checkpoint id; None uses the writer of the id's scheme.
        reader: Function that makes the storage reader for a checkpoint id; None uses the reader of the id's scheme.
        storage_options: Options of the storage, such as an endpoint, for the root and its checkpoints; None for none.
        process_group: The ranks of the run; None takes all.
        no_dist: Whether this process works alone, even if process groups exist.
        timeout_seconds: Limit of the time that ranks wait for each other in one phase.
        peers: Options of the connections by which ranks watch each other; None for the defaults.
        preemption_seconds: Time from a signal that ends the training until the process is killed. After such a signal
            it limits how long ranks wait for each other in a save, and how long the last save and `close` wait for
            saves in the background. None for no limit.
        close_seconds: Limit of the time that `wait` and `close` wait for background saves without such a signal.
        tolerated_failures: Number of consecutive saves that may fail because of the storage before `maybe_save` raises
            an error; saves in the background count when they have ended.
        stale_after_seconds: Age of a save marker or lease at which its process, if on another host, counts as dead.
        lower_steps: Policy for saving a step that is lower than the highest step in any place of the root. `warn`
            saves, logs a warning, and keeps the checkpoints of higher steps whatever `keep_policy` selects, unless
            `restore(step=…)` has gone back on purpose; `raise` refuses the save; `allow` saves.
        folder_prefix: Prefix of checkpoint folder names, before the step; folders with another prefix are ignored.

    Guarantees: the file `latest` in the root only ever names a durable checkpoint. A checkpoint is removed only after a
    later one has been published, and not while a process reads it; the undamaged checkpoint that was made last is never
    removed. The next process removes the leftovers of a killed process.

    Example:
        ```python
        from dcp_manager import CheckpointManager, EverySteps, KeepLast

        state = {"step": 0}
        with CheckpointManager("run", save_policy=EverySteps(10), keep_policy=KeepLast(2)) as manager:
            manager.restore(state)
            for state["step"] in range(state["step"] + 1, 51):
                manager.maybe_save(state["step"], state)
        ```
    """

    def __init__(
        self,
        root: Root | str | os.PathLike[str],
        *,
        save_policy: SavePolicy | None = None,
        keep_policy: KeepPolicy | None = None,
        saver: Saver | None = None,
        writer: Callable[[str], StorageWriter] | None = None,
        reader: Callable[[str], StorageReader] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        peers: PeerOptions | None = None,
        preemption_seconds: float | None = None,
        close_seconds: float = 600.0,
        tolerated_failures: int = 0,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        lower_steps: LowerSteps = "warn",
        folder_prefix: str = "step-",
    ) -> None:
        self._save_policy = save_policy or EverySteps(1)
        self._places = Places(writer, reader, dict(storage_options or {}))
        self._ranks = Ranks(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, peers=peers)
        self._where = RootPlaces(root, storage_options or {}, stale_after_seconds, folder_prefix)
        self._root, self._catalogue = self._where.url, self._where.catalogues[0]
        self._saver = saver
        self._background = BackgroundSaves()
        retention = Retention(self._catalogue, self._where.keep_policy(keep_policy))
        self._guard = StepGuard(self.checkpoint_id, lower_steps)
        self._upkeep = Upkeep(self._where, retention, self._guard, self._background, self._ranks)
        self._watch = SignalWatch(self._save_policy.signals, self._save_policy.stop_signals)
        self._limits = TimeLimits(self._watch, preemption_seconds, close_seconds, timeout_seconds)
        self._tolerance = Tolerance(self._ranks, tolerated_failures)
        self._requested = False
        self._preempted = False
        self._last_save = time.monotonic()
        self._where.start(self._ranks, compares=lower_steps != "allow")
        self._upkeep.protect()
        self._watch.start()

    @property
    def root(self) -> str:
        """Path or URI of the folder to which all checkpoints are saved."""
        return self._root

    @property
    def preempted(self) -> bool:
        """Whether any rank has received a signal to end the training; the same on all ranks after each `maybe_save`."""
        return self._preempted

    def checkpoint_id(self, step: int) -> str:
        """Return the id of a step's checkpoint, for `dcp_core.load` and tools."""
        return self._where.checkpoint_id(self._catalogue, step)

    def checkpoints(self) -> list[CheckpointRecord]:
        """Return the checkpoints under the root by ascending step, including quarantined checkpoints.

        Ranks: one; not collective.
        """
        return self._catalogue.records()

    def latest(self) -> int | None:
        """Return the highest step whose checkpoint is not known to be damaged; None if there is no such checkpoint.

        Ranks: one; not collective.
        """
        highest = self._catalogue.highest()
        return None if highest is None else highest.step

    def where(self, step: int) -> Whereabouts:
        """Return which places have a step, such as `step 40: here, protected, in s3://bucket/run` (its text).

        Ranks: one; not collective.
        """
        return find_step(self._where.catalogues, step)

    def request_save(self) -> None:
        """Request a save at the next `maybe_save`, for policies with `OnRequest`. Any rank, any thread may call it."""
        self._requested = True

    def maybe_save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save a checkpoint if the save policy decides so; to be called after every training step.

        Args:
            step: Number of the training step that has ended, at least 0.
            state: The state to save, or a function that returns it, which is called only if a save is due.
            metrics: Metrics by name, for `KeepBest`; only those of the coordinator are used. None for none.

        Returns:
            Whether a checkpoint was saved, or its save was begun in the background.

        Raises:
            CheckpointException: This save, or an earlier save in the background, failed on some rank, and the failure
                is not tolerated; raised on all ranks. After a signal that ends the training, this step is saved before
                the error of an earlier save is raised.

        Ranks: every rank; collective, except if the policy depends on the step alone and no save is due.
        """
        if not self._decide(step):
            return False
        self._look_back(tolerates=True)
        begun = False
        try:
            self._save(step, state, metrics)
            begun = True
        except Exception as error:
            if not self._tolerance.passes(error):
                raise
            self._tolerance.tell_passed(step, error)
        if begun and self._saver is None:
            self._tolerance.succeeded()
        self._tolerance.raise_owed()
        return begun

    def _decide(self, step: int) -> bool:
        moment = Moment(step, time.monotonic() - self._last_save, self._watch.noted, self._requested)
        policy = self._save_policy
        if policy.same_everywhere:
            return policy.due(moment)

        def own() -> tuple[bool, frozenset[int], bool]:
            return policy.due(moment), moment.signals, moment.requested

        def combine(reported: list[tuple[bool, frozenset[int], bool]]) -> tuple[bool, frozenset[int]]:
            signals = frozenset[int]().union(*(signals for _, signals, _ in reported))
            requested = any(requested for *_, requested in reported)
            everywhere = Moment(step, moment.seconds_since_save, signals, requested)
            return policy.due(everywhere), signals

        due, signals = self._ranks.combine("decide whether to save", own, combine)
        if signals & policy.stop_signals:
            self._preempted = True
            self._watch.heard_of_stop()
        self._watch.clear(signals)
        if due:
            self._requested = False
        return due

    def save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> Future[Metadata] | None:
        """Save a checkpoint of a training step now, whatever the save policy decides.

        Args:
            step: Number of the training step, at least 0. An existing checkpoint of this step is replaced atomically.
            state: The state to save, or a function that returns it.
            metrics: Metrics by name, for `KeepBest`; only those of the coordinator are used. None for none.

        Returns:
            With a saver, a future that completes when the checkpoint exists; without a saver, None.

        Raises:
            StepWentBackError: `lower_steps` refuses the step; in a job of several ranks, a CheckpointException contains
                this error.
            CheckpointException, OSError, …: An error of `dcp_core.save`, or of an earlier background save. An earlier
                error is raised on all ranks before this save begins, or after it if a signal has ended the training.

        Ranks: every rank; collective.
        """
        self._look_back(tolerates=False)
        future = self._save(step, state, metrics)
        self._tolerance.raise_owed()
        return future

    def _look_back(self, *, tolerates: bool) -> None:
        """Check background saves before a new one: raise errors beyond the tolerance, unless this is the last save.

        The last save, after a signal that ends the training, is made before `raise_owed` raises such errors: otherwise
        its step would be lost.
        """
        if self._saver is None:
            return
        # The saver itself would wait for the one before as long as it likes.
        late = self._overdue() if self._preempted and self._limits.ends_soon else None
        self._reckon(late, tolerates=tolerates)
        if not self._preempted:
            self._tolerance.raise_owed()

    def _reckon(self, late: UnfinishedSaveError | None, *, tolerates: bool) -> None:
        outcomes, unfinished = self._background.outcomes(self._ranks, late)
        self._tolerance.look_back(outcomes, tolerates=tolerates)
        if unfinished is not None:
            raise unfinished

    def _save(self, step: int, state: State, metrics: Mapping[str, float] | None) -> Future[Metadata] | None:
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise ValueError(f"step is {step!r}; it must be a whole number of at least 0")
        self._last_save = time.monotonic()
        try:
            values = self._upkeep.take_state(step, state, metrics or {}, hurry=self._preempted)
            if self._saver is not None:
                return self._save_later(self._saver, step, values)
            save(
                values,
                **self._places.to_write(self.checkpoint_id(step)),
                **self._ranks.arguments,
                timeout_seconds=self._limits.phase(),
            )
        except BaseException:
            self._upkeep.ended(step, saved=False)
            raise
        self._upkeep.ended(step, saved=True)
        return None

    def _save_later(self, saver: Saver, step: int, values: dict[str, Any]) -> Future[Metadata]:
        group, alone = self._ranks.process_group, self._ranks.no_dist
        number, place = self._background.begin(), self._places.to_write(self.checkpoint_id(step))
        future = future_of(saver.save(values, process_group=group, no_dist=alone, **place))
        self._upkeep.begun(number, step, future)
        return future

    def restore(
        self,
        state: dict[str, Any],
        *,
        step: int | None = None,
        planner: LoadPlanner | None = None,
        cooperative: bool | None = None,
        min_step: int | None = None,
        wait_for_hosts_seconds: float = 0.0,
    ) -> Restored | None:
        """Load the newest undamaged checkpoint, or that of `step`; the world size may differ from that of the save.

        The newest checkpoint is that of the highest step. A damaged checkpoint is quarantined, and the next lower step
        is tried. Before you train on from an earlier step, remove the checkpoints of later steps: see `lower_steps`.

        Args:
            state: The template, filled in place; see `dcp_core.load`.
            step: The step to load; None tries all steps, from the highest down.
            planner: Load planner; see `dcp_core.load`.
            cooperative: Whether the ranks read together; see `dcp_core.load`.
            min_step: Lowest step to load, without `step`; an error is raised rather than load a lower one.
            wait_for_hosts_seconds: Time to wait for what the newest step lacks, or for `min_step`, without `step`.

        Returns:
            The restored step, which is the same on all ranks, and the load's report; None if there is no checkpoint.

        Raises:
            CheckpointNotFoundError: No checkpoint (or none of `step`) can be loaded, although there are checkpoints; or
                a rank does not find files that the coordinator finds (is the storage mounted?): nothing is quarantined.
            CheckpointException, LoadMismatchError, OSError, …: The template does not fit, or the storage failed.

        Ranks: every rank; collective.
        """
        load_step = partial(
            load_from, self._places, self._where, self._ranks, state, planner=planner, cooperative=cooperative
        )
        if step is not None:
            restored = restore_step(self._where.catalogues, self._ranks, load_step, step)
            self._guard.restored(step)
            return restored
        wanted = Wanted(min_step, wait_for_hosts_seconds)
        return restore_newest(self._where.catalogues, self._ranks, load_step, wanted)

    def wait(self, seconds: float | None = None) -> None:
        """Wait for all saves in the background; raises their first error on all ranks, others on later calls.

        Args:
            seconds: Maximum time to wait; None for `close_seconds` or, after a signal that ends the training, for the
                rest of `preemption_seconds`.

        Raises:
            UnfinishedSaveError: A save takes longer; it continues, and its checkpoint may still be published. In a job
                of several ranks, all ranks raise a CheckpointException that contains this error.
            CheckpointException, OSError, …: The error of a failed save.

        Ranks: every rank; collective if there is a saver.
        """
        late = self._overdue(seconds)
        if self._saver is not None:
            self._reckon(late, tolerates=False)
            self._tolerance.raise_owed()

    def close(self, seconds: float | None = None) -> None:
        """Wait for saves like `wait(seconds)`, and restore the signal handlers. Errors after the first are logged.

        Then it waits as long again, at most, for a copy to other hosts, and for the promoter of a root of places.
        """
        try:
            self.wait(seconds)
        finally:
            self._end(seconds)
            self._watch.stop()

    def _end(self, seconds: float | None) -> None:
        self._upkeep.close(self._limits.waiting(seconds)[0])
        self._where.end(self._ranks, self._limits.waiting(seconds)[0])

    def _overdue(self, seconds: float | None = None) -> UnfinishedSaveError | None:
        """Wait for this rank's background saves; returns an error if some exceed the limit."""
        where = f"rank {self._ranks.rank}, {self._root}"
        return self._background.overdue(*self._limits.waiting(seconds), where)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._watch.stop()  # other ranks may not come here, and the error that is under way matters more
        with contextlib.suppress(Exception):
            self._overdue()
        self._end(0.0)
