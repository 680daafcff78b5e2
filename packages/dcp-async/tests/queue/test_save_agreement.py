"""What ranks agree on without waiting for each other."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dcp_async import AsyncSaver
from dcp_async.options import SaverOptions
from dcp_async.queue.save_agreement import CollectiveLink, LinkTable, StoreLink
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.memory import MemoryWriter


def _decide() -> tuple[list[str], list[int], list[int]]:
    """Outcomes when each rank proposes another one; and the epochs before and after the end of rank 1's worker."""
    link = LinkTable(SaverOptions()).of(None, no_dist=False)
    assert isinstance(link, StoreLink)
    tickets = [link.draw() for _ in range(4)]
    dist.barrier()
    fates = [link.decide(ticket, f"rank {dist.get_rank()}") for ticket in tickets]
    dist.barrier()
    if dist.get_rank() == 1:
        link.worker_ended()
    dist.barrier()
    later = [link.draw() for _ in range(2)]
    return fates, [ticket.sequence for ticket in tickets], [ticket.epoch for ticket in (*tickets, *later)]


def test_the_first_wish_counts_on_all_ranks(ranks: RankPool) -> None:
    fates, sequences, epochs = zip(*ranks.run(2, _decide), strict=True)
    assert fates[0] == fates[1]
    assert set(fates[0]) <= {"rank 0", "rank 1"}
    assert sequences == ([1, 2, 3, 4],) * 2
    assert epochs == ([0, 0, 0, 0, 1, 1],) * 2


def _kinds() -> list[str]:
    table = LinkTable(SaverOptions())
    group = dist.new_group([0, 1])
    links = [table.of(None, no_dist=False), table.of(None, no_dist=True), table.of(group, no_dist=False)]
    again = [table.of(None, no_dist=False), table.of(None, no_dist=True), table.of(group, no_dist=False)]
    assert all(one is other for one, other in zip(links, again, strict=True))
    assert len({link.seat.key for link in links}) == 3
    return [type(link).__name__ for link in links]


def test_one_link_for_each_group(ranks: RankPool) -> None:
    assert ranks.run(2, _kinds) == [["StoreLink", "GroupLink", "StoreLink"]] * 2
    assert CollectiveLink.agrees is False


def _mixed_policies() -> list[str]:
    """Errors on each rank of a save for which one rank has another policy; the next save works."""
    rank = dist.get_rank()
    told = []
    with AsyncSaver("thread") as saver:
        for overlap in ("skip" if rank else "wait", "wait"):
            try:
                answer: Any = saver.save({"w": torch.ones(2)}, storage_writer=MemoryWriter("m"), overlap=overlap)
                answer.result()
                told.append("saved")
            except Exception as error:
                told.append(str(error))
            dist.barrier()
    return told


def test_policies_that_differ_are_named_on_all_ranks(ranks: RankPool) -> None:
    for mixed, same in ranks.run(2, _mixed_policies):
        assert "it must be the same on all ranks" in mixed
        assert ("'skip'" in mixed, "'wait'" in mixed) == (True, True)
        assert same == "saved"
