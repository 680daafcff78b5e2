"""Figures of saves and loads on an accelerator, each beside its floor; and the table of all reports."""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_async import AsyncSaver
from dcp_core import load
from dcp_core.tensors.devices import pinned_buffer

__all__ = ["measure", "read_reports", "table"]

REPORTS = Path(__file__).parent / "reports"
TIMES = 5
LATENCY_SECONDS = 0.002
ROWS = {
    "torch": "PyTorch",
    "state_bytes": "state, bytes",
    "to_host_bytes_per_second": "copy to pinned memory, bytes per second",
    "to_device_bytes_per_second": "copy from pinned memory, bytes per second",
    "stall_seconds": "stall of an asynchronous save, seconds",
    "stall_by_floor": "stall ÷ (bytes ÷ copy rate + 2 ms)",
    "lost_seconds": "training time lost per save, seconds",
    "lost_by_floor": "lost ÷ (bytes ÷ copy rate + 2 ms)",
    "load_seconds": "load, seconds",
    "load_by_floor": "load ÷ (reading the files + bytes ÷ copy rate)",
}


def measure(device: str, nbytes: int, *, folder: Path | None = None) -> dict[str, Any]:
    """Return the report of a device: medians of several runs."""
    module = torch.get_device_module(device)
    # Eight tensors, of which a step changes each.
    state = {str(number): torch.randn(nbytes // 32, device=device) for number in range(8)}
    held = 4 * sum(tensor.numel() for tensor in state.values())

    def step() -> None:
        for tensor in state.values():
            tensor.mul_(1.0001)
        module.synchronize()

    host = [pinned_buffer(tensor.nbytes).view(tensor.dtype) for tensor in state.values()]

    def copy(*, to_host: bool) -> None:
        for one, other in zip(host, state.values(), strict=True):
            source, target = (other, one) if to_host else (one, other)
            target.copy_(source, non_blocking=True)
        module.synchronize()

    to_host, to_device = (held / _median(lambda way=way: copy(to_host=way)) for way in (True, False))
    host.clear()
    step_seconds = _median(step)
    floor = held / to_host + LATENCY_SECONDS
    stalls, lost = [], []
    with tempfile.TemporaryDirectory(dir=folder) as made, AsyncSaver("process") as saver:
        for number in range(1 + TIMES):  # the first one starts a process and pins memory
            begun = time.perf_counter()
            future: Any = saver.save(state, checkpoint_id=f"{made}/{number % 2}")
            stalled, steps = time.perf_counter() - begun, 0
            while not future.done():
                step()
                steps += 1
            stalls.append(stalled)
            lost.append(time.perf_counter() - begun - steps * step_seconds)
        saved = Path(made, f"{TIMES % 2}")
        load_seconds = _median(lambda: load(state, checkpoint_id=saved))
        read_seconds = _median(lambda: _read(saved))
    stall, lost_seconds = statistics.median(stalls[1:]), statistics.median(lost[1:])
    return {
        "device": _name(module, device),
        "machine": platform.platform(),
        "torch": torch.__version__,
        "state_bytes": held,
        "to_host_bytes_per_second": to_host,
        "to_device_bytes_per_second": to_device,
        "stall_seconds": stall,
        "stall_by_floor": stall / floor,
        "lost_seconds": lost_seconds,
        "lost_by_floor": lost_seconds / floor,
        "load_seconds": load_seconds,
        "load_by_floor": load_seconds / (read_seconds + held / to_device),
    }


def table(reports: Sequence[dict[str, Any]]) -> str:
    """Return a table with one column per device, as the page about accelerators has it."""
    columns = [["CUDA", *["not run yet"] * len(ROWS)]]
    if reports:
        columns = [[report["device"], *(_shown(report[key]) for key in ROWS)] for report in reports]
    rows = zip(["", *ROWS.values()], *columns, strict=True)
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "| --- |" + " ---: |" * len(columns), *lines[1:]])


def read_reports() -> list[dict[str, Any]]:
    """Return the reports of devices, in the order of their files' names."""
    return [json.loads(file.read_text()) for file in sorted(REPORTS.glob("*.json"))]


def _median(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(TIMES):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _read(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        buffer = bytearray(8 << 20)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def _name(module: Any, device: str) -> str:
    return module.get_device_name() if hasattr(module, "get_device_name") else device


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
