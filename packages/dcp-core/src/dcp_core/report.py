"""What a load did, and everything that stands against it, as records."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from dcp_core.errors import DcpError

__all__ = ["LoadMismatchError", "LoadProblem", "LoadReport"]

_SHOWN_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """One reason why a template and a checkpoint do not fit."""

    key: str
    kind: str
    """`missing`, `shape`, `kind` (tensor against object), `cast` (loses values) or `hole` (no stored data)."""
    message: str


class LoadMismatchError(DcpError, RuntimeError, ValueError):
    """The template cannot be loaded from this checkpoint; `problems` holds every reason, not only the first."""

    def __init__(self, problems: list[LoadProblem]) -> None:
        shown = "\n".join(f"  {problem.message}" for problem in problems[:_SHOWN_PROBLEMS])
        more = len(problems) - _SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        super().__init__(f"{len(problems)} problem(s) between the template and the checkpoint:\n{shown}{tail}")
        self.problems = problems

    def __reduce__(self) -> tuple[type[LoadMismatchError], tuple[list[LoadProblem]]]:
        return type(self), (self.problems,)


@dataclass(slots=True)
class LoadReport:
    """What `load` did on this rank. Keys are FQNs, sorted."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """In the template, not in the checkpoint (only with `allow_partial_load`)."""
    unexpected: tuple[str, ...] = ()
    """In the checkpoint, not in the template."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key → (stored dtype, dtype of the template), for values that were converted."""
    unverified: tuple[str, ...] = ()
    """Read without a check of their bytes: items whose writer left no CRC for the part that was needed."""
    bytes_read: int = 0
    save_id: str | None = None


def suggest(key: str, candidates: Iterable[str]) -> str:
    """`'; did you mean …?'` with the nearest names, or an empty string."""
    near = difflib.get_close_matches(key, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
