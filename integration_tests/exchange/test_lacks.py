"""A rank that lacks memory, descriptors, sockets or threads at any moment: all ranks read for themselves."""

from __future__ import annotations

import errno
import mmap
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_exchange import arena
from dcp_exchange.piece_queue import PieceReader
from dcp_io.reading.delivery import Delivery
from dcp_ranks.streams import reception
from dcp_ranks.streams import streams as streams_module
from dcp_ranks.testing.ranks import RankPool

SIZE = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> str:
    dcp.save({"w": torch.arange(float(SIZE))}, checkpoint_id=tmp_path, no_dist=True)
    return str(tmp_path)


def refuse(*_: Any) -> Any:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def refuse_large(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size) if 0 < size <= mmap.PAGESIZE else refuse()


def refuse_of_others(descriptor: int, size: int) -> mmap.mmap:
    return mmap.mmap(descriptor, size) if size else refuse()


def refuse_descriptors(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def refuse_threads(thread: threading.Thread) -> None:
    if thread.name.startswith(("dcp-exchange", "dcp-streams")):
        raise RuntimeError("can't start new thread")
    START(thread)


def refuse_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory for a piece")


def lose_descriptors(ancillary: Any) -> list[int]:
    """As the kernel does for a process that may have no more of them."""
    for descriptor in RECEIVE_DESCRIPTORS(ancillary):
        os.close(descriptor)
    return []


def in_order(flag: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that waits on other ranks until it was called on rank 1."""

    def wait_and_call(*arguments: Any) -> Any:
        if dist.get_rank() == 1:
            flag.touch()
        until = time.monotonic() + 100
        while not flag.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return call(*arguments)

    return wait_and_call


START = threading.Thread.start
RECEIVE_DESCRIPTORS = reception.descriptors_in
PLACES: dict[str, Any] = {
    "os": os,
    "mmap": arena,
    "reception": reception,
    "Reception": reception.Reception,
    "streams": streams_module,
    "select": select,
    "Thread": threading.Thread,
    "PieceReader": PieceReader,
    "Delivery": Delivery,
    "Streams": streams_module.Streams,
}


def load_with(folder: str, where: str, name: str, call: Callable[..., Any]) -> tuple[str, bool]:
    """Return the reason or the error of a load in which a call of rank 1 fails, and whether the next load is right."""
    place = PLACES[where]
    instead = mock.Mock(mmap=call) if place is arena else call
    if dist.get_rank() != 1:
        instead = getattr(place, name)
    if place is PieceReader:  # rank 1 reads a piece, however slow it is
        instead = in_order(Path(f"{folder}.read"), instead)
    template = {"w": torch.zeros(SIZE)}
    dcp.load(template, checkpoint_id=folder, cooperative=False)  # the operation itself has what it needs
    template = {"w": torch.zeros(SIZE)}
    with mock.patch.object(place, name, instead):
        try:
            said = dcp.load(template, checkpoint_id=folder, cooperative=True, timeout_seconds=60).cooperative_reason
            assert torch.equal(template["w"], torch.arange(float(SIZE)))
        except dcp.DcpError as error:
            said = f"{type(error).__name__}: {error}"
    numbers = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([float(dist.get_rank())]))
    assert [int(number) for number in numbers] == [*range(dist.get_world_size())]
    return said, dcp.load(template, checkpoint_id=folder, cooperative=True, timeout_seconds=60).cooperative


LACKS: dict[str, tuple[str, str, Callable[..., Any], str]] = {
    "no memfd": ("os", "memfd_create", refuse, "Cannot allocate"),
    "no mapping": ("mmap", "mmap", refuse, "Cannot allocate"),
    "no listening socket": ("streams", "open_doors", refuse, "Cannot allocate"),
    "no connection to the ranks of the host": ("Streams", "connect_many", refuse_descriptors, "Too many open"),
    "no mapping of many bytes": ("mmap", "mmap", refuse_large, "no shared memory of "),
    "no mapping of other ranks' memory": ("mmap", "mmap", refuse_of_others, "no shared memory of "),
    "no epoll": ("select", "epoll", refuse_descriptors, "Too many open"),
    "no eventfd": ("os", "eventfd", refuse_descriptors, "Too many open"),
    "no threads": ("Thread", "start", refuse_threads, "can't start new thread"),
    "no descriptor for a file": ("PieceReader", "read", refuse_descriptors, "Too many open"),
    "no memory for a message": ("Reception", "_take_head", refuse_memory, "no memory for a piece"),
    "no memory for a piece": ("Delivery", "take", refuse_memory, "no memory for a piece"),
}


@pytest.mark.parametrize("lack", LACKS)
def test_a_rank_that_lacks_something_makes_all_read_for_themselves(ranks: RankPool, folder: str, lack: str) -> None:
    where, name, call, text = LACKS[lack]
    for reason, right in ranks.run(3, load_with, folder, where, name, call):
        assert reason.startswith("rank 1: ")
        assert text in reason
        assert right


def test_a_descriptor_that_does_not_arrive_makes_all_read_for_themselves(ranks: RankPool, folder: str) -> None:
    found = ranks.run(3, load_with, folder, "reception", "descriptors_in", lose_descriptors)
    for reason, right in found:
        assert "rank 1 has lost the connection to rank" in reason
        assert "ulimit -n" in reason
        assert right
    assert len({reason for reason, _ in found}) == 1
