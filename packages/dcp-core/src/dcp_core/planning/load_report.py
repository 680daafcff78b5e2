"""Records of a load's result: `LoadReport`, and `LoadProblem` for each mismatch of template and checkpoint."""

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
    """One mismatch of template and checkpoint, with the kind, the key and a message."""

    key: str
    kind: str
    """Kind of the mismatch: `missing`, `unexpected`, `shape`, `kind` (a tensor instead of an object, or the reverse),
    `cast` (lossy conversion of dtype), `hole` (elements without stored data), `overlap` (elements stored twice),
    `memory` (the template's tensor cannot be filled), `rename` (renamed key that is not in the template) or `ranks`
    (a `PerRank` value of another number of ranks)."""
    message: str


class LoadMismatchError(DcpError, RuntimeError, ValueError):
    """Template and checkpoint do not match; `problems` lists all mismatches, not only the first."""

    def __init__(self, problems: list[LoadProblem]) -> None:
        shown = "\n".join(f"  {problem.message}" for problem in problems[:SHOWN_PROBLEMS])
        more = len(problems) - SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        super().__init__(f"{len(problems)} problem(s) between the template and the checkpoint:\n{shown}{tail}")
        self.problems = problems

    def __reduce__(self) -> tuple[type[LoadMismatchError], tuple[list[LoadProblem]]]:
        return type(self), (self.problems,)


@dataclass(slots=True, repr=False)
class LoadReport:
    """Report of a load on this rank. Keys are FQNs in the template, sorted, unless stated otherwise.

    Attributes:
        loaded: Keys of the tensors and objects that were loaded.
        bytes_read: Number of bytes that this rank read from storage.
        save_id: Save id of the checkpoint; None if the checkpoint records none.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Keys of the template that are missing from the checkpoint; only with `allow_partial_load`."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that are not in the template."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Key → (stored dtype, dtype in the template), for tensors that were converted."""
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Key → (stored shape, shape in the template), for tensors loaded with `allow_resize`."""
    initialised: tuple[str, ...] = ()
    """Keys of meta tensors that the load allocated as zeros and filled not at all or only in part."""
    per_rank: dict[str, int | None] = field(default_factory=dict)
    """Key of a `PerRank` → rank whose saved entry was loaded; None if no entry was loaded, or all ranks share one."""
    derived: dict[str, int] = field(default_factory=dict)
    """Key of a `PerRank` whose state was derived, because the checkpoint has none of this rank → rank from whose entry
    it was derived. Random states, for example: this rank draws other numbers than any rank that saved."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Key in the template → key in the checkpoint, where they differ."""
    overlapping: tuple[tuple[str, str], ...] = ()
    """Pairs of keys whose tensors share memory in the template although they were not tied at the save: loading one
    tensor may have overwritten the other."""
    unverified: tuple[str, ...] = ()
    """Keys whose bytes were read without a check, because the checkpoint has no CRC of the bytes that were read."""
    bytes_read: int = 0
    save_id: str | None = None
    cooperative: bool = False
    """Whether the ranks have read together, so that each stored byte was read by one rank and passed on to others."""
    cooperative_reason: str = ""
    """Reason why they have, or have not, as a clause."""
    bytes_received: int = 0
    """Number of bytes that other ranks read from storage for this rank."""

    def __repr__(self) -> str:
        """Return a short text: notebooks print what the last line of a cell returns."""
        return f"LoadReport({'; '.join(self.summary().splitlines())})"

    def summary(self) -> str:
        """Return a text for logs: one line for each kind of finding, with the first few keys."""
        kinds: dict[str, Collection[str]] = {
            "loaded": self.loaded,
            "missing": self.missing,
            "unexpected": self.unexpected,
            "cast": [f"{key} ({old} → {new})" for key, (old, new) in self.cast.items()],
            "resized": [f"{key} ({old} → {new})" for key, (old, new) in self.resized.items()],
            "initialised": self.initialised,
            "per rank": [f"{key} (rank {source})" for key, source in self.per_rank.items()],
            "derived": [f"{key} (from rank {source})" for key, source in self.derived.items()],
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
        return "\n".join([*(lines or ["nothing was loaded"]), *self._way()])

    def _way(self) -> list[str]:
        """Return a line on how the bytes were read; none for a report that no load has made."""
        if not self.cooperative_reason:
            return []
        amounts = f"{self.bytes_read:,} bytes by this rank"
        if self.cooperative:
            amounts += f", {self.bytes_received:,} from other ranks"
        return [f"read {'together' if self.cooperative else 'alone'} ({self.cooperative_reason}): {amounts}"]


class NearNames:
    """Search for existing names that are similar to a missing name, for error messages.

    Args:
        candidates: Existing names. If there are many, only those that share a dotted component are compared.
    """

    def __init__(self, candidates: Iterable[str]) -> None:
        self._candidates = sorted(candidates)
        self._by_part: dict[str, list[str]] = {}
        for name in self._candidates:
            for part in set(name.split(".")):
                self._by_part.setdefault(part, []).append(name)

    def suggest(self, key: str) -> str:
        """Return `'; did you mean …?'` with the names most similar to `key`, or an empty text if none is similar."""
        shared: Counter[str] = Counter()
        for part in set(key.split(".")):
            names = self._by_part.get(part, ())
            if len(names) <= _COMMON:
                shared.update(names)
        likely = [name for name, _ in shared.most_common(_COMPARED)]
        return suggest(key, likely or self._candidates[:_COMMON])


def suggest(key: str, candidates: Iterable[str]) -> str:
    """Return `'; did you mean …?'` with the candidates most similar to `key`, or an empty text if none is similar."""
    near = difflib.get_close_matches(key, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""
