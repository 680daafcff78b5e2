"""Loads from a large index, of which each rank reads a part."""

from __future__ import annotations

import pytest
import torch

import dcp_io.engine
from dcp_core import DefaultLoadPlanner, load, load_keys, loading, save
from dcp_core.planning.load_report import LoadMismatchError
from dcp_core.records.metadata import TensorProperties
from dcp_core.shards.shards import LocalShard, LocalTensor
from dcp_fs import FileSystemReader
from dcp_io import LocalStore, StoreBackend
from dcp_manifest.errors import CorruptCheckpointError
from dcp_manifest.file import manifest_near, manifest_write

pytestmark = pytest.mark.filterwarnings("ignore:.*were not loaded")

ROWS, COLUMNS = 200, 5


def rows(*boxes: tuple[int, int], first: float = 0, size: int = ROWS) -> LocalTensor:
    """These rows of a tensor, [start, stop)."""
    whole = torch.arange(float(first), first + size * COLUMNS).reshape(size, COLUMNS)
    parts = [(start, whole[start:stop].clone()) for start, stop in boxes]
    shards = tuple(LocalShard(torch.Size((start, 0)), part.shape, lambda part=part: part) for start, part in parts)
    return LocalTensor(whole.shape, TensorProperties(whole.dtype), False, shards)


def empty(*boxes: tuple[int, int], size: int = ROWS) -> LocalTensor:
    """A template for `rows`."""
    template = rows(*boxes, size=size)
    for shard in template.shards:
        shard.get().zero_()
    return template


def values(tensor: LocalTensor) -> list[list[list[float]]]:
    return [shard.get().tolist() for shard in tensor.shards]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Makes small indexes large; records the index of each read in parts."""
    monkeypatch.setattr(manifest_write, "RUNS_ABOVE_CHUNKS", 1)
    monkeypatch.setattr(dcp_io.engine, "IN_PARTS_ABOVE_BYTES", 0)
    monkeypatch.setattr(manifest_near, "_CHUNKS_PER_LEVEL", 0)
    found, read = [], manifest_near.read_near

    def recording(*args, **options):
        found.append(read(*args, **options))
        return found[-1]

    monkeypatch.setattr(manifest_near, "read_near", recording)
    return found


@pytest.fixture
def checkpoint(tmp_path):
    each = [(row, row + 1) for row in range(ROWS)]
    state = {
        "model": {"x": rows(*each), "y": rows(*each, first=7000), "bias": torch.arange(3.0)},
        "optim": {"state": {"0": rows(*each, first=9000)}, "lr": 0.1},
        "step": 7,
    }
    save(state, checkpoint_id=tmp_path)
    return tmp_path


def test_a_load_has_the_chunks_that_it_needs(checkpoint, parts):
    template = {"model": {"x": empty((7, 9), (40, 43)), "bias": torch.zeros(3)}, "step": 0}
    report = load(template, checkpoint_id=checkpoint)
    assert values(template["model"]["x"]) == values(rows((7, 9), (40, 43)))
    assert (template["step"], template["model"]["bias"].tolist()) == (7, [0, 1, 2])
    assert sorted(report.unexpected) == ["model.y", "optim.lr", "optim.state.0"]
    (index,) = parts
    chunks = dict(zip(index.tensor_names, index.tensor_chunks.tolist(), strict=True))
    assert chunks == {"model.x": 36, "model.y": 0, "model.bias": 1, "optim.state.0": 0}


def test_names_may_differ(checkpoint, parts):
    template = {"net": {"x": empty((5, 8))}}
    load(template, checkpoint_id=checkpoint, planner=DefaultLoadPlanner(rename={"net": "model"}))
    assert values(template["net"]["x"]) == values(rows((5, 8)))
    assert len(parts) == 1


def test_sizes_may_differ(checkpoint, parts):
    template = {"model": {"x": empty((190, 205), size=210)}}
    load(template, checkpoint_id=checkpoint, planner=DefaultLoadPlanner(allow_resize=True))
    assert values(template["model"]["x"])[0][:10] == values(rows((190, 200)))[0]
    assert len(parts) == 1


def test_an_empty_dict_gets_everything(checkpoint, parts):
    template = {"model": {"x": empty((5, 8))}, "optim": {}}
    load(template, checkpoint_id=checkpoint)
    assert template["optim"]["lr"] == 0.1
    whole = torch.arange(9000.0, 9000 + ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    assert torch.equal(template["optim"]["state"]["0"], whole)
    assert values(template["model"]["x"]) == values(rows((5, 8)))
    assert parts == [None]


def test_a_plan_that_lacks_chunks_is_made_by_the_whole_index(checkpoint, parts, monkeypatch):
    monkeypatch.setattr(loading, "boxes_of", lambda *_, **__: {"model.x": []})
    with torch.device("meta"):
        extra = torch.ones(1000)
    template = {"model": {"x": empty((5, 8)), "extra": extra}}
    load(template, checkpoint_id=checkpoint, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert values(template["model"]["x"]) == values(rows((5, 8)))
    assert not template["model"]["extra"].any()
    assert [index.is_part for index in parts] == [True]


def test_meta_tensors_are_made_once(tmp_path, parts):
    whole = torch.arange(9000.0, 9000 + ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    save({"x": rows(*[(row, row + 1) for row in range(ROWS)], first=9000)}, checkpoint_id=tmp_path)
    template = {"x": torch.empty(ROWS, COLUMNS, device="meta")}
    load(template, checkpoint_id=tmp_path)
    assert torch.equal(template["x"], whole)
    assert [index.tensor_chunks.tolist() for index in parts] == [[ROWS]]


def test_a_planner_may_load_twice(checkpoint):
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with torch.device("meta"):
        extra = torch.ones(5)
    template = {"model": {"x": empty((5, 8)), "extra": extra}}
    load(template, checkpoint_id=checkpoint, planner=planner)
    template["model"]["extra"].fill_(5)
    load(template, checkpoint_id=checkpoint, planner=planner)
    assert template["model"]["extra"].tolist() == [5] * 5


def test_an_alias_is_loaded_by_a_part(tmp_path, parts):
    each = rows(*[(row, row + 1) for row in range(ROWS)])
    save({"a": each, "b": each}, checkpoint_id=tmp_path)
    template = {"b": empty((5, 8))}
    load(template, checkpoint_id=tmp_path)
    assert values(template["b"]) == values(rows((5, 8)))
    assert (parts[0].alias_names, parts[0].tensor_chunks.tolist()) == (["b"], [3])


class OwnRead(FileSystemReader):
    def set_up_storage_reader(self, metadata, is_coordinator, *args, **kwargs):
        assert len(metadata.state_dict_metadata["model.y"].chunks) == ROWS
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)


def test_other_readers_see_all_chunks(checkpoint, parts):
    template = {"model": {"x": empty((5, 8))}}
    load(template, storage_reader=OwnRead(checkpoint))
    assert parts == []


class OwnBackend(StoreBackend):
    def read_index(self):
        return super().read_index()


def test_a_backend_may_read_its_own_index(checkpoint, parts):
    class Reader(FileSystemReader):
        def _open(self, checkpoint_id):
            return OwnBackend(LocalStore(checkpoint_id))

    template = {"model": {"x": empty((5, 8))}}
    load(template, storage_reader=Reader(checkpoint))
    assert values(template["model"]["x"]) == values(rows((5, 8)))
    assert parts == []


def test_other_planners_see_all_chunks(checkpoint, parts):
    class Planner(DefaultLoadPlanner):
        def create_local_plan(self):
            assert len(self.metadata.state_dict_metadata["model.y"].chunks) == ROWS
            return super().create_local_plan()

    load({"model": {"x": empty((5, 8))}}, checkpoint_id=checkpoint, planner=Planner())
    assert load_keys("step", checkpoint_id=checkpoint) == {"step": 7}
    assert len(FileSystemReader(checkpoint).read_metadata().state_dict_metadata["model.x"].chunks) == ROWS
    assert parts == []


def test_problems_are_those_of_the_whole_index(checkpoint, parts):
    template = {"model": {"x": empty((5, 8), size=210), "z": torch.zeros(2)}}
    with pytest.raises(LoadMismatchError) as in_parts:
        load(template, checkpoint_id=checkpoint)
    (checkpoint / ".metadata").rename(checkpoint / "kept")
    dcp_io.engine.IN_PARTS_ABOVE_BYTES = 1 << 40
    (checkpoint / "kept").rename(checkpoint / ".metadata")
    with pytest.raises(LoadMismatchError) as whole:
        load(template, checkpoint_id=checkpoint)
    assert str(in_parts.value) == str(whole.value)
    assert "Missing key" in str(whole.value)
    assert len(parts) == 1


def test_damage_of_the_index_is_an_error(checkpoint):
    path = checkpoint / ".metadata"
    data = bytearray(path.read_bytes())
    for place in range(len(data) - 3000, len(data) - 64, 97):
        data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="manifest is damaged"):
        load({"model": {"x": empty((5, 8))}}, checkpoint_id=checkpoint)
