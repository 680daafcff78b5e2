"""The global plan over columns is that over records, for plans of any shape."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core.errors import PlanError
from dcp_core.planning import balance
from dcp_core.planning.diagnose_duplicates import agreed_aliases, dedup_save_plans
from dcp_core.planning.global_plan import plan_columns
from dcp_core.planning.stock_global_plan import check_coverage, create_default_global_save_plan, drop_aliases
from dcp_core.records.lazy import LazyList
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.plan import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from dcp_core.tables.plan_columns import WrittenColumns, columns_of
from dcp_core.tables.value_table import Table
from dcp_core.tables.written_index import index_with_items
from dcp_manifest.index.items import Framing, StoredItem
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
    table = Table()
    for name in dict.fromkeys(item.index.fqn for item in items if item.tensor_data is not None):
        assert table.add_items(name, [item for item in items if item.index.fqn == name])
    objects = [item for item in items if item.tensor_data is None]
    return table.columns(
        [item.index.fqn for item in objects], [item.bytes_io_data.nbytes for item in objects if item.bytes_io_data]
    ).items()


def by_records(plans, *, lowest, pinned, complete):
    aliases = agreed_aliases(plans)
    found = dedup_save_plans(drop_aliases(plans, aliases), lowest, pinned_to_lowest=pinned)
    found, metadata = create_default_global_save_plan(found)
    check_coverage(metadata.state_dict_metadata, complete=complete)
    return found, metadata


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
    with mock.patch.object(balance, "MIN_PART_BYTES", 2):
        expected, metadata = by_records(jobs[0], lowest=lowest, pinned=pinned, complete=True)
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
    found = plan_columns(
        [SavePlan(as_columns(items)) for items in ranks], {}, to_lowest_rank=False, pinned_to_lowest=(), **options
    )
    try:
        by_records([SavePlan(items) for items in ranks], lowest=False, pinned=(), **options)
    except PlanError:
        assert found is None


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
    index = index_with_items(metadata, results)
    assert index is not None
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


def test_missing_results_are_left_to_the_records():
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
    assert index_with_items(metadata, [[]]) is None
    stored = StoredItems.of([StoredItem("f", 0, 9, 1, 7, Framing.RAW, 0)])
    assert index_with_items(metadata, [LazyList(WrittenColumns(columns, stored))]) is not None
    assert index_with_items(metadata, [LazyList(WrittenColumns(columns, stored))] * 2) is None


@pytest.mark.parametrize("complete", [True, False])
def test_rank_alone_may_hold_a_part(complete):
    half = TensorWriteData(ChunkStorageMetadata(torch.Size([2]), torch.Size([2])), TensorProperties(), torch.Size([4]))
    items = [WriteItem(MetadataIndex("t", [2]), WriteItemType.SHARD, None, half)]
    found = plan_columns(
        [SavePlan(as_columns(items))], {}, complete=complete, to_lowest_rank=False, pinned_to_lowest=()
    )
    assert (found is None) == complete
