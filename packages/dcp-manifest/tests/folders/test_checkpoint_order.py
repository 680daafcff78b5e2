from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_manifest.folders.checkpoint_order import Place, newest_first, step_of

STEPS = {
    "step-500": 500,
    "step_500": 500,
    "step500": 500,
    "steps-500": 500,
    "Step=500": 500,
    "step-0500": 500,
    "step-99999999999999999999": 99999999999999999999,
    "global_step500": 500,
    "global-step-500": 500,
    "checkpoint-500": 500,
    "checkpoint_0": 0,
    "ckpt-7": 7,
    "iter_0000500": 500,
    "epoch=1-step=20.ckpt": 20,
    "epoch=1-step=20-v1.ckpt": 20,
    "ckpt-epoch=3-step=20": 20,
    "epoch-3": 3,
    "llama-step-100": 100,
    "step-500-ema": 500,
    "500": 500,
    "0000500": 500,
    # Numbers that are no steps: to take them for some would remove what is of other runs.
    "final": None,
    f"step-{10**98}": 10**98,
    "step-" + 5000 * "1": None,
    5000 * "1": None,
    "": None,
    "step": None,
    "step-": None,
    "step--5": None,
    "step-1.5": None,
    "step-1e6": None,
    "step-10k": None,
    "checkpoint-2024-01-31": None,
    "2024-01-31": None,
    "misstep-5": None,
    "seed-3": None,
    "rank_0": None,
    "version_3": None,
    "pytorch_model_fsdp_0": None,
    "step-５００": None,
    "-500": None,
}


@pytest.mark.parametrize("name", STEPS)
def test_the_step_in_a_name(name):
    assert step_of(name) == STEPS[name]


PLACES = {
    ("run", "step-5"): (5, ("run",), ("run", "step-*"), ("run", "step-5")),
    ("step-5",): (5, (), ("step-*",), ("step-5",)),
    ("run", "checkpoint-5", "optimizer_0"): (5, ("run",), ("run", "checkpoint-*"), ("run", "checkpoint-5")),
    ("a", "epoch=1-step=2.ckpt"): (2, ("a",), ("a", "epoch=*-step=*.ckpt"), ("a", "epoch=1-step=2.ckpt")),
    ("run", "5"): (5, ("run",), ("run", "*"), ("run", "5")),
    ("multirun", "5", "model"): (None, ("multirun", "5"), ("multirun", "5", "model"), ("multirun", "5", "model")),
    ("best",): (None, (), ("best",), ("best",)),
    (): (None, (), (), ()),
}  # fmt: skip


@pytest.mark.parametrize("parts", PLACES, ids="/".join)
def test_the_place_of_a_checkpoint(parts):
    place = Place.of(parts)
    assert (place.step, place.run, place.series, place.folder) == PLACES[parts]


def test_a_noted_step_counts_where_no_name_has_one():
    assert Place.of(("best",), 7).step == 7
    assert Place.of(("best",), 7).series == ("best",)
    assert Place.of(("step-5",), 7).step == 5


NAMES = st.sampled_from(
    ["step-{}", "step-0{}", "checkpoint-{}", "global_step{}", "epoch=1-step={}.ckpt", "{}", "best{}x"]
)
STEP = st.one_of(st.integers(0, 12), st.just(10**20))
ONE = st.tuples(st.sampled_from([(), ("a",), ("b",), ("a", "deep")]), NAMES, STEP, st.integers(1, 5))


def sort(places_and_times):
    asked = []

    def made(one):
        asked.append(one)
        return one.time, one.place.parts

    found = [SimpleNamespace(place=Place.of(parts), time=time) for parts, time in places_and_times]
    return newest_first(found, lambda one: one.place, made), asked


@settings(max_examples=200, deadline=None)
@given(st.lists(ONE, max_size=12), st.randoms(use_true_random=False))
def test_steps_decide_and_times_only_where_they_do_not(drawn, random):
    times = {(*run, name.format(step)): time for run, name, step, time in drawn}
    ordered, _ = sort(times.items())
    shuffled = [*times.items()]
    random.shuffle(shuffled)
    assert [one.place for one in sort(shuffled)[0]] == [one.place for one in ordered]
    assert sorted(one.place.parts for one in ordered) == sorted(times)
    with_step = [one for one in ordered if one.place.step is not None]
    assert ordered[: len(with_step)] == with_step
    runs = list(dict.fromkeys(one.place.run for one in with_step))
    assert [one.place.run for one in with_step] == sorted((one.place.run for one in with_step), key=runs.index)
    assert [len(run) for run in runs] == sorted(map(len, runs))
    for run in runs:
        ranks = [(one.place.step, one.time, one.place.parts) for one in with_step if one.place.run == run]
        assert ranks == sorted(ranks, reverse=True)
    rest = [(one.time, one.place.parts) for one in ordered[len(with_step) :]]
    assert rest == sorted(rest, reverse=True)


def test_nobody_asks_for_times_where_steps_decide():
    _, asked = sort([((f"step-{step}",), 0) for step in range(50)] + [(("best",), 1)])
    assert asked == []
