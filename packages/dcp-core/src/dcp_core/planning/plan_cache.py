"""Cache of the plans of earlier saves: an unchanged local plan on every rank permits reuse of the global plan.

Each rank caches its final plan, and the coordinator caches the global plan, both under a random token that the
coordinator chose when it planned. A global plan is reused only if every rank of a group of the same size has the same
names, shapes, dtypes and chunks as in the earlier save, and the same planner options. The contents of tensors and
objects do not matter.
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
    """Cached final plan of one rank, and the names of replicated tensors and objects that it compares with others.

    Attributes:
        token: Random text under which the coordinator caches the global plan of the same save.
        columns: Items of the final plan.
    """

    token: str
    columns: PlanColumns
    checks: list[list[str]]
    """FQNs whose checksums are compared between ranks: one list for each set of ranks that compares them."""
    layout: bytes = b""
    """Digest of the tensors' locations in files after the last save; the coordinator caches the locations."""


@dataclass(slots=True)
class GlobalPlan:
    """Cached global plan on the coordinator: the final plans of all ranks, and the metadata.

    Attributes:
        index: Index of the checkpoint, without storage locations.
        planner_data: Data of the save planner in the metadata.
        plans: Items of each rank's final plan, in rank order.
    """

    index: CheckpointIndex
    planner_data: Any
    plans: list[PlannedRows]
    checks: list[list[int]]
    """For each rank, the numbers of the sets of replicated FQNs that this rank compares with other ranks."""
    layouts: list[RecentlyUsed[bytes, ItemColumns]]
    """For each rank, a cache of the locations of its tensors in files after recent saves: digest → locations."""
    storage_data: list[Any]
    """For each rank, what the storage writer added to the local plan, which is part of the plan's digest."""


RANK_PLANS: RecentlyUsed[Hashable, list[RankPlan]] = RecentlyUsed(_KEPT)
GLOBAL_PLANS: RecentlyUsed[str | None, GlobalPlan] = RecentlyUsed(_KEPT)


def fingerprint(plan: SavePlan, made_by: Hashable) -> bytes | None:
    """Return a digest of a local plan, as the key of the plan cache; None if the digest would take too long.

    Args:
        plan: Local plan, as it would be sent to the coordinator.
        made_by: Other inputs of the global plan, such as the planner's options; part of the digest.
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
    """Return for each list of FQNs in `checks` one digest of the checksums that `plan.digests` has for them."""
    digests = plan.digests or {}
    return [
        hashlib.blake2b(np.array([digests[name] for name in names], np.uint32).data, digest_size=8).digest()
        for names in checks
    ]


def compared_values(all_plans: Sequence[SavePlan]) -> Iterator[tuple[tuple[int, ...], list[str]]]:
    """Yield pairs (ranks, FQNs): FQNs whose replicas exactly these ranks hold, with checksums in their plans."""
    holders: dict[str, list[int]] = {}
    for rank, plan in enumerate(all_plans):
        for name in plan.digests or ():
            holders.setdefault(name, []).append(rank)
    sets: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in holders.items():
        if len(ranks) > 1:
            sets.setdefault(tuple(ranks), []).append(name)
    yield from sets.items()
