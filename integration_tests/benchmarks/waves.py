"""Saves in waves with little memory: `python -m integration_tests.benchmarks.waves --help`. Needs root.

One process with its saver, in a control group with just enough memory, on a disk of a limited rate: the peak of memory,
and how long `save` waits, beside a saver without a limit and a synchronous save of the same values.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dcp_async import AsyncSaver, SaverOptions
from dcp_core import load, save
from integration_tests.benchmarks.control_groups import ControlGroup
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["measure", "write_page"]

_MODULE = "integration_tests.benchmarks.waves"
_MIB = 1 << 20
_SHARES = (0.1, 0.25, 0.5, 1.0)
_ROOM_BYTES, _PEAK_BYTES, _WAITING = 128 * _MIB, 64 * _MIB, 1.10

Row = dict[str, Any]


def _checksums(state: Mapping[str, torch.Tensor]) -> list[int]:
    return [zlib.crc32(value.numpy()) for value in state.values()]  # type: ignore[arg-type]


def _loaded_checksums(state: dict[str, Any], folder: Path) -> list[int]:
    for value in state.values():
        value.zero_()
    load(state, checkpoint_id=folder, no_dist=True)
    return _checksums(state)


@contextmanager
def _peak_of(group: ControlGroup, found: Row) -> Iterator[None]:
    """Sample the memory of the group; `found["peak"]` is the most."""
    over = threading.Event()
    peaks = [group.memory_bytes()]

    def sample() -> None:
        while not over.wait(0.005):
            peaks.append(group.memory_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        found["peak"] = max(peaks)


@contextmanager
def _saver(kind: str, options: SaverOptions, folder: Path) -> Iterator[AsyncSaver]:
    """A saver that has saved something small, so that its process runs."""
    with AsyncSaver(kind, options=options) as saver:
        saver.save({"small": torch.ones(1000)}, checkpoint_id=folder / "small", no_dist=True).result()  # type: ignore[union-attr]
        yield saver


def _seconds_of_save(saver: AsyncSaver, state: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Seconds until `save` returns, and until the checkpoint is durable; the values are zero afterwards."""
    begun = time.perf_counter()
    future: Any = saver.save(state, checkpoint_id=folder, no_dist=True)
    returned = time.perf_counter() - begun
    for value in state.values():
        value.zero_()
    future.result()
    return returned, time.perf_counter() - begun


def _round(group: ControlGroup, folder: Path, state: dict[str, Any], kind: str, share: float, rate: int) -> Row:
    nbytes = sum(value.nbytes for value in state.values())
    expected, budget = _checksums(state), int(nbytes * share)
    begun = time.perf_counter()
    save(state, checkpoint_id=folder / "plain", no_dist=True)
    found: Row = {"plain": time.perf_counter() - begun}
    with _saver(kind, SaverOptions(), folder) as saver:
        found["copy"], _ = _seconds_of_save(saver, state, folder / "unlimited")
    same = _loaded_checksums(state, folder / "plain") == expected
    with _saver(kind, SaverOptions(max_staging_bytes=budget, staging="waves"), folder) as saver:
        found["before"] = before = group.memory_bytes()
        group.limit_memory(before + budget + _ROOM_BYTES)
        try:
            with _peak_of(group, found):
                found["returned"], found["durable"] = _seconds_of_save(saver, state, folder / "waves")
        finally:
            group.limit_memory(None)
    found["grown"] = found["peak"] - before - budget
    found["allowed"] = found["copy"] + (nbytes - budget) / rate
    found["waiting"] = found["returned"] / found["allowed"]
    found["equal"] = same and _loaded_checksums(state, folder / "waves") == expected
    return found


def measure(folder: Path, nbytes: int, rounds: int, rate_mb: int, kinds: Sequence[str]) -> dict[str, Any]:
    """Every saver with every share of the state as its memory; medians of the rounds, and the most of peaks."""
    rows = []
    with ControlGroup() as group:
        state = {f"layer.{n}": torch.randn(nbytes // 64 // 4) for n in range(64)}
        group.limit_writes(folder, rate_mb * 1_000_000)
        for kind in kinds:
            for share in _SHARES:
                found = [_round(group, folder, state, kind, share, rate_mb * 1_000_000) for _ in range(rounds)]
                row = {name: statistics.median(each[name] for each in found) for name in found[0]}
                row |= {"grown": max(each["grown"] for each in found), "equal": all(each["equal"] for each in found)}
                rows.append({"saver": kind, "share": share, **row})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        group.limit_writes(folder, None)
    return {"bytes": nbytes, "rounds": rounds, "rate_mb": rate_mb, "rows": rows}


def write_page(page: Path, figures: Mapping[str, Any]) -> None:
    """Put the table between the marks of a page."""
    size, rate = f"{figures['bytes'] / (1 << 30):g} GiB", f"{figures['rate_mb']} MB/s"
    titles = ["saver", "memory ÷ state", "`save` returns after, s", "÷ (copy + what does not fit ÷ rate)"]
    titles += ["peak beyond memory, MiB", "durable after, s", "synchronous save, s", "the same bytes"]
    lines = [
        f"{size} of state on a disk limited to {rate}; medians of {figures['rounds']} rounds, and the largest peak.",
        "",
        f"| {' | '.join(titles)} |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in figures["rows"]:
        waits, grows = row["waiting"] <= _WAITING, row["grown"] <= _PEAK_BYTES
        lines.append(
            f"| {row['saver']} | {row['share']:g} | {row['returned']:.2f} | {row['waiting']:.2f}"
            f"{'' if waits else ' (missed)'} | {row['grown'] / _MIB:.0f}{'' if grows else ' (missed)'} "
            f"| {row['durable']:.2f} | {row['plain']:.2f} | {'yes' if row['equal'] else 'no'} |"
        )
    lines += ["", f"Targets: the fourth column is at most {_WAITING:g}, and the fifth at most {_PEAK_BYTES // _MIB}."]
    replace_figures(page, _MODULE, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or make the page of what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate-mb", type=int, default=500, help="of the disk, MB/s")
    parser.add_argument("--kind", action="append", choices=["thread", "process"])
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--json", type=Path, help="write figures here")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--from-json", type=Path, help="measure nothing: make the page of these figures")
    chosen = parser.parse_args(arguments)
    if chosen.from_json is None:
        folder = Path(tempfile.mkdtemp(dir=chosen.disk, prefix="dcp-waves-"))
        try:
            kinds = chosen.kind or ["process", "thread"]
            figures = measure(folder, int(chosen.gib * (1 << 30)), chosen.rounds, chosen.rate_mb, kinds)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    else:
        figures = json.loads(chosen.from_json.read_text())
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1) + "\n")
    if chosen.page is not None:
        write_page(chosen.page, figures)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that groups and folders are cleared away
    main()
