"""Comparison of a resumed run on another world size, where not everything can be equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcp_prove.judging.bit_by_bit import Runs
from dcp_prove.judging.moments import ABSENT, differing_items, item_difference
from dcp_prove.judging.omissions import omission_of
from dcp_prove.judging.report import Difference, SizeResult, counted
from dcp_prove.judging.sample_order import explain_order
from dcp_prove.observing.random_states import CPU_RANDOM
from dcp_prove.observing.records import Moment, RunRecord

_SHARED = frozenset({"parameter", "buffer", "batchnorm", "optimizer", "scheduler", "scaler", "average"})
_TOLERANCES = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-2}


def default_tolerance(records: Sequence[RunRecord]) -> float:
    """Return the relative tolerance of losses for the coarsest dtype among all parameters.

    float64 1e-8, float32 1e-4, float16 and bfloat16 1e-2: a few thousand roundings, in another order of sums.
    """
    items = (item for moment in records[0].moments for item in moment.items.values() if item.kind == "parameter")
    dtypes = {item.shown.partition("[")[0] for item in items}
    known = [tolerance for dtype, tolerance in _TOLERANCES.items() if dtype in dtypes]
    return max(known, default=_TOLERANCES["float32"])


def compare_other_size(runs: Runs, tolerance: float) -> SizeResult:
    """Compare the restored shared state, the samples of each step, and mean losses within `tolerance`."""
    result = SizeResult(len(runs.found), runs.kill_at, exact=False)
    result.not_compared.append("random states, which cannot be equal on another number of ranks, and gradients")
    result.differences += _restored(runs, result)
    samples = _samples(runs, result)
    if _draws(runs):
        result.not_compared.append("losses: the steps draw random numbers, and other ranks draw other numbers")
        losses = []
    else:
        losses = _losses(runs, tolerance, result)
    result.differences += samples + losses
    result.omissions = [*dict.fromkeys(each.omission for each in result.differences if each.omission is not None)]
    return result


def _restored(runs: Runs, result: SizeResult) -> list[Difference]:
    expected, found = runs.expected[0].at("saved", runs.kill_at), runs.found[0].at("restored", runs.kill_at)
    if expected is None or found is None:
        return []
    differences, sharded = [], 0
    expected, found = _unwrapped(expected), _unwrapped(found)
    present = {item.digest for name, item in expected.items.items() if name in found.items}
    for name, pair in differing_items(expected, found).items():
        if pair[1] is ABSENT and pair[0].digest in present:
            continue  # another name of something that the resumed run has
        kind = pair[0].kind or pair[1].kind
        if kind not in _SHARED or name in runs.unsteady:
            continue
        if kind == "batchnorm" or ("[" in pair[0].shown and pair[0].shown == pair[1].shown):
            sharded += 1
            continue
        differences.append(item_difference(name, pair, found, 0, omission=omission_of(kind, name)))
    if sharded:
        result.not_compared.append(f"{counted(sharded, 'tensor')}: each rank holds its own part or version")
    return differences


def _unwrapped(moment: Moment) -> Moment:
    return replace(moment, items={name.replace(".module.", "."): item for name, item in moment.items.items()})


def _samples(runs: Runs, result: SizeResult) -> list[Difference]:
    expected, found = _joined_steps(runs.expected), _joined_steps(runs.found)
    if not any(moment.samples for moment in found.values()):
        result.not_compared.append("samples: no ids were seen")
        return []
    compared = 0
    for step, moment in sorted(found.items()):
        same = expected.get(step)
        if same is None:
            continue
        compared += 1
        if same.samples != moment.samples:
            keys, sentence = explain_order(expected, moment)
            result.evidence.append(sentence)
            one, other = (f"{each.samples[:8]}" for each in (same, moment))
            return [Difference("samples", step, False, 0, one, other, keys[0])]
    result.compared.append(f"the samples of {counted(compared, 'step')}, as sets over all ranks")
    return []


def _joined_steps(records: Sequence[RunRecord]) -> dict[int, Moment]:
    steps: dict[int, Moment] = {}
    for record in records:
        for step, moment in record.steps().items():
            joined = steps.setdefault(step, Moment("step", step, full=False))
            distinct = {repr(sample): sample for sample in (*joined.samples, *moment.samples)}
            joined.samples = [distinct[shown] for shown in sorted(distinct)]
    return steps


def _draws(runs: Runs) -> bool:
    for record in runs.expected:
        before = record.at("saved", runs.kill_at)
        after = record.at("step", runs.kill_at + 1)
        if before is not None and after is not None and before.items[CPU_RANDOM] != after.items[CPU_RANDOM]:
            return True
    return False


def _losses(runs: Runs, tolerance: float, result: SizeResult) -> list[Difference]:
    expected, found = _mean_losses(runs.expected), _mean_losses(runs.found)
    steps = [step for step in sorted(found) if step in expected]
    if not steps:
        result.not_compared.append("losses: step() returned none")
        return []
    worst = 0.0
    for step in steps:
        scale = max(abs(expected[step]), abs(found[step])) or 1.0
        difference = abs(expected[step] - found[step]) / scale
        if not difference <= tolerance:
            text = f"loss (mean of all ranks; differs by {difference:.1e}, tolerance {tolerance:.1e})"
            return [Difference(text, step, False, 0, repr(expected[step]), repr(found[step]))]
        worst = max(worst, difference)
    result.compared.append(
        f"the mean losses of {counted(len(steps), 'step')}, which differ by {worst:.1e} of their size at most "
        f"(tolerance {tolerance:.1e})"
    )
    return []


def _mean_losses(records: Sequence[RunRecord]) -> Mapping[int, float]:
    losses: dict[int, list[float]] = {}
    for record in records:
        for step, moment in record.steps().items():
            if moment.loss is not None:
                losses.setdefault(step, []).append(moment.loss)
    return {step: sum(values) / len(values) for step, values in losses.items() if len(values) == len(records)}
