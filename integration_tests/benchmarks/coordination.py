"""What ranks take to exchange their plans: thousands of simulated ranks as real connections to a real TCPStore.

`python -m integration_tests.benchmarks.coordination [--ranks 64,256,1024] [--json FILE]`. Above 1,024 ranks, only with
host leaders. Every rank is a thread with a
store connection, a coordinator and peers of its own, in one of several processes; eight ranks pretend to share a host.
A phase counts from the moment when the last rank has left the one before until the last rank has left it. Everything
runs on one machine: what is measured is the work of all ranks together, done by the cores that there are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed
from rich.console import Console
from rich.table import Table

from dcp_ranks import PeerOptions
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.peers.roster import own_identity
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import make_peers
from integration_tests.benchmarks import machine
from integration_tests.launcher import launcher_store

__all__ = ["FINGERPRINT_BYTES", "RANKS_PER_HOST", "Setting", "main", "measure"]

torch_dist: Any = torch.distributed  # whose stores its types do not export

PLAN_BYTES = 300_000
CENTRAL_PLAN_BYTES = 3_000
FINGERPRINT_BYTES = 32
RANKS_PER_HOST = 8
MOST_IN_STAR = 1024
FRAME_BYTES = 25
FAN_OUT = 16
PHASES = {"agree": "ids agree", "plans": "first save: plans", "fingerprints": "unchanged save: fingerprints"}
TIMEOUT_SECONDS = 1800.0  # two cores that do the work of 10,992 ranks take minutes for a phase


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    ranks: int
    leaders: bool
    rounds: int
    plan_bytes: int = PLAN_BYTES

    @property
    def prefix(self) -> str:
        """Where this setting's keys are."""
        return f"{self.ranks}-{self.leaders}"


@dataclass(frozen=True)
class Result:
    """Seconds of each phase, medians of all rounds but the first; the store's processor seconds for one round."""

    ranks: int
    leaders: bool
    seconds: dict[str, float]
    store_cpu_seconds: float
    load: dict[str, dict[str, int]]
    """By phase, of the last round: requests to the store without polls (of all ranks, of the coordinator, and the most
    of another rank), the bytes set there, and the bytes that reached the coordinator over connections. Under `sockets`:
    those of the coordinator, and the most of another rank."""


def main(given: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="64,256,1024", help="how many, of each line (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=16, help="that share the ranks (default: %(default)s)")
    parser.add_argument("--plan-bytes", type=int, default=PLAN_BYTES, help="of each rank (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="counted ones; one more warms up (default: 5)")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    options = parser.parse_args(given)
    counts = [int(count) for count in options.ranks.split(",")]
    kinds = [(count, leaders) for count in counts for leaders in (False, True) if leaders or count <= MOST_IN_STAR]
    settings = [Setting(count, leaders, options.rounds, options.plan_bytes) for count, leaders in kinds]
    results = measure(settings, options.processes)
    _print(results)
    if options.json:
        figures = {"machine": machine.describe({}), "results": [asdict(result) for result in results]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(settings: Sequence[Setting], processes: int) -> list[Result]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, hard), hard))
    store = launcher_store()
    counts = [setting.ranks for setting in settings]
    processes = min(processes, *counts)
    share = -(-max(counts) // processes)
    # One process imports PyTorch, and is copied: hundreds that import it need more memory than most machines have.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dcp_ranks", "torch.distributed", "rich.table"])  # a name `__main__` is ignored
    players = []
    try:
        for number in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, store.port, number, processes, share), daemon=True)
            process.start()
            theirs.close()
            players.append(ours)
        for player in players:
            player.recv()  # its connections are made
        return [_run(setting, players) for setting in settings]
    finally:
        for player in players:
            player.close()  # ends it


def _run(setting: Setting, players: Sequence[Any]) -> Result:
    before = time.process_time()
    for player in players:
        player.send(setting)
    heard = [player.recv() for player in players]
    told = [times for times, _ in heard]
    spent = (time.process_time() - before) / (setting.rounds + 1)
    # Of each round and phase, when the last rank of any process left it.
    ends = [[max(times) for times in zip(*phases, strict=True)] for phases in zip(*told, strict=True)]
    seconds = {
        name: statistics.median(end[place + 1] - end[place] for end in ends[1:]) for place, name in enumerate(PHASES)
    }
    load: dict[str, dict[str, int]] = {}
    for _, counts in heard:
        for rank, phases, sockets in counts:
            for phase, (requests, sent_bytes, came_bytes) in phases.items():
                found = load.setdefault(phase, dict.fromkeys(("all", "coordinator", "other", "bytes", "came"), 0))
                found["all"] += requests
                found["bytes"] += sent_bytes
                found["came"] += 0 if rank else came_bytes
                kind = "other" if rank else "coordinator"
                found[kind] = max(found[kind], requests)
            most = load.setdefault("sockets", {"coordinator": 0, "other": 0})
            kind = "other" if rank else "coordinator"
            most[kind] = max(most[kind], sockets)
    result = Result(setting.ranks, setting.leaders, seconds, spent, load)
    print(result, file=sys.stderr, flush=True)
    return result


def _serve(commands: Any, port: int, number: int, processes: int, share: int) -> None:
    """Play this process's share of ranks in one setting after the other."""
    sys.setswitchinterval(0.05)  # each of the threads that wait for the GIL wakes up as often
    threading.stack_size(512 << 10)
    timeout = timedelta(seconds=TIMEOUT_SECONDS)

    def connect(_: int) -> Any:
        return torch_dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False, timeout=timeout)

    with ThreadPoolExecutor(32) as pool:
        connections = list(pool.map(connect, range(share)))
    commands.send("connected")
    with contextlib.suppress(EOFError):
        while True:
            setting = commands.recv()
            ranks = range(number, setting.ranks, processes)
            with ThreadPoolExecutor(len(ranks)) as pool:
                played = list(pool.map(_play, [setting] * len(ranks), ranks, connections))
            # Of each round and phase, when the last rank of this process left it.
            all_times = [times for times, _ in played]
            ends = [[max(times) for times in zip(*phases, strict=True)] for phases in zip(*all_times, strict=True)]
            commands.send((ends, [count for _, count in played]))


class CountingStore:
    """A store that counts its requests without polls, and the bytes that are set."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.check = store.check
        self.counts = (0, 0)

    def __getattr__(self, name: str) -> Any:
        """Count a request, and pass it on."""

        def request(*arguments: Any) -> Any:
            requests, sent_bytes = self.counts
            self.counts = requests + 1, sent_bytes + (len(arguments[1]) if name == "set" else 0)
            return getattr(self._store, name)(*arguments)

        return request


def _play(setting: Setting, rank: int, connection: Any) -> tuple[list[list[float]], Any]:
    """One rank: of each round, when it left the barrier before it, and each phase; and its load."""
    store = CountingStore(torch_dist.PrefixStore(setting.prefix, connection))
    process = replace(own_identity(), host=f"host {rank // RANKS_PER_HOST}")
    leaders_above = 1 if setting.leaders else setting.ranks
    # A rank that has to wait for its turn on a core does not read, and is not lost.
    options = PeerOptions(peer_timeout_seconds=2 * TIMEOUT_SECONDS, leaders_above=leaders_above, fan_out=FAN_OUT)
    peers = make_peers(store, 0, rank, setting.ranks, 0, options=options, process=process)
    played = [_round(store, rank, setting, peers) for _ in range(setting.rounds + 1)]
    sockets = len(peers._held.links) + len(peers._held.doors)
    peers.close()
    return [times for times, _ in played], (rank, played[-1][1], sockets)


def _round(store: Any, rank: int, setting: Setting, peers: Peers) -> tuple[list[float], dict[str, Any]]:
    ranks, plan, fingerprint = setting.ranks, bytes(setting.plan_bytes), bytes(FINGERPRINT_BYTES)
    times, load, came = [], {}, [0]

    def leave(phase: str) -> None:
        times.append(time.monotonic())
        load[phase], store.counts, came[0] = (*store.counts, came[0]), (0, 0), 0

    def sort(link: Any, frame: Any) -> None:
        came[0] += len(frame.body) + FRAME_BYTES
        type(peers)._sort(peers, link, frame)

    peers._sort = sort  # type: ignore[method-assign]
    with StoreCoordinator(store, rank, ranks, timeout_seconds=TIMEOUT_SECONDS, peers=peers) as them:
        them.barrier("begin")
        leave("begin")
    with StoreCoordinator(store, rank, ranks, timeout_seconds=TIMEOUT_SECONDS, peers=peers) as them:
        them.agree("agree", lambda: "checkpoint", "ids")
        leave("agree")
        them.reduce_scatter("plans", lambda: plan, lambda plans: [bytes(CENTRAL_PLAN_BYTES) for _ in plans])
        leave("plans")
        them.all_reduce("fingerprints", lambda: fingerprint, lambda prints: len(set(prints)) == 1)
        leave("fingerprints")
    return times, load


def _print(results: Sequence[Result]) -> None:
    table = Table(title="Seconds until the last rank is through")
    for head in ("ranks", "host leaders", *PHASES.values(), "store CPU / round"):
        table.add_column(head, justify="right")
    for result in results:
        cells = [f"{result.seconds[name]:.3f}" for name in PHASES]
        leaders = f"{-(-result.ranks // RANKS_PER_HOST)}" if result.leaders else "none"
        table.add_row(str(result.ranks), leaders, *cells, f"{result.store_cpu_seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
