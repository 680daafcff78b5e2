"""Maintenance of a manager's root: prepares each save; after a save, updates `latest` and removes checkpoints.

The file `latest` has the directory name of the checkpoint that was published last.
"""

from __future__ import annotations

import contextlib
import reprlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from numbers import Real
from typing import Any, Literal, get_args

from dcp_base.hookspecs import CheckpointEvent
from dcp_base.logs import library_logger
from dcp_core import DcpError, plugins
from dcp_io import KeepBest, KeepPolicy
from dcp_io.roots.catalogue import Catalogue
from dcp_manager.background import BackgroundSaves
from dcp_manager.protection import Protection
from dcp_manager.root_places import RootPlaces
from dcp_manager.space import Spacing, say_when_space_ends
from dcp_manager.together import Ranks

_log = library_logger(__name__)

LowerSteps = Literal["warn", "raise", "allow"]


class StepGuard:
    """Check of a step to be saved against the highest step under the root. Coordinator only."""

    def __init__(self, name: Callable[[int], str], policy: LowerSteps) -> None:
        if policy not in get_args(LowerSteps):
            raise ValueError(f"lower_steps is {policy!r}; choose 'warn', 'raise' or 'allow'")
        self._name = name
        self.policy: LowerSteps = policy
        self._went_back = False
        self._restored: int | None = None

    def restored(self, step: int) -> None:
        """Record a restored step; higher steps count as abandoned on purpose."""
        self._restored = step

    def check(
        self, step: int, highest: int | None, running: Collection[int] = (), beyond: tuple[int, str] | None = None
    ) -> None:
        """Raise ValueError if a step is too low and the policy is `raise`."""
        top = max((*running, step if highest is None else highest))
        place = self._name(top)
        if beyond is not None and beyond[0] > top:
            highest, place = beyond
            top = highest
        self._went_back &= step <= top
        replaces = step == highest and self._went_back
        if self.policy == "allow" or not (step < top or replaces):
            return
        message = _message(step, top, place)
        if self.policy == "raise":
            raise ValueError(message)
        self._went_back = True
        _log.warning("%s", message)

    def spares_higher(self, step: int) -> bool:
        """Return whether undamaged higher steps must be kept."""
        on_purpose = self._restored is not None and self._restored <= step
        return self.policy != "allow" and not on_purpose


def _message(step: int, top: int, place: str) -> str:
    root = place.rpartition("/")[0]
    if step == top:
        return f"{place} is replaced by a training that went back to lower steps"
    return (
        f"step {step} is lower than step {top}, which is in {root}: the next restore() and latest() take "
        f"step {top}, not step {step}. If training began again by mistake, stop it and restore first. If it went "
        f"back on purpose, remove the higher steps (dcp rm {place}) or use another root; with lower_steps='allow' "
        "nothing is said"
    )


class Retention:
    """Retention of a catalogue's checkpoints by a keep policy. Coordinator only."""

    def __init__(self, catalogue: Catalogue, policy: KeepPolicy) -> None:
        self._catalogue = catalogue
        self._policy = policy
        self._swept = False

    @property
    def metrics(self) -> frozenset[str]:
        """Names of the policy's metrics."""
        return self._policy.metrics

    @property
    def best(self) -> tuple[KeepBest, ...]:
        """The policies that keep the best."""
        return self._policy.best()

    def say_when_space_ends(self, spacing: Spacing, step: int) -> None:
        """See `space.say_when_space_ends`."""
        say_when_space_ends(self._catalogue, self._policy, spacing, step)

    def sweep(self, running: Collection[int], *, always: bool = False) -> None:
        """Remove leftovers of killed processes, once or `always`."""
        if always or not self._swept:
            self._catalogue.sweep(running=running)
            self._swept = True

    def apply(self, running: Collection[int], *, published: int, spares_higher: bool = False) -> list[int]:
        """Remove the checkpoints that the policy does not select; return their steps.

        Steps in `running` and the step `published` are kept, even if others are higher: training may have gone back.
        With `spares_higher`, undamaged checkpoints of higher steps are also kept.
        """
        removed, left = self._catalogue.retain(
            self._policy,
            arrived=published,
            spares_higher=spares_higher,
            protected=lambda _: running,
        )
        if left is not None:
            self._catalogue.sweep(left, running=running)
        return removed


def tell_removed(checkpoint_ids: Iterable[str]) -> None:
    """Notify observers of removed checkpoints."""
    for place in checkpoint_ids:
        plugins.emit(CheckpointEvent("manage", "remove", "finished", 0, place))


class Upkeep:
    """Maintenance of the first place of the root before and after saves."""

    def __init__(
        self,
        where: RootPlaces,
        retention: Retention,
        guard: StepGuard,
        background: BackgroundSaves,
        ranks: Ranks,
        spacing: Spacing,
    ) -> None:
        self._where = where
        self._spacing = spacing
        self._catalogue = where.catalogues[0]
        self._retention = retention
        self._guard = guard
        self._background = background
        self._ranks = ranks
        self._protection: Protection | None = None
        self._published: int | None = None
        self._lock = threading.RLock()
        self._preparing: set[int] = set()
        self._doubtful: set[int] = set()
        """Steps that failed here, but may be published on another host; the next start checks them."""
        self._told_missing: set[str] = set()

    def protect(self) -> None:
        """Copy later saves to other hosts, if the root says so. Collective."""
        self._protection = self._where.protection(self._ranks, self._retain)

    def close(self, timeout_seconds: float) -> None:
        """Wait for a copy, at most `timeout_seconds`."""
        if self._protection is not None:
            self._protection.close(timeout_seconds)

    def take_state(
        self,
        step: int,
        state: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
        metrics: Mapping[str, float],
        *,
        hurry: bool = False,
    ) -> dict[str, Any]:
        """Return the state to save, and prepare the step's directory, or raise CheckpointException on all ranks.

        Ranks: every rank; collective.
        """
        values: dict[str, Any] = {}
        if self._where.per_host:  # the notes on all hosts have the coordinator's metrics
            metrics = self._ranks.decide("metrics of a save", lambda: self._numbers(step, metrics))

        def own() -> None:
            nonlocal metrics
            if self._ranks.is_coordinator:
                metrics = self._numbers(step, metrics)
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

    def _numbers(self, step: int, metrics: Mapping[str, Any]) -> dict[str, float]:
        if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
            raise TypeError(f"metrics is {reprlib.repr(metrics)}; pass a dict of names and numbers. Nothing was saved")
        found = {name: _number(name, value) for name, value in metrics.items()}
        missing = sorted(self._retention.metrics - found.keys() - self._told_missing)
        if missing:
            self._told_missing.update(missing)
            _log.warning(
                "the save of step %d has no metric %s, so KeepBest never keeps its checkpoint; it has %s. Pass "
                "maybe_save(…, metrics={%r: …}) with each save that may be the best (said once)",
                step,
                ", ".join(map(repr, missing)),
                ", ".join(map(repr, found)) or "no metrics",
                missing[0],
            )
        return found

    def prepare(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prepare a step's directory, on ranks that maintain a place. Raises ValueError as `StepGuard.check`."""
        with self._lock:
            highest = self._catalogue.highest()
            near, beyond = (None if highest is None else highest.step), None
            if self._ranks.is_coordinator:
                beyond = self._where.higher_beyond(step, surely=near is None or self._guard.policy == "raise")
            self._guard.check(step, near, self._background.steps, beyond)
            # Until the saver has it, an earlier save may end and look for leftovers.
            self._preparing.add(step)
            self._retention.sweep({*self._background.steps, step})
            self._catalogue.prepare(step, metrics, after=highest, best=self._retention.best)

    def begun(self, number: int, step: int, future: Future[Any]) -> None:
        """Register a background save; at its end `latest` is published and retention runs."""
        with self._lock:
            self._preparing.discard(step)
            self._background.add(number, step, future, lambda saved: self._settle(step, saved=saved))

    def ended(self, step: int, *, saved: bool) -> None:
        """Register the end of a save in the foreground, or of one that did not begin."""
        self._preparing.discard(step)
        self._settle(step, saved=saved)

    def _settle(self, step: int, *, saved: bool) -> None:
        """Publish `latest` and apply retention, if this rank maintains a place; never raises."""
        if self._protection is not None:
            self._protection.settle(step, saved=saved)
        if not self._where.keeps(self._ranks):
            return
        with self._lock:
            try:
                running = self._running(step)
                if saved:
                    self._catalogue.published(step)
                    is_first, self._published = self._published is None, step
                    self._remove_old(step)
                    if is_first and self._where.has_one_place:
                        self._retention.say_when_space_ends(self._spacing, step)
                    self._where.saved()
                elif not self._ranks.is_coordinator:
                    self._doubtful.add(step)
                else:
                    self._catalogue.failed(step)
                    self._retention.sweep(running, always=True)
            except (OSError, DcpError):  # what stays too long is removed after the next save
                _log.warning("step %d: looking after the other checkpoints failed", step, exc_info=True)

    def _running(self, step: int) -> set[int]:
        copied = frozenset[int]() if self._protection is None else self._protection.steps
        others = {other for other in self._background.steps if other != step}
        return self._preparing | self._doubtful | copied | others

    def _remove_old(self, published: int) -> None:
        removed = self._retention.apply(
            self._running(published), published=published, spares_higher=self._guard.spares_higher(published)
        )
        tell_removed(self._where.checkpoint_id(self._catalogue, other) for other in removed)

    def promoted(self) -> None:
        """Apply retention after the last promotion."""
        if self._published is not None:
            self._retain(self._published)

    def _retain(self, copied: int) -> None:
        if not self._where.keeps(self._ranks):
            return
        with self._lock:
            try:
                self._remove_old(copied if self._published is None else self._published)
            except (OSError, DcpError):
                _log.warning("step %d: looking after the other checkpoints failed", copied, exc_info=True)


def _number(name: str, value: Any) -> float:
    shape = getattr(value, "shape", None)
    if hasattr(value, "full_tensor"):  # its item() may be a collective, and this is one rank
        what = "a DTensor, of which each rank may hold a part: pass value.full_tensor().item()"
    else:
        with contextlib.suppress(Exception):  # of an object that is not ours
            # Of a masked number, it is None; of a time in nanoseconds, an int.
            item = value.tolist() if shape == () else value
            if isinstance(item, Real) and not (shape == () and "time" in str(value.dtype)):
                return float(item)
        what = reprlib.repr(value) if shape is None else f"a {type(value).__name__} of shape {tuple(shape)}"
    raise TypeError(
        f"the metric {name!r} is {what}. Nothing was saved. A metric is a number that fits into a float, or a tensor "
        "or numpy scalar without dimensions; leave out a metric that has no value at this step"
    )
