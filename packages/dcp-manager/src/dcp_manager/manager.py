"""`CheckpointManager`: saves, retains and restores the checkpoints of a training run."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist

from dcp_core import LoadPlanner, LoadReport, Metadata, PeerOptions, StorageReader, StorageWriter, load, save
from dcp_io import STALE_AFTER_SECONDS, CheckpointRecord, KeepBest, KeepPolicy
from dcp_io.roots.catalogue import Catalogue
from dcp_io.stores.root import Root
from dcp_manager.alert import Alert
from dcp_manager.background import BackgroundSaves, Saver, Tolerance, UnfinishedSaveError, future_of
from dcp_manager.protection import Whereabouts, find_step
from dcp_manager.restoring import Restored, Wanted, restore_newest, restore_step
from dcp_manager.root_places import Places, RootPlaces
from dcp_manager.save_policies import EverySteps, Moment, SaveAny, SavePolicy, SignalWatch, parts_of
from dcp_manager.space import OnFull, Room, Spacing, check_on_full
from dcp_manager.together import Ranks
from dcp_manager.upkeep import LowerSteps, Retention, StepGuard, Upkeep
from dcp_ranks.phases.coordinator import DEFAULT_TIMEOUT_SECONDS

if TYPE_CHECKING:
    from typing_extensions import Self

State = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


class CheckpointManager:
    """Manager of the checkpoints of one training run: when to save, which to keep, from which to resume.

    Every rank creates a manager, and calls the same methods in the same order. At the end of a `with` block, the
    manager waits for background saves.

    Args:
        root: Path of a directory, resolved now, or a URI that an installed storage handles; each checkpoint is a
            subdirectory. A `Root` of several places, such as `dcp_tiers.Tiers`, is saved to its first; the manager
            starts its promoter, wakes it after each save, and waits for it in `close`.
        save_policy: Policy that decides when `maybe_save` saves; None saves at every step.
        keep_policy: Policy that selects the checkpoints to keep; None for the root's policy, or all.
        saver: Saver for background saves, such as `dcp_async.AsyncSaver("process")`, which the caller closes. Its
            overlap policy decides on a save that is due while another one runs. None saves while the caller waits.
        writer: Function (checkpoint id) → storage writer; None uses the writer of the id's scheme.
        reader: Function (checkpoint id) → storage reader; None uses the reader of the id's scheme.
        storage_options: Options of the storage, such as an endpoint, for the root and its checkpoints.
        process_group: The ranks of the run; None for all.
        no_dist: Whether this process works alone, even if process groups exist.
        timeout_seconds: Limit of the time that ranks wait for each other in one phase.
        peers: Options of the connections by which ranks watch each other.
        preemption_timeout_seconds: Time after a signal that ends the training for earlier saves, the last save and
            `close`; None for no limit. Set it a few seconds below the launcher's limit: torchrun, Slurm (`KillWait`)
            and Kubernetes kill after 30 seconds by default.
        close_timeout_seconds: Longest time that `wait` and `close` wait for background saves without such a signal.
        tolerated_failures: Number of consecutive saves that may fail because of the storage before `maybe_save` raises;
            background saves count when they have ended.
        stale_after_seconds: Age of a save marker or lease at which its process, if on another host, counts as dead.
        lower_steps: Policy for saving a step below the highest step in any place of the root. `warn` saves, logs a
            warning, and keeps higher steps despite `keep_policy`, unless `restore(step=…)` went back on purpose;
            `raise` refuses the save; `allow` saves.
        on_full: Policy for a root directory without room for the next save. `fail` raises the save's error; `pause`
            waits in `maybe_save` until there is room; `drop_oldest` removes the oldest checkpoints that resuming does
            not need. Tiers have `when_full` instead.
        folder_prefix: Prefix of checkpoint directory names, before the step; other directories are ignored.

    Guarantees: the file `latest` in the root only ever names a durable checkpoint. A checkpoint is removed only after a
    later one was published, and not while a process reads it; the undamaged checkpoint that was created last is never
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
        preemption_timeout_seconds: float | None = 25.0,
        close_timeout_seconds: float = 600.0,
        tolerated_failures: int = 0,
        stale_after_seconds: float = STALE_AFTER_SECONDS,
        lower_steps: LowerSteps = "warn",
        on_full: OnFull = "fail",
        folder_prefix: str = "step-",
    ) -> None:
        check_on_full(on_full, root)
        _check_options(save_policy, keep_policy, saver, tolerated_failures)
        _check_seconds(timeout_seconds=timeout_seconds, stale_after_seconds=stale_after_seconds)
        _check_seconds(
            preemption_timeout_seconds=preemption_timeout_seconds, close_timeout_seconds=close_timeout_seconds
        )
        self._save_policy = save_policy or EverySteps(1)
        self._places = Places(writer, reader, dict(storage_options or {}))
        self._ranks = Ranks(process_group, no_dist=no_dist, timeout_seconds=timeout_seconds, peers=peers)
        self._where = RootPlaces(root, storage_options or {}, stale_after_seconds, folder_prefix)
        self._root, self._catalogue = self._where.url, self._where.catalogues[0]
        self._saver = saver
        self._background = BackgroundSaves()
        retention = Retention(self._catalogue, self._where.keep_policy(keep_policy))
        self._guard = StepGuard(self.checkpoint_id, lower_steps)
        self._upkeep = Upkeep(
            self._where, retention, self._guard, self._background, self._ranks, Spacing.of(self._save_policy)
        )
        parts = parts_of(self._save_policy)
        self._by_step = SaveAny(tuple(part for part in parts if part.same_everywhere))
        self._reasons = SaveAny(tuple(part for part in parts if not part.same_everywhere))
        self._alert = Alert(self._ranks, self._has_reason)
        self._watch = SignalWatch(self._save_policy.signals, self._save_policy.stop_signals)
        self._room = None if on_full == "fail" else Room(on_full, self._catalogue, self._ranks, is_exact=writer is None)
        self._limits = _TimeLimits(self._watch, preemption_timeout_seconds, close_timeout_seconds, timeout_seconds)
        self._tolerance = Tolerance(self._ranks, tolerated_failures, self.checkpoint_id)
        self._requested = False
        self._preempted = False
        self._last_save = time.monotonic()
        self._where.start(self._ranks, compares=lower_steps != "allow")
        self._upkeep.protect()
        self._watch.start()

    @property
    def root(self) -> str:
        """Path or URI of the directory to which checkpoints are saved."""
        return self._root

    @property
    def preempted(self) -> bool:
        """Whether any rank has received a signal to end the training; the same on all ranks after each `maybe_save`."""
        return self._preempted

    def checkpoint_id(self, step: int) -> str:
        """Return the id of a step's checkpoint, for `dcp_core.load` and tools."""
        return self._where.checkpoint_id(self._catalogue, step)

    def checkpoints(self) -> list[CheckpointRecord]:
        """Return the checkpoints under the root by ascending step, including quarantined ones. Not collective."""
        return self._catalogue.records()

    def latest(self) -> int | None:
        """Return the highest step with a checkpoint not known to be damaged; None without one. Not collective."""
        highest = self._catalogue.highest()
        return None if highest is None else highest.step

    def best(self, metric: str, mode: Literal["min", "max"] = "min") -> int | None:
        """Return the step of the best checkpoint by a metric, of those not known to be damaged; None without one.

        `metric` is a name in the `metrics` of the saves; `mode` is whether the lowest (`min`) or highest (`max`) value
        is best. Not collective.
        """
        good = [record for record in self.checkpoints() if record.quarantined is None]
        return next(iter(KeepBest(1, metric, mode).keep(good, time.time())), None)

    def where(self, step: int) -> Whereabouts:
        """Return which places have a step, such as `step 40: here, protected, in s3://bucket/run`. Not collective."""
        return find_step(self._where.catalogues, step)

    def request_save(self) -> None:
        """Request a save at the next `maybe_save`, for policies with `OnRequest`, from any rank and thread."""
        self._requested = True

    def maybe_save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> bool:
        """Save a checkpoint if the save policy decides so; call it after every training step.

        Args:
            step: Number of the training step that has ended, at least 0.
            state: The state to save, or a function that returns it, which is called only if a save is due.
            metrics: Metrics by name, for `KeepBest`: numbers, or tensors and numpy scalars without dimensions. Only the
                coordinator's are used.

        Returns:
            Whether a checkpoint was saved, or its background save has begun.

        Raises:
            CheckpointException: This or an earlier save failed on some rank, and the failure is not tolerated; raised
                on all ranks. After a signal that ends the training, this step is saved first.

        Ranks: every rank; collective if a save is due. Unless the policy is only `EverySteps`, the first call is
            collective; a signal, request or time on one rank is then acted on by all ranks in the same call, at most
            one call late.
        """
        _check_step(step)
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
        moment = self._moment(step)
        policy = self._save_policy
        if policy.same_everywhere:
            return policy.due(moment)
        if not self._alert.exchanges(reason=self._reasons.due(moment), timeout_seconds=self._limits.phase()):
            return self._by_step.due(moment)

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
            self._requested, self._last_save = False, time.monotonic()
        if self._reasons.stays_due:
            self._alert.watch()
        return due

    def _moment(self, step: int) -> Moment:
        # Time counts on the coordinator's clock alone.
        seconds = time.monotonic() - self._last_save if self._ranks.is_coordinator else 0.0
        return Moment(step, seconds, self._watch.noted, self._requested)

    def _has_reason(self) -> bool:
        return self._reasons.due(self._moment(0))

    def save(self, step: int, state: State, *, metrics: Mapping[str, float] | None = None) -> Future[Metadata] | None:
        """Save a checkpoint of a training step now, whatever the save policy decides.

        Args:
            step: Number of the training step, at least 0. An existing checkpoint of this step is replaced atomically.
            state: The state to save, or a function that returns it.
            metrics: Metrics by name, as for `maybe_save`.

        Returns:
            With a saver, a future that completes when the checkpoint exists; without a saver, None.

        Raises:
            ValueError: `lower_steps` refuses the step; with several ranks, a CheckpointException contains this error.
            CheckpointException, OSError, …: An error of `dcp_core.save`, or of an earlier background save. An earlier
                error is raised on all ranks before this save, or after it if a signal has ended the training.

        Ranks: every rank; collective.
        """
        _check_step(step)
        self._look_back(tolerates=False)
        future = self._save(step, state, metrics)
        self._tolerance.raise_owed()
        return future

    def _look_back(self, *, tolerates: bool) -> None:
        if self._saver is None:
            return
        # The saver would wait for the earlier save without this limit.
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
        self._last_save = time.monotonic()
        try:
            values = self._upkeep.take_state(step, state, {} if metrics is None else metrics, hurry=self._preempted)
            if self._room is not None:
                self._room.make(values, self.checkpoint_id(step), self._background.steps, hurry=self._preempted)
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
        hosts_timeout_seconds: float = 0.0,
    ) -> Restored | None:
        """Load the newest undamaged checkpoint, or the checkpoint of `step`; the world size may differ from the save's.

        The newest checkpoint has the highest step. A damaged checkpoint is quarantined, and the next lower step is
        tried. Before you train on from an earlier step, remove the checkpoints of later steps: see `lower_steps`.

        Args:
            state: The template, filled in place; see `dcp_core.load`.
            step: The step to load; None tries all steps, from the highest down.
            planner: See `dcp_core.load`.
            cooperative: Whether the ranks read together; see `dcp_core.load`.
            min_step: Lowest step to load, without `step`; lower ones raise an error.
            hosts_timeout_seconds: Time to wait for missing parts of the newest step, or for `min_step`, without
                `step`.

        Returns:
            The restored step, which is the same on all ranks, and the load's report; None if no checkpoint exists.

        Raises:
            CheckpointNotFoundError: There are checkpoints, but none (or not that of `step`) can be loaded; or a rank
                does not find files that the coordinator finds (is the storage mounted?), and nothing is quarantined.
            CheckpointException, LoadMismatchError, OSError, …: The template does not fit, or the storage failed.

        Ranks: every rank; collective.
        """
        load_step = partial(
            _load_from, self._places, self._where, self._ranks, state, planner=planner, cooperative=cooperative
        )
        if step is not None:
            restored = restore_step(self._where.catalogues, self._ranks, load_step, step)
            self._guard.restored(step)
            return restored
        wanted = Wanted(min_step, hosts_timeout_seconds)
        return restore_newest(self._where.catalogues, self._ranks, load_step, wanted)

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait for all background saves; raise their first error on all ranks, and others on later calls.

        Args:
            timeout_seconds: Longest time to wait; None for `close_timeout_seconds` or, after a signal that ends the
                training, the rest of `preemption_timeout_seconds`.

        Raises:
            UnfinishedSaveError: A save takes longer; it continues, and may still be published. With several ranks, all
                ranks raise a CheckpointException that contains this error.

        Ranks: every rank; collective if there is a saver.
        """
        late = self._overdue(timeout_seconds)
        if self._saver is not None:
            self._reckon(late, tolerates=False)
            self._tolerance.raise_owed()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Wait for saves like `wait`, and restore the signal handlers. Errors after the first are logged.

        Then wait at most as long again for a copy to other hosts, and for the root's promoter.
        """
        try:
            self.wait(timeout_seconds)
        finally:
            self._alert.close()
            self._end(timeout_seconds)
            self._watch.stop()

    def _end(self, timeout_seconds: float | None) -> None:
        self._upkeep.close(self._limits.waiting(timeout_seconds)[0])
        self._where.end(self._ranks, self._limits.waiting(timeout_seconds)[0])
        self._upkeep.promoted()

    def _overdue(self, timeout_seconds: float | None = None) -> UnfinishedSaveError | None:
        where = f"rank {self._ranks.rank}, {self._root}"
        return self._background.overdue(*self._limits.waiting(timeout_seconds), where)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._alert.close()
        self._watch.stop()  # other ranks may not get here, and the error that is being raised matters more
        with contextlib.suppress(Exception):
            self._overdue()
        self._end(0.0)


def _check_options(save_policy: object, keep_policy: object, saver: object, tolerated_failures: object) -> None:
    if save_policy is not None and not isinstance(save_policy, SavePolicy):
        hint = (
            "KeepPolicy objects belong to keep_policy" if isinstance(save_policy, KeepPolicy) else "join several by |"
        )
        raise TypeError(f"save_policy is {save_policy!r}; pass a policy such as EverySteps(1000) ({hint})")
    if keep_policy is not None and not isinstance(keep_policy, KeepPolicy):
        hint = (
            "SavePolicy objects belong to save_policy" if isinstance(keep_policy, SavePolicy) else "join several by |"
        )
        raise TypeError(f"keep_policy is {keep_policy!r}; pass a policy such as KeepLast(3) ({hint})")
    if saver is not None and (isinstance(saver, type) or not callable(getattr(saver, "save", None))):
        raise TypeError(f"saver is {saver!r}; pass a saver such as AsyncSaver('process'), or None")
    if not isinstance(tolerated_failures, int) or tolerated_failures < 0:
        raise ValueError(f"tolerated_failures is {tolerated_failures!r}; pass a whole number of at least 0")


def _check_seconds(**limits: Any) -> None:
    for name, seconds in limits.items():
        if seconds is not None and not (isinstance(seconds, int | float) and seconds >= 0):
            raise ValueError(f"{name} is {seconds!r}; pass a number of seconds, at least 0")


def _check_step(step: object) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step is {step!r}; it must be a whole number of at least 0")


def _load_from(
    places: Places,
    where: RootPlaces,
    ranks: Ranks,
    state: dict[str, Any],
    catalogue: Catalogue,
    step: int,
    *,
    planner: LoadPlanner | None,
    cooperative: bool | None,
) -> LoadReport:
    return load(
        state,
        **places.to_read(where.reading_id(catalogue, step)),
        **ranks.arguments,
        planner=planner,
        timeout_seconds=ranks.timeout_seconds,
        cooperative=cooperative,
    )


class _TimeLimits:
    def __init__(
        self,
        watch: SignalWatch,
        preemption_timeout_seconds: float | None,
        close_timeout_seconds: float,
        timeout_seconds: float,
    ) -> None:
        self._watch = watch
        self._preemption_timeout_seconds = preemption_timeout_seconds
        self._close_timeout_seconds = close_timeout_seconds
        self._timeout_seconds = timeout_seconds

    @property
    def ends_soon(self) -> bool:
        return self._preemption_timeout_seconds is not None

    def waiting(self, timeout_seconds: float | None = None) -> tuple[float, str]:
        left = self._watch.seconds_left(self._preemption_timeout_seconds)
        limit, setting = (
            (self._close_timeout_seconds, "close_timeout_seconds")
            if left is None
            else (left, "preemption_timeout_seconds")
        )
        return (limit if timeout_seconds is None else timeout_seconds), setting

    def phase(self) -> float:
        left = self._watch.seconds_left(self._preemption_timeout_seconds)
        return self._timeout_seconds if left is None else min(left, self._timeout_seconds)
