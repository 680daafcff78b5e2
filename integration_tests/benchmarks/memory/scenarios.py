"""The runs: restart of a process, loss of a host, what saves cost, what memory they take."""

from __future__ import annotations

import contextlib
import statistics
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.memory.keepers import RUN, Keepers, keepers_of
from integration_tests.benchmarks.memory.rank import MIB, MODULE
from integration_tests.benchmarks.memory.raw_stream import raw_seconds
from integration_tests.benchmarks.network_server import open_object_server
from integration_tests.benchmarks.rank_jobs import run_job
from integration_tests.kits.networks import NetworkHost, network_hosts

__all__ = ["Row", "run_background", "run_blocking", "run_lost_host", "run_memory", "run_restart"]

Row = dict[str, Any]
_HOSTS, _RANKS, _THREADS = 4, 8, 2
# With frames of 1,514 bytes for 1,448 of payload, this is 200 MB/s for what clients get.
_WIRE_RATE = "1673mbit"
# Of hosts whose network is slower than what two cores can do for eight ranks.
_SLOW_WIRE = "2500mbit"


def _job(task: Mapping[str, Any], ranks: int, keepers: Keepers, hosts: list[NetworkHost] | None = None) -> list[Any]:
    return run_job(MODULE, {"run": RUN, **task}, ranks, hosts or [], partial(keepers.environment, ranks))


def _save(mib: float, steps: int, ranks: int, keepers: Keepers, hosts: list[NetworkHost] | None = None) -> None:
    _job({"action": "save", "mib": mib, "steps": steps, "copies": hosts is not None}, ranks, keepers, hosts)


def run_restart(mib: float, rounds: int) -> Iterator[Row]:
    """All processes of a host start again, and load the state from its keeper; each round in new processes.

    Args:
        mib: Size of the state of all ranks together.
        rounds: Number of rounds.
    """
    for ranks in (1, 2):
        with keepers_of(1) as keepers:
            _save(mib / ranks, 2, ranks, keepers)
            task = {"action": "load", "mib": mib / ranks, "step": 2, "threads": max(1, _THREADS // ranks)}
            found = [_job(task, ranks, keepers) for _ in range(rounds)]
        yield _times_of(found) | {"ranks": ranks, "mib": mib}


def _times_of(rounds: list[list[Any]]) -> Row:
    """Medians: from the first rank's begin to the last one's end, the slowest memcpy beside it, the start before."""
    seconds = [max(one["end"] for one in ranks) - min(one["begin"] for one in ranks) for ranks in rounds]
    copies = [max(one["memcpy"] for one in ranks) for ranks in rounds]
    return {
        "seconds": seconds,
        "memcpy": copies,
        "start": statistics.median(one["start"] for ranks in rounds for one in ranks),
        "right": all(one["right"] for ranks in rounds for one in ranks),
        "received": statistics.median(sum(one["received"] for one in ranks) for ranks in rounds),
    }


def run_lost_host(mib: float, rounds: int, stock_rounds: int, wire: str | None) -> Iterator[Row]:
    """One of four hosts is lost with its keeper; the job starts again on the others and an empty one.

    Args:
        mib: Size of the state of all ranks together.
        rounds: Number of rounds.
        stock_rounds: Those of stock's loads from a storage of 200 MB/s.
        wire: Rate of each host's network, as `tc` writes it; None for no limit.
    """
    with network_hosts(_HOSTS + 1) as (hosts, networks), keepers_of(_HOSTS) as keepers:
        ours = hosts[:_HOSTS]
        for host in ours if wire else []:
            host.limit(wire or "")
        share = mib / _RANKS
        _save(share, 2, _RANKS, keepers, ours)
        keepers.stop(_HOSTS - 1)
        task = {"action": "load", "mib": share, "step": 2, "threads": 1, "network": networks[0].text}
        found = _times_of([_job(task, _RANKS, keepers, ours) for _ in range(rounds)])
        yield found | {"what": "whole state", "mib": mib, "wire": wire}
        only = {**task, "only": _HOSTS - 1}
        for limit in dict.fromkeys((wire, _SLOW_WIRE)):
            for host in ours if limit else []:
                host.limit(limit or "")
            found = _times_of([_job(only, _RANKS, keepers, ours) for _ in range(rounds)])
            nbytes = int(mib * MIB / _HOSTS)
            raw = {
                name: raw_seconds(ours[:2], nbytes, 2 * rounds + 1, untouched=name == "raw untouched")
                for name in ("raw", "raw untouched")
            }
            yield found | {"what": "lost part", "mib": mib / _HOSTS, "wire": limit} | raw
    if stock_rounds:
        yield _run_stock(mib, stock_rounds)


def _run_stock(mib: float, rounds: int) -> Row:
    """Stock loads the same from an object server behind a limit."""
    with network_hosts(_HOSTS + 1) as (hosts, _), open_object_server(hosts[-1]) as server:
        task = {"mib": mib / _RANKS, "step": 1, "threads": 1, "place": f"s3://{server.bucket}/state"}

        def run(action: str) -> list[Any]:
            variables = server.environment_from(hosts[-1])
            return run_job(MODULE, {**task, "action": action}, _RANKS, hosts[:_HOSTS], lambda _: variables)

        run("save to storage")
        hosts[-1].limit(_WIRE_RATE)
        found = [run("load by stock") for _ in range(rounds)]
    return _times_of(found) | {"what": "stock, storage of 200 MB/s", "mib": mib}


def run_blocking(mib: float, rounds: int) -> Iterator[Row]:
    """How long saves hold up one and two ranks of a host, beside a memcpy of the same bytes by all ranks at once."""
    for ranks in (1, 2):
        with keepers_of(1) as keepers:
            task = {"action": "block", "mib": mib / ranks, "rounds": rounds, "threads": max(1, _THREADS // ranks)}
            found = _job(task, ranks, keepers)
        yield {
            "ranks": ranks,
            "mib": mib,
            "blocked": [max(each) for each in zip(*(one["blocked"] for one in found), strict=True)],
            "memcpy": [max(each) for each in zip(*(one["memcpy"] for one in found), strict=True)],
        }


def run_background(mib: float, rounds: int, seconds: float, rate: float) -> Iterator[Row]:
    """A training loop on two hosts with a save in each turn, with and without copies on the other host, in turns."""
    with network_hosts(2) as (hosts, _), keepers_of(2) as keepers:
        task = {"action": "train", "mib": mib / 2, "rounds": rounds, "seconds": seconds, "rate": rate}
        ranks = _job(task, 2, keepers, hosts)
    slowest = {
        what: {
            name: [max(each) for each in zip(*(rank[what][name] for rank in ranks), strict=True)]
            for name in ("with", "without")
        }
        for what in ("taken", "waited")
    }
    yield {"mib": mib, "seconds": seconds, "rate": rate, **slowest}


def run_memory(mib: float) -> Iterator[Row]:
    """What two hosts' keepers take at most while steps are saved and copied to the other host."""
    with network_hosts(2) as (hosts, _), keepers_of(2) as keepers:
        with _most_memory() as found:
            _save(mib / 2, 6, 2, keepers, hosts)
        share = mib / 2 * MIB
        yield {"mib": mib, "hosts": 2, "most": found["most"] / 2, "allowed": share * 5 + 64 * MIB, "share": share}


@contextlib.contextmanager
def _most_memory() -> Iterator[dict[str, int]]:
    """Sample the machine's memory files; `most` is the most beyond the beginning."""
    over, first = threading.Event(), _shared_bytes()
    found = {"most": 0}

    def sample() -> None:
        while not over.wait(0.005):
            found["most"] = max(found["most"], _shared_bytes() - first)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _shared_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) * 1024
