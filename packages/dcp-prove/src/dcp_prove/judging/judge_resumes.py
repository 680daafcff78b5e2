"""Judgement of all resumes after one kill, on the same and on other world sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dcp_prove.judging.describe import describe, matching_names
from dcp_prove.judging.other_sizes import compare_other_size, default_tolerance
from dcp_prove.judging.report import ResumeReport
from dcp_prove.judging.same_size import Runs, compare_same_size, find_unsteady
from dcp_prove.observing.records import RunRecord

__all__ = ["judge_resumes"]


def judge_resumes(
    report: ResumeReport,
    expected: Sequence[RunRecord],
    killed: Sequence[RunRecord],
    kill: int,
    *,
    sizes: Sequence[int],
    resume: Callable[[int], Sequence[RunRecord]],
    tolerance: float | None,
    ignore: Sequence[str],
) -> None:
    """Add a result per world size to the report; `resume` trains from the kill at step `kill`.

    If the killed run differs from the expected one before the kill, only `report.unsteady` is set, and nothing resumes.
    """
    report.unsteady, unsteady = find_unsteady(expected, killed, kill)
    if report.unsteady:
        return
    unsteady |= matching_names(expected, ignore)
    for size in sizes:
        runs = Runs(expected, resume(size), kill, report.steps, frozenset(unsteady))
        if size == report.world_size:
            result = compare_same_size(runs)
        else:
            result = compare_other_size(runs, default_tolerance(expected) if tolerance is None else tolerance)
        describe(result, runs)
        report.results.append(result)
