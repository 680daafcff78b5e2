"""The manager over savers that save in the background: in a thread and in a process, on ranks, on disk and on S3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.s3_server import S3Server


def state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(4000.0).reshape(100, 40) + step
    return {"weight": distribute(full, mesh, [Shard(0)]), "step": step}


def train(root: str, kind: str, until: int, options: dict[str, Any] | None) -> tuple[int | None, bool, int | None]:
    with (
        dcp.AsyncSaver(kind) as saver,
        dcp.CheckpointManager(root, keep_policy=dcp.KeepLast(2), saver=saver, storage_options=options) as manager,
    ):
        template = state(-1)
        restored = manager.restore(template)
        first = None if restored is None else restored.step
        right = first is None or torch.equal(template["weight"].to_local(), state(first)["weight"].to_local())
        for step in range(1 if first is None else first + 1, until + 1):
            assert manager.maybe_save(step, state(step))
        manager.wait()
        return first, right, manager.latest()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_on_disk(ranks: Any, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, train, str(tmp_path), kind, 3, None) == [(None, True, 3)] * 2
    assert ranks.run(1, train, str(tmp_path), kind, 5, None) == [(3, True, 5)]
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step-4", "step-5"}
    assert all(dcp.verify_checkpoint(tmp_path / f"step-{step}").ok for step in (4, 5))


@pytest.fixture
def s3() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="needs moto[s3]")
    with S3Server() as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_on_an_object_store(s3: S3Server, kind: str) -> None:
    root = f"s3://{s3.bucket}/{kind}"
    variables = s3.environment()
    options = {
        "endpoint": s3.url,
        "access_key_id": variables["AWS_ACCESS_KEY_ID"],
        "secret_access_key": variables["AWS_SECRET_ACCESS_KEY"],
        "region": variables["AWS_REGION"],
    }
    with RankPool(2) as pool:
        assert pool.run(2, train, root, kind, 3, options) == [(None, True, 3)] * 2
        assert pool.run(2, train, root, kind, 4, options) == [(3, True, 4)] * 2
    assert dcp.open_store(root, storage_options=options).folders() == ("step-3", "step-4")
