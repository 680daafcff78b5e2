"""All fault points of a scenario, or some of them: each is struck, and what is left is judged."""

from __future__ import annotations

import errno
import os
import shutil
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dcp_crash import Fault, disk_states, snapshot
from dcp_crash.faults import WRITING, FaultKind
from integration_tests.robustness.actions import SAVED
from integration_tests.robustness.scenarios import Lab, Scenario
from integration_tests.robustness.zygote import Outcome

__all__ = ["POWER", "PROCESS_KINDS", "Tally", "lose_power", "strike"]

POWER = "power"
PROCESS_KINDS: tuple[FaultKind, ...] = ("kill", "torn", "eio", "enospc", "short")
_ERRORS = {"eio": os.strerror(errno.EIO), "enospc": os.strerror(errno.ENOSPC)}
Progress = Callable[[str], object]


@dataclass
class Tally:
    """What came of the fault points of one kind in one scenario."""

    scenario: str
    kind: str
    rank: int = 0
    points: int = 0
    """How many there are: system calls for faults of a process, moments for a loss of power."""
    tried: int = 0
    """How many states were judged."""
    found: Counter[str] = field(default_factory=Counter)
    """What was there afterwards: `old`, `new` or `nothing` (before a first save only)."""
    losses: list[str] = field(default_factory=list)


def strike(
    lab: Lab,
    scenario: Scenario,
    kind: FaultKind,
    *,
    rank: int = 0,
    at_most: int | None = None,
    first: int = 1,
    progress: Progress = print,
) -> Tally:
    """Strike the calls of one rank that the fault can meet: all, or some, evenly spaced from the `first` on."""
    tally = Tally(scenario.name, kind, rank)
    for at, name in _points(lab, scenario, tally, at_most=at_most, first=first):
        lab.ready(scenario)
        try:
            outcome = lab.zygote.run(lab.job(scenario, fault=Fault(kind, at, rank, scenario.of)))
            if not outcome.struck:  # whose calls are counted had less to do this time
                continue
            tally.tried += 1
            if kind in _ERRORS and name not in _REMOVING:
                lab.check_clean(scenario)
            found = lab.judge(scenario)
            tally.found[found] += 1
            _check_outcome(outcome, kind, found)
        except Exception:  # noqa: BLE001 - a loss is counted, whatever it looks like
            tally.losses.append(f"{kind} at call {at}, {name}, of rank {rank}: {traceback.format_exc(limit=-3)}")
            progress(f"LOSS in {scenario.name}: {tally.losses[-1]}")
    progress(f"{scenario.name}: {kind} on rank {rank}: {tally.tried} of {tally.points}, {dict(tally.found)}")
    return tally


_REMOVING = frozenset({"unlink", "unlinkat", "rmdir"})


def _points(
    lab: Lab, scenario: Scenario, tally: Tally, *, at_most: int | None, first: int
) -> Iterator[tuple[int, str]]:
    """The numbers of the calls and their names, from a run without a fault."""
    lab.ready(scenario)
    outcome = lab.zygote.run(lab.job(scenario))
    assert all(end.error is None for end in outcome.ranks), outcome
    end = outcome.ranks[tally.rank]
    names = end.calls if scenario.of == "own" else end.started_calls
    assert names, f"rank {tally.rank} makes no system calls in {scenario.name}"
    hit = [(at, name) for at, name in enumerate(names, 1) if tally.kind not in {"torn", "short"} or name in WRITING]
    tally.points = len(hit)
    step = 1 if at_most is None else -(-len(hit) // at_most)
    yield from hit[(first - 1) % step :: step]


def _check_outcome(outcome: Outcome, kind: FaultKind, found: str) -> None:
    """What the ranks were told fits what is there."""
    saved = [end for end in outcome.ranks if end.survived and end.error is None]
    assert not saved or found == "new", "a rank was told that the save succeeded"
    if kind == "short":
        assert len(saved) == len(outcome.ranks), f"a short write is no error: {outcome.ranks}"
    for end in outcome.ranks:
        if kind in _ERRORS and end.error is not None:
            assert _ERRORS[kind] in end.error, f"the error does not say what happened: {end.error}"


def lose_power(
    lab: Lab,
    scenario: Scenario,
    *,
    at_most: int | None = None,
    random_states: int = 4,
    seed: int = 0,
    progress: Progress = print,
) -> Tally:
    """Record a run, and judge what a disk may hold if the power goes, at all moments of it or at some of them."""
    tally = Tally(scenario.name, POWER)
    lab.ready(scenario)
    before = snapshot(lab.root)
    outcome, changes = lab.zygote.record(lab.job(scenario))
    assert all(end.error is None for end in outcome.ranks), outcome
    tally.points = len(changes) + 1
    every = 1 if at_most is None else -(-tally.points // at_most)
    recorded, place = lab.root, lab.place / "after"
    for state in disk_states(before, changes, every=every, random_states=random_states, seed=seed):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        state.put(place, recorded=recorded)
        tally.tried += 1
        try:
            found = lab.judge(scenario, place)
            tally.found[found] += 1
            assert SAVED not in state.marks or found == "new", "a rank had been told that the save succeeded"
        except Exception:  # noqa: BLE001 - a loss is counted, whatever it looks like
            where = f"power lost after change {state.at}, kept: {state.how}"
            tally.losses.append(f"{where}: {traceback.format_exc(limit=-3)}")
            progress(f"LOSS in {scenario.name}: {tally.losses[-1]}")
    progress(f"{scenario.name}: power lost at {tally.points} moments: {tally.tried} states, {dict(tally.found)}")
    return tally
