from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from torch.distributed.checkpoint import planner as stock

from dcp_core.records import protocols
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.protocols import BytesIOWriteData, LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", ["BytesIOWriteData", "LoadPlan", "ReadItem", "SavePlan", "TensorWriteData", "WriteItem"]
)
def test_fields_and_defaults_are_stocks(name: str) -> None:
    ours, theirs = dataclasses.fields(getattr(protocols, name)), dataclasses.fields(getattr(stock, name))
    assert [(f.name, f.default) for f in ours[: len(theirs)]] == [(f.name, f.default) for f in theirs]


@pytest.mark.parametrize("name", ["WriteItemType", "LoadItemType"])
def test_enums_are_stocks(name: str) -> None:
    assert {m.name: m.value for m in getattr(protocols, name)} == {m.name: m.value for m in getattr(stock, name)}


def test_sizes_of_items() -> None:
    chunk = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3]))
    data = TensorWriteData(chunk, TensorProperties(torch.bfloat16), torch.Size([4, 3]))
    item = WriteItem(MetadataIndex("a", (2, 0)), WriteItemType.SHARD, None, data)
    assert item.tensor_storage_size() == 24
    assert item.chunk_bytes() == 12
    scalar = TensorWriteData(
        ChunkStorageMetadata(torch.Size(), torch.Size()), TensorProperties(torch.int64), torch.Size()
    )
    assert WriteItem(MetadataIndex("s", ()), WriteItemType.TENSOR, None, scalar).chunk_bytes() == 8
    unknown = WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO)
    assert unknown.tensor_storage_size() is None
    assert unknown.chunk_bytes() == 0
    assert dataclasses.replace(unknown, bytes_io_data=BytesIOWriteData(7)).chunk_bytes() == 7


def test_plans_pickle() -> None:
    item = WriteItem(MetadataIndex("o"), WriteItemType.BYTE_IO, BytesIOWriteData(3))
    whole = SavePlan([item], "s", {"o": ("o",)}, aliases={"b": "a"})
    assert pickle.loads(pickle.dumps(whole)) == whole


def test_load_plans_can_be_changed_and_save_plans_not() -> None:
    LoadPlan([]).storage_data = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        SavePlan([]).usable = False  # type: ignore[misc]
