"""Reports of loads: what was loaded, and every mismatch of template and checkpoint, as records."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from dcp_core.errors import DcpError

__all__ = ["SHOWN_PROBLEMS", "LoadMismatchError", "LoadProblem", "LoadReport", "NearNames", "suggest"]

SHOWN_PROBLEMS = 50
_SHOWN_KEYS = 10
# Parts that many names share say little; up to so many names are compared letter by letter.
_COMMON = 2_000
_COMPARED = 100


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """One reason why a template and a checkpoint do not fit."""

    key: str
    kind: str
    """`missing`, `unexpected`, `shape`, `kind` (tensor against object), `cast` (loses values), `hole` (no stored data),
    `overlap` (stored twice), `memory` (the template's tensor cannot be filled) or `rename` (of something that the
    template lacks)."""
    message: str


class LoadMismatchError(DcpError, RuntimeError, ValueError):
    """The template cannot be loaded from this checkpoint; `problems` holds every reason, not only the first."""

    def __init__(self, problems: list[LoadProblem]) -> None:
        shown = "\n".join(f"  {problem.message}" for problem in problems[:SHOWN_PROBLEMS])
        more = len(problems) - SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        super().__init__(f"{len(problems)} problem(s) between the template and the checkpoint:\n{shown}{tail}")
        self.problems = problems

    def __reduce__(self) -> tuple[type[LoadMismatchError], tuple[list[LoadProblem]]]:
        return type(self), (self.problems,)


@dataclass(slots=True)
class LoadReport:
    """Report of what `load` did on this rank. Keys are FQNs, sorted."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Keys in the template, not in the checkpoint (only with `allow_partial_load`)."""
    unexpected: tuple[str, ...] = ()
    """Keys in the checkpoint, not in the template."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key → (stored dtype, dtype of the template), for values that were converted."""
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Key → (stored shape, shape of the template), for tensors of which the common part was loaded."""
    initialised: tuple[str, ...] = ()
    """Tensors without memory (on the meta device) that the load allocated and could not fill: zeros, or in part."""
    per_rank: dict[str, int | None] = field(default_factory=dict)
    """`PerRank` value → the rank whose value this rank got; None where it kept its own, or all ranks share one."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Key → name in the checkpoint, where they differ."""
    overlapping: tuple[tuple[str, str], ...] = ()
    """Pairs of keys whose tensors share memory in the template, though the checkpoint may hold different values for
    them: the values of the one may have replaced those of the other. Tensors tied at the save are not among them."""
    unverified: tuple[str, ...] = ()
    """Keys read without a check of their bytes: items whose writer left no CRC for the part that was needed."""
    bytes_read: int = 0
    save_id: str | None = None

    def summary(self) -> str:
        """Return a line for each kind of finding, with the first few keys."""
        kinds: dict[str, Collection[str]] = {
            "loaded": self.loaded,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "cast": [f"{key} ({old} → {new})" for key, (old, new) in self.cast.items()],
            "resized": [f"{key} ({old} → {new})" for key, (old, new) in self.resized.items()],
            "initialised": self.initialised,
            "per rank": [f"{key} (rank {source})" for key, source in self.per_rank.items()],
            "renamed": [f"{key} (from {stored})" for key, stored in self.renamed.items()],
            "overlapping": [f"{one} and {other}" for one, other in self.overlapping],
            "unverified": self.unverified,
        }
        lines = []
        for kind, keys in kinds.items():
            if keys:
                shown = "" if kind == "loaded" else ": " + ", ".join([*keys][:_SHOWN_KEYS])
                more = ", …" if shown and len(keys) > _SHOWN_KEYS else ""
                lines.append(f"{len(keys):,} {kind}{shown}{more}")
        return "\n".join(lines) or "nothing was loaded"


class NearNames:
    """Finds names similar to a missing name; among many names, only names that share parts between dots with it.

    Args:
        candidates: Names that exist.
    """

    def __init__(self, candidates: Iterable[str]) -> None:
        self._candidates = sorted(candidates)
        self._by_part: dict[str, list[str]] = {}
        for name in self._candidates:
            for part in set(name.split(".")):
                self._by_part.setdefault(part, []).append(name)

    def suggest(self, key: str) -> str:
        """Return `'; did you mean …?'` with the nearest names, or an empty string."""
        shared: Counter[str] = Counter()
        for part in set(key.split(".")):
            names = self._by_part.get(part, ())
            if len(names) <= _COMMON:
                shared.update(names)
        likely = [name for name, _ in shared.most_common(_COMPARED)]
        return suggest(key, likely or self._candidates[:_COMMON])


def suggest(key: str, candidates: Iterable[str]) -> str:
    """Return `'; did you mean …?'` with the nearest names, or an empty string."""
    near = difflib.get_close_matches(key, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
