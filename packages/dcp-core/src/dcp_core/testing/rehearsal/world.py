"""`World`: ranks whose `save` and `load` run in virtual time, over the virtual network and disk."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from dcp_core.planning.plan_exchange import GLOBAL_PLANS, RANK_PLANS
from dcp_core.records.protocols import CheckpointId
from dcp_core.storage.storage_reader import ByteStorageReader
from dcp_core.storage.storage_writer import ByteStorageWriter
from dcp_core.testing.rehearsal.clock import Clock, Task
from dcp_core.testing.rehearsal.network import Network
from dcp_core.testing.rehearsal.storage import Disk, VirtualStore
from dcp_io import StoreBackend
from dcp_io.saves.save_files import ProcessIdentity, Renewal
from dcp_ranks import Coordinator, PeerOptions
from dcp_ranks.choose_coordinator import assume_job_size
from dcp_ranks.options import DEFAULT_PEERS
from dcp_ranks.phases.coordinator import LocalCoordinator
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.transport.store_wire import StoreWire

__all__ = ["Cluster", "VirtualReader", "VirtualWriter", "World"]

_PROCESS = ProcessIdentity("rehearsal", "", "", 1, 1)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Ranks, hosts, and what requests and bytes take on them; seconds are one way."""

    ranks: int
    ranks_per_host: int = 8
    store_seconds: float = 100e-6
    requests_per_second: float = 50_000.0
    link_seconds: float = 50e-6
    nic_bytes_per_second: float = 12.5e9
    disk_seconds: float = 1e-3
    host_bytes_per_second: float = 2e9
    disk_bytes_per_second: float = 100e9
    writer_threads: int = 1
    timeout_seconds: float = 1800.0
    peers: PeerOptions = DEFAULT_PEERS


class World:
    """A cluster in virtual time, with faults drawn from a seed. Each `run` plays all ranks once."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster = cluster
        self.clock = Clock(seed)
        self.disk = Disk(
            self.clock,
            lambda rank: rank // cluster.ranks_per_host,
            cluster.disk_seconds,
            cluster.host_bytes_per_second,
            cluster.disk_bytes_per_second,
        )
        self.phases: list[tuple[int, str, float, float]] = []
        """(rank, phase, start, end) of phases that ended."""
        self.decisions: dict[str, tuple[float, int]] = {}
        """Phase → CPU seconds of the coordinator's part, and bytes that it needed: measured, in real time."""
        self.peak_bytes = 0
        """This process's memory at most, in those parts."""
        self.network = self._network()

    def _network(self) -> Network:
        one = self.cluster
        rates = one.store_seconds, one.requests_per_second, one.link_seconds, one.nic_bytes_per_second
        return Network(self.clock, one.ranks, one.ranks_per_host, *rates, one.peers)

    def run(
        self, call: Callable[[int], Any], *, starts: Sequence[float] = (), limit_seconds: float = 1e9
    ) -> list[Task]:
        """Call a function with each rank, as a process of its own that starts at `starts`.

        Processes that still run after `limit_seconds` are killed, and their `Task.error` is SystemExit.
        """
        self.network = self._network()
        for cache in (RANK_PLANS, GLOBAL_PLANS):
            cache.clear()  # these processes have saved nothing yet

        def play(rank: int) -> Any:
            with assume_job_size(self.cluster.ranks):
                return call(rank)

        def give_up() -> None:
            for task in self.clock.tasks:
                self.clock.kill(task)

        self.clock.at(self.clock.now + limit_seconds, give_up)
        with self.installed():
            return self.clock.run([partial(play, rank) for rank in range(self.cluster.ranks)], starts=starts)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """`save` and `load` use this world's ranks in tasks, and no ranks elsewhere."""
        changes: dict[str, Any] = {
            "dcp_core.saving.make_coordinator": self._coordinator,
            "dcp_core.loading.make_coordinator": self._coordinator,
            "dcp_io.saves.save_session.this_process": lambda: _PROCESS,
            "dcp_io.workers.threading": SimpleNamespace(Thread=self.clock.thread),
        }
        with ExitStack() as stack:
            for name, change in changes.items():
                stack.enter_context(mock.patch(name, change))
            # Its default is the function that `time.sleep` was when the module was imported.
            stack.enter_context(mock.patch.object(StoreWire.wait, "__defaults__", (self.clock.pause,)))
            # A marker is renewed by a thread in real time, once a minute.
            stack.enter_context(mock.patch.object(Renewal, "begin"))
            yield

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """Add to `decisions`."""
        before, started = _memory_bytes(), time.thread_time()
        try:
            yield
        finally:
            seconds, needed = self.decisions.get(phase, (0.0, 0))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            self.peak_bytes = max(self.peak_bytes, peak)
            self.decisions[phase] = seconds + time.thread_time() - started, max(needed, peak - before)

    def store(self, checkpoint_id: CheckpointId) -> VirtualStore:
        """Return the folder of a checkpoint."""
        return VirtualStore(self.disk, str(checkpoint_id))

    def _coordinator(self, *_: Any, timeout_seconds: float | None = None, **__: Any) -> Coordinator:
        task = self.clock.task
        if task is None or self.cluster.ranks == 1:
            return LocalCoordinator()
        rank = task.number
        peers = self.network.peers.get(rank) or self.network.connect(rank)
        made = _Coordinator(
            peers.store,
            rank,
            self.cluster.ranks,
            timeout_seconds=min(timeout_seconds or self.cluster.timeout_seconds, self.cluster.timeout_seconds),
            hosts_store=rank == 0,
            peers=peers,
        )
        made.world = self
        return made


class _Coordinator(StoreCoordinator):
    world: World

    def _run(self, kind: str, phase: str, map_fn: Callable[[], Any], answer: Any) -> Any:
        started = self.world.clock.now
        found = super()._run(kind, phase, map_fn, answer)
        self.world.phases.append((self.rank, phase, started, self.world.clock.now))
        return found

    def _conclude(self, number: int, phase: str, *arguments: Any) -> Any:
        with self.world.measured(phase):
            return super()._conclude(number, phase, *arguments)


def _memory_bytes() -> int:
    """Return this process's memory; its peak counts from here on."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class _OfWorld:
    _world: World

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        del checkpoint_id
        return True

    def _open(self, checkpoint_id: CheckpointId) -> StoreBackend:
        return StoreBackend(self._world.store(checkpoint_id), threads=self._world.cluster.writer_threads)


class VirtualWriter(_OfWorld, ByteStorageWriter):
    """Writes to `World.disk`."""

    def __init__(self, world: World, checkpoint_id: CheckpointId, **options: Any) -> None:
        super().__init__(checkpoint_id, **options)
        self._world = world


class VirtualReader(_OfWorld, ByteStorageReader):
    """Reads from `World.disk`."""

    def __init__(self, world: World, checkpoint_id: CheckpointId) -> None:
        super().__init__(checkpoint_id)
        self._world = world
