"""One rank raises, raises what cannot travel, is killed or stalls, anywhere in a save or load: nobody hangs.

Every other rank raises soon, naming rank, phase and cause; nothing is published; the old checkpoint stays as it was;
and the next save works, on new processes where one was killed. The whole table is slow; what is not marked so tries
each fault at each place, on the coordinator and another rank in turns (unpicklable ones: `test_collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from integration_tests import failing
from integration_tests.robustness import faults

WORLD = 3
DEADLINE_SECONDS = 6.0  # by less than that the others reach a phase after each other, whatever a busy disk does
PROMISED_SECONDS = {"raise": 5.0, "unpicklable": 5.0, "kill": 10.0, "stall": DEADLINE_SECONDS + 5.0}
# What every change is tested with must not fail because the machine stood still for seconds. The slow rest may not
# take longer than promised.
PATIENCE = 15
# Row of the table → place of `integration_tests.failing`
SAVE = {
    "state_dict": "state_dict",
    "set-up": "set_up_planner",
    "local plan": "create_local_plan",
    "global plan": "create_global_plan",
    "write": "write_data",
    "finish": "finish",
}
LOAD = {"read": "read_data", "load_state_dict": "load_state_dict"}
COORDINATOR, OTHER = 0, 1
COSTLY = {("set-up", "kill"), ("local plan", "kill"), ("load_state_dict", "kill")}


def _table() -> Iterator[Any]:
    """All cases; of those that both ranks can meet every second one is slow, so is what others cover or costs much."""
    for row, place in {**SAVE, **LOAD}.items():
        alone = {**failing.SAVE_PLACES, **failing.LOAD_PLACES}[place][1]
        for number, kind in enumerate(PROMISED_SECONDS):
            for rank in (COORDINATOR,) if alone else (COORDINATOR, OTHER):
                turn = alone or (list({**SAVE, **LOAD}).index(row) + number) % 2 == rank
                marks = [pytest.mark.slow] if not turn or kind == "unpicklable" or (row, kind) in COSTLY else []
                within_seconds = PROMISED_SECONDS[kind] * (1 if marks else PATIENCE)
                name = f"{row}-{kind}-{'other' if rank else 'coordinator'}"
                yield pytest.param(row, kind, rank, within_seconds, marks=marks, id=name)


@pytest.mark.parametrize(("row", "kind", "rank", "within_seconds"), list(_table()))
def test_every_rank_is_told(ranks: Any, tmp_path: Path, row: str, kind: str, rank: int, within_seconds: float) -> None:
    folder = tmp_path / "checkpoint"
    (tmp_path / "news").mkdir()
    ranks.run(WORLD, failing.save, str(folder), 1.0)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    strike, place = (faults.strike_save, SAVE[row]) if row in SAVE else (faults.strike_load, LOAD[row])
    phase = (failing.SAVE_PLACES if row in SAVE else failing.LOAD_PLACES)[place][0]
    deadline_seconds = DEADLINE_SECONDS if kind == "stall" else 1800.0
    fault = faults.Fault(kind, place, phase, rank, deadline_seconds, str(tmp_path / "news"))
    found = ranks.run(WORLD, strike, str(folder), fault, 2.0, expect_death=[rank] if kind == "kill" else [])
    for one, told in enumerate(found):
        if one != rank:
            _check(told, kind, phase, rank)
            assert told.seconds < within_seconds
        elif kind != "kill":
            assert told.error != "nothing"
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: after.get(name) for name in before} == before
    # Who is killed, or learns only after a stall that the others have given up, may leave files of no checkpoint.
    assert kind in ("kill", "stall") or after == before
    assert ranks.run(WORLD, failing.load, str(folder), 1.0) == [True] * WORLD
    ranks.run(WORLD, failing.save, str(folder), 3.0)
    assert ranks.run(WORLD, failing.load, str(folder), 3.0) == [True] * WORLD


def _check(told: faults.Told, kind: str, phase: str, rank: int) -> None:
    assert f"phase {phase!r}" in told.text
    if kind == "kill":
        # The coordinator is also the process that hosts the store.
        assert told.error == ("CoordinatorLostError" if rank == COORDINATOR else "PeerLostError")
        assert f"rank {rank} is gone (its process has ended)" in told.text
    elif kind == "stall":
        assert told.error == "CoordinatorTimeoutError"
        assert f"for rank {rank} (" in told.text
    else:
        assert told.error == "CheckpointException"
        assert f"failed on rank {rank})" in told.text
        assert "Traceback" in told.text
        assert f"{'ValueError' if kind == 'raise' else 'UnpicklableError'}: failed on purpose" in told.text


@pytest.mark.parametrize(
    ("seconds", "peer_timeout_seconds"), [(3.0, 1.0), pytest.param(10.0, 2.0, marks=pytest.mark.slow)]
)
def test_a_rank_whose_interpreter_stands_still_is_not_taken_for_dead(
    ranks: Any, tmp_path: Path, seconds: float, peer_timeout_seconds: float
) -> None:
    found = ranks.run(WORLD, faults.save_beside_a_holder, str(tmp_path), seconds, peer_timeout_seconds)
    assert all(told.seconds > seconds for told in found)
    assert ranks.run(WORLD, failing.load, str(tmp_path), 1.0) == [True] * WORLD
