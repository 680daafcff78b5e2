"""Judgement of all resumes after one kill, on the same and on other world sizes, and descriptions of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from dcp_prove.judging.bit_by_bit import Runs, compare_same_size, find_unsteady
from dcp_prove.judging.report import ResumeReport, SizeResult, counted
from dcp_prove.judging.within_tolerance import compare_other_size, default_tolerance
from dcp_prove.observing.records import Moment, RunRecord

_KINDS = {
    "parameter": ("parameter", ""),
    "buffer": ("buffer", ""),
    "batchnorm": ("buffer", " of BatchNorm"),
    "average": ("tensor", " of moving averages"),
    "optimizer": ("value", " of optimizers"),
    "scheduler": ("value", " of schedulers"),
    "scaler": ("value", " of gradient scalers"),
    "random": ("global random state", ""),
    "generator": ("generator", ""),
    "epoch": ("epoch", " of samplers"),
    "tensor": ("other tensor", ""),
}
_SHOWN = 6


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
    unsteady |= _matching_names(expected, ignore)
    for size in sizes:
        runs = Runs(expected, resume(size), kill, report.steps, frozenset(unsteady))
        if size == report.world_size:
            result = compare_same_size(runs)
        else:
            result = compare_other_size(runs, default_tolerance(expected) if tolerance is None else tolerance)
        _describe(result, runs)
        report.results.append(result)


def _describe(result: SizeResult, runs: Runs) -> None:
    """Add sentences about the parts that were compared, and about the others."""
    steps = [moment for record in runs.expected for step, moment in record.steps().items() if step > runs.kill_at]
    if result.exact:
        _describe_steps(result, steps)
    restored = runs.found[0].at("restored", runs.kill_at)
    if restored is not None:
        counts = Counter(item.kind for item in restored.items.values())
        found = [counted(counts[kind], noun) + rest for kind, (noun, rest) in _KINDS.items() if counts[kind]]
        result.compared.append(f"after the restore (rank 0): {', '.join(found)}")
    kinds = {
        name: item.kind for record in runs.expected for moment in record.moments for name, item in moment.items.items()
    }
    unsteady = sorted(name for name in runs.unsteady if kinds.get(name) not in ("value", None))
    if unsteady:
        more = ", …" if len(unsteady) > _SHOWN else ""
        result.not_compared.append(
            f"{', '.join(unsteady[:_SHOWN])}{more}: differs between two equal runs from the beginning, or is ignored"
        )
    result.not_compared += dict.fromkeys(note for record in (*runs.expected, *runs.found) for note in record.notes)


def _describe_steps(result: SizeResult, steps: Sequence[Moment]) -> None:
    if any(moment.loss is not None for moment in steps):
        result.compared.append(f"losses of {counted(sum(moment.loss is not None for moment in steps), 'step')}")
    else:
        result.not_compared.append("losses: the steps gave none")
    if any(moment.samples for moment in steps):
        count = sum(bool(moment.samples) for moment in steps)
        result.compared.append(f"sample ids of {counted(count, 'step')}, in order")
    else:
        result.not_compared.append("sample ids: no data loader with ids was seen, and the steps gave none")
    if any(moment.batches for moment in steps):
        count = sum(len(moment.batches) for moment in steps)
        result.compared.append(f"contents of {count} batch{'es' * (count != 1)}")
    else:
        result.not_compared.append("contents of batches: neither data loaders nor models in training mode were seen")


def _matching_names(records: Sequence[RunRecord], patterns: Sequence[str]) -> set[str]:
    """Return the items that match a pattern; `*` stands for any text."""
    names = {name for record in records for moment in record.moments for name in moment.items}
    return {name for name in names for pattern in patterns if fnmatchcase(name, pattern)}
