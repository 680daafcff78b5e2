"""Faults drawn at random in cooperative loads: kind, victim, moment, layout, template and pretended hosts."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.faults import KINDS, LAYOUTS, MOMENTS, Fault, check, save_checkpoints, told_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FAULTS = 200
# A new process for each rank that is killed, and a deadline for each that is stopped, take the time of ten others.
WEIGHTS = {kind: 1 if kind in ("kill", "stop") else 2 for kind in KINDS}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("faults")
    save_checkpoints(made)
    return made


@pytest.fixture(scope="module")
def own_ranks() -> Iterator[RankPool]:
    """Ranks that are killed and stopped, apart from those of other tests."""
    with RankPool(4, timeout_seconds=240) as pool:
        yield pool


def drawn(number: int) -> Fault:
    """Return the fault with this number, the same each time."""
    draw = random.Random(number)
    moment = draw.choice([*MOMENTS, "read", "read", "take", "take"])
    kind = draw.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
    ranks_of_host = draw.choice([3, 2, 1] if kind == "holder" else [4, 3, 2, 1])
    return Fault(
        kind,
        draw.randrange(4),
        moment,
        draw.randrange(4) if moment in ("read", "take") else 0,
        ranks_of_host,
        indirect=ranks_of_host == 1 and draw.random() < 0.5,
        template=draw.choice(["ddp", "columns", "some"]),
        layout=draw.choice(LAYOUTS),
    )


def run(numbers: range, pool: RankPool, root: Path, tmp_path: Path, patience: float) -> None:
    """Try faults; print what came of them."""
    ends: defaultdict[str, Counter[str]] = defaultdict(Counter)
    longest: defaultdict[str, float] = defaultdict(float)
    failed: list[str] = []
    for number in numbers:
        fault = drawn(number)
        try:
            found = told_of(pool, root, tmp_path / str(number), fault)
            check(fault, found, patience=patience)
        except (AssertionError, RuntimeError) as error:
            failed.append(f"{number}: {str(error)[:3000]}")
            print(failed[-1], flush=True)
            continue
        struck = [told.seconds for told in found if told.seconds is not None]
        ends[fault.kind][(found[0].error or found[0].state) if struck else "did not strike"] += 1
        if found[0].error:
            longest[fault.kind] = max(longest[fault.kind], *struck)
    for kind, counts in ends.items():
        print(f"{kind}: {dict(counts)}; longest {longest[kind]:.2f} s")
    assert failed == []
    assert sum(counts["did not strike"] for counts in ends.values()) < len(numbers) / 3


def test_a_tenth(own_ranks: RankPool, root: Path, tmp_path: Path) -> None:
    run(range(FAULTS // 10), own_ranks, root, tmp_path, patience=4.0)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all(own_ranks: RankPool, root: Path, tmp_path: Path) -> None:
    run(range(FAULTS // 10, FAULTS), own_ranks, root, tmp_path, patience=1.0)


def test_the_same_number_draws_the_same() -> None:
    faults = [drawn(number) for number in range(FAULTS)]
    assert faults == [drawn(number) for number in range(FAULTS)]
    assert {fault.kind for fault in faults[: FAULTS // 10]} == {*KINDS}
    assert {fault.moment for fault in faults} == {*MOMENTS}
