"""The most memory that a call takes, in a process of its own: what the kernel counted, beside what was held before."""

from __future__ import annotations

import ctypes
import gc
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from integration_tests.benchmarks.workers.meter import give_back_freed_blocks
from integration_tests.weaknesses.both import quiet

__all__ = ["MIB", "extra_mib", "measure"]

MIB = 1 << 20
_VIEWS, _ROWS, _COLUMNS = 8, 4096, 2048
_LARGE = 192 * MIB
_OBJECT = 64 * MIB


def _peak_mib() -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) / 1024


def extra_mib(action: Callable[[], Any]) -> float:
    """MiB that `action` needed at its height, in addition to what this process held before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew from here
    before = _peak_mib()
    with quiet():
        action()
    return round(_peak_mib() - before, 1)


def _column_views() -> dict[str, torch.Tensor]:
    """Views that need a copy to be written in order: 16 MiB each, of storages of 32 MiB."""
    return {f"v{i}": torch.ones(_ROWS, _COLUMNS)[:, : _COLUMNS // 2] for i in range(_VIEWS)}


def _row_views() -> dict[str, torch.Tensor]:
    """Views that lie in order in a larger storage: 16 MiB each, of storages of 32 MiB."""
    return {f"v{i}": torch.ones(_ROWS, _COLUMNS)[: _ROWS // 2] for i in range(_VIEWS)}


def _large() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(_LARGE // 4)}


def _object() -> dict[str, str]:
    return {"text": "x" * _OBJECT}


def measure(module: str, folder: str) -> dict[str, float]:
    """What each case needs in addition, MiB. Runs on one rank."""
    give_back_freed_blocks()
    library: Any = importlib.import_module(module)
    with quiet():
        library.save({"warm": torch.ones(3), "up": 1}, checkpoint_id=f"{folder}/warm", no_dist=True)
        library.load({"warm": torch.zeros(3), "up": 0}, checkpoint_id=f"{folder}/warm", no_dist=True)
    found: dict[str, float] = {}
    cases = {"columns": _column_views, "rows": _row_views, "large": _large, "object": _object}
    for name, make in cases.items():
        state: dict[str, Any] = make()
        writer = library.FileSystemWriter(f"{folder}/{name}", sync_files=False, thread_count=1)
        found[f"save {name}"] = extra_mib(lambda: library.save(state, storage_writer=writer, no_dist=True))  # noqa: B023
        if name in ("large", "object"):
            template = {key: torch.zeros_like(value) if name == "large" else "" for key, value in state.items()}
            del state
            found[f"load {name}"] = extra_mib(
                lambda: library.load(template, checkpoint_id=f"{folder}/{name}", no_dist=True)  # noqa: B023
            )
    return found
