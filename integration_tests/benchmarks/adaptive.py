"""What `compression="adaptive"` chooses: `python -m integration_tests.benchmarks.adaptive --help`. Needs root.

Saves with fsync on a disk whose rate is limited by a control group, and in memory: the time of a first and of a second
save beside those without compression and with `auto`.
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
from dcp_core.encoding.adaptive import forget_rates
from dcp_fs import FileSystemWriter
from integration_tests.benchmarks.control_groups import ControlGroup
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["measure", "write_page"]

_MODULE = "integration_tests.benchmarks.adaptive"
_RATES_MB = (100, 500, 1000, 2000)
_FIRST, _SECOND = 1.15, 1.05


def _save(folder: Path, state: dict[str, Any], compression: str) -> tuple[float, str]:
    """Seconds of a save, everything dirty having been written before, and what was chosen."""
    writer = FileSystemWriter(folder, thread_count=2, compression=compression)
    os.sync()
    begun = time.perf_counter()
    save(state, storage_writer=writer, no_dist=True)
    return time.perf_counter() - begun, writer.compression_choice or ""


def _round(folder: Path, number: int, state: dict[str, Any]) -> dict[str, Any]:
    """One save of each kind; the first of the adaptive ones knows nothing."""
    forget_rates()
    fresh = folder / f"round-{number}"
    found: dict[str, Any] = {}
    for name in ("none", "auto"):
        found[name], _ = _save(folder / "other" / name, state, name)
    found["first"], found["chosen first"] = _save(fresh / "step-1", state, "adaptive")
    shutil.rmtree(fresh / "step-1")
    found["second"], found["chosen second"] = _save(fresh / "step-2", state, "adaptive")
    shutil.rmtree(fresh)
    best = min(found["none"], found["auto"])
    return {**found, "first ÷ best": found["first"] / best, "second ÷ best": found["second"] / best}


def _row(name: str, folder: Path, rounds: int, state: dict[str, Any]) -> dict[str, Any]:
    found = [_round(folder, number, state) for number in range(rounds + 1)][1:]
    numbers = [key for key, value in found[0].items() if isinstance(value, float)]
    row = {"storage": name, **{key: statistics.median(each[key] for each in found) for key in numbers}}
    best = min(row["none"], row["auto"])
    row |= {"first ÷ best": row["first"] / best, "second ÷ best": row["second"] / best}
    row |= {key: [each[key] for each in found] for key in ("chosen first", "chosen second")}
    print(json.dumps(row, ensure_ascii=False), file=sys.stderr, flush=True)
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
        f"{size} of bf16 noise, 2 threads, fsync included, seconds; medians of {figures['rounds']} rounds.",
        "",
        "| storage | none | auto | adaptive, first | ÷ best | adaptive, second | ÷ best | compressed, second |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in figures["rows"]:
        first, second, chosen = row["first ÷ best"], row["second ÷ best"], row["chosen second"]
        times = sum(each.startswith("compressed") for each in chosen)
        lines.append(
            f"| {row['storage']} | {row['none']:.2f} | {row['auto']:.2f} | {row['first']:.2f} "
            f"| {first:.2f}{'' if first <= _FIRST else ' (missed)'} | {row['second']:.2f} "
            f"| {second:.2f}{'' if second <= _SECOND else ' (missed)'} | {times} of {len(chosen)} |"
        )
    lines += ["", f"To be at most {_FIRST:g} for the first save, and {_SECOND:g} for later ones."]
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
