"""What a slow tier costs a trainer: `python -m integration_tests.benchmarks.tiers --help`.

One trainer saves to a fast tier alone, and then to the same with a slow tier behind it, which has a twentieth of its
bandwidth, then hangs, and then refuses everything. Compared are the time of a save and the time of the training; at the
end the slow tier answers again, and must get every checkpoint, equal in every bit, in ascending order.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dcp_manager import CheckpointManager
from dcp_tiers import Tier, Tiers
from integration_tests.benchmarks.pages import replace_figures

__all__ = ["measure", "train", "write_page"]

_MODULE = "integration_tests.benchmarks.tiers"
_MODES = ("slow", "hangs", "refuses")
_SLOWER, _SAVE_RATIO, _LOST = 20, 1.05, 0.01

# What pip would install of a package with a storage: the promoter, a process of its own, finds it, too.
_PLUGIN = {
    "slow_tier-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: slow-tier\nVersion: 1.0\n",
    "slow_tier-1.0.dist-info/entry_points.txt": "[dcp]\nslow-tier = slow_tier_plugin\n",
    "slow_tier_plugin.py": """
from dcp_base import StoreSpec, hookimpl

@hookimpl
def dcp_register_stores():
    return [StoreSpec("slow", "slow_tier:open_store")]
""",
    "slow_tier.py": """
import errno, os, time
from dcp_io import LocalStore

class SlowStore(LocalStore):
    @property
    def url(self):
        return "slow://" + self.path

    def _inside(self, name):
        obey()
        return super()._inside(name)

    def list(self):
        obey()
        return super().list()

    def folders(self):
        obey()
        return super().folders()

    def child(self, name):
        return SlowStore(os.path.join(self.path, name))

    def create(self, name, *, sync=True):
        sink = super().create(name, sync=sync)
        write = sink.write

        def write_slowly(buffers):
            for buffer in buffers:
                time.sleep(len(buffer) / float(os.environ["SLOW_TIER_RATE"]))
            obey()
            write(buffers)

        return Slow(sink, write_slowly)

class Slow:
    def __init__(self, sink, write):
        self._sink, self.write = sink, write

    def __getattr__(self, name):
        return getattr(self._sink, name)

def obey():
    while mode() == "hangs":
        time.sleep(0.05)
    if mode() == "refuses":
        raise OSError(errno.EIO, "the slow tier refuses")

def mode():
    with open(os.environ["SLOW_TIER_MODE"]) as file:
        return file.read()

def open_store(uri, *, storage_options=None):
    return SlowStore(uri.removeprefix("slow://"))
""",
}

Row = dict[str, Any]


def train(folder: Path, nbytes: int, saves: int, step_seconds: float, *, with_slow: bool) -> Row:
    """Train for some steps in this process, with a save after each; returns the times in seconds.

    A step is a fixed amount of work. With the slow tier, a third of the steps belongs to each of its modes.
    """
    mode = Path(os.environ["SLOW_TIER_MODE"])
    mode.write_text(_MODES[0])
    tiers = Tiers([Tier(folder / "fast"), *([Tier(f"slow://{folder}/slow")] if with_slow else [])])
    state = {f"layer.{n}": torch.zeros(nbytes // 16 // 4) for n in range(16)}
    seconds: list[float] = []
    manager = CheckpointManager(tiers, no_dist=True, close_timeout_seconds=0.0)
    manager.save(0, state)  # the first makes folders and starts processes
    work = _work_of(step_seconds)
    begun = time.perf_counter()
    for step in range(1, saves + 1):
        mode.write_text(_MODES[(step - 1) * len(_MODES) // saves])
        work()
        for value in state.values():
            value.fill_(step)
        start = time.perf_counter()
        manager.save(step, state)
        seconds.append(time.perf_counter() - start)
    total = time.perf_counter() - begun
    found: Row = {"save": seconds, "training": total - sum(seconds), "total": total}
    if with_slow:
        found["left"] = tiers.drain(0.0)[tiers.tiers[1].url]
        mode.write_text(_MODES[0])
        found["lacks"] = tiers.drain(1800.0)
        found |= _arrived(folder)
    manager.close()
    return found


def _work_of(seconds: float) -> Any:
    """Return a function with a fixed number of multiplications of matrices, which take about `seconds`."""
    matrix = torch.randn(256, 256)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < 1.0:
        torch.mm(matrix, matrix)
        count += 1
    rounds = int(os.environ.setdefault("TIERS_ROUNDS", str(int(count * seconds))))

    def work() -> None:
        for _ in range(rounds):
            torch.mm(matrix, matrix)

    return work


def _arrived(folder: Path) -> Row:
    """Compare the tiers file by file, and return the order in which the slow one got its indexes."""
    order = sorted((folder / "slow").glob("step-*/.metadata"), key=lambda path: path.stat().st_mtime_ns)
    steps = [int(path.parent.name.removeprefix("step-")) for path in order]
    names = [path.relative_to(folder / "fast") for path in (folder / "fast").glob("step-*/*") if _is_data(path)]
    equal = all((folder / "slow" / name).read_bytes() == (folder / "fast" / name).read_bytes() for name in names)
    return {"arrived": steps, "equal": equal}


def _is_data(path: Path) -> bool:
    return path.name == ".metadata" or path.suffix == ".distcp"


def _run(folder: Path, options: Mapping[str, Any], environment: Mapping[str, str]) -> Row:
    """Run `train` in a process of its own, on one core, as a trainer whose promoter has the others."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    values = json.dumps({**options, "folder": str(folder)})
    command = [sys.executable, "-m", _MODULE, "--train", values]
    done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True)
    found: Row = json.loads(done.stdout)
    shutil.rmtree(folder)
    return found


def measure(folder: Path, nbytes: int, saves: int, step_seconds: float, rounds: int) -> Row:
    """Alternate between the fast tier alone and both tiers; returns medians over the rounds.

    Args:
        folder: Place of both tiers.
        nbytes: Size of the state.
        saves: Number of saves of a run, a third for each mode.
        step_seconds: Time of the work before each save.
        rounds: Runs with each.
    """
    plugin = folder / "plugin"
    for name, text in _PLUGIN.items():
        (plugin / name).parent.mkdir(parents=True, exist_ok=True)
        (plugin / name).write_text(text)
    environment = {
        "PYTHONPATH": f"{plugin}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "SLOW_TIER_MODE": str(folder / "mode"),
        "SLOW_TIER_RATE": "1",
        "OMP_NUM_THREADS": "1",
    }
    options = {"nbytes": nbytes, "saves": saves, "step_seconds": step_seconds}
    first = _run(folder / "run", {**options, "with_slow": False}, environment)
    rate = nbytes / statistics.median(first["save"])
    environment |= {"SLOW_TIER_RATE": str(rate / _SLOWER), "TIERS_ROUNDS": str(first["work"])}
    alone: list[dict[str, Any]] = []
    both: list[dict[str, Any]] = []
    for number in range(rounds):
        for with_slow in (False, True) if number % 2 else (True, False):
            found = _run(folder / "run", {**options, "with_slow": with_slow}, environment)
            (both if with_slow else alone).append(found)
    ratios = [b["training"] / a["training"] - 1 for a, b in zip(alone, both, strict=True)]
    found = {
        "bytes": nbytes,
        "rate": rate,
        "alone": statistics.median(value for each in alone for value in each["save"]),
        "lost": statistics.median(ratios),
        "training": statistics.median(each["training"] for each in alone),
        "modes": {},
        "left": statistics.median(len(each["left"]) for each in both),
        "saves": saves + 1,
        "rounds": rounds,
        "arrived": all(each["arrived"] == [*range(saves + 1)] and not each["lacks"] for each in both),
        "equal": all(each["equal"] for each in both),
    }
    for number, mode in enumerate(_MODES):
        part = slice(number * saves // len(_MODES), (number + 1) * saves // len(_MODES))
        # The same saves of the same round: a folder with more checkpoints takes longer to list.
        pairs = [
            statistics.median(b["save"][part]) / statistics.median(a["save"][part])
            for a, b in zip(alone, both, strict=True)
        ]
        seconds = statistics.median(value for each in both for value in each["save"][part])
        found["modes"][mode] = {"save": seconds, "ratio": statistics.median(pairs)}
    return found


def write_page(found: Mapping[str, Any], page: Path) -> None:
    """Put the figures on a page."""
    lines = [
        "| the slow tier | a save takes | ÷ time with the fast tier alone | target |",
        "| --- | ---: | ---: | --- |",
    ]
    for mode, each in found["modes"].items():
        name = "has a twentieth of the bandwidth" if mode == "slow" else mode
        verdict = "met" if each["ratio"] <= _SAVE_RATIO else "missed"
        lines.append(f"| {name} | {each['save']:.3f} s | {each['ratio']:.3f} | ≤ {_SAVE_RATIO}: {verdict} |")
    lost = "met" if found["lost"] <= _LOST else "missed"
    arrived, equal = ("" if found[key] else "not " for key in ("arrived", "equal"))
    sentences = (
        f"Medians of {found['rounds']} runs of each case, in turns. In each run, one process makes",
        f"{found['saves']} saves of {found['bytes'] >> 20} MiB and trains for {found['training']:.1f} s between them;",
        f"it lost {found['lost']:+.1%} of the training time",
        f"(≤ {_LOST:.0%}: {lost}). The slow tier takes {found['rate'] / _SLOWER / 1e6:.1f} MB/s.",
        f"When the training ended, the slow tier lacked {found['left']:.0f} checkpoints. When it answered again,",
        f"{arrived}all arrived in ascending order, {equal}equal in every bit. Written by `python -m {_MODULE} --page`.",
    )
    lines += ["", " ".join(sentences)]
    replace_figures(page, _MODULE, lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the state")
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--step-seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the fast storage; default: a temporary folder")
    parser.add_argument("--page", type=Path, help="page of the docs for the figures")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.train is not None:
        options = json.loads(given.train)
        found = train(Path(options.pop("folder")), **options)
        print(json.dumps({**found, "work": os.environ["TIERS_ROUNDS"]}))
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(Path(folder), given.mib << 20, given.saves, given.step_seconds, given.rounds)
    print(json.dumps(found, indent=1))
    if given.page is not None:
        write_page(found, given.page)


if __name__ == "__main__":
    main()
