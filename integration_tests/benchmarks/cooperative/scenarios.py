"""The runs: throttled storage, the choice that `None` makes, and the processor time of a load from memory."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import dcp_all as dcp
from integration_tests.benchmarks.cooperative.ranks import run_ranks
from integration_tests.benchmarks.cooperative.tasks import MIB, Taken, Task, fill_state
from integration_tests.benchmarks.folders import opened, settle
from integration_tests.benchmarks.network_server import open_object_server
from integration_tests.kits.networks import NetworkHost, network_hosts

__all__ = ["LIMIT", "Outcome", "run_choice", "run_copies", "run_folder", "run_objects"]

LIMIT = 100e6
"""Bytes per second of throttled storage, for all ranks together."""
# With frames of 1,514 bytes for 1,448 of payload, this is the limit for what clients get.
_WIRE_RATE = "837mbit"
_HOSTS = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run has found: its name, the number of ranks, MiB of the state, and what each way took."""

    name: str
    ranks: int
    mib: float
    taken: dict[str, Taken]

    @property
    def least_seconds(self) -> float:
        """Unique bytes ÷ limit of a throttled storage."""
        return self.mib * MIB / LIMIT


@contextlib.contextmanager
def _object_store(host: NetworkHost, mib: float) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Context manager: an object server on a pretended host, behind a limit; gives the address and variables."""
    with open_object_server(host) as server:
        place = f"s3://{server.bucket}/state"
        with server.in_environment():
            dcp.save(fill_state(mib), storage_writer=dcp.ObjectStoreWriter(place), no_dist=True)
        host.limit(_WIRE_RATE)
        yield place, server.environment_from(host)


def run_objects(mib: float, rounds: int, slow_rounds: int, *, ranks: tuple[int, ...] = (8, 16)) -> Iterator[Outcome]:
    """Load from an object server behind a limit: all ranks on one pretended host, then on four.

    Args:
        mib: Size of the state.
        rounds: Counted rounds of cooperative loads.
        slow_rounds: Those of independent loads, and of stock's reader.
        ranks: Numbers of ranks on one host; the last one is that on four hosts, too.
    """
    ways = {"together": rounds, "alone": slow_rounds, "stock": slow_rounds}
    with network_hosts(_HOSTS + 1) as (hosts, networks), _object_store(hosts[-1], mib) as (place, variables):
        task = Task(place, "objects", mib, ways, network=networks[0].text)
        for count in ranks:
            yield Outcome("object store", count, mib, run_ranks(task, count, hosts[:1], variables))
        task = Task(place, "objects", mib, {"together": rounds}, network=networks[0].text)
        yield Outcome("object store, 4 hosts", ranks[-1], mib, run_ranks(task, ranks[-1], hosts[:_HOSTS], variables))


def run_folder(mib: float, rounds: int, slow_rounds: int, *, ranks: tuple[int, ...] = (8, 16)) -> Iterator[Outcome]:
    """Load from a throttled folder; then with one rank that has a tenth of the limit, and of its share of the limit."""
    with opened({"tmpfs": "/dev/shm"}) as places:
        place = _save(places["tmpfs"], mib)
        for count in ranks:
            ways = {"together": rounds, "alone": slow_rounds}
            task = Task(place, "throttled", mib, ways, bytes_per_second=LIMIT)
            yield Outcome("throttled folder", count, mib, run_ranks(task, count))
        for name, slow in {"limit": LIMIT / 10, "share": LIMIT / ranks[0] / 10}.items():
            task = Task(place, "throttled", mib, {"together": rounds}, False, LIMIT, slow)
            yield Outcome(f"one rank at a tenth of its {name}", ranks[0], mib, run_ranks(task, ranks[0]))


def run_choice(mib: float, rounds: int, disk: str, *, ranks: tuple[int, ...] = (2, 4, 8)) -> Iterator[Outcome]:
    """Load in the three ways: chosen by the library, together, alone. From four kinds of storage."""
    ways = dict.fromkeys(("chosen", "together", "alone"), rounds)
    with opened({"disk": disk, "tmpfs": "/dev/shm"}) as places:
        on_disk, in_memory = _save(places["disk"], mib), _save(places["tmpfs"], mib)
        settle()
        small = _save(places["tmpfs"] / "small", mib / 4)
        for count in ranks:
            tasks = {
                "warm disk": Task(on_disk, "folder", mib, ways),
                "cold disk": Task(on_disk, "folder", mib, ways, cold=True),
                "tmpfs": Task(in_memory, "folder", mib, ways),
                "throttled folder": Task(small, "throttled", mib / 4, ways, bytes_per_second=LIMIT),
            }
            for name, task in tasks.items():
                yield Outcome(name, count, task.mib, run_ranks(task, count))


def run_copies(mib: float, rounds: int, *, ranks: int = 4) -> Iterator[Outcome]:
    """Load replicated state from tmpfs, beside the least that a common load must do."""
    ways = dict.fromkeys(("together", "alone", "floor"), rounds)
    with opened({"tmpfs": "/dev/shm"}) as places:
        task = Task(_save(places["tmpfs"], mib), "folder", mib, ways)
        yield Outcome("tmpfs", ranks, mib, run_ranks(task, ranks))


def _save(folder: Path, mib: float) -> str:
    place = folder / "state"
    shutil.rmtree(place, ignore_errors=True)
    dcp.save(fill_state(mib), storage_writer=dcp.FileSystemWriter(place), no_dist=True)
    return str(place)
