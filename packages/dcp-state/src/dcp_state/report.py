"""Reports of loads into a model or optimizer, and errors of state that does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.nn.modules.module import _IncompatibleKeys

from dcp_core.errors import DcpError, UnsupportedValueError

_SHOWN_PROBLEMS = 50


class StateMismatchError(DcpError, RuntimeError, ValueError):
    """A state dict does not fit the model or optimizer. Neither was changed, unless the model has load hooks.

    If the `load_state_dict` of an optimizer or scheduler refuses its state, those before it were restored.

    `what` was to be restored, e.g. `optimizer state`; `problems` are sentences with FQN and remedy.
    """

    def __init__(self, what: str, problems: Sequence[str]) -> None:
        self.what = what
        self.problems = tuple(problems)
        shown = "\n".join(f"  {problem}" for problem in self.problems[:_SHOWN_PROBLEMS])
        more = len(self.problems) - _SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        super().__init__(f"{what}: {len(self.problems)} problem(s)\n{shown}{tail}")

    def __reduce__(self) -> tuple[type[StateMismatchError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.what, self.problems)


def named_values(value: Any, what: str, of: str = "") -> Mapping[str, Any]:
    """Return a state dict or a part of it, or raise StateMismatchError for another kind of value or key."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    keys = [name for name in value if not isinstance(name, str)] if isinstance(value, Mapping) else None
    found = f"a {type(value).__name__}" if keys is None else f"a dict with the key {keys[0]!r:.80}"
    raise _foreign(what, f"{of or what} must be a dict of names, not {found}")


@contextmanager
def refusals(what: str, of: str) -> Iterator[None]:
    """Raise StateMismatchError if an object's `load_state_dict` or constructor cannot use a saved value."""
    try:
        yield
    except DcpError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise _foreign(what, f"{of} refuses it: {error!r:.200}") from error


def _foreign(what: str, problem: str) -> StateMismatchError:
    return StateMismatchError(what, [f"{problem}. Something else may have saved it: load single values with load_keys"])


def nameless_state(optimizer: Any, keys: Sequence[Any]) -> UnsupportedValueError:
    """Return the error for state keys that are not parameters."""
    return UnsupportedValueError(
        f"{class_name(optimizer)} has state that belongs to no parameter "
        f"({', '.join(map(repr, keys[:5]))}) and so has no name; save `optimizer.state_dict()` as it is"
    )


def class_name(value: object) -> str:
    """Return a class's full name, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


@dataclass(slots=True)
class StateReport:
    """Report of a load on this rank: names restored, and name → reason for names initialised or dropped.

    Names are FQNs for the model, and `state.<FQN>` for optimizer state.
    """

    restored: list[str] = field(default_factory=list)
    initialised: dict[str, str] = field(default_factory=dict)
    """State that was initialised or left unchanged → the reason."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Unused value's name → the reason."""

    def merge(self, other: StateReport) -> None:
        """Add the entries of another report."""
        self.restored += other.restored
        self.initialised |= other.initialised
        self.dropped |= other.dropped

    def __str__(self) -> str:
        lines = [f"{len(self.restored)} restored"]
        for word, entries in (("initialised", self.initialised), ("dropped", self.dropped)):
            lines += [f"{word}: {name} ({why})" for name, why in sorted(entries.items())]
        return "\n".join(lines)


class IncompatibleKeys(_IncompatibleKeys):
    """Result of loading a model: FQNs as `missing_keys` and `unexpected_keys`, and a `StateReport` as `report`."""

    report: StateReport

    @classmethod
    def of(cls, missing: list[str], unexpected: list[str], report: StateReport) -> IncompatibleKeys:
        """Return the result for these names."""
        keys = cls(missing, unexpected)
        keys.report = report
        return keys

    def __reduce__(self) -> Any:
        return type(self).of, (self.missing_keys, self.unexpected_keys, self.report)
