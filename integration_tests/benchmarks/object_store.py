"""Saves and loads over an S3 server on loopback: ours by obstore and by fsspec, stock by fsspec, and obstore alone.

`python -m integration_tests.benchmarks.object_store [MiB] [rounds] [--json FILE] [--page FILE]` prints medians and
ratios. Bars: our throughput ÷ that of obstore alone ≥ 0.8, ÷ stock's ≥ 2, bytes read ÷ needed ≤ 1.1, memory within the
budget. It runs in an environment that has s3torchconnector, made on first use; `--here` leaves that one out. The server
is `loopback_s3`, which costs little more than the kernel's copies; it takes cores from the client all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from integration_tests.benchmarks.environments import ROOT, python_of
from integration_tests.benchmarks.loopback_s3 import LoopbackS3
from integration_tests.benchmarks.object_store_sides import ALONE, CONNECTOR, OURS, STOCK, clear, sides
from integration_tests.benchmarks.pages import replace_figures
from integration_tests.kits.fault_proxy import FaultProxy
from integration_tests.kits.s3_server import S3Server

__all__ = ["BARS", "MOST_MIB", "MOST_READ", "compare", "main"]

MIB = 1 << 20
TENSORS = 16
OPERATIONS = ("save", "load")
BARS = {ALONE: 0.8, STOCK: 2.0}
"""Of our throughput ÷ theirs, at least."""
MOST_READ = 1.1
MOST_MIB = {"save": 256.0, "load": 128.0}
"""The writer's and the reader's `max_inflight_bytes`."""
_MODULE = "integration_tests.benchmarks.object_store"
_SERVERS: Mapping[str, type[S3Server]] = {"loopback": LoopbackS3, "moto": S3Server}


def _state(mib: int) -> dict[str, torch.Tensor]:
    """Equal tensors with values that do not compress."""
    generator = torch.Generator().manual_seed(3)
    count = mib * MIB // TENSORS // 4
    return {f"layers.{n}.weight": torch.randn(count, generator=generator) for n in range(TENSORS)}


def compare(mib: int, rounds: int, *, without: Sequence[str] = (), server: str = "loopback") -> dict[str, Any]:
    """Seconds of each side's save and load, taken in turn, and what is asked of them.

    Args:
        mib: Size of the state.
        rounds: Counted ones; one more warms up, and compares what was loaded with what was saved.
        without: Sides to leave out.
        server: `loopback`, or `moto`.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    state = _state(mib)
    template = {name: torch.zeros_like(value) for name, value in state.items()}
    taken: dict[str, dict[str, list[float]]] = {}
    with _SERVERS[server]() as running, running.in_environment():
        for turn in range(rounds + 1):
            for name, (save, load) in sides(state, template, without=without).items():
                uri = f"s3://{running.bucket}/turn/{name.replace(', ', '-').replace(' ', '-')}"
                for value in template.values():
                    value.zero_()
                seconds = [_seconds(save, uri), _seconds(load, uri)]
                clear(uri)
                if not turn and any(not torch.equal(template[key], value) for key, value in state.items()):
                    raise RuntimeError(f"{name} did not load what it saved")
                for operation, spent in zip(OPERATIONS, seconds if turn else (), strict=bool(turn)):
                    taken.setdefault(name, {}).setdefault(operation, []).append(spent)
        read = _read(running, mib)
    return {
        "MiB": mib,
        "rounds": rounds,
        "seconds": taken,
        "our throughput / theirs": {
            operation: {rival: _ratio(taken, rival, operation) for rival in taken if rival != OURS}
            for operation in OPERATIONS
        },
        "read / needed": read,
        "MiB above the state": _memory(mib, server),
    }


def _ratio(taken: Mapping[str, Mapping[str, Sequence[float]]], rival: str, operation: str) -> float:
    pairs = zip(taken[rival][operation], taken[OURS][operation], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def _seconds(function: Callable[[str], object], uri: str) -> float:
    start = time.perf_counter()
    function(uri)
    return time.perf_counter() - start


def _read(server: S3Server, mib: int) -> float:
    """Bytes that the server gives for one quarter of each tensor ÷ bytes of that quarter."""
    import dcp_all as dcp

    state = _state(mib)
    uri = f"s3://{server.bucket}/read"
    dcp.save(state, storage_writer=dcp.ObjectStoreWriter(uri))
    part = {name: torch.zeros(len(value) // 4) for name, value in state.items()}
    with FaultProxy(server.url) as proxy:
        reader = dcp.ObjectStoreReader(uri, storage_options={"endpoint": proxy.url})
        dcp.load(part, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_resize=True))
        return proxy.bytes_given / sum(value.nbytes for value in part.values())


def _memory(mib: int, server: str) -> dict[str, float]:
    """MiB that a save and a load take above the state, each in a process of its own."""
    with _SERVERS[server]() as running:
        environment = {**os.environ, **running.environment(), "OMP_NUM_THREADS": "1"}
        found = {}
        for operation in OPERATIONS:
            command = [sys.executable, "-m", _MODULE, str(mib), "--peak", operation]
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            found[operation] = float(ran.stdout)
        return found


def _peak(mib: int, operation: str) -> float:
    import dcp_all as dcp

    uri = "s3://bucket/memory"
    state = _state(mib)
    small = {"warm": torch.ones(10)}
    dcp.save(small, storage_writer=dcp.ObjectStoreWriter("s3://bucket/warm"))
    dcp.load(small, storage_reader=dcp.ObjectStoreReader("s3://bucket/warm"))
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark falls to what is resident now
    before = _highest_mib()
    if operation == "save":
        dcp.save(state, storage_writer=dcp.ObjectStoreWriter(uri))
    else:
        dcp.load(state, storage_reader=dcp.ObjectStoreReader(uri))
    return _highest_mib() - before


def _highest_mib() -> float:
    """The most memory that was resident; `getrusage` would count what the parent had when it started this process."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def _lines(figures: Mapping[str, Any]) -> list[str]:
    """The figures as Markdown."""
    mib, ratios = figures["MiB"], figures["our throughput / theirs"]
    rows = [
        "| | save, MiB/s | load, MiB/s | our throughput ÷ theirs: save | load |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for side, seconds in figures["seconds"].items():
        speeds = [mib / statistics.median(seconds[operation]) for operation in OPERATIONS]
        against = ["" if side == OURS else f"{ratios[operation][side]:.2f}" for operation in OPERATIONS]
        rows.append(f"| {side} | {speeds[0]:.0f} | {speeds[1]:.0f} | {against[0]} | {against[1]} |")
    memory, read = figures["MiB above the state"], figures["read / needed"]
    took = " and ".join(f"{memory[each]:.0f} MiB for a {each} (at most {MOST_MIB[each]:.0f})" for each in OPERATIONS)
    return [
        *rows,
        "",
        f"{mib} MiB in {TENSORS} tensors, medians of {figures['rounds']} rounds; the server runs on the same cores.",
        f"A quarter of each tensor reads {read:.3f} times its bytes (at most {MOST_READ}).",
        f"Memory above the state: {took}.",
    ]


def _run_inside(arguments: Sequence[str]) -> int:
    """This command in the environment that has the connector, over the packages as they lie here."""
    path = [*map(str, sorted(ROOT.glob("packages/*/src"))), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    command = [python_of(CONNECTOR), "-m", _MODULE, "--inside", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog=f"python -m {_MODULE}", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("mib", nargs="?", type=int, default=512)
    parser.add_argument("rounds", nargs="?", type=int, default=5)
    parser.add_argument("--here", action="store_true", help="leave out s3torchconnector, which needs an environment")
    parser.add_argument("--server", choices=_SERVERS, default="loopback")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write them between the marks of this page")
    parser.add_argument("--from-json", type=Path, metavar="FILE", help="measure nothing: take these figures")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peak", choices=OPERATIONS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.peak:
        print(_peak(given.mib, given.peak))
        return 0
    if given.from_json:
        figures = json.loads(given.from_json.read_text())
    elif given.here or given.inside:
        without = () if given.inside else (CONNECTOR,)
        figures = compare(given.mib, given.rounds, without=without, server=given.server)
    else:
        return _run_inside(sys.argv[1:] if arguments is None else arguments)
    print("\n".join(_lines(figures)))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    if given.page:
        replace_figures(given.page, _MODULE, _lines(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
