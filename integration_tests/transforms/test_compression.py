"""Saving with `compression`: every kind of value comes back, on any number of ranks; parts cost what they should."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp_all as dcp
from dcp_base.hookspecs import hookimpl
from dcp_core.testing.sharding import distribute
from dcp_core.testing.trees import same
from dcp_io import verify_checkpoint
from dcp_transforms import BlockZStandard, FloatPlanes, ZStandard
from integration_tests.robustness.damage import flipped

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

SETTINGS: list[Any] = [
    "auto", "planes", "zstd", "block.zstd/1", FloatPlanes(), [BlockZStandard(), FloatPlanes()],
    {torch.bfloat16: "planes", "*.exp_avg": "auto", "*": "zstd"},
]  # fmt: skip


def normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def state() -> dict[str, Any]:
    """Tensors of all kinds and sizes, and other values."""
    special = torch.tensor([0, 1, -1, 0x7F800001, -0x7FFFFFFF, 0x7FC00000, -0x80000000], dtype=torch.int32)
    return {
        "weight": normal(300, 400, dtype=torch.bfloat16),
        "half": normal(300, 40, dtype=torch.float16),
        "single": normal(1000, 70),
        "double": normal(40_000, dtype=torch.float64),
        "complex": torch.complex(normal(99, 100), normal(99, 100, seed=2)),
        "eight": normal(200, 300).to(torch.float8_e4m3fn),
        "bits": special.repeat(2000).view(torch.float32),
        "steps": torch.arange(50_000),
        "mask": normal(90_000) > 0,
        "noise": torch.from_numpy(np.random.default_rng(1).integers(0, 256, 70_000, dtype=np.uint8)),
        "zeros": torch.zeros(400_000),
        "transposed": normal(300, 200).t(),
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "layer": {"exp_avg": normal(5000, seed=3), "text": "words", "list": [1, 2]},
    }


def zeroed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: zeroed(each) for key, each in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


@pytest.mark.parametrize("setting", SETTINGS, ids=["auto", "planes", "zstd", "descriptor", "object", "chain", "by-key"])
@pytest.mark.parametrize("layout", ["torch", "raw"])
def test_every_value_comes_back(tmp_path: Path, setting: Any, layout: Any) -> None:
    value = state()
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path, compression=setting, layout=layout, thread_count=3))
    template = zeroed(value)
    dcp.load(template, checkpoint_id=tmp_path)
    assert same(template, value)
    assert verify_checkpoint(tmp_path).ok


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.distcp"))


def test_auto_stores_plain_what_would_not_shrink(tmp_path: Path) -> None:
    value = {"w": normal(400, 500, dtype=torch.bfloat16), "noise": state()["noise"]}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path, compression="auto", layout="raw"))
    places = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    chains = {index.fqn: place.transform_descriptors for index, place in places.items()}
    assert chains == {"w": ["block.planes/1"], "noise": None}
    assert stored_bytes(tmp_path) < 0.67 * value["w"].nbytes + value["noise"].nbytes + 128


@pytest.mark.parametrize(
    "setting", ["zstd", ZStandard(7), [ZStandard()], {"*": "zstd"}], ids=["name", "object", "list", "by-name"]
)
def test_stock_reads_the_zstd_setting(tmp_path: Path, setting: Any) -> None:
    value = {"w": normal(300, 400), "n": 5}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path, compression=setting))
    template = zeroed(value)
    stock.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert same(template, value)


def test_stock_is_told_that_blocks_are_ours(tmp_path: Path) -> None:
    value = {"w": normal(300, 400)}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path, compression="auto"))
    with pytest.raises(BaseException, match="dcp"):
        stock.load(zeroed(value), checkpoint_id=tmp_path, no_dist=True)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["auto", "block.zstd/1"]),
    st.sampled_from([torch.bfloat16, torch.float32, torch.int64, torch.uint8]),
    st.tuples(st.integers(1, 300), st.integers(1, 300), st.integers(1, 12)),
    st.data(),
)
def test_any_part_of_a_tensor(
    tmp_path_factory: pytest.TempPathFactory, setting: str, dtype: torch.dtype, shape: Any, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("part")
    whole = (normal(*shape) * 1000).to(dtype)
    dcp.save({"t": whole}, storage_writer=dcp.FileSystemWriter(folder, compression=setting))
    starts = [data.draw(st.integers(0, size - 1)) for size in shape]
    stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
    part = tuple(slice(start, stop) for start, stop in zip(starts, stops, strict=True))
    reader = dcp.FileSystemReader(folder)
    found = torch.zeros_like(whole[part])
    read_box(reader, starts, found)
    assert torch.equal(found, whole[part])


def read_box(reader: Any, offsets: list[int], into: torch.Tensor) -> None:
    """Read a box of the tensor `t`, as a planner would ask for it."""
    metadata = reader.read_metadata()
    planner = dcp.DefaultLoadPlanner()
    planner.set_up_planner({"t": into}, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    index = dcp.metadata.MetadataIndex("t", torch.Size([0] * into.dim()), 0)
    item = dcp.planner.ReadItem(
        type=dcp.planner.LoadItemType.TENSOR,
        dest_index=dcp.metadata.MetadataIndex("t", torch.Size([0] * into.dim())),
        dest_offsets=torch.Size([0] * into.dim()),
        storage_index=index,
        storage_offsets=torch.Size(offsets),
        lengths=into.shape,
    )
    reader.read_data(dcp.planner.LoadPlan([item]), planner).wait()


def test_a_sixteenth_costs_a_sixteenth(tmp_path: Path) -> None:
    """The bar of users: at most 1.2 times the compressed bytes of the part."""
    whole = normal(4096, 4096, dtype=torch.bfloat16)
    dcp.save({"t": whole}, storage_writer=dcp.FileSystemWriter(tmp_path, compression="auto", thread_count=1))
    reader = dcp.FileSystemReader(tmp_path)
    compressed = stored_bytes(tmp_path) / 16
    for start in (0, 256, 1000, 3840):
        found = torch.zeros(256, 4096, dtype=torch.bfloat16)
        read_box(reader, [start, 0], found)
        assert torch.equal(found, whole[start : start + 256])
        assert reader.bytes_read <= 1.2 * compressed


def _save_sharded(folder: str, setting: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute(normal(64, 5000, dtype=torch.bfloat16), mesh, [Shard(0)])
    copied = distribute(normal(300, 400, seed=2), mesh, [Replicate()])
    writer = dcp.FileSystemWriter(folder, compression=setting)
    for step in (1, 2):
        dcp.save({"rows": rows, "copied": copied * step, "step": step}, storage_writer=writer, checkpoint_id=folder)


def _load_sharded(folder: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, copied = normal(64, 5000, dtype=torch.bfloat16), normal(300, 400, seed=2) * 2
    columns = distribute(torch.zeros_like(whole), mesh, [Shard(1)])
    template: dict[str, Any] = {"rows": columns, "copied": torch.zeros_like(copied), "step": 0}
    dcp.load(template, checkpoint_id=folder)
    own = distribute(whole, mesh, [Shard(1)])
    assert isinstance(template["rows"], DTensor)
    return torch.equal(template["rows"].to_local(), own.to_local()) and torch.equal(template["copied"], copied)


@pytest.mark.parametrize("setting", ["auto", "zstd"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 4), (4, 2), (2, 1)])
def test_resharding(ranks: Any, tmp_path: Path, setting: str, saved_on: int, loaded_on: int) -> None:
    ranks.run(saved_on, _save_sharded, str(tmp_path), setting)
    assert all(ranks.run(loaded_on, _load_sharded, str(tmp_path)))


@pytest.mark.parametrize("verify", [True, "before", "full"])
def test_damage_is_refused(tmp_path: Path, verify: Any) -> None:
    value = {"a": normal(3000, 100, dtype=torch.bfloat16), "b": normal(500, 300)}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path, compression="auto", thread_count=1))
    (file,) = tmp_path.glob("*.distcp")
    whole = file.read_bytes()
    for place in range(64, len(whole) - 200, len(whole) // 7):  # behind the mark of the save, which loads do not need
        template = zeroed(value)
        with flipped(file, place, 8), pytest.raises(dcp.CorruptCheckpointError, match="differ from what was written"):
            dcp.load(template, storage_reader=dcp.FileSystemReader(tmp_path, verify=verify))
        file.write_bytes(whole[: place + 100])
        with pytest.raises(dcp.CorruptCheckpointError):
            dcp.load(template, storage_reader=dcp.FileSystemReader(tmp_path, verify=verify))
        if verify == "before":
            assert same(template, zeroed(value))
        file.write_bytes(whole)
    dcp.load(template, checkpoint_id=tmp_path)
    assert same(template, value)


class Lying(FloatPlanes):
    """Writes what cannot be decoded."""

    @staticmethod
    def registry_name() -> str:
        return "block.lying"

    @staticmethod
    def from_descriptor(version: str) -> Lying:
        del version
        return Lying()

    def get_descriptor(self) -> str:
        return "block.lying/1"

    def encode_block(self, block: memoryview, dtype: str) -> memoryview:
        return memoryview(bytes(super().encode_block(block, dtype))[:-1])


class LyingPlugin:
    @hookimpl
    def dcp_register_transforms(self) -> dict[str, str]:
        return {"block.lying": f"{Lying.__module__}:Lying"}


def test_what_cannot_be_decoded_names_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": normal(3000, 100)}
    dcp.save(value, storage_writer=dcp.FileSystemWriter(tmp_path, compression=Lying()))
    with pytest.raises(dcp.UnsupportedFormatError, match=r"block\.lying.*install"):
        dcp.load(zeroed(value), checkpoint_id=tmp_path)
    monkeypatch.setitem(sys.modules, Lying.__module__, sys.modules[__name__])
    dcp.plugins.register(LyingPlugin(), name="lying")
    try:
        with pytest.raises(dcp.CorruptCheckpointError, match=r"block 0 .*cannot be decoded.*do not fill") as error:
            dcp.load(zeroed(value), checkpoint_id=tmp_path)
    finally:
        dcp.plugins.unregister("lying")
    assert error.value.key == "a"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"compression": "fast"}, "'fast' is not known"),
        ({"compression": [FloatPlanes(), ZStandard()]}, "mixes"),
        ({"compression": "auto", "_extensions": [ZStandard()]}, "mean the same"),
    ],
)
def test_settings_that_mean_nothing(tmp_path: Path, options: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dcp.FileSystemWriter(tmp_path, **options)
