"""What `compression="adaptive"` chooses: `python -m integration_tests.benchmarks.adaptive --help`. Needs root.

Saves with fsync on a disk whose rate is limited by a control group, and in memory. Each round has a first, a second and
a third adaptive save to a new folder, beside saves without compression and with `auto`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_core import save
from dcp_fs import FileSystemReader, FileSystemWriter
from integration_tests.benchmarks.control_groups import ControlGroup
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["measure", "write_page"]

_MODULE = "integration_tests.benchmarks.adaptive"
_RATES_MB = (100, 500, 1000, 2000)
_AIM = 1.05
_SAVES = ("first", "second", "third")


def _save(folder: Path, state: dict[str, Any], compression: str) -> float:
    """Seconds of a save, after everything dirty has been written."""
    writer = FileSystemWriter(folder, thread_count=2, compression=compression)
    os.sync()
    begun = time.perf_counter()
    save(state, storage_writer=writer, no_dist=True)
    return time.perf_counter() - begun


def _is_compressed(folder: Path) -> bool:
    places = FileSystemReader(folder).read_metadata().storage_data or {}
    return any(place.transform_descriptors for place in places.values())


def _round(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Adaptive saves to a new place, in turns with plain ones."""
    fresh = Path(tempfile.mkdtemp(dir=folder))
    found: dict[str, Any] = {"auto": _save(folder / "other" / "auto", state, "auto"), "plain": [], "compressed": []}
    for name in _SAVES:
        found["plain"].append(_save(folder / "other" / "plain", state, "none"))
        found[name] = _save(fresh / name, state, "adaptive")
        found["compressed"].append(_is_compressed(fresh / name))
        shutil.rmtree(fresh / name)
    return found


def _row(name: str, folder: Path, rounds: int, state: dict[str, Any]) -> dict[str, Any]:
    found = [_round(folder, state) for _ in range(rounds + 1)][1:]
    row: dict[str, Any] = {"storage": name}
    row |= {key: statistics.median(each[key] for each in found) for key in ("auto", *_SAVES)}
    row["plain"] = statistics.median(seconds for each in found for seconds in each["plain"])
    for number, key in enumerate(_SAVES):
        row[f"{key} compressed"] = sum(each["compressed"][number] for each in found)
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def measure(disk: Path, memory: Path, nbytes: int, rounds: int) -> dict[str, Any]:
    """All rates; medians of the rounds, of which one more warms up."""
    maker = torch.Generator().manual_seed(1)
    count = nbytes // 64 // 2
    state = {f"layer.{n}.weight": (torch.randn(count, generator=maker) * 0.02).bfloat16() for n in range(64)}
    rows = []
    with ControlGroup() as group:
        for rate in _RATES_MB:
            group.limit_writes(disk, rate * 1_000_000)
            rows.append(_row(f"{rate:,} MB/s", disk, rounds, state))
        group.limit_writes(disk, None)
        rows.append(_row("tmpfs", memory, rounds, state))
    return {"bytes": nbytes, "rounds": rounds, "rows": rows}


def write_page(page: Path, figures: Mapping[str, Any]) -> None:
    """Put the table between the marks of a page."""
    size = f"{figures['bytes'] / (1 << 30):g} GiB"
    lines = [
        f"{size} of bf16 noise, 2 threads, fsync included, seconds; medians of {figures['rounds']} rounds in turns.",
        "",
        "| storage | plain | auto | first adaptive save ÷ plain | second ÷ plain | third ÷ plain | compressed |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in figures["rows"]:
        ratios = [row[key] / row["plain"] for key in _SAVES]
        marked = [f"{ratio:.2f}{'' if ratio <= _AIM else ' (missed)'}" for ratio in ratios]
        times = ", ".join(f"{row[f'{key} compressed']}" for key in _SAVES)
        lines.append(
            f"| {row['storage']} | {row['plain']:.2f} | {row['auto']:.2f} | {' | '.join(marked)} "
            f"| {times} of {figures['rounds']} |"
        )
    lines += ["", f"The aim is at most {_AIM:g} times a plain save."]
    replace_figures(page, _MODULE, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or make the page of what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds; one more warms up (default: 5)")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--tmpfs", type=Path, default=Path("/dev/shm"), help="a folder in memory")
    parser.add_argument("--json", type=Path, help="write figures here")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--from-json", type=Path, help="measure nothing: make the page of these figures")
    chosen = parser.parse_args(arguments)
    if chosen.from_json is None:
        with tempfile.TemporaryDirectory(dir=chosen.disk) as disk, tempfile.TemporaryDirectory(dir=chosen.tmpfs) as ram:
            figures = measure(Path(disk), Path(ram), int(chosen.gib * (1 << 30)), chosen.rounds)
    else:
        figures = json.loads(chosen.from_json.read_text())
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    if chosen.page is not None:
        write_page(chosen.page, figures)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups and folders are cleared away
    main()
