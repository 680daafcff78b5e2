"""Cache of plans of earlier saves, by content: names, shapes, dtypes and places of a rank's values, and the planner.

A rank caches its final plan, the coordinator caches the global plan; both under a random token that the coordinator
chose when it planned. A global plan is used again only if every rank of a group of the same size holds, at the same
place, exactly what it held in the earlier save: planning again would give the same plan. The contents of tensors and
objects are not part of the key.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_core.planning.comparable_bytes import value_bytes
from dcp_core.records.plan import SavePlan
from dcp_core.tables.columns_of_items import columns_of
from dcp_core.tables.plan_columns import PlanColumns
from dcp_core.tables.planned_rows import PlannedRows
from dcp_io.recently_used import RecentlyUsed
from dcp_manifest.index.columns import CheckpointIndex, ItemColumns

__all__ = [
    "GLOBAL_PLANS",
    "RANK_PLANS",
    "GlobalPlan",
    "RankPlan",
    "check_sums",
    "compared_values",
    "fingerprint",
]

# Several models, optimizers and groups may alternate.
_KEPT = 16


@dataclass(slots=True)
class RankPlan:
    """A rank's final plan, and the names of its values that other ranks hold too."""

    token: str
    columns: PlanColumns
    checks: list[list[str]]
    """Names of values whose checksums are compared between ranks: one list for each set of ranks that compares them."""
    layout: bytes = b""
    """Digest of the tensors' locations in files at the last write, as the coordinator knows it."""


@dataclass(slots=True)
class GlobalPlan:
    """The plans of all ranks together."""

    index: CheckpointIndex
    planner_data: Any
    plans: list[PlannedRows]
    checks: list[list[int]]
    """For each rank, the numbers of the sets of compared values that it takes part in."""
    layouts: list[RecentlyUsed[bytes, ItemColumns]]
    """For each rank, the locations of its tensors in files at the last write, by digest."""


RANK_PLANS: RecentlyUsed[Hashable, list[RankPlan]] = RecentlyUsed(_KEPT)
GLOBAL_PLANS: RecentlyUsed[str | None, GlobalPlan] = RecentlyUsed(_KEPT)


def fingerprint(plan: SavePlan, made_by: Hashable) -> bytes | None:
    """Return a digest of a local plan, equal for equal plans by equal planners; None if it would cost too much.

    Args:
        plan: Local plan, as it would be sent to the coordinator.
        made_by: Other inputs of the global plan, besides the local plans.
    """
    if type(plan) is not SavePlan:
        return None
    columns = columns_of(plan.items)
    index = columns.index
    facts = (
        repr(made_by),
        index.tensor_names,
        index.object_names,
        list(index.dtypes),
        plan.usable,
        plan.splittable,
        plan.aliases and list(plan.aliases.items()),
        None if plan.digests is None else list(plan.digests),
    )
    arrays = (
        *(index.tensor_dtype, index.tensor_flags, index.tensor_ndim, index.tensor_owner, index.tensor_shape),
        *(index.tensor_chunks, index.chunk_offsets, index.chunk_sizes, index.object_owner, columns.whole),
    )
    digest = hashlib.blake2b(marshal.dumps(facts, 2), digest_size=16)
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(array).data)
    try:
        for extra in (plan.planner_data, plan.storage_data):
            digest.update(value_bytes(extra))
    except Exception:  # noqa: BLE001 - whatever cannot be pickled cannot be compared either
        return None
    return digest.digest()


def check_sums(plan: SavePlan, checks: Sequence[Sequence[str]]) -> list[bytes]:
    """Return, for each set of names, a digest of the values' checksums."""
    digests = plan.digests or {}
    return [
        hashlib.blake2b(np.array([digests[name] for name in names], np.uint32).data, digest_size=8).digest()
        for names in checks
    ]


def compared_values(all_plans: Sequence[SavePlan]) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Yield the sets of ranks that hold the same values with checksums, with the names of these values."""
    holders: dict[str, list[int]] = {}
    for rank, plan in enumerate(all_plans):
        for name in plan.digests or ():
            holders.setdefault(name, []).append(rank)
    sets: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in holders.items():
        if len(ranks) > 1:
            sets.setdefault(tuple(ranks), []).append(name)
    yield from sets.items()
