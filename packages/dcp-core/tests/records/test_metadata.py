from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dcp_core.records.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    DeferredMetadata,
    Metadata,
    MetadataIndex,
    StorageInfo,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from dcp_manifest.index.literal_keys import LiteralKey

# Evaluated with our classes here and with stock's in a process that knows nothing of us.
METADATA = """Metadata(
    state_dict_metadata={
        "w": TensorStorageMetadata(
            TensorProperties(torch.bfloat16, torch.strided, True, torch.channels_last, False),
            torch.Size([4, 3]),
            [
                ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3])),
                ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 3])),
            ],
        ),
        "s": TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size([]), [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
        ),
        "step": BytesStorageMetadata(),
    },
    planner_data={"w": ("m", "w"), "s": ("m", LiteralKey("5"), 0), "step": ("step",)},
    storage_data={
        MetadataIndex("w", (0, 0), 0): StorageInfo("__0_0.distcp", 0, 10),
        MetadataIndex("w", (2, 0), 1): StorageInfo("__1_0.distcp", 0, 10, ["stream.zstd/1"]),
        MetadataIndex("s", (), 0): StorageInfo("__0_0.distcp", 10, 4),
        MetadataIndex("step"): StorageInfo("__0_0.distcp", 14, 4),
    },
    storage_meta=StorageMeta("/some/where", "id"),
    version="1.0.0",
)"""

STOCK_READS = """
import pickle, sys, torch
from torch.distributed.checkpoint.metadata import *
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
LiteralKey = str
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        found = pickle.load(file)
    assert found == eval(sys.argv[1]), found
    assert type(next(iter(found.storage_data.values()))) is StorageInfo
    assert [type(part) for part in found.planner_data["s"]] == [str, str, int]
assert not [name for name in sys.modules if name.startswith("dcp_")]
"""


def example() -> Metadata:
    names = {**globals(), "LiteralKey": LiteralKey}
    made: Metadata = eval(METADATA, names)
    return made


@pytest.mark.newest
def test_stock_reads_pickles_of_metadata(tmp_path: Path) -> None:
    metadata = example()
    paths = []
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        paths.append(tmp_path / f"p{protocol}")
        paths[-1].write_bytes(pickle.dumps(metadata, protocol))
    # As a storage writer ported from stock does it: change the metadata, dump it into its own file.
    ported = dataclasses.replace(metadata, storage_data=None, storage_meta=None)
    ported.storage_data = metadata.storage_data
    ported.storage_meta = StorageMeta("/some/where", "id")
    paths.append(tmp_path / ".metadata")
    with paths[-1].open("wb") as file:
        pickle.dump(ported, file)
    done = subprocess.run(
        [sys.executable, "-c", STOCK_READS, METADATA, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_pickling_imports_no_stock() -> None:
    code = (
        "import pickle, sys; from dcp_core.records.metadata import Metadata, StorageMeta; "
        "pickle.dumps(Metadata({}, storage_meta=StorageMeta())); "
        "sys.exit('torch.distributed.checkpoint' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class ForeignInfo:
    """A storage's own record in `storage_data`."""

    def __init__(self, url: str) -> None:
        self.url = url


def test_foreign_storage_data_keeps_its_class() -> None:
    from torch.distributed.checkpoint import metadata as stock

    metadata = example()
    metadata.storage_data = {MetadataIndex("step"): ForeignInfo("x"), "inner": [StorageInfo("f", 1, 2)]}
    found = pickle.loads(pickle.dumps(metadata))
    assert type(found) is stock.Metadata
    assert found.storage_data[stock.MetadataIndex("step")].url == "x"
    assert found.storage_data["inner"][0].relative_path == "f"


@pytest.mark.parametrize("twin", [copy.copy, copy.deepcopy, dataclasses.replace])
def test_copies_are_equal_and_ours(twin: object) -> None:
    metadata = example()
    metadata.aliases = {"t": "w"}
    other = twin(metadata)  # type: ignore[operator]
    assert type(other) is Metadata
    assert other == metadata
    assert other is not metadata
    assert other.aliases == {"t": "w"}
    other.version = "2"
    assert other != metadata


def test_deepcopy_shares_nothing() -> None:
    metadata = example()
    copy.deepcopy(metadata).state_dict_metadata.clear()
    assert metadata.state_dict_metadata


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_records_pickle_as_themselves(memory_format: torch.memory_format) -> None:
    properties = TensorProperties(torch.float8_e4m3fn, memory_format=memory_format)
    record = TensorStorageMetadata(
        properties, torch.Size([2]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))]
    )
    for value in (
        record,
        StorageMeta("p"),
        StorageInfo("f", 0, 1),
        BytesStorageMetadata(),
        MetadataIndex("a", (1,), 2),
    ):
        twin = pickle.loads(pickle.dumps(value))
        assert twin == value
        assert type(twin) is type(value)


def test_index_equality_ignores_the_hint() -> None:
    one, two = MetadataIndex("a", [1, 2], 3), MetadataIndex("a", torch.Size([1, 2]))
    assert one == two
    assert hash(one) == hash(two)
    assert isinstance(one.offset, torch.Size)
    assert one != MetadataIndex("a", [1, 3])
    assert MetadataIndex("a") != MetadataIndex("b")
    assert dataclasses.replace(one, index=9) == one
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.fqn = "b"  # type: ignore[misc]


@pytest.mark.newest
def test_field_order_is_stocks() -> None:
    from torch.distributed.checkpoint import metadata as stock

    for ours in (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
        BytesStorageMetadata,
        StorageMeta,
        MetadataIndex,
    ):
        theirs = [f.name for f in dataclasses.fields(getattr(stock, ours.__name__))]
        found = [f.name for f in dataclasses.fields(ours)]
        assert found[: len(theirs)] == theirs
        assert set(found[len(theirs) :]) <= {"strides"}  # which stock has from 2.15 on
    names = [f.name for f in dataclasses.fields(Metadata)]
    assert names[:5] == [f.name for f in dataclasses.fields(stock.Metadata)]


def test_properties_of_a_tensor() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.float16, requires_grad=True)
    assert TensorProperties.create_from_tensor(tensor) == TensorProperties(torch.float16, requires_grad=True)


def test_a_repr_is_one_line_whatever_the_metadata_holds() -> None:
    places = {
        MetadataIndex("w", [0]): StorageInfo("__0_0.distcp", 0, 3000),
        MetadataIndex("w", [5]): StorageInfo("__1_0.distcp", 0, 72),
        MetadataIndex("tied", [0]): StorageInfo("__0_0.distcp", 0, 3000),
    }
    values = {name: BytesStorageMetadata() for name in ("w", "tied")}
    metadata = Metadata({**values}, storage_data=places, storage_meta=StorageMeta("step\n1"))
    assert repr(metadata) == r"<Metadata of step\n1: 2 values, 3.00 KiB in 2 data files, by 2 ranks>"
    assert repr(Metadata({"w": BytesStorageMetadata()})) == "<Metadata: 1 value>"
    assert repr(Metadata({}, storage_data={"what": "another storage"})) == "<Metadata: 0 values>"
    assert repr(Metadata({}, storage_data=object())) == "<Metadata: 0 values>"
    assert repr(DeferredMetadata(lambda: pytest.fail("read"))).startswith("<Metadata")
