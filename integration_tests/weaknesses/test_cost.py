"""Entries C2 and C5 of stock's measured weaknesses: memory beside the payload, and bytes per small tensor.

Only memory and sizes are asserted; times are written beside them (`-rP` shows them), for they belong to benchmarks.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from integration_tests.weaknesses.both import our_save, stock_load, stock_save
from integration_tests.weaknesses.memory import measure

SCALARS = 20_000
SCALARS_OF_STOCK = 1_000
# (case, most MiB that we may need, least MiB that stock needs, or None where it does well)
# The views hold 8 × 16 MiB, the large tensor 192 MiB, the object 64 MiB.
BUDGETS = [
    ("save columns", 16 + 8, 120, "one copy at a time, not all of them"),
    ("save rows", 8, 120, "no copy"),
    ("save large", 8, None, "no copy"),
    ("save object", 64 * 3 + 8, None, "what pickling takes, and no more"),
    ("load large", 8, 180, "read into the template's own memory"),
    ("load object", 64 * 4 + 8, None, "what unpickling takes, and no more"),
]


@pytest.fixture(scope="module")
def memory(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """Library → case → MiB."""
    folder = tmp_path_factory.mktemp("memory")
    found = {}
    for module in ("dcp_all", "torch.distributed.checkpoint"):
        (found[module],) = ranks.run(1, measure, module, str(folder / module), timeout_seconds=240)
    for case, *_ in BUDGETS:
        mine, other = (each[case] for each in found.values())
        print(f"{case:14} ours {mine:7.1f} MiB, stock {other:7.1f} MiB")
    return found


@pytest.mark.parametrize(("case", "ours", "stock", "why"), BUDGETS, ids=[case for case, *_ in BUDGETS])
def test_c02_memory_beside_the_payload(
    memory: dict[str, dict[str, float]], case: str, ours: float, stock: float | None, why: str
) -> None:
    assert memory["dcp_all"][case] <= ours, why
    if stock is not None:
        assert memory["torch.distributed.checkpoint"][case] >= stock, "stock should show the defect"


def _sizes(folder: Path) -> tuple[float, float]:
    """Bytes of data and of the index."""
    index = (folder / ".metadata").stat().st_size
    return sum(path.stat().st_size for path in folder.iterdir()) - index, index


def _line(who: str, data: float, index: float, save: float, load: float) -> str:
    return f"{who:5}: {data:5.0f} + {index:3.0f} B, save {save * 1e6:5.0f} µs, load {load * 1e6:5.0f} µs each"


@pytest.fixture(scope="module")
def scalars() -> dict[str, torch.Tensor]:
    return {f"optimizer.state.{i:05d}.step": torch.tensor(float(i)) for i in range(SCALARS)}


@pytest.mark.parametrize(
    ("options", "most_data", "most_index", "most"),
    [({}, 600, 280, 880), ({"layout": "raw", "interop": False}, 100, 100, 100)],
    ids=["stock-readable", "raw"],
)
def test_c05_bytes_per_scalar(
    tmp_path: Path,
    scalars: dict[str, torch.Tensor],
    options: dict[str, Any],
    most_data: int,
    most_index: int,
    most: int,
) -> None:
    start = time.perf_counter()
    our_save(scalars, tmp_path / "ours", **options)
    saved = time.perf_counter()
    template = {key: torch.tensor(-1.0) for key in scalars}
    began = time.perf_counter()
    dcp.load(template, checkpoint_id=tmp_path / "ours", no_dist=True)
    loaded = time.perf_counter()
    assert template == scalars
    data, index = (size / SCALARS for size in _sizes(tmp_path / "ours"))
    few = dict(list(scalars.items())[:SCALARS_OF_STOCK])
    began_stock = time.perf_counter()
    stock_save(few, tmp_path / "stock")
    saved_stock = time.perf_counter()
    stock_load({key: torch.tensor(-1.0) for key in few}, tmp_path / "stock")
    loaded_stock = time.perf_counter()
    stock_data, stock_index = (size / SCALARS_OF_STOCK for size in _sizes(tmp_path / "stock"))
    print(
        _line("ours", data, index, (saved - start) / SCALARS, (loaded - began) / SCALARS),
        _line(
            "stock",
            stock_data,
            stock_index,
            (saved_stock - began_stock) / SCALARS_OF_STOCK,
            (loaded_stock - saved_stock) / SCALARS_OF_STOCK,
        ),
        sep="\n",
    )
    assert data <= most_data
    assert index <= most_index
    assert data + index <= most
    assert stock_data > 1500, "stock should show the defect"


def test_c05_stock_reads_our_scalars(tmp_path: Path, scalars: dict[str, torch.Tensor]) -> None:
    few = dict(list(scalars.items())[:100])
    our_save(few, tmp_path)
    assert stock_load({key: torch.tensor(-1.0) for key in few}, tmp_path) == few
