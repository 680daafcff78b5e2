"""Errors of getting and setting the state of models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dcp_core.errors import DcpError

__all__ = ["StateMismatchError", "UnknownParameterError", "UnsupportedOptimizerError", "class_name", "nameless_state"]

_SHOWN_PROBLEMS = 50


class StateMismatchError(DcpError, RuntimeError, ValueError):
    """A state dict does not fit the model or optimizer, which was not changed; `problems` has every reason.

    Args:
        what: The state that was to be restored, e.g. `optimizer state`.
        problems: Reasons, one sentence each, with the FQN and the remedy.
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


class UnknownParameterError(DcpError, LookupError, ValueError):
    """An optimizer has a parameter that is in no module of the model, so it has no name."""


class UnsupportedOptimizerError(DcpError, TypeError, NotImplementedError):
    """The state of this kind of optimizer cannot be stored by parameter name."""


def nameless_state(optimizer: Any, keys: Sequence[Any]) -> UnsupportedOptimizerError:
    """Return the error for an optimizer whose `state` has keys that are not parameters."""
    return UnsupportedOptimizerError(
        f"{class_name(optimizer)} has state that belongs to no parameter "
        f"({', '.join(map(repr, keys[:5]))}) and so has no name; save `optimizer.state_dict()` as it is"
    )


def class_name(value: object) -> str:
    """Return the full name of a value's class, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
