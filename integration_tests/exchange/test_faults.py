"""Faults in a cooperative load: right tensors, or the same named error on all living ranks in time; nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.faults import KINDS, Fault, Told, check, save_checkpoints, told_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
# On a machine that does other things, too.
PATIENCE = 15.0


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


def struck(pool: RankPool, root: Path, folder: Path, fault: Fault) -> list[Told]:
    """What the ranks saw of a fault.

    On a busy machine, the other ranks may read everything before the victim reads anything: then it is tried again.
    """
    for _ in range(5):
        found = told_of(pool, root, folder, fault)
        check(fault, found, patience=PATIENCE)
        if all(told.seconds is not None for told in found):
            return found
    pytest.fail("it did not strike")


@pytest.mark.parametrize(
    "ranks_of_host",
    [pytest.param(4, marks=pytest.mark.slow), 2, pytest.param(1, marks=pytest.mark.slow)],
    ids=["1 x 4", "2 x 2", "4 x 1"],
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("kill", "stop", "holder")])
def test_files_and_connections(own_ranks: RankPool, root: Path, tmp_path: Path, kind: str, ranks_of_host: int) -> None:
    fault = Fault(kind, 1, "read", ranks_of_host=ranks_of_host)
    found = struck(own_ranks, root, tmp_path / "run", fault)
    assert [bool(told.error) for told in found] == [not fault.is_harmless] * 4
    if kind == "replace":
        assert [told.state for told in found] == ["new"] * 4


@pytest.mark.parametrize("moment", ["start", "read"])
def test_one_of_two_holders(own_ranks: RankPool, root: Path, tmp_path: Path, moment: str) -> None:
    fault = Fault("holder", 1, moment, ranks_of_host=2)
    struck(own_ranks, root, tmp_path / "run", fault)


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_rank_that_does_nothing_more(own_ranks: RankPool, root: Path, tmp_path: Path, kind: str) -> None:
    fault = Fault(kind, 1, "read", ranks_of_host=2)
    found = told_of(own_ranks, root, tmp_path / "run", fault)
    check(fault, found, patience=PATIENCE)
    assert all(told.error for told in found)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_of_host", [4, 2, 1], ids=["1 x 4", "2 x 2", "4 x 1"])
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("kind", ["kill", "stop", "cut"])
def test_each_owner(
    own_ranks: RankPool, root: Path, tmp_path: Path, kind: str, victim: int, ranks_of_host: int
) -> None:
    fault = Fault(kind, victim, "read", 1, ranks_of_host=ranks_of_host)
    check(fault, told_of(own_ranks, root, tmp_path / "run", fault), patience=PATIENCE)
