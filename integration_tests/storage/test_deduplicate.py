"""Links between checkpoints of several ranks: resharding, removal in any order, kills, and copies in other tiers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dcp_all as dcp
from dcp_core import DcpError
from dcp_core.testing.sharding import distribute
from dcp_io import LocalStore
from dcp_io.checkpoints.remove_checkpoint import remove_checkpoint
from dcp_tiers import Tier, Tiers

ROWS, COLUMNS = 512, 256  # a shard of 4 ranks has 128 KiB: smaller values are never linked
FROZEN = 9


def full(step: int) -> dict[str, torch.Tensor]:
    """Frozen tensors, one that changes, and one that all ranks have."""
    seeds = {f"frozen.{n}": n for n in range(FROZEN)} | {"head": 100 + step, "replicated": 99}
    return {
        key: torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed)) for key, seed in seeds.items()
    }


def sharded(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        key: value if key == "replicated" else distribute(value, mesh, [Shard(0)]) for key, value in full(step).items()
    }


def save(root: str, *steps: int, **options: Any) -> None:
    for step in steps:
        writer = dcp.FileSystemWriter(f"{root}/step-{step}", deduplicate=True, thread_count=1, **options)
        dcp.save({**sharded(step), "step": step}, storage_writer=writer)


def check(path: Path) -> None:
    """Every byte is sound, and stock and this library read the values of the step."""
    assert dcp.verify_checkpoint(path).problems == ()
    wanted = full(int(path.name.removeprefix("step-")))
    for load in (dcp.load, stock.load):
        found = {key: torch.zeros_like(value) for key, value in wanted.items()}
        load(found, checkpoint_id=path, no_dist=True)
        assert all(torch.equal(found[key], value) for key, value in wanted.items()), load


def own_bytes(path: Path) -> int:
    """Bytes of the files that no other checkpoint has."""
    return sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1)


@pytest.fixture(scope="module")
def resharded(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps each of 2, 4 and again 2 ranks."""
    root = tmp_path_factory.mktemp("resharded")
    for world, steps in ((2, (1, 2)), (4, (3, 4)), (2, (5, 6))):
        ranks.run(world, save, str(root), *steps)
    return root


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_ranks_link_what_they_saved_before(resharded: Path) -> None:
    whole = own_bytes(resharded / "step-1") + sum(value.nbytes for value in full(1).values())
    for step in (2, 4, 6):
        assert own_bytes(resharded / f"step-{step}") < whole / 4, step
    for step in range(1, 7):
        check(resharded / f"step-{step}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("order", [(1, 2, 3, 4, 5), (6, 4, 2, 5, 3), (2, 5, 1, 6, 4)])
def test_checkpoints_are_removed_in_any_order(resharded: Path, tmp_path: Path, order: tuple[int, ...]) -> None:
    root = tmp_path / "run"
    shutil.copytree(resharded, root, copy_function=os.link)
    left = {*range(1, 7)}
    for step in order:
        remove_checkpoint(LocalStore(root / f"step-{step}"))
        left -= {step}
        for other in left:
            assert dcp.verify_checkpoint(root / f"step-{other}").problems == ()
    (last,) = left
    check(root / f"step-{last}")


def save_single(root: str, step: int) -> None:
    """Save with a file per value, so that each is a link."""
    save(root, step, single_file_per_rank=False)


def save_and_die(root: str, step: int, victim: int, number: int) -> None:
    """One rank is killed before it makes its link with this number."""
    links = iter(range(1, 1000))
    link = os.link

    def counted(*args: Any, **options: Any) -> None:
        if dist.get_rank() == victim and next(links) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        link(*args, **options)

    os.link = counted
    try:
        with contextlib.suppress(DcpError, RuntimeError):  # the other rank is gone
            save_single(root, step)
    finally:
        os.link = link


KILLS = [(0, 1), (1, 4)]
ALL_KILLS = [
    kill for kill in ((rank, number) for rank in (0, 1) for number in range(1, FROZEN + 1)) if kill not in KILLS
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kills", [KILLS, pytest.param(ALL_KILLS, marks=pytest.mark.slow)], ids=["some", "all"])
def test_a_rank_is_killed_at_a_link(ranks: Any, tmp_path: Path, kills: list[tuple[int, int]]) -> None:
    ranks.run(2, save_single, str(tmp_path), 1)
    for rank, number in kills:
        ends = ranks.run(2, save_and_die, str(tmp_path), 2, rank, number, expect_death=[rank], timeout_seconds=90)
        assert ends[1 - rank] is None
        check(tmp_path / "step-1")
        assert not (tmp_path / "step-2/.metadata").exists()
    ranks.run(2, save_single, str(tmp_path), 2)
    check(tmp_path / "step-2")
    assert own_bytes(tmp_path / "step-2") < sum(value.nbytes for value in full(2).values()) / 4
    linked = [*(tmp_path / "step-2").glob("*linked*")]
    assert len(linked) == len({file.stat().st_ino for file in linked}) == 2 * FROZEN + 1
    assert not [*(tmp_path / "step-2").glob("*.tmp")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_copy_in_another_tier_is_whole(tmp_path: Path) -> None:
    """The near tier has links, and has removed the step that they were made from."""
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = Tiers([Tier(near, keep=dcp.KeepLast(2)), Tier(far)])

    def writer(path: Any) -> Any:
        return dcp.FileSystemWriter(path, deduplicate=True)

    with dcp.CheckpointManager(tiers, no_dist=True, writer=writer) as manager:
        for step in (1, 2, 3):
            manager.save(step, full(step))
    assert tiers.drain(timeout_seconds=120) == {}
    assert not (near / "step-1").exists()
    assert own_bytes(near / "step-3") < sum(value.nbytes for value in full(3).values()) / 4
    for step in (1, 2, 3):
        check(far / f"step-{step}")
        assert own_bytes(far / f"step-{step}") > sum(value.nbytes for value in full(step).values())
    for step in (2, 3):  # damage to the near tier's shared files does not reach the far one
        for file in (near / f"step-{step}").glob("*linked*"):
            os.truncate(file, 100)
        check(far / f"step-{step}")
    with dcp.CheckpointManager(tiers, no_dist=True, writer=writer) as manager:
        template = {key: torch.zeros_like(value) for key, value in full(3).items()}
        restored = manager.restore(template)
        assert restored is not None
        assert restored.step == 3
        manager.save(4, full(4))  # from a base that is damaged
    check(near / "step-4")


def test_a_tier_in_memory_has_no_links() -> None:
    with pytest.raises(ValueError, match="keeper"):
        dcp.FileSystemWriter("keeper://run/step-1", deduplicate=True)
