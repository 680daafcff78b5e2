"""What the tests of cooperative loads share: readers that count at the store, pretended hosts, and templates."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import dcp_all as dcp
from dcp_core.testing.sharding import distribute
from dcp_exchange import together, topology
from dcp_io import LocalStore, Source
from dcp_io.stores.host_store import HostFolder
from dcp_ranks import Streams
from dcp_ranks.phases.store_coordinator import StoreCoordinator

__all__ = [
    "ApartReader",
    "CountingReader",
    "Loaded",
    "Read",
    "blank",
    "blank_experts",
    "count_union",
    "hosts_of",
    "load",
    "own_piece_first",
    "same",
    "whole",
]

Read = tuple[str, int, int]


class _CountingSource(Source):
    """A file whose reads are noted."""

    def __init__(self, note: Callable[[Read], None], name: str, source: Source) -> None:
        self._note, self._name, self.inner = note, name, source

    def size(self) -> int:
        return self.inner.size()

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._note((self._name, offset, offset + sum(map(len, buffers))))
        self.inner.read_into(offset, buffers)

    def close(self) -> None:
        self.inner.close()


class _CountingStore(LocalStore):
    kind: Any
    reads: list[Read]
    index_reads: list[Read]

    @property
    def place(self) -> Any:
        return self.kind

    def note(self, read: Read) -> None:
        """Note a read, of the index in a list of its own."""
        (self.index_reads if read[0].endswith(".metadata") else self.reads).append(read)

    def open(self, name: str) -> Source:
        return _CountingSource(self.note, name, super().open(name))


class _CountingHostFolder(_CountingStore, HostFolder):
    """A folder of each host whose reads are noted."""


class CountingReader(dcp.FileSystemReader):
    """A reader that notes each read of a data file and of an index, and says where the folder lies."""

    def __init__(self, path: str, *, kind: str = "remote", **options: Any) -> None:
        self.reads: list[Read] = []
        self.index_reads: list[Read] = []
        self.kind = kind
        super().__init__(path, **options)

    def _open(self, checkpoint_id: Any) -> Any:
        backend = super()._open(checkpoint_id)
        store = (_CountingHostFolder if self.kind == "host" else _CountingStore)(backend.store.url)
        store.kind, store.reads, store.index_reads = self.kind, self.reads, self.index_reads
        backend.store = store
        return backend


class ApartReader(CountingReader):
    """A reader of one host's folder, which is at the same path on each host."""

    def __init__(self, path: str, folder: str) -> None:
        self.folder = folder
        super().__init__(path, kind="host")

    def _open(self, checkpoint_id: Any) -> Any:
        return super()._open(self.folder)


def count_union(reads: Iterable[Read]) -> int:
    """Number of bytes of files that were read at least once."""
    by_file: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for file, start, stop in reads:
        by_file[file].append((start, stop))
    total = 0
    for ranges in by_file.values():
        end = 0
        for start, stop in sorted(ranges):
            total += max(0, stop - max(start, end))
            end = max(end, stop)
    return total


@contextlib.contextmanager
def hosts_of(ranks: int, *, indirect: bool = False) -> Iterator[list[int]]:
    """Context manager: so many ranks share a pretended host; gives a list that gets the bytes sent to other hosts."""
    size, rank = dist.get_world_size(), dist.get_rank()
    grouped = tuple(tuple(range(start, min(start + ranks, size))) for start in range(0, size, ranks))
    mine = next(host for host in grouped if rank in host)
    sent: list[int] = []
    dispatch = Streams.dispatch

    def counted(streams: Streams, handler: Any) -> Any:
        arrive = handler.on_payload

        def on_payload(stream: Any, data: bytes, buffer: memoryview) -> None:
            assert stream.rank not in mine, "within a host, pieces go through memory"
            sent.append(len(buffer))
            arrive(stream, data, buffer)

        handler.on_payload = on_payload
        return dispatch(streams, handler)

    with (
        mock.patch.object(together, "group_by_host", return_value=grouped),
        mock.patch.object(topology, "MOST_LINKED_HOSTS", 2 if indirect else topology.MOST_LINKED_HOSTS),
        mock.patch.object(Streams, "dispatch", counted),
    ):
        yield sent


@contextlib.contextmanager
def own_piece_first() -> Iterator[None]:
    """Context manager: ranks help another rank only after it has taken a piece of its own, however slow it is."""
    tickets, store = StoreCoordinator.tickets, dist.distributed_c10d._get_default_store()

    def patient(coordinator: StoreCoordinator, queues: int) -> Callable[[int], int]:
        take, key = tickets(coordinator, queues), f"own piece/{coordinator.sequence}"

        def take_in_turn(owner: int) -> int:
            while owner != coordinator.rank and not store.check([f"{key}/{owner}"]):
                time.sleep(0.001)  # `wait` would keep the coordinator from the store
            ticket = take(owner)
            if owner == coordinator.rank:
                store.set(f"{key}/{owner}", "")
            return ticket

        return take_in_turn

    with mock.patch.object(StoreCoordinator, "tickets", patient):
        yield


def whole() -> dict[str, Any]:
    """What the checkpoints of these tests hold: 7 MB of tensors, many with odd sizes, an empty one, and objects."""
    maker = torch.Generator().manual_seed(7)
    state: dict[str, Any] = {f"w{n}": torch.randn(211 + 2 * n, 509, generator=maker) for n in range(8)}
    state["big"] = torch.randn(1021, 1000, generator=maker).bfloat16()
    state["bias"] = torch.randn(13, generator=maker)
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(0, 4)
    return state | {"step": 3, "words": ["a", {"b": (1, 2.5)}]}


_OBJECTS = {"step": 0, "words": ["", {"b": None}]}
_PLACEMENTS: dict[str, list[Placement]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "hsdp": [Replicate(), Shard(0)],
    "hsdp columns": [Replicate(), Shard(1)],
    "3d": [Shard(0), Replicate(), Shard(1)],
}


def blank(kind: str, state: dict[str, Any]) -> dict[str, Any]:
    """This rank's template for a state: `ddp`, `pipeline`, `some` (keys by rank), or DTensors of a kind."""
    size, rank = dist.get_world_size(), dist.get_rank()
    template: dict[str, Any] = {}
    mesh: Any = None
    if kind in _PLACEMENTS:
        shape = {1: (size,), 2: (size // 2, 2), 3: (size // 4, 2, 2)}[len(_PLACEMENTS[kind])]
        mesh = init_device_mesh("cpu", shape)
    for number, (key, value) in enumerate(state.items()):
        if not isinstance(value, torch.Tensor):
            template[key] = _OBJECTS[key]
        elif mesh is not None and value.ndim == 2:
            template[key] = distribute(torch.full_like(value, 9), mesh, _PLACEMENTS[kind])
        elif kind == "pipeline":
            if number % size == rank:
                template[key] = torch.full_like(value, 9)
        elif kind != "some" or (number + rank) % 3:
            template[key] = torch.full_like(value, 9)
    if kind == "pipeline":
        template = {key: value for key, value in template.items() if isinstance(value, torch.Tensor)}
    return template


def blank_experts(state: dict[str, Any]) -> dict[str, Any]:
    """Expert parallelism: every second matrix is split over 2 ranks and replicated, the others are split over all."""
    size = dist.get_world_size()
    experts, dense = init_device_mesh("cpu", (size // 2, 2)), init_device_mesh("cpu", (size,))
    template: dict[str, Any] = {}
    for number, (key, value) in enumerate(state.items()):
        if not isinstance(value, torch.Tensor):
            template[key] = _OBJECTS[key]
        elif value.ndim < 2:
            template[key] = torch.full_like(value, 9)
        elif number % 2:
            template[key] = distribute(torch.full_like(value, 9), experts, [Replicate(), Shard(0)])
        else:
            template[key] = distribute(torch.full_like(value, 9), dense, [Shard(0)])
    return template


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two states hold the same bits in the same local tensors, and equal objects."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        ours, theirs = _local(value), _local(other[key])
        if isinstance(ours, torch.Tensor):
            if ours.shape != theirs.shape or not torch.equal(_bits(ours), _bits(theirs)):
                return False
        elif ours != theirs:
            return False
    return True


@dataclass
class Loaded:
    """What one load did on one rank."""

    report: Any
    reads: list[Read] = field(default_factory=list)
    index_bytes: int = 0
    """Bytes of indexes that this rank read."""


def load(folder: str, template: dict[str, Any], cooperative: bool | None, **options: Any) -> Loaded:
    """Load with a counting reader."""
    reader = CountingReader(folder)
    report = dcp.load(template, storage_reader=reader, cooperative=cooperative, timeout_seconds=60, **options)
    return Loaded(report, reader.reads, sum(stop - start for _, start, stop in reader.index_reads))
