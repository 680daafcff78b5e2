"""Asynchronous saves beside stock's and torch_checkpointing's: `python -m integration_tests.benchmarks.asynchronous`.

Figures of one run, medians of rounds; each contender runs in processes of its own. Bars are those of `docs/async.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.async_savers import SAVERS
from integration_tests.benchmarks.environments import ROOT, python_of

__all__ = ["main"]

Rounds = list[dict[str, float]]


def run(name: str, ranks: int, **options: Any) -> Rounds:
    """One contender in one scenario: the figures of all rounds and ranks.

    Raises:
        subprocess.CalledProcessError: A rank failed; its output is in the exception.
    """
    python = python_of("torch_checkpointing" if name == "torch_checkpointing" else "shared")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    folder = tempfile.mkdtemp(prefix="async-", dir=options.pop("work"))
    text = json.dumps({"saver": name, "folder": folder, **options})
    started = [
        subprocess.Popen(
            [python, "-m", "integration_tests.benchmarks.async_rank", text],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found: Rounds = []
    for process in started:
        output, errors = process.communicate(timeout=900)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, name, output, errors[-2000:])
        found += json.loads(output.splitlines()[-1])
    shutil.rmtree(folder, ignore_errors=True)
    return found


def median(rounds: Rounds, name: str) -> float:
    """The median of one figure."""
    return statistics.median(each[name] for each in rounds)


def lost_time(names: Sequence[str], options: dict[str, Any]) -> dict[str, Any]:
    """Lost training time per save of many small tensors and some large ones, 2 ranks; the window is stock's save."""
    window = median(run("stock process", 2, scenario="beside training", window=0, **options), "save")
    figures: dict[str, Any] = {"window": window}
    for name in names:
        rounds = run(name, 2, scenario="beside training", window=window, **options)
        figures[name] = {each: median(rounds, each) for each in rounds[0]}
        figures[name]["worst"] = max(each["worst"] for each in rounds)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="asynchronous", description=__doc__)
    parser.add_argument("--savers", nargs="+", default=list(SAVERS), choices=SAVERS)
    parser.add_argument("--tensors", type=int, default=4000, help="small tensors of each rank")
    parser.add_argument("--mib", type=int, default=512, help="MiB in large tensors of each rank")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(4, os.cpu_count() or 1), help="of the memcpy")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()), help="folder for checkpoints")
    parser.add_argument("--json", type=Path, help="where to write the figures, too")
    chosen = parser.parse_args(arguments)
    common = {"rounds": chosen.rounds, "work": str(chosen.work)}
    training = {**common, "tensors": chosen.tensors, "mib": chosen.mib}
    returning = {**common, "tensors": 0, "mib": 2 * chosen.mib, "threads": chosen.threads}
    figures = {
        "beside training": lost_time(chosen.savers, training),
        "until it returns": until_return(chosen.savers, returning),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if chosen.json is not None:
        chosen.json.write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
