"""Comparison of the ranks' save plans: tied tensors, replicas that differ, and inconsistent plans.

These functions work on plans only, without tensors or communication, and are deterministic.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from dcp_core.errors import PlanError
from dcp_core.planning.global_plan import plan_columns
from dcp_core.planning.stock_global_plan import check_coverage, create_default_global_save_plan
from dcp_core.records.metadata import MetadataIndex
from dcp_core.records.plan import SavePlan, WriteItem
from dcp_core.tables.columns_of_items import columns_of

__all__ = [
    "DivergentReplicaWarning",
    "OnDivergence",
    "agreed_aliases",
    "dedup_save_plans",
    "divergent_keys",
    "explain_contradiction",
    "report_divergence",
]

OnDivergence = Literal["warn", "error", "ignore"]
_SHOWN_KEYS = 10


class DivergentReplicaWarning(UserWarning):
    """Replicas of a tensor or object differ between ranks; only the replica of the lowest rank is saved."""


def dedup_save_plans(
    all_plans: Sequence[SavePlan],
    save_to_lowest_rank: bool = False,
    *,
    pinned_to_lowest: Iterable[str] = (),
) -> list[SavePlan]:
    """Return save plans in which every item is written by exactly one rank (dedup).

    A replicated item is assigned to the rank with the fewest bytes to write, largest items first; of ranks with equal
    loads, to the lowest. A large item is cut if that levels the load and `splittable` is True in all plans that contain
    the item.

    Args:
        all_plans: Save plans of all ranks, in rank order.
        save_to_lowest_rank: Whether each item is written by the lowest rank that holds it, without balancing.
        pinned_to_lowest: FQNs whose items are always written by the lowest rank that holds them.

    Source: torch 2.13 `_dedup_save_plans.dedup_save_plans` (contract; stock weighs a shard by its global tensor).
    """
    planned = plan_columns(
        all_plans, {}, complete=None, to_lowest_rank=save_to_lowest_rank, pinned_to_lowest=[*pinned_to_lowest]
    )
    if planned is None:
        raise explain_contradiction(all_plans, {}, complete=False)
    return planned[0]


def explain_contradiction(all_plans: Sequence[SavePlan], aliases: Collection[str], *, complete: bool) -> PlanError:
    """Return the error for inconsistent plans, for which `plan_columns` returns None.

    Args:
        all_plans: Save plans of all ranks, in rank order.
        aliases: FQNs of tied tensors that are not written.
        complete: Whether chunks must fill tensors completely.

    Returns:
        Exception, which the caller raises; its message names the FQN, and the ranks that contradict each other or the
        box of the hole or overlap.
    """
    items: dict[MetadataIndex, tuple[int, WriteItem]] = {}
    kinds: dict[str, tuple[int, bool]] = {}
    try:
        for rank, plan in enumerate(all_plans):
            for item in columns_of(plan.items):
                if item.index.fqn not in aliases:
                    _check_kind(kinds, item, rank)
                    _check_same(*items.setdefault(item.index, (rank, item)), item, rank)
        _, metadata = create_default_global_save_plan([SavePlan([item for _, item in items.values()])])
        check_coverage(metadata.state_dict_metadata, complete=complete)
    except PlanError as error:
        return error
    return PlanError("the ranks' plans contradict each other")


def _check_kind(kinds: dict[str, tuple[int, bool]], item: WriteItem, rank: int) -> None:
    """Raise if a name is a tensor on one rank, an object on another; `kinds`: FQN → first rank, whether a tensor."""
    first_rank, is_tensor = kinds.setdefault(item.index.fqn, (rank, item.tensor_data is not None))
    if is_tensor != (item.tensor_data is not None):
        raise PlanError(
            f"{item.index.fqn!r} is a tensor on one rank and an object on another (ranks {first_rank}, {rank}); "
            "give them different names"
        )


def _check_same(first_rank: int, first: WriteItem, other: WriteItem, other_rank: int) -> None:
    if first is other or first.tensor_data == other.tensor_data:
        return
    mine, theirs = first.tensor_data, other.tensor_data
    if mine is None or theirs is None:
        return  # both are objects: `_check_kind` has seen them
    if (mine.size, mine.chunk, mine.properties.dtype) != (theirs.size, theirs.chunk, theirs.properties.dtype):
        raise PlanError(
            f"{first.index.fqn!r} differs between ranks: {mine.properties.dtype} {tuple(mine.size)} on rank "
            f"{first_rank}, {theirs.properties.dtype} {tuple(theirs.size)} on rank {other_rank}; "
            "wrap values that belong to one rank in PerRank"
        )


def agreed_aliases(all_plans: Sequence[SavePlan]) -> dict[str, str]:
    """Return the tied tensors that are tied in the same way on every rank: alias FQN → FQN that is written.

    A pair is in the result only if each rank that holds one of the two tensors holds both and ties them; all other
    tensors are written under their own FQNs.
    """
    proposed: dict[str, set[str]] = defaultdict(set)
    for plan in all_plans:
        for alias, target in (plan.aliases or {}).items():
            proposed[alias].add(target)
    pairs = {alias: targets.pop() for alias, targets in proposed.items() if len(targets) == 1}
    if not pairs:
        return {}
    for plan in all_plans:
        names = plan.names()
        tied = plan.aliases or {}
        for alias, target in list(pairs.items()):
            if (alias in names or target in names) and (tied.get(alias) != target or target not in names):
                del pairs[alias]
    return {alias: target for alias, target in pairs.items() if target not in pairs}


def divergent_keys(all_plans: Sequence[SavePlan]) -> dict[str, list[int]]:
    """Return the FQNs whose replicas differ: FQN → ranks whose replica differs from that of the lowest rank."""
    first: dict[str, int] = {}
    divergent: dict[str, list[int]] = defaultdict(list)
    for rank, plan in enumerate(all_plans):
        for key, digest in (plan.digests or {}).items():
            if first.setdefault(key, digest) != digest:
                divergent[key].append(rank)
    return dict(divergent)


def report_divergence(divergent: dict[str, list[int]], on_divergence: OnDivergence) -> None:
    """Warn or raise about replicas that differ between ranks, with their FQNs and ranks.

    Args:
        divergent: Result of `divergent_keys`.
        on_divergence: `warn`, `error` or `ignore`.

    Raises:
        PlanError: `on_divergence` is `error`, and replicas differ.
    """
    if not divergent or on_divergence == "ignore":
        return
    shown = "; ".join(f"{key!r} on ranks {ranks}" for key, ranks in list(divergent.items())[:_SHOWN_KEYS])
    more = f"; and {len(divergent) - _SHOWN_KEYS} more" if len(divergent) > _SHOWN_KEYS else ""
    text = (
        f"{len(divergent)} value(s) differ between ranks under one name, and only the lowest rank's is saved: "
        f"{shown}{more}. Wrap values that belong to one rank in PerRank"
    )
    if on_divergence == "error":
        raise PlanError(text)
    warnings.warn(text, DivergentReplicaWarning, stacklevel=3)
