"""Comparison of records of runs: what is a difference, what is harmless, and which omission it suggests."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_prove import ResumeError, ResumeReport
from dcp_prove.judging.bit_by_bit import Runs, compare_same_size, find_unsteady
from dcp_prove.judging.judge_resumes import judge_resumes
from dcp_prove.judging.omissions import OMISSIONS
from dcp_prove.judging.sample_order import explain_order
from dcp_prove.judging.within_tolerance import compare_other_size
from dcp_prove.observing.records import Item, Moment, RunRecord

KILL, STEPS = 4, 8


def run(first: int = 0, *, salt: str = "", **changed: Any) -> RunRecord:
    """A run of four steps an epoch; `changed` gives name → {(at, step): digest}, or loss, or samples by step."""
    moments = []
    between = [("restored" if first else "saved", KILL)]
    before = [] if first else [("step", step) for step in range(1, KILL + 1)]
    for at, step in [*before, *between, *(("step", step) for step in range(KILL + 1, STEPS + 1))]:
        samples = [10 * step, 10 * step + 1] if step <= 4 else [10 * (step - 4) + 1, 10 * (step - 4)]
        moment = Moment(at, step, True, loss=float(step))
        moment.samples = changed.get("samples", {}).get(step, samples) if at == "step" else []
        moment.items = {
            "torch.random": Item("random", f"r{step}", ""),
            "trainer.model.weight": Item("parameter", f"w{step}", "float32[3]"),
            "trainer.started": Item("value", f"now{salt}", "1.5"),
        }
        for name, (kind, digests) in changed.get("items", {}).items():
            moment.items[name] = Item(kind, digests.get((at, step), digests.get(None, "same")), "")
        moments.append(moment)
    return RunRecord(moments)


def compare(found: RunRecord, expected: RunRecord | None = None) -> Any:
    return compare_same_size(Runs([expected or run()], [found], KILL, STEPS))


def test_equal_runs_are_equal() -> None:
    result = compare(run(KILL))
    assert result.ok
    assert result.omissions == []


def test_counts_are_in_words() -> None:
    report = ResumeReport(STEPS, 1)
    generator = {"trainer.generator": ("generator", {})}
    one, again = run(items=generator), run(KILL, items=generator)
    judge_resumes(report, [one], [one], KILL, sizes=[1], resume=lambda _: [again], tolerance=None, ignore=())
    assert "after the restore (rank 0): 1 parameter, 1 global random state, 1 generator" in report.results[0].compared
    assert "losses of 4 steps" in report.results[0].compared


def test_what_differs_without_effect_is_no_difference() -> None:
    result = compare(run(KILL, salt="later"))
    assert result.ok
    assert "trainer.started" in result.not_compared[0]


@pytest.mark.parametrize(
    ("kind", "name", "omission"),
    [
        ("scheduler", "trainer.scheduler.last_epoch", "scheduler"),
        ("scaler", "trainer.scaler.scale", "scaler"),
        ("average", "trainer.ema.weight", "ema"),
        ("batchnorm", "trainer.model.norm.running_mean", "batchnorm"),
        ("buffer", "trainer.model.mask", "buffer"),
        ("optimizer", "trainer.optimizer.state[weight].exp_avg", "optimizer"),
        ("random", "numpy.random", "numpy-rng"),
        ("random", "random", "python-rng"),
        ("random", "torch.random", "torch-rng"),
    ],
)
def test_lost_state_is_named(kind: str, name: str, omission: str) -> None:
    expected = run(items={name: (kind, {})})
    result = compare(run(KILL, items={name: (kind, {None: "lost"})}), expected)
    assert result.omissions == [omission]
    assert result.differences[0].name == name
    assert result.differences[0].after_restore
    assert OMISSIONS[omission].remedy in str(ResumeReport(STEPS, 1, results=[result]))


def test_gradients_that_are_used_up_are_harmless_and_others_are_not() -> None:
    name = "trainer.model.weight.grad"
    expected = run(items={name: ("gradient", {})})
    assert compare(run(KILL, items={name: ("gradient", {("restored", KILL): "none"})}), expected).ok
    lost = {name: ("gradient", {("restored", KILL): "none"}), "trainer.model.weight": ("parameter", {None: "other"})}
    lost["trainer.model.weight"][1]["restored", KILL] = f"w{KILL}"
    assert compare(run(KILL, items=lost), expected).omissions == ["accumulation"]


def test_rank_zeros_random_state_on_every_rank() -> None:
    def of(rank: int, saved_by: int) -> dict[str, Any]:
        return {
            "torch.random": (
                "random",
                {None: f"r{rank}", ("saved", KILL): f"s{rank}", ("restored", KILL): f"s{saved_by}"},
            )
        }

    expected = [run(items=of(rank, rank)) for rank in range(2)]
    found = [
        run(KILL, items=of(0, 0)),
        run(KILL, items={"torch.random": ("random", {None: "x", ("restored", KILL): "s0"})}),
    ]
    result = compare_same_size(Runs(expected, found, KILL, STEPS))
    assert result.omissions == ["one-rank-rng"]
    assert result.differences[0].rank == 1


@pytest.mark.parametrize(
    ("samples", "omission"),
    [
        ([10, 11], "epoch"),  # of step 1, the same place of the epoch before
        ([31, 30], "position"),  # of step 7: two steps are skipped
        ([20, 21], "epoch"),
        ([10, 21], "position"),  # in the middle of two steps
        ([77, 78], "epoch"),
    ],
)
def test_the_order_of_samples_is_explained(samples: list[int], omission: str) -> None:
    found = Moment("step", 5, True, samples=samples)
    expected = run().steps()
    expected[2].samples = [21, 20]
    if samples == [20, 21]:
        expected = run().steps()
    keys, sentence = explain_order(expected, found)
    assert keys[0] == omission
    assert "step 5" in sentence


def test_a_training_that_is_not_deterministic_is_found_first() -> None:
    other = run()
    other.moments[1].loss = 0.5
    differences, _ = find_unsteady([run()], [other], KILL)
    assert [each.name for each in differences] == ["loss"]
    report = ResumeReport(STEPS, 1, unsteady=differences)
    assert not report.ok
    with pytest.raises(ResumeError, match="the training is not deterministic"):
        report.raise_if_different()


def test_items_that_differ_between_equal_runs_prove_nothing() -> None:
    differences, names = find_unsteady([run()], [run(salt="later")], KILL)
    assert differences == []
    assert names == {"trainer.started"}


def test_tensors_that_only_one_of_two_equal_runs_recorded_prove_nothing() -> None:
    """How often tensors are recorded depends on the time that it takes."""
    other = run()
    for moment in other.moments[:2]:
        moment.full = False
        del moment.items["trainer.model.weight"]
    assert find_unsteady([run()], [other], KILL)[0] == []
    other.moments[2].items["trainer.model.weight"] = Item("parameter", "another", "float32[3]")
    assert [each.step for each in find_unsteady([run()], [other], KILL)[0]] == [3]


@pytest.mark.parametrize(("weight", "is_ok"), [(f"w{KILL}", True), ("lost", False)])
def test_models_with_and_without_a_wrapper_are_compared(weight: str, is_ok: bool) -> None:
    found = [run(KILL), run(KILL)]
    for record in found:
        for moment in record.moments:
            del moment.items["trainer.model.weight"]
            moment.samples = []
            moment.items["trainer.model.module.weight"] = Item("parameter", weight, "1.0")
    result = compare_other_size(Runs([run()], found, KILL, STEPS), 1e-4)
    assert result.ok is is_ok
    assert result.omissions == ([] if is_ok else ["model"])


@pytest.mark.parametrize("other_name", [True, False])
def test_a_second_name_that_the_resumed_run_lacks_is_no_difference(other_name: bool) -> None:
    expected, found = run(samples={step: [] for step in range(9)}), [run(KILL), run(KILL)]
    for moment in (moment for record in found for moment in record.moments):
        moment.samples = []
        if not other_name:
            del moment.items["trainer.model.weight"]
    for moment in expected.moments:
        moment.items["trainer.wrapper.weight"] = moment.items["trainer.model.weight"]
    assert compare_other_size(Runs([expected], found, KILL, STEPS), 1e-4).ok is other_name


@pytest.mark.parametrize(
    ("first", "second", "is_ok"), [([21], [20], True), ([20, 21], [20], True), ([21], [21], False)]
)
def test_samples_that_fill_a_batch_of_another_rank_count_once(first: list[int], second: list[int], is_ok: bool) -> None:
    expected = run(samples={6: [20, 21]})
    found = [run(KILL, samples={6: samples}) for samples in (first, second)]
    assert compare_other_size(Runs([expected], found, KILL, STEPS), 1e-4).ok is is_ok


def test_losses_on_other_numbers_of_ranks_have_a_tolerance() -> None:
    for loss, is_ok in ((5.0001, True), (5.01, False)):
        found = [run(KILL), run(KILL)]
        for record in (*found, expected := run()):
            for moment in record.moments:
                moment.items["torch.random"] = Item("random", "still", "")
                moment.samples = []
        for record in found:
            record.steps()[5].loss = loss
        result = compare_other_size(Runs([expected], found, KILL, STEPS), 1e-4)
        assert result.ok is is_ok
        assert any("samples" in line for line in result.not_compared)
