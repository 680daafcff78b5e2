"""Metadata from plans, and the proof that chunks make up whole tensors."""

import pytest
import torch

from dcp_core.errors import PlanError
from dcp_core.planning.stock_global_plan import check_coverage, create_default_global_save_plan
from dcp_core.records.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.records.protocols import SavePlan, TensorWriteData, WriteItem, WriteItemType


def shard(offset: int, size: int, total: int = 8, dtype: torch.dtype = torch.float32) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size((offset, 0)), torch.Size((size, 3)))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size((total, 3)))
    return WriteItem(MetadataIndex("w", chunk.offsets), WriteItemType.SHARD, None, data)


def entry(*chunks: tuple[int, int], total: int = 8) -> TensorStorageMetadata:
    boxes = [ChunkStorageMetadata(torch.Size((o, 0)), torch.Size((n, 3))) for o, n in chunks]
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size((total, 3)), boxes)


def test_chunks_are_numbered_in_rank_order() -> None:
    plans, metadata = create_default_global_save_plan([SavePlan([shard(4, 4)]), SavePlan([shard(0, 4)])])
    assert [plan.items[0].index.index for plan in plans] == [0, 1]
    found = metadata.state_dict_metadata["w"]
    assert isinstance(found, TensorStorageMetadata)
    assert [chunk.offsets[0] for chunk in found.chunks] == [4, 0]
    assert metadata.version == "1.0.0"


def test_hints_are_left_alone_on_request() -> None:
    plans, _ = create_default_global_save_plan([SavePlan([shard(0, 8)])], rewrite_index_hints=False)
    assert plans[0].items[0].index.index is None


def test_objects_have_entries() -> None:
    thing = WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO)
    assert create_default_global_save_plan([SavePlan([thing])])[1].state_dict_metadata == {"o": BytesStorageMetadata()}


@pytest.mark.parametrize(
    "second",
    [
        shard(4, 4, total=9),
        shard(4, 4, dtype=torch.int32),
        WriteItem(MetadataIndex("w"), WriteItemType.BYTE_IO),
        WriteItem(MetadataIndex("w"), WriteItemType.SHARD),
    ],
    ids=["shape", "dtype", "object", "no-data"],
)
def test_items_that_do_not_belong_together(second: WriteItem) -> None:
    with pytest.raises(PlanError, match="'w'"):
        create_default_global_save_plan([SavePlan([shard(0, 4)]), SavePlan([second])])


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([(0, 4)], "no rank holds [4:8, 0:3]"),
        ([(0, 3), (5, 3)], "no rank holds [3:5, 0:3]"),
        ([(0, 5), (4, 4)], "overlap"),
        ([(0, 4), (4, 5)], "beyond the tensor"),
        ([], "no rank holds"),
    ],
)
def test_flaws_are_named_with_their_box(chunks: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_coverage({"w": entry(*chunks)}, complete=True)
    assert "'w'" in str(caught.value)
    assert words in str(caught.value)


def test_partial_jobs_may_leave_holes_but_not_overlaps() -> None:
    check_coverage({"w": entry((0, 4))}, complete=False)
    with pytest.raises(PlanError, match="overlap"):
        check_coverage({"w": entry((0, 5), (4, 4))}, complete=False)


def test_whole_and_empty_tensors_pass() -> None:
    scalar = TensorStorageMetadata(
        TensorProperties(torch.float32), torch.Size(()), [ChunkStorageMetadata(torch.Size(()), torch.Size(()))]
    )
    check_coverage({"w": entry((4, 4), (0, 4)), "s": scalar, "e": entry((0, 0), total=0)}, complete=True)


def test_all_flawed_tensors_are_named() -> None:
    with pytest.raises(PlanError, match=r"(?s)'t0'.*'t1'"):
        check_coverage({f"t{i}": entry((0, 4)) for i in range(2)}, complete=True)
