"""The global plan over columns is that over records, for plans of any shape."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.errors import PlanError
from dcp_core.planning import global_plan
from dcp_core.planning.global_plan import Assignment, Candidates, assign, cut_dim, plan_columns
from dcp_core.planning.replicas import agreed_aliases, explain_contradiction
from dcp_core.planning.stock_global_plan import check_coverage, create_default_global_save_plan
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.protocols import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from dcp_core.tables.metadata_columns import written_index
from dcp_core.tables.plan_columns import WrittenColumns, columns_of
from dcp_manifest.index.columns import Framing, StoredItem, starts
from dcp_manifest.index.stored_items import StoredItems

DTYPES = [torch.float32, torch.bfloat16, torch.int8]


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[ChunkStorageMetadata]:
    """The boxes of a tensor that is cut into `cuts[d]` parts along each dimension, as evenly as it goes."""
    borders = [
        [(size * part // count, size * (part + 1) // count) for part in range(count)]
        for size, count in zip(shape, cuts, strict=True)
    ]
    return [
        ChunkStorageMetadata(torch.Size(a for a, _ in box), torch.Size(b - a for a, b in box))
        for box in itertools.product(*borders)
    ]


@st.composite
def jobs(draw: st.DrawFn) -> list[list[WriteItem]]:
    """The items of each rank: replicated, sharded and partly replicated tensors and objects."""
    world = draw(st.integers(1, 4))
    ranks: list[list[WriteItem]] = [[] for _ in range(world)]
    for number in range(draw(st.integers(0, 6))):
        name = f"t{number}"
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        properties = TensorProperties(draw(st.sampled_from(DTYPES)), requires_grad=draw(st.booleans()))
        whole = draw(st.booleans())
        cuts = (1,) * len(shape) if whole or 0 in shape else tuple(draw(st.integers(1, 3)) for _ in shape)
        kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
        for chunk in grid(shape, cuts):
            if 0 in chunk.sizes and 0 not in shape:
                continue
            for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                ranks[rank].append(WriteItem(MetadataIndex(name, chunk.offsets), kind, None, data))
    for number in range(draw(st.integers(0, 3))):
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1)):
            nbytes = BytesIOWriteData(draw(st.integers(0, 50)))
            ranks[rank].append(WriteItem(MetadataIndex(f"o{number}"), WriteItemType.BYTE_IO, nbytes))
    return ranks


def as_columns(items: list[WriteItem]) -> LazyList[WriteItem]:
    return columns_of(items).items()


def plan_by_records(plans, *, lowest, pinned, complete):
    """The global plan item by item, over records: slow and plain."""
    aliases = agreed_aliases(plans)
    without = [replace(plan, items=[i for i in plan.items if i.index.fqn not in aliases]) for plan in plans]
    found, metadata = create_default_global_save_plan(_assign(without, lowest, pinned))
    check_coverage(metadata.state_dict_metadata, complete=complete)
    return found, metadata


def _assign(
    all_plans: Sequence[SavePlan], save_to_lowest_rank: bool, pinned_to_lowest: Iterable[str]
) -> list[SavePlan]:
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


def chunk_sets(metadata):
    return {
        name: (entry.properties, entry.size, Counter((c.offsets, c.sizes) for c in entry.chunks))
        if hasattr(entry, "chunks")
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def lies_in(part, item):
    """Whether an item is another one or a part of its box, and says so."""
    if part.tensor_data is None or item.tensor_data is None:
        return part == item
    mine, theirs = part.tensor_data.chunk, item.tensor_data.chunk
    if mine == theirs:
        return replace(part.index, index=None) == item.index and part.type is item.type
    return part.type is WriteItemType.SHARD and all(
        start <= at and at + size <= start + whole
        for at, size, start, whole in zip(mine.offsets, mine.sizes, theirs.offsets, theirs.sizes, strict=True)
    )


def loads(plans):
    return [sum(max(item.chunk_bytes(), 1) for item in plan.items) for plan in plans]


@settings(max_examples=300, deadline=None)
@given(jobs(), st.booleans(), st.sets(st.sampled_from(["t0", "t1", "o0"])), st.lists(st.booleans(), min_size=4))
def test_columns_plan_what_records_plan(ranks, lowest, pinned, splittable):
    jobs = [[SavePlan(items, splittable=cut) for items, cut in zip(ranks, splittable, strict=False)]]
    jobs += [[replace(plan, items=as_columns(plan.items)) for plan in jobs[0]]]
    with mock.patch.object(global_plan, "MIN_PART_BYTES", 2):
        expected, metadata = plan_by_records(jobs[0], lowest=lowest, pinned=pinned, complete=True)
        found = plan_columns(
            pickle.loads(pickle.dumps(jobs[1])), {}, complete=True, to_lowest_rank=lowest, pinned_to_lowest=pinned
        )
    assert found is not None
    plans, merged = found
    assert chunk_sets(merged) == chunk_sets(metadata)
    assert all(columns_of(plan.items) is not None for plan in plans)
    for plan, held in zip(plans, ranks, strict=True):
        boxes = {item.index.fqn: [other for other in held if other.index.fqn == item.index.fqn] for item in held}
        for item in plan.items:
            assert any(lies_in(item, other) for other in boxes[item.index.fqn])
            if item.tensor_data is not None:
                chunks = merged.state_dict_metadata[item.index.fqn].chunks
                assert chunks[item.index.index] == item.tensor_data.chunk
    every = Counter(item.index for plan in plans for item in plan.items)
    assert every == Counter(item.index for plan in expected for item in plan.items)
    check_coverage(merged.state_dict_metadata, complete=True)
    assert set(every.values()) <= {1}
    assert max(loads(plans)) <= max(loads(expected)) + max((item.chunk_bytes() for r in ranks for item in r), default=0)
    if lowest:
        assert [{i.index for i in p.items} for p in plans] == [{i.index for i in p.items} for p in expected]


@settings(max_examples=200, deadline=None)
@given(jobs(), st.data())
def test_what_is_wrong_for_records_is_never_planned(ranks, data):
    """A lost or moved box, or ranks that contradict each other: columns leave it to the records, which raise."""
    places = [(rank, at) for rank, items in enumerate(ranks) for at, item in enumerate(items) if item.tensor_data]
    if not places:
        return
    rank, at = data.draw(st.sampled_from(places))
    item = ranks[rank].pop(at)
    change = data.draw(st.sampled_from(["lost", "moved", "larger", "dtype", "shape"]))
    old = item.tensor_data
    if change != "lost" and old.size:
        chunk, size, properties = old.chunk, old.size, old.properties
        if change == "moved":
            chunk = ChunkStorageMetadata(torch.Size([chunk.offsets[0] + 1, *chunk.offsets[1:]]), chunk.sizes)
        elif change == "larger":
            chunk = ChunkStorageMetadata(chunk.offsets, torch.Size([chunk.sizes[0] + 1, *chunk.sizes[1:]]))
        elif change == "dtype":
            properties = TensorProperties(torch.float64)
        else:
            size = torch.Size([size[0] + 1, *size[1:]])
        # Each rank must agree with itself, or it would not be columns.
        ranks[rank] = [other for other in ranks[rank] if other.index.fqn != item.index.fqn]
        new = TensorWriteData(chunk, properties, size)
        ranks[rank].append(WriteItem(MetadataIndex(item.index.fqn, chunk.offsets), item.type, None, new))
    options = {"complete": True}
    found = plan_columns([SavePlan(items) for items in ranks], {}, to_lowest_rank=False, pinned_to_lowest=(), **options)
    try:
        plan_by_records([SavePlan(items) for items in ranks], lowest=False, pinned=(), **options)
    except PlanError:
        assert found is None
        assert isinstance(explain_contradiction([SavePlan(items) for items in ranks], {}, **options), PlanError)


@settings(max_examples=100, deadline=None)
@given(jobs(), st.randoms(use_true_random=False))
def test_results_of_ranks_become_one_index(ranks, random):
    plans, metadata = plan_columns(
        [SavePlan(as_columns(items)) for items in ranks], {}, complete=True, to_lowest_rank=False, pinned_to_lowest=()
    )
    places, results = {}, []
    for rank, plan in enumerate(plans):
        columns = columns_of(plan.items)
        stored = [
            StoredItem(f"__{rank}_{random.randint(0, 1)}", random.randint(0, 99), 9, 1, 7, Framing.RAW, rank)
            for _ in range(len(columns))
        ]
        places.update(zip((item.index for item in columns), stored, strict=True))
        results.append(pickle.loads(pickle.dumps(LazyList(WrittenColumns(columns, StoredItems.of(stored))))))
    index = written_index(metadata, results)
    row = 0
    for name, entry in metadata.state_dict_metadata.items():
        for chunk in getattr(entry, "chunks", ()):
            item = index.stored_item(index.chunk_items, row)
            assert (item.file, item.offset, item.crc32) == (
                places[MetadataIndex(name, chunk.offsets)].file,
                places[MetadataIndex(name, chunk.offsets)].offset,
                places[MetadataIndex(name, chunk.offsets)].crc32,
            )
            row += 1
    for position, name in enumerate(index.object_names):
        item = index.stored_item(index.object_items, position)
        assert (item.file, item.offset) == (places[MetadataIndex(name)].file, places[MetadataIndex(name)].offset)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_each_item_needs_a_result(times):
    item = WriteItem(
        MetadataIndex("t", [0]),
        WriteItemType.TENSOR,
        None,
        TensorWriteData(ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), TensorProperties(), torch.Size([2])),
    )
    plans, metadata = plan_columns(
        [SavePlan(as_columns([item]))], {}, complete=True, to_lowest_rank=False, pinned_to_lowest=()
    )
    columns = columns_of(plans[0].items)
    stored = StoredItems.of([StoredItem("f", 0, 9, 1, 7, Framing.RAW, 0)])
    results = [LazyList(WrittenColumns(columns, stored))] * times
    with nullcontext() if times else pytest.raises(PlanError, match="nothing was stored for 't'"):
        index = written_index(metadata, results)
        assert (index.files, len(index.chunk_items)) == (("f",), 1)


@pytest.mark.parametrize("complete", [True, False])
def test_rank_alone_may_hold_a_part(complete):
    half = TensorWriteData(ChunkStorageMetadata(torch.Size([2]), torch.Size([2])), TensorProperties(), torch.Size([4]))
    items = [WriteItem(MetadataIndex("t", [2]), WriteItemType.SHARD, None, half)]
    found = plan_columns(
        [SavePlan(as_columns(items))], {}, complete=complete, to_lowest_rank=False, pinned_to_lowest=()
    )
    assert (found is None) == complete
