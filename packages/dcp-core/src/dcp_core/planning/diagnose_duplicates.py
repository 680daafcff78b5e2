"""Who writes what several ranks hold: replicas, tied values, and values that differ where they should not.

Plain decisions over plans: no tensors, no communication, and the same answer on every run.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

import numpy as np
import torch

from dcp_core.errors import PlanError
from dcp_core.planning.balance import Assignment, Candidates, assign, cut_dim
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex
from dcp_core.records.plan import SavePlan, WriteItem, WriteItemType
from dcp_manifest.index.box_columns import starts

__all__ = [
    "DivergentReplicaWarning",
    "OnDivergence",
    "agreed_aliases",
    "dedup_save_plans",
    "divergent_keys",
    "report_divergence",
    "without_keys",
]

OnDivergence = Literal["warn", "error", "ignore"]
_SHOWN_KEYS = 10


class DivergentReplicaWarning(UserWarning):
    """Ranks hold different values under one name, of which only the lowest rank's is saved."""


def dedup_save_plans(
    all_plans: Sequence[SavePlan],
    save_to_lowest_rank: bool = False,
    *,
    pinned_to_lowest: Iterable[str] = (),
) -> list[SavePlan]:
    """Plans in which every item is written by exactly one rank.

    Replicas go to the rank with the least bytes to write, largest first; equal loads to the lower rank. Large ones are
    cut where that levels the load and every plan that has them is `splittable`.

    Args:
        all_plans: One plan per rank, in rank order.
        save_to_lowest_rank: Give each item to the lowest rank that has it instead of balancing.
        pinned_to_lowest: FQNs that always go to the lowest rank that has them.

    Source: torch 2.13 `_dedup_save_plans.dedup_save_plans` (contract; stock weighs a shard by its global tensor).
    """
    holders: dict[MetadataIndex, list[int]] = defaultdict(list)
    items: dict[MetadataIndex, WriteItem] = {}
    nbytes: dict[MetadataIndex, int] = defaultdict(lambda: 1)
    kinds: dict[str, tuple[int, bool]] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            holders[item.index].append(rank)
            nbytes[item.index] = max(nbytes[item.index], item.chunk_bytes())
            _check_kind(kinds, item, rank)
            _check_same(items.setdefault(item.index, item), item, holders[item.index][0], rank)
    # Tensor by tensor, then objects: as columns have them, so that equal sizes come in the same order.
    order = {fqn: position for position, fqn in enumerate(kinds)}
    items = dict(sorted(items.items(), key=lambda pair: (pair[1].tensor_data is None, order[pair[0].fqn])))
    holders = {index: holders[index] for index in items}
    pinned = frozenset(pinned_to_lowest)
    held_by = [[*dict.fromkeys(ranks)] for ranks in holders.values()]
    assigned = assign(
        Candidates(
            nbytes=np.array([nbytes[index] for index in items], np.int64),
            slices=np.array(
                [
                    _slices(item) if all(all_plans[rank].splittable for rank in ranks) else 1
                    for item, ranks in zip(items.values(), held_by, strict=True)
                ],
                np.int64,
            ),
            first=starts(np.array([len(ranks) for ranks in held_by], np.int64)),
            ranks=np.array(list(chain.from_iterable(held_by)), np.int64),
            settled=np.array([save_to_lowest_rank or index.fqn in pinned for index in items], bool),
        ),
        len(all_plans),
    )
    rows = {index: row for row, index in enumerate(items)}
    return [
        replace(plan, items=[*chain.from_iterable(_share(item, rows[item.index], rank, assigned) for item in once)])
        for rank, plan in enumerate(all_plans)
        for once in [_once(plan.items)]
    ]


def _slices(item: WriteItem) -> int:
    data = item.tensor_data
    dim = None if data is None else cut_dim(data.chunk.sizes)
    return 1 if data is None or dim is None else data.chunk.sizes[dim]


def _share(item: WriteItem, row: int, rank: int, assigned: Assignment) -> list[WriteItem]:
    """What one rank writes of an item: all of it, a part, or nothing."""
    if row not in assigned.parts:
        return [item] if assigned.writer[row] == rank else []
    return [_part(item, part.begin, part.end) for part in assigned.parts[row] if part.rank == rank]


def _part(item: WriteItem, begin: int, end: int) -> WriteItem:
    data = item.tensor_data
    dim = None if data is None else cut_dim(data.chunk.sizes)
    if data is None or dim is None:
        return item
    offsets, sizes = [*data.chunk.offsets], [*data.chunk.sizes]
    offsets[dim] += begin
    sizes[dim] = end - begin
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    index = MetadataIndex(item.index.fqn, chunk.offsets)
    return replace(item, index=index, type=WriteItemType.SHARD, tensor_data=replace(data, chunk=chunk))


def _once(items: Iterable[WriteItem]) -> list[WriteItem]:
    """A rank may hold a box twice (two equal local shards); one copy is written."""
    return list({item.index: item for item in items}.values())


def _check_kind(kinds: dict[str, tuple[int, bool]], item: WriteItem, rank: int) -> None:
    """Raise if one name is a tensor here and an object there; `kinds`: FQN → first rank, whether it is a tensor."""
    first_rank, is_tensor = kinds.setdefault(item.index.fqn, (rank, item.tensor_data is not None))
    if is_tensor != (item.tensor_data is not None):
        raise PlanError(
            f"{item.index.fqn!r} is a tensor on one rank and an object on another (ranks {first_rank}, {rank}); "
            "give them different names"
        )


def _check_same(first: WriteItem, other: WriteItem, first_rank: int, other_rank: int) -> None:
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
    """The tied values that every rank ties in the same way: alias FQN → FQN that is written.

    A pair counts only if each rank that holds one of the two holds both and ties them; otherwise both are written.
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


def without_keys(plan: SavePlan, keys: Iterable[str]) -> SavePlan:
    """The plan without the items of `keys`."""
    dropped = frozenset(keys)
    return replace(plan, items=[item for item in plan.items if item.index.fqn not in dropped])


def divergent_keys(all_plans: Sequence[SavePlan]) -> dict[str, list[int]]:
    """Replicated values whose contents differ: FQN → ranks that differ from the lowest rank that has it."""
    first: dict[str, int] = {}
    divergent: dict[str, list[int]] = defaultdict(list)
    for rank, plan in enumerate(all_plans):
        for key, digest in (plan.digests or {}).items():
            if first.setdefault(key, digest) != digest:
                divergent[key].append(rank)
    return dict(divergent)


def report_divergence(divergent: dict[str, list[int]], on_divergence: OnDivergence) -> None:
    """Warn or raise, naming keys and ranks.

    Raises:
        PlanError: `on_divergence` is `error` and there is any.
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
