"""A slow tier that is no folder: promotes, retains, restores when the fast one is lost."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcp_all as dcp
from dcp_tiers.promote import promote
from integration_tests.hosts.pretended import without_promoter
from integration_tests.kits.damage import lose
from integration_tests.kits.s3_server import S3Server


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def slow(bucket: S3Server) -> Iterator[str]:
    """Folder of the bucket; the promoter, a process of its own, finds server and credentials in its environment."""
    with bucket.in_environment():
        yield f"s3://{bucket.bucket}/run"


def test_a_bucket_is_a_tier(slow: str, tmp_path: Path) -> None:
    def tiers() -> dcp.Tiers:
        return dcp.Tiers([dcp.Tier(tmp_path / "near", keep=dcp.KeepLast(1)), dcp.Tier(slow, keep=dcp.KeepLast(2))])

    with dcp.CheckpointManager(tiers(), no_dist=True) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"weight": torch.full((100_000,), step)})
    assert tiers().drain(60) == {}
    assert [step.step for step in tiers().steps() if 1 in step.complete_in] == [2, 3]
    assert dcp.Tiers.read(slow).tiers[1].url == slow
    lose(tmp_path / "near")
    state = {"weight": torch.zeros(100_000, dtype=torch.int64)}
    with dcp.CheckpointManager(tiers(), no_dist=True) as manager:
        restored = manager.restore(state)
        assert restored is not None
        manager.save(4, state)
    assert (restored.step, state["weight"].unique().tolist()) == (3, [3])
    assert tiers().drain(60) == {}
    assert [step.step for step in tiers().steps() if 1 in step.complete_in] == [3, 4]


def test_a_file_system_of_fsspec_is_a_tier(tmp_path: Path) -> None:
    """It is in the memory of this process, so that the promoter is, too."""

    def tiers() -> dcp.Tiers:
        near = dcp.Tier(tmp_path / "near", keep=dcp.KeepLast(1))
        return dcp.Tiers([near, dcp.Tier("memory://tiers/run", keep=dcp.KeepLast(2))])

    with without_promoter():
        with dcp.CheckpointManager(tiers(), no_dist=True) as manager:
            for step in (1, 2, 3):
                manager.save(step, {"weight": torch.full((100_000,), step)})
                if step != 2:
                    assert promote(tiers()) == {}
        assert [step.step for step in tiers().steps() if 1 in step.complete_in] == [2, 3]
        lose(tmp_path / "near")
        state = {"weight": torch.zeros(100_000, dtype=torch.int64)}
        with dcp.CheckpointManager(tiers(), no_dist=True) as manager:
            restored = manager.restore(state)
    assert restored is not None
    assert (restored.step, state["weight"].unique().tolist()) == (3, [3])
    assert dcp.latest_valid(tiers()).step == 3  # type: ignore[union-attr]
