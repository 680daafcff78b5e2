"""Policies for keeping checkpoints, or parts of them, which can be combined with `|`."""

from __future__ import annotations

import ast
import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from dcp_io.roots.records import CheckpointRecord


class KeepPolicy(ABC):
    """Base class of policies that select the checkpoints to keep; they remove nothing."""

    parts: list[str] | tuple[str, ...] | None = None
    """What stays of the selected checkpoints: names, each with all names below it; None for everything."""

    @abstractmethod
    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps to keep.

        `records` are in the order of creation, which may differ from the order of steps; `now_seconds` is since the
        epoch.
        """

    def select(
        self,
        records: Sequence[CheckpointRecord],
        protected: Collection[int],
        is_fit: Callable[[int], bool],
        now_seconds: float | None = None,
    ) -> dict[int, tuple[str, ...] | None]:
        """Return the steps that stay (the policy's, the protected ones, and those found to be unfit) and their parts.

        All parts of any policy that keeps a step stay; None for the whole checkpoint. `is_fit` examines checkpoints
        that `KeepLast` or `KeepBest` selects. A quarantined checkpoint stays, whole, if the policy would keep it, but
        does not count.
        """
        records, now = CheckpointRecord.by_creation(records), time.time() if now_seconds is None else now_seconds
        good = [record for record in records if record.quarantined is None]
        damaged = {record.step for record in records if record.quarantined is not None}
        unfit: set[int] = set()
        kept: dict[int, tuple[str, ...] | None] = {}
        for part in parts_of(self):
            chosen = part.keep(good, now)
            while isinstance(part, KeepLast | KeepBest):
                found = {step for step in sorted(chosen, reverse=True) if not is_fit(step)}
                if not found:
                    break
                unfit |= found
                chosen = part.keep([record for record in good if record.step not in unfit], now)
            for step in chosen:
                known = kept.get(step, ())
                is_whole = known is None or part.parts is None
                kept[step] = None if is_whole else tuple(dict.fromkeys((*(known or ()), *(part.parts or ()))))
        spared = damaged & self.keep(records, now) if damaged else damaged
        return kept | dict.fromkeys((*protected, *spared, *unfit))

    @property
    def metrics(self) -> frozenset[str]:
        """Names of the metrics by which the policy selects."""
        return frozenset()

    def best(self) -> tuple[KeepBest, ...]:
        """Return the combined `KeepBest` policies."""
        return ()

    def text(self) -> str:
        """Return the policy as text for `parse`; ValueError for a policy of your own class."""
        if type(self) not in _KINDS.values():
            raise ValueError(
                f"{type(self).__name__} cannot be written as text, which another process reads; combine "
                f"{', '.join(_KINDS)} with |"
            )
        values: Any = self  # a dataclass, as all in the table
        fields = (each.name for each in dataclasses.fields(values) if not each.kw_only)
        arguments = [_literal(getattr(values, name)) for name in fields]
        arguments += [] if self.parts is None else [f"parts={[*self.parts]!r}"]
        return f"{type(self).__name__}({', '.join(arguments)})"

    @staticmethod
    def parse(text: str) -> KeepPolicy:
        """Parse a policy in Python syntax: calls of this package's classes, combined with `|`. No code is run.

        Raises ValueError for other text.

        Example:
            ```python
            from dcp_io import KeepEvery, KeepLast, KeepPolicy

            assert KeepPolicy.parse("KeepLast(2) | KeepEvery(1000)") == KeepLast(2) | KeepEvery(1000)
            ```
        """
        try:
            return _policy(ast.parse(text.strip(), mode="eval").body)
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(
                f"{text!r} is not a policy to keep ({error}); write one such as 'KeepLast(2) | KeepEvery(1000)', from "
                f"{', '.join(_KINDS)}"
            ) from error

    def __or__(self, other: KeepPolicy) -> KeepAny:
        if not isinstance(other, KeepPolicy):
            return NotImplemented
        return KeepAny((*parts_of(self), *parts_of(other)))


def parts_of(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    """Return the combined policies, or the policy."""
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


@dataclass(frozen=True, slots=True)
class KeepAny(KeepPolicy):
    """Policy that keeps a checkpoint if any of several policies keeps it."""

    policies: tuple[KeepPolicy, ...]

    @property
    def metrics(self) -> frozenset[str]:
        """All metrics."""
        return frozenset[str]().union(*(policy.metrics for policy in self.policies))

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the steps that any policy keeps."""
        return set().union(*(policy.keep(records, now_seconds) for policy in self.policies))

    def best(self) -> tuple[KeepBest, ...]:
        """Return all `KeepBest` policies."""
        return tuple(each for policy in self.policies for each in policy.best())

    def text(self) -> str:
        """Return the combined texts."""
        return " | ".join([policy.text() for policy in self.policies])


@dataclass(frozen=True, slots=True)
class _KeepParts(KeepPolicy):
    parts: list[str] | tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.parts is not None:
            names = tuple(self.parts) if isinstance(self.parts, list | tuple) else ()
            right = bool(names) and all(isinstance(name, str) and name for name in names)
            _check(right, f"parts={self.parts!r}: give a list of names, such as ['app.model']")
            object.__setattr__(self, "parts", names)
        self._check_numbers()

    def _check_numbers(self) -> None:
        pass

    def __repr__(self) -> str:
        return self.text() if type(self) in _KINDS.values() else object.__repr__(self)


@dataclass(frozen=True, slots=True, repr=False)
class KeepAll(_KeepParts):
    """Policy that keeps every checkpoint.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepAll

        records = [CheckpointRecord(step, created_seconds=step) for step in (1, 2, 3)]
        assert KeepAll().keep(records, 30.0) == {1, 2, 3}
        ```
    """

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return all steps."""
        del now_seconds
        return {record.step for record in records}


@dataclass(frozen=True, slots=True, repr=False)
class KeepLast(_KeepParts):
    """Policy that keeps the `count` newest checkpoints by creation time.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepLast

        records = [CheckpointRecord(step, created_seconds=step) for step in (1, 2, 3)]
        assert KeepLast(2).keep(records, 30.0) == {2, 3}
        ```
    """

    count: int

    def _check_numbers(self) -> None:
        _check(_is_count(self.count), f"KeepLast({self.count!r}): keep a whole number of at least one")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the newest steps."""
        del now_seconds
        return {record.step for record in CheckpointRecord.by_creation(records)[-self.count :]}


@dataclass(frozen=True, slots=True, repr=False)
class KeepBest(_KeepParts):
    """Policy that keeps the `count` best checkpoints by a metric; of equally good checkpoints, the newer.

    A checkpoint without the metric, or with NaN, is not kept. `mode` is `min` if lower is better, `max` if higher is
    better.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepBest

        losses = {0: 0.5, 1: 0.2, 2: 0.9}
        records = [CheckpointRecord(step, step, {"loss": loss}) for step, loss in losses.items()]
        assert KeepBest(1, "loss", mode="min").keep(records, 30.0) == {1}
        ```
    """

    count: int
    metric: str
    mode: Literal["min", "max"] = "min"

    def _check_numbers(self) -> None:
        _check(_is_count(self.count), f"KeepBest({self.count!r}): keep a whole number of at least one")
        _check(isinstance(self.metric, str), f"KeepBest: metric is {self.metric!r}; give the name of a metric")
        _check(self.mode in ("min", "max"), f"KeepBest: mode is {self.mode!r}; choose 'min' or 'max'")

    @property
    def metrics(self) -> frozenset[str]:
        """Name of the metric."""
        return frozenset({self.metric})

    def best(self) -> tuple[KeepBest, ...]:
        """Return this policy."""
        return (self,)

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the best steps."""
        del now_seconds
        sign = 1 if self.mode == "min" else -1
        found = [
            (sign * record.metrics[self.metric], -record.created_seconds, -record.step, record.step)
            for record in records
            if not math.isnan(record.metrics.get(self.metric, math.nan))
        ]
        return {step for *_, step in sorted(found)[: self.count]}


@dataclass(frozen=True, slots=True, repr=False)
class KeepEvery(_KeepParts):
    """Policy that keeps steps that are multiples of `steps`, or parts of their checkpoints.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepEvery, KeepLast

        records = [CheckpointRecord(step, created_seconds=step) for step in (5, 10, 15)]
        assert KeepEvery(10).keep(records, 30.0) == {10}
        policy = KeepLast(1) | KeepEvery(5, parts=["app.model"])
        assert policy.select(records, (), lambda step: True) == {5: ("app.model",), 10: ("app.model",), 15: None}
        ```
    """

    steps: int

    def _check_numbers(self) -> None:
        _check(_is_count(self.steps), f"KeepEvery({self.steps!r}): a number of steps is a whole number of at least 1")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the multiples."""
        del now_seconds
        return {record.step for record in records if record.step % self.steps == 0}


@dataclass(frozen=True, slots=True, repr=False)
class KeepFor(_KeepParts):
    """Policy that keeps each checkpoint for `seconds` seconds after its creation.

    Example:
        ```python
        from dcp_io import CheckpointRecord, KeepFor, KeepLast

        records = [CheckpointRecord(step, created_seconds=step) for step in (1, 2, 3)]
        assert (KeepLast(1) | KeepFor(28.5)).keep(records, 30.0) == {2, 3}
        ```
    """

    seconds: float

    def _check_numbers(self) -> None:
        _check(isinstance(self.seconds, Real) and self.seconds > 0, f"KeepFor({self.seconds!r}): a time is more than 0")

    def keep(self, records: Sequence[CheckpointRecord], now_seconds: float) -> set[int]:
        """Return the young steps."""
        return {record.step for record in records if now_seconds - record.created_seconds < self.seconds}


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _check(right: bool, message: str) -> None:
    if not right:
        raise ValueError(message)


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast)}


def _literal(value: Any) -> str:
    if isinstance(value, Integral):
        return repr(int(value))
    if isinstance(value, Real):
        return "1e999" if math.isinf(value) else repr(float(value))
    return repr(str(value))


def _policy(node: ast.expr) -> KeepPolicy:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _policy(node.left) | _policy(node.right)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in _KINDS:
        raise ValueError("unknown policy")
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg is not None}
    found: KeepPolicy = _KINDS[node.func.id](*map(ast.literal_eval, node.args), **named)
    return found
