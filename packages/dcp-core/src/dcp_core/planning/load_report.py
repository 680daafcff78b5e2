"""`LoadReport`, `LoadProblem`, and the warning about keys that no rank loaded."""

from __future__ import annotations

import difflib
import warnings
import zlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from dcp_core.errors import DcpError
from dcp_core.records.metadata import Metadata

SHOWN_PROBLEMS = 50
_SHOWN_KEYS = 10
_SHOWN_SURPLUS = 3
# Name components that more names share are ignored; up to this many names are compared letter by letter.
_COMMON = 2_000
_COMPARED = 100


@dataclass(frozen=True, slots=True)
class LoadProblem:
    """One mismatch of template and checkpoint."""

    key: str
    kind: str
    """One of `missing`, `unexpected`, `shape`, `kind` (tensor or object), `cast` (lossy dtype), `hole` (elements
    without stored data), `overlap` (elements stored twice), `memory` (the template's tensor cannot be filled), `tie`
    (different values for one memory), `rename` (the template lacks a renamed key) or `ranks` (a `PerRank` saved by
    another number of ranks).
    """
    message: str


class LoadMismatchError(DcpError, RuntimeError, ValueError):
    """Template and checkpoint do not match; see `problems`."""

    def __init__(self, problems: list[LoadProblem]) -> None:
        shown = "\n".join(f"  {problem.message}" for problem in problems[:SHOWN_PROBLEMS])
        more = len(problems) - SHOWN_PROBLEMS
        tail = f"\n  … and {more} more" if more > 0 else ""
        if any(problem.kind == "missing" for problem in problems):
            tail += "\n  to keep the template's values of missing keys: DefaultLoadPlanner(allow_partial_load=True)"
        super().__init__(f"{len(problems)} problem(s) between the template and the checkpoint:\n{shown}{tail}")
        self.problems = problems

    def __reduce__(self) -> tuple[type[LoadMismatchError], tuple[list[LoadProblem]]]:
        return type(self), (self.problems,)


@dataclass(slots=True, repr=False)
class LoadReport:
    """Report of a load on this rank. Keys are sorted FQNs of the template unless stated otherwise."""

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Keys that the checkpoint lacks; only with `allow_partial_load`."""
    unexpected: tuple[str, ...] = ()
    """Keys of the checkpoint that the template lacks."""
    cast: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Converted key → (stored dtype, dtype in the template)."""
    resized: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Key → (stored shape, shape in the template), with `allow_resize`."""
    initialised: tuple[str, ...] = ()
    """Keys of meta tensors that were allocated as zeros and not filled completely."""
    per_rank: dict[str, int | None] = field(default_factory=dict)
    """Key of a `PerRank` → rank of the loaded entry; None if no entry was loaded, or all ranks share one."""
    derived: dict[str, int] = field(default_factory=dict)
    """Key of a `PerRank` without an entry for this rank → rank of the entry from which its state was derived."""
    renamed: dict[str, str] = field(default_factory=dict)
    """Key in the template → key in the checkpoint, where they differ."""
    overlapping: tuple[tuple[str, str], ...] = ()
    """Pairs of tensors that share memory but were not tied at the save: one may have overwritten the other."""
    unverified: tuple[str, ...] = ()
    """Keys read without a CRC."""
    bytes_read: int = 0
    save_id: str | None = None
    cooperative: bool = False
    """Whether one rank read each stored byte and sent it to the others."""
    cooperative_reason: str = ""
    """Reason for `cooperative`, as a clause."""
    bytes_received: int = 0
    """Bytes that other ranks read for this rank."""

    def __repr__(self) -> str:
        return f"LoadReport({'; '.join(self.summary().splitlines())})"

    def summary(self) -> str:
        """Return a text with one line per kind of finding, and the first keys."""
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
        if not self.cooperative_reason:
            return []
        amounts = f"{self.bytes_read:,} bytes by this rank"
        if self.cooperative:
            amounts += f", {self.bytes_received:,} from other ranks"
        return [f"read {'together' if self.cooperative else 'alone'} ({self.cooperative_reason}): {amounts}"]


class NearNames:
    """Finds similar names."""

    def __init__(self, candidates: Iterable[str]) -> None:
        self._candidates = sorted(candidates)
        self._by_part: dict[str, list[str]] = {}
        for name in self._candidates:
            for part in set(name.split(".")):
                self._by_part.setdefault(part, []).append(name)

    def suggest(self, key: str) -> str:
        """See `suggest`."""
        shared: Counter[str] = Counter()
        for part in set(key.split(".")):
            names = self._by_part.get(part, ())
            if len(names) <= _COMMON:
                shared.update(names)
        likely = [name for name, _ in shared.most_common(_COMPARED)]
        return suggest(key, likely or self._candidates[:_COMMON])


def suggest(key: str, candidates: Iterable[str]) -> str:
    """Return `'; did you mean …?'` with similar candidates, or nothing."""
    near = difflib.get_close_matches(key, list(candidates), n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def surplus_bits(
    metadata: Metadata, template: Iterable[object], unexpected: Collection[str], per_rank: Iterable[str]
) -> bytes:
    """Return one compressed bit per checkpoint key: whether this rank ignores it.

    Keys below missing top-level keys, and other ranks' `PerRank` entries, do not count.
    """
    paths, tops = metadata.planner_data or {}, {str(key) for key in template}
    of_ranks = tuple(f"{name}." for name in per_rank)
    surplus = {
        name for name in unexpected if str(paths.get(name, (name,))[0]) in tops and not name.startswith(of_ranks)
    }
    if not surplus:
        return b""
    bits = np.array([name in surplus for name in metadata.state_dict_metadata], np.bool_)
    return zlib.compress(np.packbits(bits).tobytes(), 1)


def warn_of_surplus(metadata: Metadata, bits_of_ranks: Collection[bytes]) -> None:
    """Warn of the keys that all ranks ignore."""
    bits = [np.frombuffer(zlib.decompress(each), np.uint8) for each in bits_of_ranks]
    names = [*metadata.state_dict_metadata]
    unused = [names[at] for at in np.flatnonzero(np.unpackbits(np.bitwise_and.reduce(bits)))]
    if unused:
        shown = ", ".join(map(repr, unused[:_SHOWN_SURPLUS])) + (", …" if len(unused) > _SHOWN_SURPLUS else "")
        warnings.warn(
            f"{len(unused)} key(s) of the checkpoint were not loaded, because the template has no place for them: "
            f"{shown}. LoadReport.unexpected has all of them; DefaultLoadPlanner(strict=True) refuses them",
            UserWarning,
            stacklevel=2,
        )
