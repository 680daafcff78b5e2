"""Saves into a folder of each host, and loads on other numbers of hosts."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_all as dcp
from dcp_core.hosts.host_storage import HostStorageWriter
from dcp_io import StoreBackend
from dcp_ranks.testing.ranks import RankPool
from integration_tests.hosts.pretended import NEAR, folder_of, job_on, on_host, reads_below

HOSTS = ["a", "b", "c", "d"]
ID = f"host://{NEAR}/step-1"


def state_of(seed: int) -> dict[str, Any]:
    """A state whose matrices are split over all ranks, with what all ranks have beside."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    state: dict[str, Any] = {f"w{n}": distribute_tensor(torch.randn(64 + n, 97), mesh, [Shard(0)]) for n in range(4)}
    return state | {"bias": torch.randn(31), "seed": seed}


def save(disks: str, hosts: list[str], seed: int, place: str = ID) -> None:
    with job_on(disks, hosts):
        dcp.save(state_of(seed), checkpoint_id=place)


def load(disks: str, hosts: list[str], seed: int, place: str = ID, far: str = "/nowhere") -> tuple[bool, list[Any]]:
    """Load, and return whether the state is right, and what was read from the far folder."""
    template = state_of(99)
    with job_on(disks, hosts), reads_below(far) as seen:
        dcp.load(template, checkpoint_id=place, timeout_seconds=60)
    wanted = state_of(seed)
    same = all(torch.equal(local(template[key]), local(wanted[key])) for key in wanted if key != "seed")
    return same and template["seed"] == seed, seen


def local(value: Any) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def files(disks: Path, host: str) -> set[str]:
    return {file.name for file in Path(folder_of(disks, host, NEAR), "step-1").iterdir()}


def test_each_host_has_its_ranks_files_and_the_index(pool: RankPool, tmp_path: Path) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1)
    indexes = set()
    for number, host in enumerate(HOSTS):
        names = files(tmp_path, host)
        assert all(
            name == ".metadata" or name.startswith((f"__{2 * number}_", f"__{2 * number + 1}_")) for name in names
        )
        assert len(names) > 2
        folder = Path(folder_of(tmp_path, host, NEAR))
        indexes.add((folder / "step-1/.metadata").read_bytes())
        assert [file.name for file in folder.iterdir() if file.name != "step-1"] == [".dcp-run"]
    assert len(indexes) == 1
    assert len({run_of(tmp_path, host) for host in HOSTS}) == 1


def run_of(disks: str | Path, host: str) -> str:
    return str(json.loads(Path(folder_of(disks, host, NEAR), ".dcp-run").read_bytes())["run"])


def test_a_place_that_is_lost_while_the_job_goes_on_stays_of_its_run(pool: RankPool, tmp_path: Path) -> None:
    def save_lose_and_save(disks: str) -> None:
        save(disks, ["a", "b"], 1)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(disks, f"{disks}-before")
            for host in ("a", "b"):
                shutil.rmtree(folder_of(disks, host, NEAR))
        dist.barrier()
        save(disks, ["a", "b"], 2)

    pool.run(4, save_lose_and_save, str(tmp_path / "disks"))
    runs = {run_of(f"{tmp_path}/{disks}", host) for disks in ("disks", "disks-before") for host in ("a", "b")}
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("world", "hosts"), [(8, ["d", "b", "a", "c"]), (4, ["c", "a", "d", "b"])], ids=["other order", "other ranks"]
)
def test_hosts_come_back_in_another_order(pool: RankPool, tmp_path: Path, world: int, hosts: list[str]) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1)
    assert pool.run(world, load, str(tmp_path), hosts, 1) == [(True, [])] * world


def test_a_lost_hosts_part_is_read_from_the_shared_copy(pool: RankPool, tmp_path: Path) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1)
    far = tmp_path / "far/step-1"
    far.mkdir(parents=True)
    for host in HOSTS:
        for name in files(tmp_path, host):
            shutil.copy(Path(folder_of(tmp_path, host, NEAR), "step-1", name), far / name)
    lost = {name: (far / name).stat().st_size for name in files(tmp_path, "b") if name != ".metadata"}
    shutil.rmtree(folder_of(tmp_path, "b", NEAR))
    place = f"{ID}?also={far}"
    for world, hosts in [(6, ["a", "c", "d"]), (8, ["new", "d", "a", "c"])]:
        found = pool.run(world, load, str(tmp_path), hosts, 1, place, str(tmp_path / "far"))
        assert [right for right, _ in found] == [True] * world
        read = [one for _, seen in found for one in seen]
        assert {name for name, _ in read} == lost.keys()
        assert sum(size for _, size in read) <= sum(lost.values())
    found = pool.run(8, load, str(tmp_path), ["x", "y", "z", "u"], 1, place)
    assert [right for right, _ in found] == [True] * 8


def test_without_the_lost_part_no_tensor_changes(pool: RankPool, tmp_path: Path) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1)

    def check(disks: str) -> str:
        template = state_of(99)
        before = {key: local(value).clone() for key, value in template.items() if key != "seed"}
        with job_on(disks, ["d", "a"]), pytest.raises(dcp.CheckpointNotFoundError) as caught:
            dcp.load(template, checkpoint_id=ID)
        assert all(torch.equal(local(template[key]), value) for key, value in before.items())
        return str(caught.value)

    for text in pool.run(4, check, str(tmp_path)):
        assert "has no complete checkpoint on the 2 hosts" in text
        assert "files, such as __2_0" in text


def test_a_crash_before_the_other_hosts_have_the_index_loses_nothing(pool: RankPool, tmp_path: Path) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1)

    def save_and_die(disks: str) -> None:
        killed = mock.patch.object(HostStorageWriter, "follow_commit", side_effect=RuntimeError("killed"))
        with job_on(disks, HOSTS), killed, pytest.raises(RuntimeError, match="killed"):
            dcp.save(state_of(2), checkpoint_id=ID)

    pool.run(8, save_and_die, str(tmp_path))
    old = {Path(folder_of(tmp_path, host, NEAR), "step-1/.metadata").read_bytes() for host in HOSTS[1:]}
    assert len(old) == 1
    assert Path(folder_of(tmp_path, "a", NEAR), "step-1/.metadata").read_bytes() not in old
    hosts = ["c", "d", "a", "b"]  # the coordinator has the old index now
    assert pool.run(8, load, str(tmp_path), hosts, 2) == [(True, [])] * 8
    pool.run(8, save, str(tmp_path), hosts, 3)
    assert pool.run(4, load, str(tmp_path), HOSTS, 3) == [(True, [])] * 4
    assert all(not name.startswith(".dcp-save") for host in HOSTS for name in files(tmp_path, host))


def test_folders_of_their_own_on_one_machine_are_those_of_two_hosts(pool: RankPool, tmp_path: Path) -> None:
    """Containers of one machine: their ranks can share memory, and do not have the same files."""

    def save_and_load(disks: str) -> bool:
        with on_host(disks, "ab"[dist.get_rank() // 2]):
            dcp.save(state_of(1), checkpoint_id=ID)
        template, wanted = state_of(99), state_of(1)
        with on_host(disks, "ba"[dist.get_rank() // 2]):
            dcp.load(template, checkpoint_id=ID, timeout_seconds=60)
        return all(torch.equal(local(template[key]), local(wanted[key])) for key in wanted if key != "seed")

    assert pool.run(4, save_and_load, str(tmp_path)) == [True] * 4
    assert {name.split("_")[2] for name in files(tmp_path, "b") if name != ".metadata"} == {"2", "3"}


def test_a_host_that_cannot_write_leaves_nothing_on_any(pool: RankPool, tmp_path: Path) -> None:
    pool.run(4, save, str(tmp_path), ["a", "b"], 1)

    def fail(disks: str) -> str:
        full = OSError(errno.ENOSPC, "No space left on device")
        is_last = dist.get_rank() == 3
        cannot = mock.patch.object(StoreBackend, "write", side_effect=full) if is_last else contextlib.nullcontext()
        with job_on(disks, ["a", "b"]), cannot, pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(state_of(2), checkpoint_id=f"host://{NEAR}/step-2")
        return str(caught.value)

    assert all("No space left" in text for text in pool.run(4, fail, str(tmp_path)))
    for host in "ab":
        folder = Path(folder_of(tmp_path, host, NEAR), "step-2")
        assert not folder.exists() or [*folder.iterdir()] == []


def test_an_interrupted_host_keeps_what_may_be_published(pool: RankPool, tmp_path: Path) -> None:
    def interrupt(disks: str) -> None:
        stopped = mock.patch.object(HostStorageWriter, "follow_commit", side_effect=RuntimeError("stopped"))
        with job_on(disks, ["a", "b"]), stopped, pytest.raises(RuntimeError, match="stopped"):
            dcp.save(state_of(1), checkpoint_id=ID)

    pool.run(4, interrupt, str(tmp_path))
    assert pool.run(4, load, str(tmp_path), ["a", "b"], 1) == [(True, [])] * 4


def test_a_place_of_another_run_is_refused_by_name(pool: RankPool, tmp_path: Path) -> None:
    pool.run(8, save, str(tmp_path), HOSTS, 1)
    run = Path(folder_of(tmp_path, "c", NEAR), ".dcp-run")
    run.write_bytes(b'{"run": "another"}')

    def refused(disks: str) -> str:
        with job_on(disks, HOSTS), pytest.raises(dcp.CheckpointException) as caught:
            dcp.save(state_of(2), checkpoint_id=ID)
        return str(caught.value)

    for text in pool.run(8, refused, str(tmp_path)):
        assert f"host://{NEAR} belongs to different runs" in text
        assert "run another on the host of rank 4" in text
    run.unlink()
    assert pool.run(8, load, str(tmp_path), HOSTS, 1) == [(True, [])] * 8


def test_one_host_alone(tmp_path: Path) -> None:
    with on_host(tmp_path, "a"):
        dcp.save({"x": torch.arange(9)}, checkpoint_id=ID, no_dist=True)
        template = {"x": torch.zeros(9, dtype=torch.int64)}
        dcp.load(template, checkpoint_id=ID, no_dist=True)
    assert template["x"].tolist() == [*range(9)]
