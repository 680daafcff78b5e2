"""Several hosts, which are pretended: each byte crosses to each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_exchange import topology
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import blank, hosts_of, same, whole

WANTED = sum(value.nbytes for value in whole().values() if isinstance(value, torch.Tensor))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("hosts") / "saved")
    dcp.save(whole(), checkpoint_id=made, no_dist=True)
    return made


@pytest.fixture(scope="module")
def many() -> Iterator[RankPool]:
    with RankPool(8, timeout_seconds=240) as pool:
        yield pool


def over_hosts(folder: str, kind: str, ranks_of_host: int, indirect: bool) -> tuple[bool, str, int, int, int]:
    """Whether the load was right, the reason, bytes read, received, and received from other hosts."""
    alone, template = blank(kind, whole()), blank(kind, whole())
    dcp.load(alone, checkpoint_id=folder, cooperative=False)
    with hosts_of(ranks_of_host, indirect=indirect) as sent:
        report = dcp.load(template, checkpoint_id=folder, cooperative=True, timeout_seconds=60)
        if indirect:
            hosts = [rank // ranks_of_host for rank in range(dist.get_world_size())]
            assert not topology.Topology.of(hosts).direct
    return same(alone, template), report.cooperative_reason, report.bytes_read, report.bytes_received, sum(sent)


def check(found: list[Any], hosts: int, *, all_over: bool) -> None:
    assert [one[:2] for one in found] == [(True, "cooperative=True")] * len(found)
    assert WANTED <= sum(one[2] for one in found) <= 1.01 * WANTED
    crossed = sum(one[4] for one in found)
    if all_over:
        assert crossed <= 1.01 * WANTED * (hosts - 1)
        assert crossed >= 0.99 * WANTED * (hosts - 1)
    assert crossed > 0


@pytest.mark.parametrize(("world", "ranks_of_host"), [(4, 2), (3, 1), (4, 3)], ids=["2 x 2", "3 x 1", "3 and 1"])
@pytest.mark.parametrize("kind", ["ddp", "columns", "some"])
def test_each_byte_crosses_to_each_host_once(
    ranks: RankPool, folder: str, world: int, ranks_of_host: int, kind: str
) -> None:
    hosts = -(-world // ranks_of_host)
    found = ranks.run(world, over_hosts, folder, kind, ranks_of_host, False)
    assert [one[:2] for one in found] == [(True, "cooperative=True")] * world
    crossed = sum(one[4] for one in found)
    if kind == "some":
        assert 0 < crossed < 1.01 * WANTED * (hosts - 1)
    else:
        check(found, hosts, all_over=kind == "ddp" or ranks_of_host == 1)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "ranks_of_host"), [(6, 1), (7, 1), (8, 1)])
@pytest.mark.parametrize("kind", ["ddp", "columns", "some"])
def test_hosts_pass_on_what_comes_from_others(
    many: RankPool, folder: str, world: int, ranks_of_host: int, kind: str
) -> None:
    found = many.run(world, over_hosts, folder, kind, ranks_of_host, True)
    assert [one[0] for one in found] == [True] * world
    if kind == "ddp":
        check(found, world, all_over=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_of_host", [2, 4])
def test_hosts_of_several_ranks(many: RankPool, folder: str, ranks_of_host: int) -> None:
    for kind in ("ddp", "hsdp", "3d"):
        found = many.run(8, over_hosts, folder, kind, ranks_of_host, False)
        assert [one[0] for one in found] == [True] * 8
        if kind == "ddp":
            check(found, 8 // ranks_of_host, all_over=True)
