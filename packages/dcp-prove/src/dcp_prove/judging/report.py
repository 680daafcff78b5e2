"""Report of a proof: whether the resumed run was equal, the first difference, and its likely cause."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dcp_core import DcpError
from dcp_prove.judging.omissions import OMISSIONS

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between the uninterrupted and the resumed run."""

    name: str
    """A part of the state, `loss`, `samples` or `batches`."""
    step: int
    after_restore: bool
    """Whether it was seen right after the restore, or after the step."""
    rank: int
    expected: str
    """Value in the uninterrupted run, as a short text, or empty."""
    found: str
    omission: str | None = None
    """Key of the likely omission in `OMISSIONS`, if known."""

    def __str__(self) -> str:
        when = f"after the restore of step {self.step}" if self.after_restore else f"step {self.step}"
        values = f": {self.expected} uninterrupted, {self.found} resumed" if self.expected or self.found else ""
        return f"{self.name}, {when}, rank {self.rank}{values}"


@dataclass(slots=True)
class SizeResult:
    """Result of resuming on one world size from a checkpoint of one step."""

    world_size: int
    kill_at: int
    exact: bool
    """Whether the runs were compared bit by bit, or losses within a tolerance."""
    differences: list[Difference] = field(default_factory=list)
    """The earliest first."""
    omissions: list[str] = field(default_factory=list)
    """Keys of the likely omissions, the likeliest first."""
    evidence: list[str] = field(default_factory=list)
    """Sentences about effects in the training."""
    compared: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Sentences about the parts that were not compared, with the reasons."""

    @property
    def ok(self) -> bool:
        """Whether the resumed run was equal."""
        return not self.differences


@dataclass(slots=True)
class ResumeReport:
    """Report of a proof."""

    steps: int
    world_size: int
    """World size of the uninterrupted and the killed run."""
    unsteady: list[Difference] = field(default_factory=list)
    """Differences before the kill: the training is not deterministic, and nothing was proved."""
    results: list[SizeResult] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every resumed run was equal to the uninterrupted one."""
        return not self.unsteady and bool(self.results) and all(result.ok for result in self.results)

    @property
    def omissions(self) -> list[str]:
        """Keys of the likely omissions, the likeliest first."""
        return [*dict.fromkeys(key for result in self.results for key in result.omissions)]

    @property
    def first(self) -> Difference | None:
        """The first difference, if any."""
        found = [*self.unsteady, *(each for result in self.results for each in result.differences)]
        return found[0] if found else None

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {"ok": self.ok, "omissions": self.omissions, **asdict(self)}

    def raise_if_different(self) -> None:
        """Raise ResumeError if a resumed run differs, or the training is not deterministic."""
        if not self.ok:
            raise ResumeError(self)

    def __str__(self) -> str:
        if self.unsteady:
            lines = [
                "nothing could be proved: the training is not deterministic. Two runs from the beginning differ in:",
                *_listed(self.unsteady),
                "Seed every generator at the beginning, and see torch.use_deterministic_algorithms.",
            ]
            return "\n".join(lines)
        return "\n".join(line for result in self.results for line in _result_lines(result, self))


class ResumeError(DcpError, AssertionError):
    """A resumed run was not equal to the uninterrupted one; see `report`."""

    def __init__(self, report: ResumeReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> tuple[type[ResumeError], tuple[ResumeReport]]:
        return type(self), (self.report,)


def _result_lines(result: SizeResult, report: ResumeReport) -> list[str]:
    where = f"killed after step {result.kill_at} of {report.steps} on {counted(report.world_size, 'rank')}"
    where += f", resumed on {counted(result.world_size, 'rank')}"
    if result.ok:
        how = "bit by bit" if result.exact else "as far as it can be"
        lines = [f"ok: {where}: equal to the uninterrupted run {how}"]
    else:
        lines = [f"different: {where}", f"  first difference: {result.differences[0]}"]
        for number, key in enumerate(result.omissions):
            word = "likely omission" if number == 0 else "another"
            lines += [f"  {word}: {OMISSIONS[key].title} ({key})", f"    remedy: {OMISSIONS[key].remedy}"]
        if not result.omissions:
            lines.append("  no known omission explains it: look at what the training holds where nothing can find it")
        lines += [f"  {sentence}" for sentence in result.evidence]
        if len(result.differences) > 1:
            lines += ["  also different:", *(f"  {line}" for line in _listed(result.differences[1:]))]
    lines += [f"  compared: {sentence}" for sentence in result.compared]
    return lines + [f"  not compared: {sentence}" for sentence in result.not_compared]


def _listed(differences: list[Difference]) -> list[str]:
    lines = [f"  {difference}" for difference in differences[:_SHOWN]]
    more = len(differences) - _SHOWN
    return lines + ([f"  … and {more} more"] if more > 0 else [])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
