"""Saves with `deduplicate=True` beside other ways: `python -m integration_tests.benchmarks.deduplicate --help`.

One tensor in 20 changes from step to step, then all do. Restic and rsync copy the folders of plain saves. fsync
everywhere.

Of two equal saves on a virtual machine, one may take three times the system time, most of it in the kernel's copy to
the page cache: probably the first write to a page that the machine has returned to its host is slow. So before each
timed call three times the state's size in memory is filled and released, and the save of a fully changed state is
compared with a plain save in the same position, after equal saves.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_core import save
from dcp_fs import FileSystemWriter
from dcp_io.writing.deduplication import new_digest
from integration_tests.benchmarks.folders import settle
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["measure", "write_page"]

_MODULE = "integration_tests.benchmarks.deduplicate"
_PLAIN_CHANGED = "plain save: all changed"
_NOTES = {
    "plain save": "",
    "deduplicate: first save": "",
    "deduplicate: second save": "",
    "deduplicate: third save": "",
    _PLAIN_CHANGED: "after the same saves as in the next row",
    "deduplicate: all changed": "÷ the row above",
    "plain save, then restic": "a load needs `restic restore` first; removal needs `prune`",
    "restic restore": "as long as this, and as many bytes",
    "plain save, then `rsync --link-dest`": "finds only files with equal names: links nothing",
    "plain save, then `cp -al`": "another name for the same step: steps share nothing",
}


def _processor_seconds() -> float:
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in both)


def _own_bytes(folder: Path) -> int:
    """Bytes on the disk, each file once."""
    found = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    return sum(found.values())


class _Round:
    """One round, below an empty folder."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor]) -> None:
        self._folder, self._state = folder, state
        self._nbytes = sum(value.nbytes for value in state.values())
        self.found: dict[str, dict[str, float]] = {}

    def timed(self, name: str, action: Callable[[], object], *, after: str | None = None) -> None:
        """Measure a call, and add what another one took."""
        settle()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        mmap.mmap(-1, 3 * self._nbytes, flags=flags).close()
        before, processor, begun = _own_bytes(self._folder), _processor_seconds(), time.perf_counter()
        action()
        took = {"seconds": time.perf_counter() - begun, "processor": _processor_seconds() - processor}
        took["share"] = (_own_bytes(self._folder) - before) / self._nbytes
        self.found[name] = took
        if after is not None:
            for key in ("seconds", "processor"):
                took[key] += self.found[after][key]

    def save(self, name: str, **options: Any) -> None:
        writer = FileSystemWriter(self._folder / name, thread_count=2, **options)
        save(self._state, storage_writer=writer, no_dist=True)

    def change(self, every: int) -> None:
        for value in [*self._state.values()][::every]:
            value.add_(1)

    def run(self, every: int, *, links_first: bool) -> None:
        """Plain saves and their copies first, then those with links, twice: all end with a fully changed state."""
        self.timed("plain save", lambda: self.save("plain/step-1"))
        self._copy(1)
        self.change(every)
        self.timed("second plain save", lambda: self.save("plain/step-2"))
        self.found["plain save"] = {
            key: (value + self.found["second plain save"][key]) / 2 for key, value in self.found["plain save"].items()
        }
        self._copy(2)
        shutil.rmtree(self._folder / "copies")
        self._save_links("one", every, deduplicate=links_first)
        self._save_links("other", every, deduplicate=not links_first)

    def _save_links(self, run: str, every: int, *, deduplicate: bool) -> None:
        for number, name in enumerate(("first", "second", "third"), 1):
            self.timed(f"deduplicate: {name} save", lambda n=number: self.save(f"{run}/step-{n}", deduplicate=True))  # type: ignore[misc]
            self.change(every)
        self.change(1)
        options = {"deduplicate": True} if deduplicate else {}
        name = "deduplicate: all changed" if deduplicate else _PLAIN_CHANGED
        self.timed(name, lambda: self.save(f"{run}/step-4", **options))
        shutil.rmtree(self._folder / run)

    def _copy(self, step: int) -> None:
        """Each step of the plain saves, by other programs; the first step is not timed."""
        source, copies = self._folder / f"plain/step-{step}", self._folder / "copies"
        commands: dict[str, list[Any]] = {"plain save, then `cp -al`": ["cp", "-al", source, copies / f"names-{step}"]}
        if shutil.which("rsync"):
            link = [] if step == 1 else [f"--link-dest={copies / 'rsync-1'}"]
            commands["plain save, then `rsync --link-dest`"] = [
                *("rsync", "-a", "--fsync", *link, f"{source}/", copies / f"rsync-{step}")
            ]
        if shutil.which("restic"):
            os.environ |= {"RESTIC_PASSWORD": "none", "RESTIC_REPOSITORY": str(copies / "restic")}
            quiet = ["restic", "--no-cache", "--quiet"]
            if step == 1:
                subprocess.run([*quiet, "init"], check=True)
            commands["plain save, then restic"] = [*quiet, "--compression", "off", "backup", source]
            if step == 2:
                commands["restic restore"] = [*quiet, "restore", "latest", "--target", copies / "restored"]
        copies.mkdir(exist_ok=True)
        for name, command in commands.items():
            if step == 1:
                subprocess.run(command, check=True)
            else:
                after = "plain save" if name.startswith("plain save") else None
                self.timed(name, lambda c=command: subprocess.run(c, check=True), after=after)  # type: ignore[misc]


def _beside(name: str) -> str:
    return _PLAIN_CHANGED if name == "deduplicate: all changed" else "plain save"


def measure(place: Path, nbytes: int, count: int, rounds: int) -> dict[str, Any]:
    """Medians of the rounds, of which one more warms up if there are several."""
    maker = torch.Generator().manual_seed(1)
    state = {f"layer.{n:04}": torch.randn(nbytes // count // 4, generator=maker) for n in range(count)}
    found, loads = [], []
    for number in range(rounds + (rounds > 1)):
        with tempfile.TemporaryDirectory(dir=place) as folder:
            one = _Round(Path(folder), state)
            one.run(20, links_first=number % 2 == 1)
        found.append(one.found)
        loads.append(os.getloadavg()[0])
        print(json.dumps(one.found), file=sys.stderr, flush=True)
    rows = {
        name: {key: statistics.median(each[name][key] for each in found[-rounds:]) for key in found[0][name]}
        for name in _NOTES
        if name in found[0]
    }
    ratios = {
        name: statistics.median(each[name]["seconds"] / each[_beside(name)]["seconds"] for each in found[-rounds:])
        for name in rows
    }
    facts = {"bytes": nbytes, "count": count, "rounds": rounds, "load": max(loads), "digest": new_digest().name}
    return {**facts, "rows": rows, "ratios": ratios}


def write_page(page: Path, figures: Mapping[str, Any]) -> None:
    """Put the table between the marks of a page."""
    facts = [
        f"{figures['bytes'] / (1 << 30):g} GiB in {figures['count']} tensors, 2 threads, fsync, {figures['digest']}",
        f"rounds: {figures['rounds']}, medians; on a machine with a load of up to {figures['load']:.0f}",
    ]
    lines = [
        f"| {'; '.join(facts)} | new bytes ÷ state | seconds | processor seconds | ÷ plain save | what it costs |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, row in figures["rows"].items():
        numbers = f"{row['share']:.3f} | {row['seconds']:.2f} | {row['processor']:.2f} | {figures['ratios'][name]:.2f}"
        lines.append(f"| {name} | {numbers} | {_NOTES[name]} |")
    replace_figures(page, _MODULE, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or make the page of what was measured."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--count", type=int, default=800, help="number of tensors (default: 800)")
    parser.add_argument("--rounds", type=int, default=6, help="even; one more warms up (default: 6)")
    parser.add_argument("--place", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    chosen = parser.parse_args(arguments)
    figures = measure(chosen.place, chosen.mib << 20, chosen.count, chosen.rounds)
    print(json.dumps(figures, indent=1))
    if chosen.page is not None:
        write_page(chosen.page, figures)


if __name__ == "__main__":
    main()
