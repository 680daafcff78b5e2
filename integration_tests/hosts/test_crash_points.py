"""Saves to the disks of two hosts are killed, meet errors, or lose power at each of their system calls.

Whatever is left: the hosts load the newest step that all of them have or the one before, never parts of both; a rank
that was told of a success finds its step; the next save and its promotion succeed, and nothing else remains.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

import dcp_all as dcp
from dcp_crash import Fault, disk_states, snapshot
from dcp_crash.faults import WRITING, FaultKind
from dcp_ranks.testing.ranks import RankPool
from integration_tests.hosts.pretended import NEAR, folder_of, job_on, promote_on, tiers_in, without_promoter
from integration_tests.oracle.kinds import same_bits
from integration_tests.robustness import states
from integration_tests.robustness.actions import SAVED
from integration_tests.robustness.zygote import Job, Outcome, Zygote

pytestmark = [pytest.mark.traced, pytest.mark.timeout(3600)]

HOSTS = ("a", "b")
ERRORS = {"eio": "Input/output error", "enospc": "No space left on device"}
SCENARIOS = {"the next step": 2, "over the remains of a killed save": 3}
"""The step that is saved. Both hosts have steps 1 and 2, or 2 and what a killed save has left of 3."""


@pytest.fixture(scope="module")
def lab(pool: RankPool) -> Iterator[SimpleNamespace]:
    """The pool, a zygote, and a folder in memory if there is such a file system."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        contextlib.closing(Zygote()) as zygote,
        tempfile.TemporaryDirectory(dir=place) as folder,
    ):
        made = SimpleNamespace(pool=pool, zygote=zygote, place=Path(folder), root=Path(folder, "run"))
        prepare(made)
        yield made


def prepare(lab: SimpleNamespace) -> None:
    first = lab.place / "the next step"
    lab.pool.run(2, save, str(first), 1)
    assert promote_on(first, HOSTS) == {}
    later = lab.place / "over the remains of a killed save"
    shutil.copytree(first, later)
    lab.pool.run(2, save, str(later), 2)
    ready(lab, "over the remains of a killed save")
    calls = len(lab.zygote.run(job(lab, 3)).ranks[1].calls)
    ready(lab, "over the remains of a killed save")
    assert lab.zygote.run(job(lab, 3, Fault("kill", 3 * calls // 4, 1))).struck
    shutil.rmtree(later)
    lab.root.rename(later)
    assert (Path(folder_of(later, "b", NEAR)) / "step-3").exists()


def ready(lab: SimpleNamespace, scenario: str) -> None:
    """Put the disks of a scenario in place."""
    shutil.rmtree(lab.root, ignore_errors=True)
    shutil.copytree(lab.place / scenario, lab.root)


def job(lab: SimpleNamespace, step: int, fault: Fault | None = None) -> Job:
    return Job("save on hosts", str(lab.root), step, 2, fault, {"step": step})


def save(disks: str, step: int) -> None:
    with job_on(disks, HOSTS), without_promoter(), dcp.CheckpointManager(tiers_in(disks)) as manager:
        manager.save(step, states.sharded(step))


def local(values: dict[str, Any]) -> dict[str, Any]:
    """The parts of this rank."""
    model = {key: each.to_local() if isinstance(each, DTensor) else each for key, each in values["model"].items()}
    return {**values, "model": model}


def resume(disks: str, saves: int) -> int:
    """Restore on hosts that come back in another order, then save a step; returns the step that was there."""
    template = {**states.sharded(0), "step": None, "noise": None}
    for value in local(template)["model"].values():
        value.fill_(-7)
    with job_on(disks, HOSTS[::-1]), without_promoter(), dcp.CheckpointManager(tiers_in(disks)) as manager:
        restored = manager.restore(template)
        assert restored is not None
        assert same_bits(local(template), local(states.sharded(restored.step))), f"step {restored.step} is a mixture"
        manager.save(saves, states.sharded(saves))
    return restored.step


def judge(lab: SimpleNamespace, disks: Path, step: int, *, told: bool) -> int:
    """Check what is left, and that saving and promoting go on; returns the step that was restored."""
    for path in disks.rglob("*.tmp"):
        os.utime(path, (time.time() - 7200,) * 2)
    found = lab.pool.run(2, resume, str(disks), step + 1)
    assert found in ([step - 1] * 2, [step] * 2)
    assert found[0] == step or not told, "a rank had been told that the save succeeded"
    assert promote_on(disks, HOSTS) == {}
    assert dcp.verify_checkpoint(disks / f"far/step-{step + 1}").ok
    lab.pool.run(2, save, str(disks), step + 2)  # whose retention removes all that has arrived
    for host in HOSTS:
        near = Path(folder_of(disks, host, NEAR))
        assert {path.name for path in near.iterdir() if path.is_dir()} == {f"step-{step + 1}", f"step-{step + 2}"}
        strange = [path for path in near.rglob("*") if path.is_file() and not is_expected(path.name)]
        assert not strange
    return found[0]


def is_expected(name: str) -> bool:
    return (
        name in {".metadata", ".dcp-note.json", ".dcp-run", ".dcp-host", "latest", "run.tiers.toml"}
        or name.endswith(".distcp")
        or name.startswith((".dcp-promoted-", ".dcp-here-"))
    )


def strike(
    lab: SimpleNamespace, scenario: str, kind: FaultKind, rank: int, every: int, note: Callable[..., Any]
) -> None:
    step = SCENARIOS[scenario]
    ready(lab, scenario)
    whole = lab.zygote.run(job(lab, step))
    assert all(end.error is None for end in whole.ranks), whole
    calls = [at for at, name in enumerate(whole.ranks[rank].calls, 1) if kind != "torn" or name in WRITING]
    found, tried = set(), 0
    for at in calls[len(kind) % every :: every]:
        ready(lab, scenario)
        outcome = lab.zygote.run(job(lab, step, Fault(kind, at, rank)))
        if not outcome.struck:
            continue
        tried += 1
        found.add(judge(lab, lab.root, step, told=was_told(outcome, kind)))
    note("states", tried)
    assert tried
    assert every > 1 or found == {step - 1, step} or kind == "torn" or rank


def was_told(outcome: Outcome, kind: FaultKind) -> bool:
    """Whether a rank returned from its save; checks what the others were told."""
    for end in outcome.ranks:
        assert end.error is None or kind not in ERRORS or ERRORS[kind] in end.error, end.error
    return any(end.survived and end.error is None for end in outcome.ranks)


def _every(kinds: tuple[str, ...]) -> list[Any]:
    """All points of both scenarios are slow; a few gate."""
    slow = [
        pytest.param(name, kind, rank, 1, id=f"{name.replace(' ', '-')}-{kind}-{rank}-all", marks=pytest.mark.slow)
        for name in SCENARIOS
        for kind in kinds
        for rank in range(2)
    ]
    some = [pytest.param("the next step", kind, len(kind) % 2, 25, id=f"{kind}-some") for kind in kinds]
    return slow + some


@pytest.mark.parametrize(("scenario", "kind", "rank", "every"), _every(("kill", "torn", "eio", "enospc")))
def test_a_fault_at_each_call(
    lab: SimpleNamespace, scenario: str, kind: FaultKind, rank: int, every: int, record_property: Any
) -> None:
    strike(lab, scenario, kind, rank, every, record_property)


@pytest.mark.parametrize(
    ("scenario", "every"),
    [pytest.param(name, 1, marks=pytest.mark.slow) for name in SCENARIOS] + [("the next step", 40)],
)
def test_loss_of_power_at_each_call(lab: SimpleNamespace, scenario: str, every: int, record_property: Any) -> None:
    """All hosts lose power at once, and each disk keeps what it must."""
    step = SCENARIOS[scenario]
    ready(lab, scenario)
    before = snapshot(lab.root)
    outcome, changes = lab.zygote.record(job(lab, step))
    assert all(end.error is None for end in outcome.ranks), outcome
    after, found = lab.place / "after", []
    for state in disk_states(before, changes, every=every, random_states=1 if every > 1 else 4, seed=7):
        shutil.rmtree(after, ignore_errors=True)
        after.mkdir()
        state.put(after, recorded=lab.root)
        found.append(judge(lab, after, step, told=SAVED in state.marks))
    record_property("states", len(found))
    assert {*found} == {step - 1, step}
