"""Tensors in many chunks: a load plans with those that it needs, and the coordinator of a save keeps little of each."""

from __future__ import annotations

import tracemalloc
from unittest import mock

import numpy as np
import pytest
import torch

from dcp_core import load, save
from dcp_core.planning.plan_exchange import PackedResults, pack
from dcp_core.planning.read_items import LoadRules, plan_local_load
from dcp_core.records.metadata import ChunkStorageMetadata, TensorProperties
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_core.tables import metadata_columns
from dcp_core.tables.metadata_columns import metadata_from_index, records_of
from dcp_manifest.index.columns import CheckpointIndex, Framing, StoredItem
from dcp_manifest.index.stored_items import StoredItems
from dcp_ranks.phases.phases import Answer, Outcome, Verdict
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.transport.store_wire import decode, encode

CHUNKS, COLUMNS = 100, 5


def rows(*boxes: tuple[int, int]) -> LocalTensor:
    """These rows of a tensor of `CHUNKS` rows, [start, stop)."""
    whole = torch.arange(float(CHUNKS * COLUMNS)).reshape(CHUNKS, COLUMNS)
    parts = [(start, whole[start:stop].clone()) for start, stop in boxes]
    shards = tuple(LocalShard(torch.Size((start, 0)), part.shape, lambda part=part: part) for start, part in parts)
    return LocalTensor(whole.shape, TensorProperties(whole.dtype), False, shards)


def test_a_resharded_load_makes_records_of_the_chunks_that_it_needs(tmp_path):
    save({"x": rows(*[(row, row + 1) for row in range(CHUNKS)])}, checkpoint_id=tmp_path)
    wanted, template = rows((7, 9), (40, 43)), rows((7, 9), (40, 43))
    for shard in template.shards:
        shard.get().zero_()
    made = []

    def make(*args, **options):
        made.append(args)
        return ChunkStorageMetadata(*args, **options)

    with mock.patch.object(metadata_columns, "ChunkStorageMetadata", make):
        load({"x": template}, checkpoint_id=tmp_path)
    assert len(made) == 5
    for shard, expected in zip(template.shards, wanted.shards, strict=True):
        assert torch.equal(shard.get(), expected.get())


def problems_of(starts, *boxes):
    """Kinds of the problems of a load of rows, from chunks of one row that begin at `starts`."""
    count = len(starts)
    index = CheckpointIndex(
        dtypes=("float32",),
        tensor_names=["x"],
        tensor_dtype=np.zeros(1, np.uint8),
        tensor_flags=np.zeros(1, np.uint8),
        tensor_ndim=np.full(1, 2, np.uint8),
        tensor_owner=np.zeros(1, np.uint32),
        tensor_shape=np.array([CHUNKS, COLUMNS]),
        tensor_chunks=np.array([count]),
        chunk_offsets=np.stack([starts, np.zeros(count, np.int64)], 1).reshape(-1),
        chunk_sizes=np.tile([1, COLUMNS], count),
    )
    planned = plan_local_load({"x": rows(*boxes)}, metadata_from_index(index), LoadRules())
    return [problem.kind for problem in planned.problems], [item.storage_index.index for item in planned.items]


@pytest.mark.parametrize(
    ("starts", "box", "kinds", "positions"),
    [
        (range(CHUNKS), (3, 5), [], [3, 4]),
        (range(CHUNKS - 1, -1, -1), (3, 5), [], [95, 96]),
        ([*range(50), *range(51, CHUNKS)], (49, 51), ["hole"], []),
        ([*range(50), *range(51, CHUNKS)], (51, 52), [], [50]),
        ([*range(CHUNKS), 50], (50, 52), ["overlap"], []),
    ],
)
def test_holes_and_overlaps_are_found_where_a_rank_reads(starts, box, kinds, positions):
    found, items = problems_of(np.array(starts), box)
    assert found == kinds
    assert kinds or items == positions


def test_an_entry_that_was_looked_at_may_be_changed(tmp_path):
    metadata = save({"x": torch.ones(3), "y": torch.ones(3)}, checkpoint_id=tmp_path)
    assert records_of(metadata) is not None
    metadata.state_dict_metadata["x"]
    assert records_of(metadata) is None
    assert records_of(metadata, "x") is None
    assert records_of(metadata, "y") is not None


def test_locations_that_do_not_fit_32_bits_keep_their_sums():
    item = StoredItem("a", offset=2**32 - 8, length=2**31, lead=0, stored_bytes=2**31, framing=Framing.RAW)
    with mock.patch("dcp_manifest.index.stored_items.CHUNKS_AT_ONCE", 1):
        stored = StoredItems.joined([StoredItems.of([item])] * 2, np.array([1, 0], np.uint8))
    assert stored.columns.offset.dtype == np.uint32
    index = CheckpointIndex(files=stored.files, chunk_items=stored.columns)
    assert metadata_columns.needed_bytes(index) == {"a": 2**32 - 8 + 2**31}


def test_a_coordinator_holds_each_message_once():
    """Messages are freed while they are decoded."""
    size, ranks = 1 << 20, 16
    coordinator = StoreCoordinator.__new__(StoreCoordinator)
    coordinator.rank = 0
    tracemalloc.start()
    outcomes = [Outcome("write", encode(np.zeros(size, np.uint8))) for _ in range(ranks)]
    tracemalloc.reset_peak()
    answer = coordinator._conclude(0, "write", outcomes, None, lambda values: Answer(Verdict(), own=len(values)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert answer.own == ranks
    assert all(outcome.value is None for outcome in outcomes)
    assert peak < (ranks + 3) * size


def test_equal_locations_are_sent_compressed():
    item = StoredItem("a", offset=0, length=100, lead=0, stored_bytes=100, framing=Framing.RAW, crc32=1)
    stored = StoredItems.of([StoredItem(**{**vars_of(item), "offset": 100 * row}) for row in range(3000)])
    packed = pack(stored, 3000, b"")
    again = decode(encode(packed))
    assert isinstance(again, PackedResults)
    assert len(encode(packed)) < 3000 * 8
    assert pack(stored, 3000, packed.layout).places is None


def vars_of(item):
    return {name: getattr(item, name) for name in StoredItem.__slots__}
