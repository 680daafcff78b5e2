"""Exchange of save plans: the whole plan in the first save, only a token for an unchanged plan later.

In a large job, ranks first send what differs between their plans (`Brief`). Then one rank of each form sends the rest.

With the token, a rank sends checksums of replicas. The coordinator makes the global plan (`save` says how), finds it in
its cache, or requests all local plans, and replies with each rank's part.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dcp_core.planning.plan_forms import MANY_RANKS, Brief, Form, brief_of
from dcp_core.planning.replicas import fingerprint
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import ReplicaKey, SavePlan, SavePlanner, WriteResult
from dcp_core.tables.metadata_columns import metadata_from_index, planned_rows, records_of
from dcp_core.tables.plan_columns import PlanColumns, PlannedRows, Selection, WrittenColumns, columns_of, written_of
from dcp_io.recently_used import RecentlyUsed
from dcp_manifest.index.columns import BlockColumns, CheckpointIndex, ItemColumns
from dcp_manifest.index.stored_items import StoredItems, join_items
from dcp_ranks import Coordinator

# A rank's plan may belong to several global plans if other ranks' plans change.
_KEPT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class _Offer:
    """A whole local plan; `known` says whether the rank would recognise it."""

    plan: SavePlan
    known: bool


@dataclass(frozen=True, slots=True)
class _Unchanged:
    sums: dict[bytes, list[bytes]]


@dataclass(frozen=True, slots=True)
class _Reply:
    rest: SavePlan | None
    chosen: Selection | None = None
    token: bytes | None = None
    checks: npt.NDArray[np.int32] | None = None
    """Set number per checksum that the rank sent; -1 if no other rank has the value."""
    unchanged: bool = False
    wanted: Literal["brief", "whole", "nothing"] = "nothing"
    """What the rank has to send in the next phase, without a `rest`."""


PlanGlobally = Callable[[list[SavePlan], Metadata | None], tuple[list[SavePlan], Metadata]]
"""From local plans, or from cached final plans with their metadata: final plans with placement, and the metadata."""


@dataclass(slots=True)
class PlanExchange:
    """One save's plans on one rank, with a cache by `group`."""

    coordinator: Coordinator
    planner: SavePlanner
    group: Hashable
    packs: bool = field(init=False, default=False)
    """Whether this rank sends `PackedResults`: the coordinator knows its items from the plan."""
    # Of this rank: its local plan, and the items that it writes.
    _local: SavePlan | None = field(init=False, default=None)
    _columns: PlanColumns | None = field(init=False, default=None)
    # Key of its cached plans (None: not cached), those that fit its local plan, and the one that is used.
    _key: Hashable = field(init=False, default=None)
    _candidates: list[RankPlan] = field(init=False, default_factory=list)
    _known: RankPlan | None = field(init=False, default=None)
    # Digest of the locations that it sent.
    _layout: bytes = field(init=False, default=b"")
    # Of the coordinator: the cached global plan, its token, each rank's items (None: not in the index), and `Brief`s.
    _global: GlobalPlan | None = field(init=False, default=None)
    _token: bytes | None = field(init=False, default=None)
    _final: Sequence[PlannedRows | None] = field(init=False, default=())
    _briefs: list[Brief | _Offer] = field(init=False, default_factory=list)
    # Locations by their digest: ranks of one form share them.
    _places: dict[bytes, ItemColumns] = field(init=False, default_factory=dict)

    def run(self, plan_locally: Callable[[], SavePlan], plan_globally: PlanGlobally) -> SavePlan:
        """Return this rank's part of the global plan, which the coordinator makes with `plan_globally`.

        Ranks: every rank; collective: one phase. One more if a rank has a cached plan that the coordinator cannot use:
        other ranks' plans or replicas have changed, or its own cache lacks it. One more from `MANY_RANKS` ranks on,
        unless all ranks send their whole plans.
        """
        answer = partial(self._answer, plan_globally)
        reply = self.coordinator.reduce_scatter("plan", partial(self._propose, plan_locally), answer)
        while reply.rest is None:
            reply = self.coordinator.reduce_scatter("plan", partial(self._send, reply.wanted), answer)
        return self._accept(reply, reply.rest)

    def forget(self) -> None:
        """Uncache this plan."""
        RANK_PLANS.drop(self._key)
        GLOBAL_PLANS.drop(self._token)

    def succeeded(self) -> None:
        """Remember the locations that this rank has sent: the coordinator has cached them."""
        if self._known is not None:
            self._known.layout = self._layout

    def pack_results(self, results: list[WriteResult]) -> list[WriteResult] | PackedResults:
        """Return the results without locations that the coordinator has cached; unchanged if not of this plan."""
        written = written_of(results)
        if written is None or self._columns is None or written.planned is not self._columns:
            return results
        tensors = int(self._columns.table.tensor_chunks.sum())
        level = int(self.coordinator.world_size >= MANY_RANKS)
        packed = pack(written.stored, tensors, self._known.layout if self._known else b"", level=level)
        self._layout = packed.layout
        return packed

    def unpack_results(self, packed: PackedResults, rank: int) -> list[WriteResult]:
        """Return a rank's results, and cache its locations. Called on the coordinator."""
        planned, known = self._final[rank], None if self._global is None else self._global.layouts[rank]
        places = self._places.get(packed.layout)
        if places is None and packed.places is not None:
            places = pickle.loads(zlib.decompress(packed.places))
        elif places is None and known is not None:
            places = known.get(packed.layout)
        if places is None or planned is None:
            raise RuntimeError("a rank sent no locations of its items")
        self._places[packed.layout] = places
        if known is not None:
            known.put(packed.layout, places)
        tensors = replace(places, crc32=packed.crc32, running_crcs=packed.running_crcs, blocks=packed.blocks)
        parts = (
            StoredItems(tensors, packed.files, packed.chains),
            StoredItems(packed.objects, packed.files, packed.chains),
        )
        stored = [part for part in parts if len(part.columns.file)] or parts[:1]
        return LazyList(WrittenColumns(planned, StoredItems.joined(stored)))

    def _propose(self, plan_locally: Callable[[], SavePlan]) -> _Offer | Brief | _Unchanged:
        self._local = plan = plan_locally()
        made_by = self.planner.plan_key()
        mark = None if made_by is None else fingerprint(plan, made_by)
        if mark is not None:
            ranks = (self.coordinator.rank, self.coordinator.world_size, self.coordinator.coordinator_rank)
            self._key = (self.group, ranks, mark)
            self._candidates = RANK_PLANS.get(self._key) or []
        if not self._candidates:
            return self._offer(brief=True)
        return _Unchanged({one.token: check_sums(plan, one.checks) for one in self._candidates})

    def _send(self, wanted: str) -> _Offer | Brief | None:
        return None if wanted == "nothing" else self._offer(brief=wanted == "brief")

    def _offer(self, *, brief: bool) -> _Offer | Brief:
        if self._local is None:
            raise RuntimeError("there is no local plan")
        known = self._key is not None
        found = brief_of(self._local, known=known) if brief and self.coordinator.world_size >= MANY_RANKS else None
        return _Offer(self._local, known) if found is None else found

    def _answer(
        self, plan_globally: PlanGlobally, messages: list[_Offer | Brief | _Unchanged | None]
    ) -> Sequence[_Reply]:
        unchanged = [message for message in messages if isinstance(message, _Unchanged)]
        if unchanged:
            known = self._find(unchanged) if len(unchanged) == len(messages) else None
            return (
                [_Reply(None, wanted="brief")] * len(messages)
                if known is None
                else self._plan_again(plan_globally, known)
            )
        offers = [message for message in messages if isinstance(message, _Offer)]
        if self._briefs:
            return self._plan(plan_globally, self._rebuilt(messages))
        if len(offers) == len(messages):
            return self._plan(plan_globally, offers)
        self._briefs = [message for message in messages if isinstance(message, Brief | _Offer)]
        seen: set[bytes] = set()
        replies = [_Reply(None)] * len(messages)
        for rank, message in enumerate(self._briefs):
            if isinstance(message, Brief) and message.form not in seen:
                seen.add(message.form)
                replies[rank] = _Reply(None, wanted="whole")
        return replies

    def _rebuilt(self, messages: Sequence[Any]) -> list[_Offer]:
        forms: dict[bytes, Form] = {}
        for brief, message in zip(self._briefs, messages, strict=True):
            if isinstance(brief, Brief) and isinstance(message, _Offer):
                forms[brief.form] = Form(message.plan)
        offers = [
            brief if isinstance(brief, _Offer) else _Offer(forms[brief.form].plan(brief), brief.known)
            for brief in self._briefs
        ]
        own = self.coordinator.rank
        if self._local is not None:  # its records keep their order, which is not sent
            offers[own] = replace(offers[own], plan=self._local)
        self._briefs = []
        return offers

    def _find(self, messages: Sequence[_Unchanged]) -> GlobalPlan | None:
        for token in messages[0].sums:
            known = GLOBAL_PLANS.get(token)
            sums = [message.sums.get(token) for message in messages]
            if known is not None and len(known.plans) == len(messages) and _still_agree(known.checks, sums):
                self._token, self._global = token, known
                return known
        return None

    def _plan_again(self, plan_globally: PlanGlobally, known: GlobalPlan) -> list[_Reply]:
        metadata = metadata_from_index(known.index)
        metadata.planner_data = dict(known.planner_data) if known.planner_data is not None else None
        items = [LazyList(rows) for rows in known.plans]
        plans = [SavePlan(one, added) for one, added in zip(items, known.storage_data, strict=True)]
        plans, _ = plan_globally(plans, metadata)
        self._final = [*known.plans]
        # The storage may have changed the items.
        return [
            _Reply(replace(plan, items=[]), token=self._token, unchanged=True)
            if plan.items is one and one.source is not None
            else _Reply(plan)
            for plan, one in zip(plans, items, strict=True)
        ]

    def _plan(self, plan_globally: PlanGlobally, offers: Sequence[_Offer]) -> list[_Reply]:
        all_plans = [offer.plan for offer in offers]
        plans, metadata = plan_globally([*all_plans], None)  # a planner may change the list
        chosen: list[PlanColumns | PlannedRows] = []
        for plan in plans:
            given = plan.items.source if isinstance(plan.items, LazyList) else None
            chosen.append(given if isinstance(given, PlannedRows) else columns_of(plan.items))
        records = records_of(metadata)
        # None for a rank with items that are not in the metadata's index.
        rows_of_names: dict[int, npt.NDArray[np.int64]] = {}
        rows = [None if records is None else planned_rows(one, records, rows_of_names) for one in chosen]
        self._final = [None if one is None else replace(one, chosen=None, chosen_from=None) for one in rows]
        whole = [one for one in self._final if one is not None]
        sets = compared_values(all_plans)
        known = [offer for offer in offers if offer.known]
        # Each save must report replicated values that differ. Plans of one form share their digests.
        digests = {id(plan.digests): plan.digests or {} for plan in all_plans}.values()
        numbers: list[list[int]] = [[] for _ in plans]
        for number, (ranks, _) in enumerate(sets):
            for rank in ranks:
                numbers[rank].append(number)
        if len(known) == len(whole) == len(plans) and not [
            name for _, names in sets for name in names if len({each[name] for each in digests if name in each}) > 1
        ]:
            self._token = secrets.token_bytes(8)
            source = whole[0].index
            # The caller may change the returned metadata.
            paths = None if metadata.planner_data is None else dict(metadata.planner_data)
            layouts: list[RecentlyUsed[bytes, ItemColumns]] = [RecentlyUsed(KEPT_LAYOUTS) for _ in plans]
            added = [plan.storage_data for plan in all_plans]
            self._global = GlobalPlan(source, paths, whole, numbers, layouts, added)
            GLOBAL_PLANS.put(self._token, self._global)
        replies = []
        checks_of: dict[tuple[int, ...], npt.NDArray[np.int32]] = {}
        for rank, (plan, one, local) in enumerate(zip(plans, chosen, all_plans, strict=True)):
            by = None if rows[rank] is None or rank == self.coordinator.rank else one.chosen
            # A planner may give this rank items that were chosen from other ones than it offered.
            offered = local.items.source if isinstance(local.items, LazyList) else None
            if offered is None or one.chosen_from is None or one.chosen_from() is not offered:
                by = None
            checks = None
            if self._token is not None:
                key = (id(local.digests), *numbers[rank])
                checks = checks_of.get(key)
                if checks is None:
                    number_of = {name: number for number in numbers[rank] for name in sets[number][1]}
                    checks = np.array([number_of.get(name, -1) for name in local.digests or ()], np.int32)
                    checks_of[key] = checks
            rest = plan if by is None else replace(plan, items=[])
            replies.append(_Reply(rest, by, self._token, checks))
        return replies

    def _accept(self, reply: _Reply, plan: SavePlan) -> SavePlan:
        local = self._local
        if local is None:
            raise RuntimeError("there is no local plan")
        self.packs = not self.coordinator.is_coordinator and (reply.unchanged or reply.chosen is not None)
        if reply.unchanged:
            (self._known,) = [one for one in self._candidates if one.token == reply.token]
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
    seen: dict[int, bytes] = {}
    for numbers, reported in zip(checks, sums, strict=True):
        if reported is None:
            return False
        for number, one in zip(numbers, reported, strict=True):
            if seen.setdefault(number, one) != one:
                return False
    return True


def _names(plan: SavePlan, numbers: npt.NDArray[np.int32] | None) -> list[list[ReplicaKey]]:
    sets: dict[int, list[ReplicaKey]] = {}
    for name, number in zip(plan.digests or (), () if numbers is None else numbers.tolist(), strict=False):
        if number >= 0:
            sets.setdefault(number, []).append(name)
    return [sorted(sets[number], key=str) for number in sorted(sets)]


# Several models, optimizers and groups may alternate.
_KEPT = 16


@dataclass(slots=True)
class RankPlan:
    """Cached final plan of one rank; `token` names the coordinator's global plan."""

    token: bytes
    columns: PlanColumns
    checks: list[list[ReplicaKey]]
    layout: bytes = b""


@dataclass(slots=True)
class GlobalPlan:
    """Cached global plan, without storage locations."""

    index: CheckpointIndex
    planner_data: Any
    plans: list[PlannedRows]
    checks: list[list[int]]
    layouts: list[RecentlyUsed[bytes, ItemColumns]]
    storage_data: list[Any]
    """The writer's additions to the local plans."""


RANK_PLANS: RecentlyUsed[Hashable, list[RankPlan]] = RecentlyUsed(_KEPT)
GLOBAL_PLANS: RecentlyUsed[bytes | None, GlobalPlan] = RecentlyUsed(_KEPT)


def check_sums(plan: SavePlan, checks: Sequence[Sequence[ReplicaKey]]) -> list[bytes]:
    """Return one digest of checksums per list of keys."""
    digests = plan.digests or {}
    return [
        hashlib.blake2b(np.array([digests[name] for name in names], np.uint32).data, digest_size=8).digest()
        for names in checks
    ]


def compared_values(all_plans: Sequence[SavePlan]) -> list[tuple[tuple[int, ...], list[ReplicaKey]]]:
    """Return (ranks, keys with checksums that exactly these ranks hold)."""
    sharing: dict[int, list[int]] = {}
    for rank, plan in enumerate(all_plans):
        sharing.setdefault(id(plan.digests), []).append(rank)
    holders: dict[ReplicaKey, list[int]] = {}
    for group, ranks in sharing.items():
        for name in all_plans[ranks[0]].digests or ():
            holders.setdefault(name, []).append(group)
    names_of: dict[tuple[int, ...], list[ReplicaKey]] = {}
    for name, groups in holders.items():
        names_of.setdefault(tuple(groups), []).append(name)
    together = [(tuple(sorted(chain(*map(sharing.__getitem__, groups)))), names) for groups, names in names_of.items()]
    return [(ranks, names) for ranks, names in together if len(ranks) > 1]


_PLACES = ("file", "offset", "length", "lead", "stored_bytes", "framing", "chain", "checked")
KEPT_LAYOUTS = 4
_NONE = np.zeros(0, np.uint32)


@dataclass(frozen=True, slots=True)
class PackedResults:
    """Compact write results of one rank."""

    files: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...]
    crc32: npt.NDArray[np.uint32]
    running_crcs: npt.NDArray[np.uint32]
    blocks: BlockColumns | None
    objects: ItemColumns
    layout: bytes
    places: bytes | None
    """Compressed `ItemColumns`, which ranks of one form share; None if the coordinator has them."""


def pack(stored: StoredItems, tensors: int, known_layout: bytes, *, level: int = 1) -> PackedResults:
    """Return write results (chunks, then objects) without known locations; `level` is that of zlib."""
    columns = stored.columns
    first = join_items([columns], np.arange(tensors), narrow=True)
    layout = hashlib.blake2b(repr((len(stored.files), stored.chains)).encode(), digest_size=16)
    for name in _PLACES:
        layout.update(np.ascontiguousarray(getattr(first, name)).data)
    digest, places = layout.digest(), replace(first, crc32=_NONE, running_crcs=_NONE, blocks=None)
    return PackedResults(
        stored.files,
        stored.chains,
        first.crc32,
        first.running_crcs,
        first.blocks,
        join_items([columns], np.arange(tensors, len(stored))),
        digest,
        None if digest == known_layout else zlib.compress(pickle.dumps(places, 5), level),
    )
