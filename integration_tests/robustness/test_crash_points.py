"""A save fails at one of its system calls, or the power does, at one call after another, in every kind of save.

What is there afterwards is exactly the old or exactly the new checkpoint, `latest_valid` names it, no rank was told of
a success that is not there, the next save succeeds, and nothing but that save's files remains. All points are slow;
what is not marked so tries a few of each scenario. `python -m integration_tests.robustness` makes the table in
docs/robustness.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from integration_tests.robustness.points import POWER, PROCESS_KINDS, lose_power, strike
from integration_tests.robustness.scenarios import SCENARIOS, Lab, Scenario

pytestmark = pytest.mark.traced

# Two ranks agree over a group that is made anew each time, and starting a saver's process takes seconds.
KILLS, KILLS_OF_TWO, KILLS_IN_PROCESS = 4, 2, 1
MOMENTS = 4
ERRORS = ("re-save", "convert to safetensors again")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("crash")) as made:
        yield made


def _all() -> Iterator[Any]:
    for scenario in SCENARIOS.values():
        for kind in (*PROCESS_KINDS, POWER):
            for rank in range(scenario.world if kind != POWER else 1):
                yield pytest.param(scenario, kind, rank, id=f"{_id(scenario)}-{kind}-{rank}")


def _id(scenario: Scenario) -> str:
    return scenario.name.replace(",", "").replace(" ", "-")


def _one_of_each_sort() -> list[Any]:
    """Numbers of all scenarios, some of them slow."""
    quick = (
        "first save",
        "re-save, 2 ranks",
        "ranks alone, 2 ranks",
        "in a thread",
        "convert to safetensors again",
        "export again, 2 ranks",
    )
    return [
        pytest.param(number, id=_id(scenario), marks=() if scenario.name in quick else pytest.mark.slow)
        for number, scenario in enumerate(SCENARIOS.values())
    ]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("scenario", "kind", "rank"), list(_all()))
def test_every_point(lab: Lab, scenario: Scenario, kind: Any, rank: int) -> None:
    tally = lose_power(lab, scenario) if kind == POWER else strike(lab, scenario, kind, rank=rank)
    assert tally.losses == []
    assert tally.tried > 0
    # All is written before one rename makes it count; only ranks without a coordinator write again after it.
    counts_last = kind == "torn" and scenario.options.get("use_collectives", True)
    assert counts_last or tally.found["new"] > 0 or (scenario.action == "export" and rank)
    # Rank 1 alone has little to do before it publishes nothing.
    assert rank or kind == "short" or tally.found["old"] + tally.found["nothing"] > 0


@pytest.mark.parametrize("number", _one_of_each_sort())
def test_killed_at_some_calls(lab: Lab, number: int) -> None:
    """Which ones differs from scenario to scenario."""
    scenario = [*SCENARIOS.values()][number]
    wanted = KILLS_IN_PROCESS if scenario.of == "started" else KILLS if scenario.world == 1 else KILLS_OF_TWO
    tally = strike(lab, scenario, "kill", rank=number % scenario.world, at_most=wanted, first=1 + 3 * number)
    assert tally.losses == []
    assert 0 < tally.tried <= wanted


@pytest.mark.parametrize("number", _one_of_each_sort())
def test_power_is_lost_at_some_moments(lab: Lab, number: int) -> None:
    scenario = [*SCENARIOS.values()][number]
    tally = lose_power(lab, scenario, at_most=MOMENTS, random_states=2)
    assert tally.losses == []
    assert tally.tried >= MOMENTS
    assert tally.found["new"] > 0
    assert tally.found["old"] + tally.found["nothing"] > 0


@pytest.mark.parametrize("kind", [kind for kind in PROCESS_KINDS if kind != "kill"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_at_some_calls(lab: Lab, name: str, kind: Any) -> None:
    """Of a storage that fails, is full or writes less than asked for, and writes that are torn."""
    tally = strike(lab, SCENARIOS[name], kind, at_most=5, first=2)
    assert tally.losses == []
    assert tally.tried > 1
