"""`estimate` says what a save then writes: bytes, files and memory, on every rank, whatever the state holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_all as dcp
from dcp_base.escaping import printable_bytes
from dcp_core import hookimpl
from dcp_core.events import _rates


def replicated() -> dict[str, Any]:
    return {f"layer {n}": torch.arange(50_000.0) + n for n in range(9)}


def sharded() -> dict[str, Any]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.arange(300_000.0).reshape(500, 600)
    placements = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}
    return {name: distribute_tensor(full, mesh, [each]) for name, each in placements.items()}


def with_objects() -> dict[str, Any]:
    scalars = {f"value {n}": n for n in range(500)}
    return {"text": "x" * 100_000, "mine": dcp.PerRank({"rank": dist.get_rank(), "seed": [1] * 900}), **scalars}


def many_small() -> dict[str, Any]:
    return {f"scalar {n}": torch.tensor(float(n)) for n in range(2000)}


def everything() -> dict[str, Any]:
    return {"a": replicated(), "b": sharded(), "c": with_objects(), "d": many_small()}


STATES: list[Callable[[], dict[str, Any]]] = [replicated, sharded, with_objects, many_small, everything]


def estimated_and_saved(number: int, folder: str, options: dict[str, Any]) -> tuple[dcp.Estimate, bool, list[str]]:
    """An estimate, and whether it left anything; the save after it."""
    state = STATES[number]()
    found = dcp.estimate(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    dist.barrier()
    left = os.path.exists(folder)
    dist.barrier()
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    return found, left, sorted(os.listdir(folder))


def sizes(folder: Path, names: list[str]) -> dict[str, int]:
    return {name: (folder / name).stat().st_size for name in names}


@pytest.mark.parametrize("options", [{}, {"layout": "raw", "thread_count": 3}], ids=["torch", "raw"])
def test_bytes_and_files_are_those_of_the_save(ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    for number, make in enumerate(STATES):
        folder = tmp_path / make.__name__
        (found, left, names), (other, _, _) = ranks.run(2, estimated_and_saved, number, str(folder), options)
        written = sizes(folder, names)
        assert found == other
        assert not left
        assert not found.is_upper_bound
        assert found.files == len(written)
        assert found.bytes == pytest.approx(sum(written.values()), rel=0.01)
        for rank in (0, 1):
            own = {name: size for name, size in written.items() if name.startswith(f"__{rank}_")}
            own |= {".metadata": written[".metadata"]} if rank == 0 else {}
            assert found.ranks[rank].files == len(own)
            assert found.ranks[rank].bytes == pytest.approx(sum(own.values()), rel=0.01)


@pytest.mark.parametrize("options", [{}, {"layout": "raw", "thread_count": 3}], ids=["torch", "raw"])
@pytest.mark.parametrize("make", [replicated, many_small], ids=lambda make: make.__name__)
def test_estimate_and_save_report_the_same_data_files(
    tmp_path: Path, make: Callable[[], dict[str, Any]], options: dict[str, Any]
) -> None:
    state, folder = make(), tmp_path / "c"
    found = dcp.estimate(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    saved = dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options))
    read = dcp.FileSystemReader(folder).read_metadata()
    on_disk = sum(each.stat().st_size for each in folder.glob("*.distcp"))
    assert found.bytes - found.index_bytes == on_disk
    assert found.index_bytes == pytest.approx((folder / ".metadata").stat().st_size, rel=0.05)
    reported = re.compile(r"[\d.,]+ [KM]iB in \d+ data files?")
    texts = {reported.search(repr(each))[0] for each in (found, saved, read)}  # type: ignore[index]
    assert texts == {f"{printable_bytes(on_disk)} in {found.files - 1} data file{'s' * (found.files > 2)}"}
    assert f", and an index of {printable_bytes(found.index_bytes)}" in repr(found)


@pytest.mark.parametrize("compression", ["auto", "zstd"])
def test_what_is_compressed_has_an_upper_bound(ranks: Any, tmp_path: Path, compression: str) -> None:
    number = STATES.index(everything)
    options = {"compression": compression}
    (found, _, names), _ = ranks.run(2, estimated_and_saved, number, str(tmp_path / "c"), options)
    assert found.is_upper_bound
    assert repr(found).startswith("<Estimate: at most ")
    assert sum(sizes(tmp_path / "c", names).values()) < found.bytes


def test_the_copy_of_a_saver_is_counted(tmp_path: Path) -> None:
    state = {**replicated(), "more": torch.ones(100, 100).t(), "again": torch.ones(7)}
    state["tied"] = state["more"]
    assert dcp.estimate(state).staging_bytes == 0
    with dcp.AsyncSaver("thread") as saver:
        found = dcp.estimate(state, saver)
        assert saver.staging_bytes == 0
        saver.save(state, checkpoint_id=tmp_path / "a")
        assert 0 <= saver.staging_bytes - found.staging_bytes < 4096
    assert found.staging_bytes >= 9 * 200_000 + 40_000


def test_seconds_come_from_the_last_save_of_this_process_to_such_a_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_rates, "file", 0.0)
    _rates.clear()
    state = {"x": torch.ones(1 << 20)}
    dcp.save({"x": 1}, checkpoint_id=tmp_path / "small")
    assert dcp.estimate(state).seconds is None
    for kind in ("foreground", "process"):
        _rates.clear()
        if kind == "process":
            with dcp.AsyncSaver("process") as saver:
                saver.save(state, checkpoint_id=tmp_path / kind)
        else:
            dcp.save(state, checkpoint_id=tmp_path / kind)
        found = dcp.estimate(state)
        assert found.seconds is not None
        assert found.seconds == pytest.approx(found.bytes / _rates["file"])
        assert repr(found).endswith(" s>")
        assert (
            dcp.estimate(state, checkpoint_id="elsewhere://a", storage_writer=dcp.FileSystemWriter("a")).seconds is None
        )


def test_an_estimate_is_one_event_of_its_own_and_the_next_save_plans_as_the_first(tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []

    class Observer:
        @hookimpl
        def dcp_on_event(self, event: Any) -> None:
            heard.append((event.operation, event.state))

    dcp.plugins.register(Observer(), name="observer")
    try:
        dcp.estimate({"x": torch.ones(3)})
    finally:
        dcp.plugins.unregister("observer")
    assert {operation for operation, _ in heard} == {"estimate"}
    state = {"x": torch.ones(3)}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    dcp.load(state, checkpoint_id=tmp_path / "a")
    assert state["x"].tolist() == [1, 1, 1]


class OwnFiles(dcp.FileSystemWriter):
    """Storage writer that creates files itself, without the methods of `ByteStorageWriter`."""

    def write_data(self, *arguments: Any) -> Any:
        pytest.fail("written")


def test_other_writers_and_bad_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(dcp.DcpError, match="OwnFiles lays out its own files"):
        dcp.estimate({"x": torch.ones(3)}, storage_writer=OwnFiles(tmp_path))
    with pytest.raises(dcp.DcpError, match="HuggingFaceStorageWriter lays out its own files"):
        dcp.estimate({"x": torch.ones(3)}, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path)))
    with pytest.raises(dcp.DcpError, match="sparse"):
        dcp.estimate({"x": torch.ones(3).to_sparse()})


def on_device(device: str) -> dict[str, Any]:
    """Large and small tensors, tied ones, an empty one, one that is not contiguous, and a shard of a DTensor."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    with torch.device(device):
        layers = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Linear(300, 300), torch.nn.Linear(2000, 50))
        more = [torch.empty(0, 3), torch.empty(3, 50_000, dtype=torch.bfloat16).t(), torch.empty((), dtype=torch.long)]
        part = torch.empty(500, 300)
    layers[1].weight = layers[0].weight
    shard = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
    return {"model": layers.state_dict(), "more": more, "nested": (torch.empty(4, device=device), 7), "shard": shard}


def estimated_on_meta() -> tuple[dcp.Estimate, dcp.Estimate]:
    state = on_device("meta")
    found = dcp.estimate(state), dcp.estimate(on_device("cpu"), planner=dcp.DefaultSavePlanner(replicas="ignore"))
    assert state["model"]["0.weight"].is_meta
    with (
        dcp.AsyncSaver("thread") as saver,
        pytest.raises(dcp.DcpError, match=r"model\.0\.weight.* is on the meta device"),
    ):
        dcp.estimate(state, saver)
    return found


def test_meta_tensors_have_the_sizes_of_tensors_with_memory(ranks: Any) -> None:
    for found, real in ranks.run(2, estimated_on_meta):
        assert found == real
        assert found.bytes > 2 * 500 * 300 * 4 + 300 * 300 * 4


def failing_on_one_rank() -> str:
    state = {"x": torch.ones(3), "y": torch.ones(3).to_sparse() if dist.get_rank() else torch.ones(3)}
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.estimate(state)
    return str(error.value)


def test_a_failure_on_one_rank_is_raised_on_all(ranks: Any) -> None:
    assert all("rank 1" in text for text in ranks.run(2, failing_on_one_rank))
