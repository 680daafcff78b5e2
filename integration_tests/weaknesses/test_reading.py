"""Entries C2 and C4 of stock's measured weaknesses where they concern loading: memory, and bytes that are read.

Memory is counted beside the template, bytes by the kernel. Times belong to benchmarks.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import dcp_all as dcp
from integration_tests.weaknesses.both import data_files, flip, our_load, our_save, quiet, stock_save
from integration_tests.weaknesses.memory import MIB, extra_mib

RANKS = 4
COLUMNS = 2048  # of 4 bytes: rows of 8 KiB
ROWS = 16 << 10
BYTES = ROWS * COLUMNS * 4
INDEX_BYTES = 64 << 10
"""For the index, and files that tell that no save is running."""
EXTRA_MIB = 64 + 64
"""Beside the destination: 64 MiB and the buffers' budget."""


def _saved() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One large tensor, saved whole by one rank: library → folder."""
    folder = tmp_path_factory.mktemp("large")
    our_save({"weight": _saved()}, folder / "ours", sync_files=False)
    stock_save({"weight": _saved()}, folder / "stock", sync_files=False)
    return {"dcp_all": folder / "ours", "torch.distributed.checkpoint": folder / "stock"}


def _given_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _load_shard(module: str, folder: str, dim: int, options: dict[str, Any]) -> tuple[float, float, bool]:
    """Load this rank's shard: bytes that the kernel gave ÷ bytes of the shard, extra MiB, and whether it is right."""
    library: Any = importlib.import_module(module)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = [ROWS, COLUMNS]
    shape[dim] //= dist.get_world_size()
    template = DTensor.from_local(torch.zeros(shape, dtype=torch.int32), mesh, [Shard(dim)])
    reader = library.FileSystemReader(folder, **options)
    before = _given_bytes()
    with quiet():
        extra = extra_mib(lambda: library.load({"weight": template}, storage_reader=reader))
    read = _given_bytes() - before
    local = template.to_local()
    start = dist.get_rank() * shape[dim]
    first = torch.arange(local.numel(), dtype=torch.int64).reshape(shape) if dim == 0 else None
    if first is not None:
        right = torch.equal(local, (first + start * COLUMNS).to(torch.int32))
    else:
        rows = torch.arange(ROWS, dtype=torch.int32)[:, None] * COLUMNS
        right = torch.equal(local, rows + torch.arange(start, start + shape[1], dtype=torch.int32))
    return (read - INDEX_BYTES) / local.nbytes, extra, right


CASES = [
    ("dcp_all", 0, {}, 1.1),
    ("dcp_all", 0, {"verify": False}, 1.01),
    ("dcp_all", 1, {}, 4.05),
    ("dcp_all", 1, {"verify": False}, 1.6),
]


@pytest.mark.parametrize(("module", "dim", "options", "most"), CASES, ids=["rows", "rows-", "columns", "columns-"])
def test_c04_a_shard_reads_what_it_needs_in_bounded_memory(
    ranks: Any, folders: dict[str, Path], module: str, dim: int, options: dict[str, Any], most: float
) -> None:
    found = ranks.run(RANKS, _load_shard, module, str(folders[module]), dim, options)
    print(module, dim, options, found)
    assert all(right for _, _, right in found)
    assert max(ratio for ratio, _, _ in found) <= most
    assert max(extra for _, extra, _ in found) <= EXTRA_MIB / 2, "the buffers of few threads are far below the budget"


@pytest.mark.parametrize(("dim", "verify", "most"), [(0, "blocks", 1.05), (1, False, 1.6), (0, "full", 4.05)])
def test_c04_a_shard_of_what_stock_saved_reads_what_it_needs(
    ranks: Any, folders: dict[str, Path], dim: int, verify: Any, most: float
) -> None:
    folder = str(folders["torch.distributed.checkpoint"])
    found = ranks.run(RANKS, _load_shard, "dcp_all", folder, dim, {"verify": verify})
    print(dim, verify, found)
    assert all(right for _, _, right in found)
    assert max(ratio for ratio, _, _ in found) <= most
    assert max(extra for _, extra, _ in found) <= EXTRA_MIB / 2


def test_c04_stock_reads_everything_on_every_rank(ranks: Any, folders: dict[str, Path]) -> None:
    module = "torch.distributed.checkpoint"
    found = ranks.run(RANKS, _load_shard, module, str(folders[module]), 0, {})
    assert min(ratio for ratio, _, _ in found) >= 3.9, "stock should show the defect"
    assert min(extra for _, extra, _ in found) >= BYTES / MIB - 16, "stock should show the defect"


@pytest.mark.parametrize("verify", ["blocks", False])
def test_c04_several_parts_of_one_chunk_are_read_once(folders: dict[str, Path], verify: Any) -> None:
    parts = [torch.zeros(ROWS, COLUMNS // 16, dtype=torch.int32) for _ in range(16)]
    template = {"weight": LocalShardsWrapper(parts, [(0, n * (COLUMNS // 16)) for n in range(16)])}
    reader = dcp.FileSystemReader(folders["dcp_all"], verify=verify)
    report = dcp.load(template, storage_reader=reader, no_dist=True)
    assert torch.equal(torch.cat(parts, 1), _saved())
    assert report.bytes_read <= BYTES


def _targets(case: str) -> torch.Tensor:
    if case == "cast":
        return torch.zeros(ROWS, COLUMNS, dtype=torch.int64)
    if case == "transposed":
        return torch.zeros(COLUMNS, ROWS, dtype=torch.int32).t()
    return torch.zeros(ROWS, 2 * COLUMNS, dtype=torch.int32)[:, ::2]


def _load_into(folder: str, case: str, options: dict[str, Any]) -> tuple[float, bool]:
    """Extra MiB of a load that cannot be done in place, and whether it is right."""
    options = {"thread_count": 2, **options}  # each thread has buffers of its own
    our_load({"weight": torch.zeros(ROWS, COLUMNS, dtype=torch.int32)}, folder, **options)  # what is loaded once
    template = {"weight": _targets(case)}
    extra = extra_mib(lambda: our_load(template, folder, **options))
    return extra, torch.equal(template["weight"].to(torch.int32), _saved())


@pytest.mark.parametrize("case", ["cast", "transposed", "every other element"])
@pytest.mark.parametrize("options", [{}, {"max_inflight_bytes": 1 << 20}, {"verify": "full"}], ids=str)
def test_c02_one_large_tensor_of_another_form_takes_bounded_memory(
    ranks: Any, folders: dict[str, Path], case: str, options: dict[str, Any]
) -> None:
    ((extra, right),) = ranks.run(1, _load_into, str(folders["dcp_all"]), case, options)
    assert right
    assert extra <= 16, f"{BYTES / MIB} MiB are loaded"


def _flipped_stock(folder: Path) -> Path:
    stock_save({"weight": _saved()[:512]}, folder, sync_files=False)
    (path,) = data_files(folder)
    flip(path, path.stat().st_size // 2)
    return path


@pytest.mark.parametrize("verify", ["blocks", "full", "before"])
def test_a01_a_flip_in_a_large_archive_of_stock_is_refused(tmp_path: Path, verify: Any) -> None:
    path = _flipped_stock(tmp_path)
    template = {"weight": torch.zeros(512, COLUMNS, dtype=torch.int32)}
    with pytest.raises(dcp.CorruptCheckpointError, match="differ from what was written") as caught:
        our_load(template, tmp_path, verify=verify)
    assert (caught.value.file, caught.value.key) == (path.name, "weight")
    assert verify != "before" or not template["weight"].any()


def _load_flipped(folder: str, verify: Any) -> tuple[str, ...]:
    mesh = init_device_mesh("cpu", (2,))
    template = DTensor.from_local(torch.zeros(256, COLUMNS, dtype=torch.int32), mesh, [Shard(0)])
    reader = dcp.FileSystemReader(folder, verify=verify)
    try:
        return dcp.load({"weight": template}, storage_reader=reader).unverified
    except dcp.CheckpointException as error:
        return (str(error),)


def test_a01_a_slice_of_a_large_archive_of_stock_is_reported_unless_all_of_it_is_checked(
    ranks: Any, tmp_path: Path
) -> None:
    _flipped_stock(tmp_path)
    assert ranks.run(2, _load_flipped, str(tmp_path), "blocks") == [("weight",), ("weight",)]
    for (text,) in ranks.run(2, _load_flipped, str(tmp_path), "full"):
        assert "differ from what was written" in text
