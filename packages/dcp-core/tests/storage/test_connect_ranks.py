"""A writer's own phases before it writes, and what it adds to local plans, also when the plans come from the cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dcp_core import SavePlan, save
from integration_tests.kits.memory import MemoryWriter


def test_a_writer_meets_the_ranks_and_sees_what_it_added(ranks: Any) -> None:
    def run() -> list[Any]:
        seen: list[Any] = []

        class Writer(MemoryWriter):
            def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
                return replace(super().prepare_local_plan(plan), storage_data=f"from {dist.get_rank()}")

            def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
                seen.append([plan.storage_data for plan in plans])
                return super().prepare_global_plan([replace(plan, storage_data=None) for plan in plans])

            def connect_ranks(self, coordinator: Any, plan: SavePlan) -> None:
                seen.append(coordinator.all_gather("names", lambda: (coordinator.rank, len(plan.items))))

        for _ in range(2):
            save({f"w{dist.get_rank()}": torch.ones(2)}, storage_writer=Writer("connected"))
        return seen

    added, met = ["from 0", "from 1"], [(0, 1), (1, 1)]
    assert ranks.run(2, run) == [[added, met, added, met], [met, met]]
