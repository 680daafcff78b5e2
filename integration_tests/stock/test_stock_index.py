"""PyTorch's `Metadata` and our index say the same: its pickles are read, and our heads unpickle to equal records."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

import dcp_all
from dcp_manifest import read_index
from dcp_manifest.file.manifest_write import encode
from dcp_manifest.index.columns import ManifestInfo
from dcp_manifest.index.dtypes import ITEM_BYTES
from dcp_manifest.stock.stock_read import read_stock
from dcp_manifest.stock.stock_write import stock_head, unreadable_reason

DTYPES = [getattr(torch, name) for name in sorted(ITEM_BYTES) if hasattr(torch, name)]
LAYOUTS = [torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged]
MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last, torch.preserve_format]
NAMES = st.text(st.characters(codec="utf-8") | st.sampled_from(".0é"), max_size=300)
INFO = ManifestInfo("0123456789abcdef", 4, "test", 2)


@st.composite
def places(draw):
    return _StorageInfo(
        relative_path=draw(st.sampled_from(["__0_0.distcp", "__1_0.distcp", "sub/ä.distcp"])),
        offset=draw(st.integers(0, 300) | st.integers(0, 2**61)),
        length=draw(st.integers(0, 70_000) | st.integers(0, 2**61)),
        transform_descriptors=draw(st.none() | st.none() | st.just(["stream.zstd/1"])),
    )


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 300) | st.just(2**33), max_size=4))
    boxes = {}
    for _ in range(draw(st.integers(0, 4))):
        offsets = tuple(draw(st.integers(0, size)) for size in shape)
        boxes[offsets] = tuple(
            draw(st.integers(0, min(size - at, 2**12))) for size, at in zip(shape, offsets, strict=True)
        )
    return TensorStorageMetadata(
        properties=TensorProperties(
            dtype=draw(st.sampled_from(DTYPES)),
            layout=draw(st.sampled_from(LAYOUTS)),
            requires_grad=draw(st.booleans()),
            memory_format=draw(st.sampled_from(MEMORY_FORMATS)),
            pin_memory=draw(st.booleans()),
        ),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes.items()],
    )


@st.composite
def metadatas(draw):
    values = draw(st.dictionaries(NAMES, tensors() | st.just(None), max_size=6))
    state, storage, paths = {}, {}, {}
    for name, tensor in values.items():
        paths[name] = tuple(draw(st.lists(NAMES | st.integers(0, 300), max_size=5)))
        state[name] = BytesStorageMetadata() if tensor is None else tensor
        if tensor is None:
            storage[MetadataIndex(name)] = draw(places())
        else:
            for position, chunk in enumerate(tensor.chunks):
                storage[MetadataIndex(name, chunk.offsets, position)] = draw(places())
    planner_data = draw(st.just(paths) | st.none())
    checkpoint_id = draw(st.none() | st.just("x") | st.just(Path("/a/b")))
    meta = draw(st.none() | st.just(StorageMeta(checkpoint_id, "uuid", None, [])))
    return Metadata(state, planner_data, storage, meta, draw(st.none() | st.just("1.0.0")))


quick = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(metadatas(), st.sampled_from([2, 3, 4, 5]))
def test_stocks_records_survive_the_way_through_our_index(metadata, protocol):
    """Stock pickles, we read, we write a head, stock unpickles: equal, but for what a head always says."""
    data = pickle.dumps(metadata, protocol=protocol)
    index, end, modules = read_stock(data, file=".metadata")
    assert (end, modules) == (len(data), [])
    assert unreadable_reason(index) is None
    index.info = INFO
    found = pickle.loads(stock_head(index))
    assert found == Metadata(
        metadata.state_dict_metadata,
        metadata.planner_data,
        metadata.storage_data,
        StorageMeta(None, INFO.save_id, None, ["dcp-manifest/1"]),
        "1.0.0",
    )
    assert [key.index for key in sorted(found.storage_data, key=repr)] == [
        key.index for key in sorted(metadata.storage_data, key=repr)
    ]


@quick
@given(metadatas())
def test_a_whole_file_of_ours_loads_in_stock(metadata):
    index = read_index(pickle.dumps(metadata), file=".metadata")
    index.info = INFO
    data = encode(index)
    found = pickle.loads(data)
    assert found.state_dict_metadata == metadata.state_dict_metadata
    assert found.storage_data == metadata.storage_data
    # It can be pickled again: but then the manifest is gone, and we say so instead of trusting it.
    again = read_index(data, file=".metadata")
    assert (again.info, again.tensor_names, again.paths) == (INFO, index.tensor_names, index.paths)


def test_records_are_separate_objects():
    """Who changes one entry changes no other."""
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    tensor = TensorStorageMetadata(TensorProperties(), torch.Size([2]), [chunk])
    storage = {MetadataIndex(name, [0], 0): _StorageInfo("f", 0, 600) for name in "ab"}
    index = read_index(pickle.dumps(Metadata({"a": tensor, "b": tensor}, None, storage)), file=".metadata")
    index.info = INFO
    found = pickle.loads(stock_head(index)).state_dict_metadata
    assert found["a"] == found["b"]
    for part in ("properties", "chunks"):
        assert getattr(found["a"], part) is not getattr(found["b"], part)
    assert found["a"].chunks[0] is not found["b"].chunks[0]


def test_aliases_are_entries_that_share_their_places():
    storage = {MetadataIndex("a", [], 0): _StorageInfo("f", 5, 600)}
    tensor = TensorStorageMetadata(
        TensorProperties(torch.int64), torch.Size([]), [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
    )
    index = read_index(pickle.dumps(Metadata({"a": tensor}, None, storage)), file=".metadata")
    index.info = INFO
    index.alias_names, index.alias_targets = ["b"], index.tensor_owner[:1].copy()
    found = pickle.loads(stock_head(index))
    assert found.state_dict_metadata["b"] == tensor
    assert found.storage_data[MetadataIndex("b", [])] == storage[MetadataIndex("a", [])]


@pytest.mark.parametrize("interop", [True, False])
def test_our_own_metadata_pickles_are_read(interop):
    """`dcp_core.Metadata` pickles as a call of `pickle.loads`, so that stock gets its own classes."""
    from dcp_core.records.metadata import ChunkStorageMetadata as OurChunk
    from dcp_core.records.metadata import Metadata as OurMetadata
    from dcp_core.records.metadata import MetadataIndex as OurIndex
    from dcp_core.records.metadata import StorageInfo
    from dcp_core.records.metadata import TensorProperties as OurProperties
    from dcp_core.records.metadata import TensorStorageMetadata as OurTensor

    chunk = OurChunk(torch.Size([0, 0]), torch.Size([2, 3]))
    metadata = OurMetadata(
        state_dict_metadata={"w": OurTensor(OurProperties(torch.float16), torch.Size([2, 3]), [chunk])},
        planner_data={"w": ("w",)},
        storage_data={OurIndex("w", [0, 0], 0): StorageInfo("f.distcp", 1, 700)},
    )
    for protocol in (2, 4, 5):
        index = read_index(pickle.dumps(metadata, protocol=protocol), file=".metadata")
        assert (index.tensor_names, index.dtypes, index.files) == (["w"], ("float16",), ("f.distcp",))
        assert isinstance(pickle.loads(pickle.dumps(metadata, protocol=protocol)), Metadata)
    index.info = INFO
    assert read_index(encode(index, interop=interop), file="f").tensor_names == ["w"]


FOREIGN = {
    "ordered": collections.OrderedDict,
    "ordered, with attributes": lambda maps: vars(made := collections.OrderedDict(maps)).update(_metadata=1) or made,
    "with a factory": lambda maps: collections.defaultdict(list, maps),
    "with a factory of its own": lambda maps: collections.defaultdict(BytesStorageMetadata, maps),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["state_dict_metadata", "storage_data", "planner_data"])
@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("protocol", [2, 4])
def test_mappings_of_other_tools_are_read_as_stock_reads_them(tmp_path, name, kind, protocol):
    _check_change(tmp_path, lambda found: setattr(found, name, FOREIGN[kind](getattr(found, name))), protocol)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [tuple, list])
def test_sequences_of_other_tools_are_read_as_stock_reads_them(tmp_path, kind):
    def change(found):
        entry = found.state_dict_metadata["w"]
        for chunk in entry.chunks:
            object.__setattr__(chunk, "offsets", kind(chunk.offsets))
            object.__setattr__(chunk, "sizes", kind(chunk.sizes))
        entry.chunks = kind(entry.chunks)

    _check_change(tmp_path, change, 4)


def _check_change(folder, change, protocol):
    stock.save({"w": torch.arange(4.0), "step": {"n": 3}}, checkpoint_id=folder, no_dist=True)
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found, protocol))
    for module in (stock, dcp_all):
        state = {"w": torch.zeros(4), "step": {"n": 0}}
        module.load(state, checkpoint_id=folder, no_dist=True)
        assert torch.equal(state["w"], torch.arange(4.0))
        assert state["step"] == {"n": 3}
