"""Exchange of save plans between ranks: the whole plan on the first save, only a token for an unchanged plan later.

A rank with a new plan sends the plan; a rank that made the same plan in an earlier save sends only the token of that
plan and checksums of replicated tensors and objects. The coordinator plans, or finds the cached global plan by the
token, or else requests the plans of all ranks. It replies to each rank with the items that the rank writes, and with
the additions of the storage writer.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dcp_core.planning.plan_cache import (
    GLOBAL_PLANS,
    RANK_PLANS,
    GlobalPlan,
    RankPlan,
    check_sums,
    compared_values,
    fingerprint,
)
from dcp_core.planning.write_results import KEPT_LAYOUTS, PackedResults, pack, unpack
from dcp_core.records.abilities import SavePlannerAbilities, abilities
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata
from dcp_core.records.plan import SavePlan
from dcp_core.records.protocols import SavePlanner, StorageWriter, WriteResult, placed_plans
from dcp_core.tables.columns_of_items import columns_of
from dcp_core.tables.metadata_columns import metadata_from_index
from dcp_core.tables.plan_columns import PlanColumns, Selection, written_of
from dcp_core.tables.planned_rows import PlannedRows
from dcp_core.tables.records_of_index import records_of
from dcp_io.recently_used import RecentlyUsed
from dcp_manifest.index.columns import ItemColumns
from dcp_ranks import Coordinator

__all__ = ["PlanExchange"]

# A rank's values may be part of several global plans, if other ranks hold different values.
_KEPT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Offer:
    """Message with a whole local plan; `known` says whether the rank would recognise the plan in a later save."""

    plan: SavePlan
    known: bool


@dataclass(frozen=True, slots=True)
class _Unchanged:
    """Message for an unchanged plan: token of each earlier save → digests of values that other ranks had too."""

    sums: dict[str, list[bytes]]


@dataclass(frozen=True, slots=True)
class _Reply:
    """A rank's final plan without the parts that the rank knows. `rest` is the plan without items sent as columns."""

    rest: SavePlan | None
    """Rest of the plan; None asks the rank to send its whole plan."""
    chosen: Selection | None = None
    token: str | None = None
    checks: npt.NDArray[np.int32] | None = None
    """For each checksum that the rank sent, the number of its set of values; -1 if no other rank has the value."""
    unchanged: bool = False


class PlanExchange:
    """Exchange of the plans of one save, on one rank, with a cache of earlier plans.

    Args:
        coordinator: Coordinator of this save.
        planner: Save planner, whose `create_global_plan` runs on the coordinator unless the global plan is cached.
        group: Key of this group of ranks in the plan cache of this process.
    """

    def __init__(self, coordinator: Coordinator, planner: SavePlanner, group: Hashable) -> None:
        self._coordinator = coordinator
        self._planner = planner
        self._group = (group, coordinator.rank, coordinator.world_size, coordinator.coordinator_rank)
        self._local: SavePlan | None = None
        self._columns: PlanColumns | None = None
        self._key: Hashable = None
        self._candidates: list[RankPlan] = []
        self._known: RankPlan | None = None
        self._global: GlobalPlan | None = None
        self._token: str | None = None
        self._final: list[PlannedRows | None] = []
        self._packs = False
        self._layout = b""
        self.metadata: Metadata | None = None
        """Metadata of the global plan on the coordinator; None on other ranks."""

    def run(self, plan_locally: Callable[[], SavePlan], writer: Callable[[], StorageWriter]) -> SavePlan:
        """Agree on the global plan with all ranks, and return this rank's final plan.

        Args:
            plan_locally: Function that returns the local plan; called once, within the first phase.
            writer: Function that returns the storage writer; called after `plan_locally`.

        Ranks: every rank; collective: one phase, or two if only some ranks have a cached plan.
        """

        def answer(messages: list[_Offer | _Unchanged]) -> Sequence[_Reply]:
            return self._answer(messages, writer())

        reply = self._coordinator.reduce_scatter("plan", lambda: self._propose(plan_locally()), answer)
        if reply.rest is None:
            reply = self._coordinator.reduce_scatter("plan", self._offer, answer)
        return self._accept(reply)

    def forget(self) -> None:
        """Remove this save's plan from the cache after a failed save, so that the next save plans again."""
        RANK_PLANS.drop(self._key)
        GLOBAL_PLANS.drop(self._token)

    def succeeded(self) -> None:
        """Record after a successful save that the coordinator has cached the file locations of this rank's items."""
        if self._known is not None:
            self._known.layout = self._layout

    def pack_results(self, results: list[WriteResult]) -> list[WriteResult] | PackedResults:
        """Return this rank's write results in compact form, or unchanged if the storage returns no columns.

        File locations that the coordinator has cached are left out.
        """
        written = written_of(results) if self._packs else None
        if written is None or self._columns is None or written.planned is not self._columns:
            return results
        tensors = int(self._columns.index.tensor_chunks.sum())
        packed = pack(written.stored, tensors, self._known.layout if self._known else b"")
        self._layout = packed.layout
        return packed

    def unpack_results(self, packed: Sequence[list[WriteResult] | PackedResults]) -> list[list[WriteResult]]:
        """Return the write results of all ranks from their compact form, in rank order. Called on the coordinator."""
        return [
            unpack(one, self._final[rank], RecentlyUsed(0) if self._global is None else self._global.layouts[rank])
            if isinstance(one, PackedResults)
            else one
            for rank, one in enumerate(packed)
        ]

    def _propose(self, plan: SavePlan) -> _Offer | _Unchanged:
        self._local = plan
        plan_key = abilities(self._planner, SavePlannerAbilities).plan_key
        made_by = None if plan_key is None else plan_key()
        mark = None if made_by is None else fingerprint(plan, made_by)
        if mark is not None:
            self._key = (self._group, mark)
            self._candidates = RANK_PLANS.get(self._key) or []
        if not self._candidates:
            return self._offer()
        return _Unchanged({one.token: check_sums(plan, one.checks) for one in self._candidates})

    def _offer(self) -> _Offer:
        if self._local is None:
            raise RuntimeError("there is no local plan")
        return _Offer(self._local, self._key is not None)

    def _answer(self, messages: list[_Offer | _Unchanged], writer: StorageWriter) -> Sequence[_Reply]:
        offers = [message for message in messages if isinstance(message, _Offer)]
        if len(offers) == len(messages):
            return self._plan(offers, writer)
        known = None if offers else self._find([message for message in messages if isinstance(message, _Unchanged)])
        return [_Reply(None)] * len(messages) if known is None else self._plan_again(known, writer)

    def _find(self, messages: Sequence[_Unchanged]) -> GlobalPlan | None:
        """Return the cached global plan that all ranks name, if replicated values are still equal between ranks."""
        for token in messages[0].sums:
            known = GLOBAL_PLANS.get(token)
            sums = [message.sums.get(token) for message in messages]
            if known is not None and len(known.plans) == len(messages) and _still_agree(known.checks, sums):
                self._token, self._global = token, known
                return known
        return None

    def _plan_again(self, known: GlobalPlan, writer: StorageWriter) -> list[_Reply]:
        self.metadata = metadata_from_index(known.index)
        self.metadata.planner_data = dict(known.planner_data) if known.planner_data is not None else None
        items = [LazyList(rows) for rows in known.plans]
        plans = [SavePlan(one, added) for one, added in zip(items, known.storage_data, strict=True)]
        adopt = abilities(self._planner, SavePlannerAbilities).adopt_global_plan
        if adopt is not None:
            adopt(plans, self.metadata)
        plans = placed_plans(writer, plans)
        self._final = [*known.plans]
        # A storage that looked at the items may have changed them.
        return [
            _Reply(replace(plan, items=[]), token=self._token, unchanged=True)
            if plan.items is one and one.source is not None
            else _Reply(plan)
            for plan, one in zip(plans, items, strict=True)
        ]

    def _plan(self, offers: Sequence[_Offer], writer: StorageWriter) -> list[_Reply]:
        all_plans = [offer.plan for offer in offers]
        plans, metadata = self._planner.create_global_plan(all_plans)
        self.metadata = metadata
        plans = placed_plans(writer, plans)
        chosen = [columns_of(plan.items) for plan in plans]
        rows = _planned_rows(metadata, chosen)
        self._final = rows
        sets = list(compared_values(all_plans))
        whole = [one for one in rows if one is not None]
        if all(offer.known for offer in offers) and len(whole) == len(plans) and _agree(all_plans, sets):
            self._token = secrets.token_hex(8)
            source = whole[0].index
            numbers = [[n for n, (ranks, _) in enumerate(sets) if rank in ranks] for rank in range(len(plans))]
            # The caller gets this metadata, and may change it.
            paths = None if metadata.planner_data is None else dict(metadata.planner_data)
            layouts: list[RecentlyUsed[bytes, ItemColumns]] = [RecentlyUsed(KEPT_LAYOUTS) for _ in plans]
            added = [plan.storage_data for plan in all_plans]
            self._global = GlobalPlan(source, paths, whole, numbers, layouts, added)
            GLOBAL_PLANS.put(self._token, self._global)
        replies = []
        for rank, (plan, one, local) in enumerate(zip(plans, chosen, all_plans, strict=True)):
            by = None if rows[rank] is None or rank == self._coordinator.rank else one.chosen
            checks = None if self._token is None else _numbers(rank, local, sets)
            rest = plan if by is None else replace(plan, items=[])
            replies.append(_Reply(rest, by, self._token, checks))
        return replies

    def _accept(self, reply: _Reply) -> SavePlan:
        local, plan = self._local, reply.rest
        if plan is None or local is None:
            raise RuntimeError("the coordinator asked for the plans twice")
        self._packs = not self._coordinator.is_coordinator and (reply.unchanged or reply.chosen is not None)
        if reply.unchanged:
            self._known = next(one for one in self._candidates if one.token == reply.token)
            self._columns = self._known.columns
            plan = replace(plan, items=self._columns.items())
        else:
            if reply.chosen is not None:
                plan = replace(plan, items=columns_of(local.items).select(reply.chosen).items())
            self._columns = columns_of(plan.items)
            if reply.token is not None:
                self._known = RankPlan(reply.token, self._columns, _names(local, reply.checks))
        if self._known is None:
            RANK_PLANS.drop(self._key)
        elif self._key is not None:
            others = [one for one in self._candidates if one is not self._known]
            RANK_PLANS.put(self._key, [self._known, *others][:_KEPT_TOKENS])
        return plan


def _still_agree(checks: Sequence[Sequence[int]], sums: Sequence[Sequence[bytes] | None]) -> bool:
    """Whether every rank knows the plan, and the values that sets of ranks compare are equal."""
    seen: dict[int, bytes] = {}
    for numbers, reported in zip(checks, sums, strict=True):
        if reported is None or any(
            seen.setdefault(number, one) != one for number, one in zip(numbers, reported, strict=True)
        ):
            return False
    return True


def _planned_rows(metadata: Metadata, plans: Sequence[PlanColumns]) -> list[PlannedRows | None]:
    """Return the items of each rank as rows of the metadata's index; None for a rank whose items are not in it."""
    records = records_of(metadata)
    return [None if records is None else PlannedRows.of(one, records) for one in plans]


def _agree(plans: Sequence[SavePlan], sets: Sequence[tuple[tuple[int, ...], list[str]]]) -> bool:
    """Whether no value differs between ranks; a value that differs must be reported in every save."""
    digests = [plan.digests or {} for plan in plans]
    return all(len({digests[rank][name] for rank in ranks}) == 1 for ranks, names in sets for name in names)


def _numbers(rank: int, plan: SavePlan, sets: Sequence[tuple[tuple[int, ...], list[str]]]) -> npt.NDArray[np.int32]:
    number_of = {name: number for number, (ranks, names) in enumerate(sets) if rank in ranks for name in names}
    return np.array([number_of.get(name, -1) for name in plan.digests or ()], np.int32)


def _names(plan: SavePlan, numbers: npt.NDArray[np.int32] | None) -> list[list[str]]:
    """Return the names in each of a rank's sets, in the same order on all ranks of the set."""
    sets: dict[int, list[str]] = {}
    for name, number in zip(plan.digests or (), () if numbers is None else numbers.tolist(), strict=False):
        if number >= 0:
            sets.setdefault(number, []).append(name)
    return [sorted(sets[number]) for number in sorted(sets)]
