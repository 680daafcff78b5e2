from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner

from dcp_core.records.foreign_records import as_chunk, as_index, as_metadata, as_properties, as_write_item
from dcp_core.records.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_core.records.protocols import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType


@pytest.mark.newest
def test_stocks_metadata_becomes_ours() -> None:
    theirs = metadata.Metadata(
        {
            "w": metadata.TensorStorageMetadata(
                metadata.TensorProperties(torch.int8),
                torch.Size([2]),
                [metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))],
            ),
            "o": metadata.BytesStorageMetadata(),
        },
        {"w": ("w",)},
        {metadata.MetadataIndex("w", (0,), 0): filesystem._StorageInfo("f", 1, 2, ["t/1"]), "own": 3},
        metadata.StorageMeta("id", modules=["m"]),
        "1.0.0",
    )
    ours = as_metadata(theirs)
    assert ours == Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.int8), torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
            ),
            "o": BytesStorageMetadata(),
        },
        {"w": ("w",)},
        {MetadataIndex("w", (0,)): StorageInfo("f", 1, 2, ["t/1"]), "own": 3},
        StorageMeta("id", modules=["m"]),
        "1.0.0",
    )
    assert as_metadata(ours) is ours


def test_metadata_of_older_torch_lacks_attributes() -> None:
    class Old:
        state_dict_metadata: ClassVar[dict[str, object]] = {}
        planner_data = None
        storage_data = "opaque"

    assert as_metadata(Old()) == Metadata({}, storage_data="opaque")


@pytest.mark.newest
def test_stocks_write_items_become_ours() -> None:
    chunk = metadata.ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    theirs = planner.WriteItem(
        metadata.MetadataIndex("w", (0,)),
        planner.WriteItemType.SHARD,
        None,
        planner.TensorWriteData(chunk, metadata.TensorProperties(torch.int8), torch.Size([4])),
    )
    ours = as_write_item(theirs)
    assert ours == WriteItem(
        MetadataIndex("w", (0,)),
        WriteItemType.SHARD,
        None,
        TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), torch.Size([2])), TensorProperties(torch.int8), torch.Size([4])
        ),
    )
    assert as_write_item(ours) is ours
    theirs = planner.WriteItem(metadata.MetadataIndex("o"), planner.WriteItemType.BYTE_IO, planner.BytesIOWriteData(3))
    assert as_write_item(theirs) == WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO, BytesIOWriteData(3))


def test_ours_are_returned_as_they_are() -> None:
    for convert, value in (
        (as_index, MetadataIndex("a")),
        (as_chunk, ChunkStorageMetadata(torch.Size(), torch.Size())),
        (as_properties, TensorProperties()),
    ):
        assert convert(value) is value
