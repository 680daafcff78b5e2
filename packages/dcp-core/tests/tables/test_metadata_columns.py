from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from dcp_core.errors import PlanError, UnsupportedFormatError, UnsupportedValueError
from dcp_core.records.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    TensorProperties,
    TensorStorageMetadata,
    dtype_of,
)
from dcp_core.tables import metadata_columns
from dcp_core.tables.metadata_columns import index_from_metadata, metadata_from_index
from dcp_manifest.index.columns import Framing, ManifestInfo, StoredItem
from dcp_manifest.index.literal_keys import LiteralKey


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def stored(file: str, *, running: int = 0, framing: Framing = Framing.RAW) -> StoredItem:
    size = 65536 * (running + 1)
    crcs = np.arange(running, dtype=np.uint32)
    return StoredItem(file, 64, size + 10, 4, size, framing, 7, crcs, ("b/1", "a/2") if running else ())


def info(item: StoredItem) -> StorageInfo:
    return StorageInfo(item.file, item.offset, item.length, list(item.chain) or None, item)


def example() -> Metadata:
    return Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.float8_e5m2, requires_grad=True, memory_format=torch.channels_last),
                torch.Size([4, 3]),
                [chunk((0, 0), (2, 3)), chunk((2, 0), (2, 3))],
            ),
            "step": BytesStorageMetadata(),
            "scalar": TensorStorageMetadata(TensorProperties(torch.int64), torch.Size([]), [chunk((), ())]),
            "empty": TensorStorageMetadata(TensorProperties(torch.bool), torch.Size([0, 2]), [chunk((0, 0), (0, 2))]),
            "sparse": TensorStorageMetadata(TensorProperties(layout=torch.sparse_coo), torch.Size([1]), []),
        },
        {"w": ("m", LiteralKey("5"), "w"), "step": ("step",), "scalar": ("l", 0), "empty": ("e",), "sparse": ("s",)},
        {
            MetadataIndex("w", (0, 0), 0): info(stored("__0_0.x.distcp", running=2)),
            MetadataIndex("w", (2, 0), 1): info(stored("__1_0.x.distcp", running=1)),
            MetadataIndex("scalar", (), 0): StorageInfo("__0_0.x.distcp", 500, 20),
            MetadataIndex("empty", (0, 0), 0): info(stored("__0_0.x.distcp")),
            MetadataIndex("step"): StorageInfo("__0_0.x.distcp", 520, 30, ["z/1"]),
        },
        version="1.0.0",
    )


def test_there_and_back() -> None:
    metadata = example()
    found = metadata_from_index(index_from_metadata(metadata))
    assert found == metadata
    assert metadata == found
    for key, place in metadata.storage_data.items():
        item = found.storage_data[key].stored
        if place.stored is None:
            assert (item.file, item.offset, item.stored_bytes, item.lead, item.crc32) == (
                place.relative_path,
                place.offset,
                place.length,
                0,
                None,
            )
            assert item.framing is (Framing.OBJECT if key.offset is None else Framing.TORCH_ZIP)
        else:
            assert item.running_crcs.tolist() == place.stored.running_crcs.tolist()
            assert dataclasses.replace(item, running_crcs=None) == dataclasses.replace(place.stored, running_crcs=None)
    assert type(found.planner_data["w"][1]) is LiteralKey


def test_the_hint_of_an_index_is_only_a_hint() -> None:
    for hint in (None, 0, 1, 5, -1):
        # Anew each time: what was looked up once is kept.
        found = metadata_from_index(index_from_metadata(example()))
        assert found.storage_data[MetadataIndex("w", (2, 0), hint)].relative_path == "__1_0.x.distcp"
    for missing in (MetadataIndex("w", (1, 0)), MetadataIndex("w"), MetadataIndex("nope"), MetadataIndex("step", (0,))):
        assert missing not in found.storage_data
    assert "w" not in found.storage_data


def test_one_look_up_makes_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = metadata_columns.StateRecords._tensor

    def counting(self: metadata_columns.StateRecords, row: int) -> TensorStorageMetadata:
        made.append(row)
        return original(self, row)

    monkeypatch.setattr(metadata_columns.StateRecords, "_tensor", counting)
    found = metadata_from_index(index_from_metadata(example()))
    record = found.state_dict_metadata["w"]
    assert isinstance(record, TensorStorageMetadata)
    assert record.chunks[1].offsets == (2, 0)
    assert found.storage_data[MetadataIndex("w", (2, 0))].offset == 64
    assert len(found.state_dict_metadata) == 5
    assert len(found.storage_data) == 5
    assert made == [0]


def test_items_are_counted_once() -> None:
    found = metadata_from_index(index_from_metadata(example()))
    records = found.storage_data.source._records  # what a look-up per item must not go through each time
    assert len(found.storage_data) == 5
    records.tensors = None
    assert len(found.storage_data) == 5


def test_aliases_are_entries_that_share_storage() -> None:
    metadata = example()
    metadata.aliases = {"tied": "w"}
    index = index_from_metadata(metadata, aliases=metadata.aliases)
    assert index.tensor_names == ["w", "scalar", "empty", "sparse"]
    found = metadata_from_index(index)
    assert found.aliases == {"tied": "w"}
    assert found.state_dict_metadata["tied"] == found.state_dict_metadata["w"]
    assert found.storage_data[MetadataIndex("tied", (2, 0))] == found.storage_data[MetadataIndex("w", (2, 0))]
    assert len(found.storage_data) == 7
    # An alias that has an entry already is not stored twice.
    again = index_from_metadata(found, aliases=found.aliases)
    assert again.tensor_names == index.tensor_names
    assert len(again.chunk_sizes) == len(index.chunk_sizes)


def test_values_of_one_rank_are_left_out() -> None:
    index = index_from_metadata(example())
    index.object_names = ["w"]
    index.object_owner = np.array([3], np.uint32)
    assert isinstance(metadata_from_index(index).state_dict_metadata["w"], TensorStorageMetadata)
    index.tensor_owner[0], index.object_owner[0] = 3, 0
    assert isinstance(metadata_from_index(index).state_dict_metadata["w"], BytesStorageMetadata)


def test_without_storage_data_nothing_is_stored() -> None:
    metadata = dataclasses.replace(example(), storage_data=None, planner_data=None)
    index = index_from_metadata(metadata)
    assert index.chunk_items is None
    assert index.paths is None
    found = metadata_from_index(index)
    assert found.storage_data is None
    assert found == metadata


def test_the_manifests_info_becomes_storage_meta() -> None:
    index = index_from_metadata(example())
    index.info = ManifestInfo("a1", 2, "w")
    meta = metadata_from_index(index).storage_meta
    assert meta is not None
    assert meta.save_id == "a1"


def test_what_a_manifest_cannot_hold_is_named() -> None:
    lost = example()
    del lost.storage_data[MetadataIndex("w", (2, 0))]
    with pytest.raises(PlanError, match=r"'w' at offset \(2, 0\)"):
        index_from_metadata(lost)
    with pytest.raises(PlanError, match="'nope'"):
        index_from_metadata(example(), aliases={"t": "nope"})
    with pytest.raises(UnsupportedValueError, match="planner_data of type set"):
        index_from_metadata(dataclasses.replace(example(), planner_data={1}))
    with pytest.raises(UnsupportedValueError, match="storage_data of type int"):
        index_from_metadata(dataclasses.replace(example(), storage_data=3))
    foreign = example()
    foreign.storage_data[MetadataIndex("step")] = "s3://x"
    with pytest.raises(UnsupportedValueError, match="'step' is a str"):
        index_from_metadata(foreign)


def test_dtype_names() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        assert dtype_of(str(dtype).removeprefix("torch.")) is dtype
    for name in ("float3", "nn", "Tensor"):
        with pytest.raises(UnsupportedFormatError, match=name):
            dtype_of(name)
