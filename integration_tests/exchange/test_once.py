"""Each byte is taken from the store once, and what arrives is what an independent load brings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute
from dcp_ranks.testing.ranks import RankPool
from dcp_transforms import BlockZStandard, FloatPlanes, ZStandard
from integration_tests.demo.weights import weights_file
from integration_tests.exchange import counting
from integration_tests.exchange.counting import Loaded, blank, blank_experts, count_union, whole
from integration_tests.kits.coordinators import caught

SHARED = "cooperative=True"
NOTHING_SHARED = "no two ranks want the same bytes"


def save_plain(folder: str, **options: Any) -> None:
    dcp.save(whole(), storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)


def save_sharded(folder: str, use_collectives: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        key: distribute(value, mesh, [Shard(0)]) if isinstance(value, torch.Tensor) and value.ndim == 2 else value
        for key, value in whole().items()
    }
    dcp.save(state, checkpoint_id=folder, use_collectives=use_collectives)


def both(folder: str, kind: str) -> tuple[Loaded, Loaded]:
    """A load by each rank for itself, and one together, which bring the same."""
    make = blank_experts if kind == "experts" else partial(blank, kind)
    alone, together = make(whole()), make(whole())
    loads = counting.load(folder, alone, cooperative=False), counting.load(folder, together, cooperative=True)
    assert counting.same(alone, together)
    assert "step" not in alone or alone["step"] == 3
    return loads


def check(found: list[tuple[Loaded, Loaded]], *, reason: str = SHARED, tolerance: float = 0.01) -> tuple[float, float]:
    """Bytes taken from the store ÷ unique bytes wanted, for each rank by itself and together."""
    alone, together = [one for one, _ in found], [two for _, two in found]
    unique = count_union(read for one in alone for read in one.reads)
    taken = [sum(stop - start for one in side for _, start, stop in one.reads) for side in (alone, together)]
    assert count_union(read for one in together for read in one.reads) >= unique * (1 - tolerance)
    assert abs(taken[1] / unique - 1) <= tolerance, f"{taken[1]} bytes were taken, {unique} wanted"
    assert taken[1] == sum(one.report.bytes_read for one in together), "the reports count what the store gave"
    for one in alone:
        assert (one.report.cooperative, one.report.bytes_received) == (False, 0)
    files = [one.index_bytes for one in alone]
    assert len(set(files)) == 1, "each rank reads the index"
    assert [one.index_bytes for one in together] == [files[0]] + [0] * (len(found) - 1), "one rank reads the index"
    for one in together:
        assert (one.report.cooperative, one.report.cooperative_reason) == (reason == SHARED, reason)
        assert one.report.loaded == alone[together.index(one)].report.loaded
    return taken[0] / unique, taken[1] / unique


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("once") / "plain")
    save_plain(made)
    return made


MESHES = [(4, "hsdp"), (4, "hsdp columns"), (4, "columns"), (3, "columns"), (4, "3d")]
KINDS = [(2, "ddp"), (4, "ddp"), *MESHES, (4, "some")]


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_each_byte_is_read_once(ranks: RankPool, folder: str, world: int, kind: str) -> None:
    found = ranks.run(world, both, folder, kind)
    alone, _ = check(found)
    assert alone > 1.5, "there was nothing to gain"
    received = [one.report.bytes_received for _, one in found]
    assert all(received), "every rank was helped by others"


@pytest.mark.parametrize(("world", "kind"), [(4, "rows"), (3, "rows"), (4, "experts")])
def test_blocks_at_the_borders_of_rows_are_read_once(ranks: RankPool, folder: str, world: int, kind: str) -> None:
    check(ranks.run(world, both, folder, kind))


def test_ranks_that_want_disjoint_keys_read_for_themselves(ranks: RankPool, folder: str) -> None:
    found = ranks.run(4, both, folder, "pipeline")
    assert check(found, reason=NOTHING_SHARED) == (1.0, 1.0)
    assert [one.report.bytes_received for _, one in found] == [0] * 4


@pytest.mark.parametrize("use_collectives", [True, False], ids=["one index", "an index of each rank"])
def test_from_four_ranks_to_three(ranks: RankPool, tmp_path: Path, use_collectives: bool) -> None:
    ranks.run(4, save_sharded, str(tmp_path), use_collectives)
    assert (tmp_path / ".metadata").exists() == use_collectives
    for kind in ("columns", "rows", "ddp"):
        check(ranks.run(3, both, str(tmp_path), kind))


FORMS: dict[str, dict[str, Any]] = {
    "stream": {"compression": "zstd"},
    "auto": {"compression": "auto"},
    "planes": {"compression": "planes"},
    "blocks": {"compression": BlockZStandard(level=1)},
    "chain": {"compression": [BlockZStandard(), FloatPlanes()]},
    "as in stock": {"_extensions": [ZStandard()]},
    "raw": {"layout": "raw"},
    "raw planes": {"layout": "raw", "compression": "planes"},
    "a file per item": {"single_file_per_rank": False},
}


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("kind", ["ddp", "columns"])
def test_each_form_of_stored_items(ranks: RankPool, tmp_path: Path, options: dict[str, Any], kind: str) -> None:
    save_plain(str(tmp_path / "saved"), **options)
    check(ranks.run(4, both, str(tmp_path / "saved"), kind))


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["ddp", "columns"])
def test_checkpoints_of_stock(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    stock.save(whole(), checkpoint_id=tmp_path, no_dist=True)
    check(ranks.run(4, both, str(tmp_path), kind))


BLOB: dict[str, Any] = {"blob": "0123456789abcdef" * (1 << 17), "w": torch.arange(4096.0)}


def with_an_object(folder: str) -> tuple[Any, bool]:
    state: dict[str, Any] = {"blob": "", "w": torch.zeros(4096)}
    loaded = counting.load(folder, state, cooperative=True)
    return loaded, state["blob"] == BLOB["blob"] and torch.equal(state["w"], BLOB["w"])


def test_an_object_is_read_once(ranks: RankPool, tmp_path: Path) -> None:
    dcp.save(BLOB, checkpoint_id=tmp_path, no_dist=True)
    found = ranks.run(4, with_an_object, str(tmp_path))
    assert [right for _, right in found] == [True] * 4
    unique = len(BLOB["blob"]) + BLOB["w"].nbytes
    assert unique <= sum(one.report.bytes_read for one, _ in found) <= 1.01 * unique
    assert [one.report.unverified for one, _ in found] == [()] * 4


def test_an_object_that_is_damaged_is_refused_by_all(ranks: RankPool, tmp_path: Path) -> None:
    dcp.save(BLOB, checkpoint_id=tmp_path, no_dist=True)
    file = max(tmp_path.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[data.index(BLOB["blob"].encode()) + 70_000] ^= 1
    file.write_bytes(data)
    for error in ranks.run(3, lambda: caught(lambda: with_an_object(str(tmp_path)))):
        assert "blob" in str(error), str(error)
        assert "CorruptCheckpointError" in str(error)


def from_safetensors(folder: str, kind: str) -> tuple[bool, int, int]:
    tensors = {key: value for key, value in whole().items() if isinstance(value, torch.Tensor)}
    template = blank(kind, tensors)
    dcp.load(template, storage_reader=dcp.HuggingFaceStorageReader(folder), cooperative=False)
    again = blank(kind, tensors)
    report = dcp.load(again, storage_reader=dcp.HuggingFaceStorageReader(folder), cooperative=True)
    return counting.same(template, again) and report.cooperative, report.bytes_read, report.bytes_received


@pytest.mark.parametrize("kind", ["ddp", "columns"])
def test_safetensors_files(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    tensors = {key: value for key, value in whole().items() if isinstance(value, torch.Tensor)}
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    found = ranks.run(4, from_safetensors, str(tmp_path), kind)
    assert all(right and received for right, _, received in found)
    wanted = sum(value.nbytes for value in tensors.values())
    assert wanted <= sum(read for _, read, _ in found) <= 1.01 * wanted


def keys_both_ways(folder: str) -> int:
    loads = []
    for cooperative in (False, True):
        reader = counting.CountingReader(folder)
        state = dcp.load_keys(["w1", "big", "words"], storage_reader=reader, cooperative=cooperative)
        loads.append((state, sum(stop - start for _, start, stop in reader.reads)))
    (alone, all_bytes), (together, own_bytes) = loads
    assert alone.keys() == together.keys() == {"w1", "big", "words"}
    assert counting.same(alone, together)
    assert own_bytes < all_bytes
    return own_bytes


def test_some_keys_without_a_template(ranks: RankPool, folder: str) -> None:
    taken = sum(ranks.run(4, keys_both_ways, folder))
    wanted = whole()["w1"].nbytes + whole()["big"].nbytes
    assert wanted <= taken <= 1.01 * wanted


def resumed(root: str) -> tuple[bool, int]:
    state = {key: torch.zeros_like(value) for key, value in whole().items() if isinstance(value, torch.Tensor)}
    with dcp.CheckpointManager(root) as manager:
        manager.save(5, {key: value for key, value in whole().items() if key in state})
        restored = manager.restore(state, cooperative=True)
    assert restored is not None
    right = counting.same(state, {key: value for key, value in whole().items() if key in state})
    return restored.report.cooperative and right, restored.report.bytes_read


def test_the_manager_restores_together(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(4, resumed, str(tmp_path))
    assert [right for right, _ in found] == [True] * 4
    wanted = sum(value.nbytes for value in whole().values() if isinstance(value, torch.Tensor))
    assert wanted <= sum(read for _, read in found) <= 1.01 * wanted


def by_reader(reader: str, place: str) -> tuple[bool, str, int]:
    template = blank("ddp", whole())
    report = dcp.load(template, storage_reader=getattr(dcp, reader)(place), cooperative=None)
    return counting.same(template, whole()), report.cooperative_reason, report.bytes_read


def test_a_file_system_of_fsspec(ranks: RankPool, folder: str) -> None:
    found = ranks.run(4, both_by_fsspec, f"file://{folder}")
    assert [right for right, _ in found] == [True] * 4
    wanted = sum(value.nbytes for value in whole().values() if isinstance(value, torch.Tensor))
    assert wanted <= sum(read for _, read in found) <= 1.01 * wanted


def both_by_fsspec(place: str) -> tuple[bool, int]:
    template = blank("ddp", whole())
    report = dcp.load(template, storage_reader=dcp.FsspecReader(place), cooperative=True)
    return counting.same(template, whole()) and report.cooperative, report.bytes_read


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["ObjectStoreReader", "FsspecReader"])
def test_object_stores_without_being_asked(s3: Any, s3_ranks: RankPool, reader: str) -> None:
    pytest.importorskip("s3fs", reason="needs s3fs")
    place = f"s3://{s3.bucket}/exchange/{reader}"
    dcp.save(whole(), storage_writer=dcp.ObjectStoreWriter(place), no_dist=True)
    found = s3_ranks.run(4, by_reader, reader, place)
    wanted = sum(value.nbytes for value in whole().values() if isinstance(value, torch.Tensor))
    assert [found[rank][:2] for rank in range(4)] == [(True, "the checkpoint is in a remote storage")] * 4
    assert wanted <= sum(read for _, _, read in found) <= 1.01 * wanted


def both_of_file(file: str, folder: str, kind: str) -> tuple[Loaded, Loaded]:
    weights = load_file(file)
    alone, together = blank(kind, weights), blank(kind, weights)
    loads = counting.load(folder, alone, cooperative=False), counting.load(folder, together, cooperative=True)
    assert counting.same(alone, together)
    return loads


@pytest.mark.parametrize("compression", [None, "auto"], ids=["plain", "compressed"])
@pytest.mark.parametrize("kind", ["ddp", "columns"])
def test_real_weights(ranks: RankPool, tmp_path: Path, kind: str, compression: str | None) -> None:
    try:
        file = str(weights_file())
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    writer = dcp.FileSystemWriter(tmp_path, compression=compression)
    dcp.save(load_file(file), storage_writer=writer, no_dist=True)
    check(ranks.run(4, both_of_file, file, str(tmp_path), kind))


@pytest.mark.slow
@pytest.mark.parametrize(("world", "mib"), [(4, 1024), (16, 256)])
@pytest.mark.parametrize("kind", ["ddp", "columns"])
def test_large_states(tmp_path: Path, world: int, mib: int, kind: str) -> None:
    state = {f"w{n}": torch.randn(mib << 8, 256) for n in range(4)}
    save_file(state, tmp_path / "model.safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    with RankPool(world, timeout_seconds=240) as pool:
        check(pool.run(world, both_of_file, str(tmp_path / "model.safetensors"), str(tmp_path / "saved"), kind))


@pytest.mark.slow
@pytest.mark.parametrize("world", [8, 16])
def test_more_ranks(folder: str, world: int) -> None:
    with RankPool(world, timeout_seconds=240) as pool:
        for kind in ("ddp", "hsdp", "columns", "3d"):
            check(pool.run(world, both, folder, kind))
