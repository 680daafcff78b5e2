"""Asynchronous saves beside stock's and torch_checkpointing's: `python -m integration_tests.benchmarks.asynchronous`.

Figures of one run, medians of rounds; each contender runs in processes of its own. Bars are those of `docs/async.md`.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.async_page import write_page
from integration_tests.benchmarks.async_savers import SAVERS
from integration_tests.benchmarks.environments import ROOT, python_of
from integration_tests.benchmarks.machine import describe
from integration_tests.launcher import launcher_store, rank_environment

__all__ = ["main"]

Rounds = list[dict[str, Any]]

STOCK = "stock process"

_RANK_SECONDS = 900


def run(name: str, ranks: int, **options: Any) -> Rounds:
    """One contender in one scenario: the figures of all rounds and ranks.

    Raises:
        subprocess.CalledProcessError: A rank failed; its output is in the exception.
        subprocess.TimeoutExpired: A rank did not end.
    """
    python = python_of("torch_checkpointing" if name == "torch_checkpointing" else "shared")
    store = launcher_store()
    common = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    folder = tempfile.mkdtemp(prefix="async-", dir=options.pop("work"))
    text = json.dumps({"saver": name, "folder": folder, **options})
    started = [
        subprocess.Popen(
            [python, "-m", "integration_tests.benchmarks.async_rank", text],
            cwd=ROOT,
            env={**common, **rank_environment(rank, ranks, store.port)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found: Rounds = []
    try:
        for process in started:
            output, errors = process.communicate(timeout=_RANK_SECONDS)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, name, output, errors[-2000:])
            found += json.loads(output.splitlines()[-1])
    finally:
        for process in started:
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    return found


def median(rounds: Rounds, name: str) -> float:
    """The median of one figure."""
    return float(statistics.median(each[name] for each in rounds))


def lost_time(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Lost training time per save of many small tensors and some large ones, 2 ranks; the window is stock's save."""
    measured = {STOCK: run(STOCK, 2, scenario="beside training", window=0, **options)}
    window = median(measured[STOCK], "save")
    figures: dict[str, Any] = {"window": window}
    for name in names:
        rounds = measured.get(name) or run(name, 2, scenario="beside training", window=window, **options)
        figures[name] = {each: median(rounds, each) for each in rounds[0]}
        figures[name].update({each: max(one[each] for one in rounds) for each in ("worst", "worst without")})
        figures[name]["lost of the window"] = figures[name]["lost"] / window
    return figures


def until_return(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Until a save returns, first and later ones, one rank, beside one parallel memcpy of the state."""
    figures: dict[str, Any] = {}
    for name in names:
        rounds = run(name, 1, scenario="alone", **options)
        first, later = rounds[0], rounds[1:]
        figures[name] = {each: median(later, each) for each in first}
        figures[name]["returned of memcpy"] = median(later, "returned") / median(later, "memcpy")
        figures[name]["first save"] = first["save"]
    if "ours process" in names:
        warm = run("ours process", 1, scenario="alone", warm=True, **options)
        figures["ours process"]["first save, warm"] = warm[0]["save"]
    return figures


def many_saves(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """What trainer and process hold more after all saves than after the first fifth of them."""
    return {name: run(name, 1, scenario="many", **options)[0] for name in names}


def few_descriptors(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Whether 10,000 tensors are saved by a process that may have few descriptors."""
    figures = {}
    for name in names:
        try:
            figures[name] = run(name, 1, scenario="few descriptors", **options)[0]["told"]
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            figures[name] = f"the process does not end in order ({type(error).__name__})"
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures as JSON, and write them where they are wanted."""
    parser = argparse.ArgumentParser(prog="asynchronous", description=__doc__)
    parser.add_argument("--savers", nargs="+", default=list(SAVERS), choices=SAVERS)
    parser.add_argument("--tensors", type=int, default=4000, help="small tensors of each rank")
    parser.add_argument("--mib", type=int, default=512, help="MiB in large tensors of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1), help="of the memcpy")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for checkpoints")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    parser.add_argument("--saves", type=int, default=200, help="for what grows with the number of saves")
    parser.add_argument("--page", type=Path, help="write the tables between the marks of this page")
    parser.add_argument("--from-json", type=Path, help="measure nothing: make the page of these figures")
    chosen = parser.parse_args(arguments)
    figures = measure(chosen) if chosen.from_json is None else json.loads(chosen.from_json.read_text())
    text = json.dumps(figures, indent=1)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")
    if chosen.page is not None:
        write_page(chosen.page, figures)


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Every scenario."""
    common = {"rounds": chosen.rounds, "work": str(chosen.work)}
    training = {**common, "tensors": chosen.tensors, "mib": chosen.mib}
    returning = {**common, "tensors": 0, "mib": 2 * chosen.mib, "threads": chosen.threads}
    repeated = {"work": str(chosen.work), "tensors": 64, "mib": 16, "saves": chosen.saves}
    narrow = {"work": str(chosen.work), "tensors": 10_000, "mib": 0, "descriptors": 256}
    described = {"rounds": chosen.rounds, "tensors": chosen.tensors, "mib": chosen.mib}
    return {
        "described": {**described, "machine": describe({"disk": chosen.work.resolve()})},
        "beside training": lost_time(chosen.savers, training),
        "until it returns": until_return(chosen.savers, returning),
        "many saves": many_saves(chosen.savers, repeated),
        "few descriptors": few_descriptors(chosen.savers, narrow),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
