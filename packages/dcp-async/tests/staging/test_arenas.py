"""The memory for staged copies."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_async import AsyncSaver, SaverOptions
from dcp_async.queue.job_staging import lender_for
from dcp_async.staging.arenas import Arena, ArenaPool, LentArena
from dcp_core import Metadata, load
from dcp_core.errors import NotEnoughMemoryError
from dcp_fs import FileSystemReader, FileSystemWriter
from dcp_io import LocalStore, MemoryLender, Sink, StoreBackend
from dcp_io.lent_memory import FileId


def test_shared_memory_is_seen_through_its_descriptor() -> None:
    arena = Arena(shared=True, pinned=False)
    arena.reserve(10)
    arena.view()[:3] = 7
    with mmap.mmap(arena.descriptor, arena.nbytes) as mapped:
        assert mapped[:4] == b"\7\7\7\0"
    arena.close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(arena.descriptor)


def test_grows_only_when_it_must() -> None:
    arena = Arena(shared=False, pinned=False)
    for nbytes in (1, mmap.PAGESIZE, 100, 3 * mmap.PAGESIZE, mmap.PAGESIZE):
        arena.reserve(nbytes)
        assert len(arena.view()) == arena.nbytes >= nbytes
    assert arena.grown == 2
    assert arena.nbytes == 3 * mmap.PAGESIZE


def test_a_view_outlives_growth_and_close() -> None:
    arena = Arena(shared=True, pinned=False)
    arena.reserve(8)
    view = arena.view()
    view.fill_(5)
    arena.reserve(10 * mmap.PAGESIZE)
    arena.close()
    assert np.asarray(view).max() == 5


def test_what_is_taken_is_not_given_again() -> None:
    pool = ArenaPool(shared=False, pinned=False)
    first, second = pool.take(100), pool.take(100)
    assert first is not second
    pool.give_back(first)
    assert pool.take(100) is first
    assert pool.nbytes == 2 * mmap.PAGESIZE


def test_until_dropped_waits_for_the_last_tensor() -> None:
    pool = ArenaPool(shared=False, pinned=False, until_dropped=True)
    arena = pool.take(100)
    part = arena.view()[3:5].view(-1)
    pool.give_back(arena)
    other = pool.take(100)
    assert other is not arena
    pool.give_back(other)
    del part
    assert pool.take(100) in (arena, other)
    assert pool.take(100) in (arena, other)


def test_the_limit_counts_copies_that_are_read() -> None:
    pool = ArenaPool(shared=False, pinned=False, max_bytes=3 * mmap.PAGESIZE)
    arena = pool.take(2 * mmap.PAGESIZE)
    with pytest.raises(NotEnoughMemoryError, match=r"8,192 bytes are to be staged.*max_staging_bytes=12,288"):
        pool.take(2 * mmap.PAGESIZE)
    pool.give_back(arena)
    assert pool.take(3 * mmap.PAGESIZE) is arena


def test_idle_memory_does_not_count_against_the_limit() -> None:
    pool = ArenaPool(shared=True, pinned=False, max_bytes=4 * mmap.PAGESIZE)
    first, second = pool.take(mmap.PAGESIZE), pool.take(2 * mmap.PAGESIZE)
    pool.give_back(first)
    pool.give_back(second)
    assert pool.take(4 * mmap.PAGESIZE) is second
    assert first.closed
    assert pool.nbytes == 4 * mmap.PAGESIZE
    pool.give_back(second)
    assert pool.take(8) is second
    third = Arena(shared=False, pinned=False)
    third.reserve(mmap.PAGESIZE)
    pool._free.append(third)
    with pytest.raises(NotEnoughMemoryError, match=r"still read take 16,384"):
        pool.take(2 * mmap.PAGESIZE)
    assert not third.closed


class Memory:
    """Memory of a `Lender`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("lent")
        os.ftruncate(self.descriptor, self.nbytes)
        self.memory = mmap.mmap(self.descriptor, self.nbytes)
        FileId.note(self.memory, self.descriptor)
        status = os.fstat(self.descriptor)
        self.file = FileId(status.st_dev, status.st_ino)
        self.closed = self.is_lent = False
        self.returned = 0

    def give_back(self) -> None:
        self.is_lent = False
        self.returned += 1

    def free(self) -> None:
        self.closed = True
        os.close(self.descriptor)


class Lender:
    """A lender of memory files of this process."""

    def __init__(self) -> None:
        self.made: list[Memory] = []
        self.prepared: list[int] = []
        self.has_prepared = threading.Event()

    def lend(self, nbytes: int, *, timeout_seconds: float) -> Memory:
        free = [one for one in self.made if not one.is_lent and not one.closed and one.nbytes >= nbytes]
        if not free:
            free = [Memory(nbytes)]
            self.made += free
        free[0].is_lent = True
        return free[0]

    def prepare(self, nbytes: int) -> None:
        self.prepared.append(nbytes)
        self.has_prepared.set()


@pytest.fixture
def lender() -> Lender:
    return Lender()


def test_memory_that_is_lent_again_is_the_same_arena(lender: Lender) -> None:
    pool = ArenaPool(shared=True, pinned=False)
    first, second = pool.take(100, lender), pool.take(100, lender)
    assert first is not second
    assert pool.nbytes == 2 * mmap.PAGESIZE
    assert isinstance(first, LentArena)
    assert first.descriptor == lender.made[0].descriptor
    first.view()[:4] = 7
    assert lender.made[0].memory[:5] == b"\7\7\7\7\0"
    pool.give_back(first)
    pool.give_back(first)
    assert lender.made[0].returned == 1
    assert pool.nbytes == mmap.PAGESIZE
    assert pool.take(50, lender) is first
    assert lender.has_prepared.wait(60)
    assert lender.prepared == [mmap.PAGESIZE]
    assert pool.take(100) is not first, "a save elsewhere takes memory of the saver's own"


def test_freed_memory_is_released(lender: Lender) -> None:
    pool = ArenaPool(shared=True, pinned=False)
    arena = pool.take(100, lender)
    pool.give_back(arena)
    lender.made[0].free()
    other = pool.take(100, lender)
    assert other is not arena
    assert arena.closed
    assert not other.closed


def test_an_arena_in_use_survives_the_end_of_its_pool(lender: Lender) -> None:
    pool = ArenaPool(shared=True, pinned=False)
    idle, used = pool.take(100, lender), pool.take(100, lender)
    pool.give_back(idle)
    pool.close()
    assert idle.closed
    assert not used.closed
    assert lender.made[1].returned == 0
    pool.give_back(used)
    assert used.closed
    assert lender.made[1].returned == 1


def test_more_than_the_limit_is_refused(lender: Lender) -> None:
    pool = ArenaPool(shared=True, pinned=False, max_bytes=1000)
    with pytest.raises(NotEnoughMemoryError, match=r"1,001 bytes .* in waves, .*max_staging_bytes=1,000"):
        pool.take(1001, lender)
    assert lender.made == []


class LendingStore(LocalStore):
    """A folder that lends memory, and notes what of it is written."""

    lent: MemoryLender
    seen: list[Any]

    def lender(self) -> MemoryLender:
        return self.lent

    def create(self, name: str, *, sync: bool = True) -> Sink:
        sink = super().create(name, sync=sync)
        write = sink.write

        def noting(buffers: Sequence[Any]) -> None:
            self.seen += [(FileId.find(buffer), len(buffer)) for buffer in buffers]
            write(buffers)

        sink.write = noting  # type: ignore[method-assign]
        return sink


class LendingWriter(FileSystemWriter):
    def __init__(self, path: Path, lender: Lender, seen: list[Any], **options: Any) -> None:
        self.lent, self.seen = lender, seen
        super().__init__(path, **options)

    def _open(self, checkpoint_id: Any) -> StoreBackend:
        backend = super()._open(checkpoint_id)
        store = LendingStore(backend.store.path)  # type: ignore[attr-defined]
        store.lent, store.seen = self.lent, self.seen
        backend.store = store
        return backend


def save(saver: AsyncSaver, state: dict[str, Any], writer: FileSystemWriter) -> Metadata:
    future = saver.save(state, storage_writer=writer, no_dist=True)
    return future.result(120)  # type: ignore[union-attr]


def test_what_is_saved_lies_in_the_lent_memory(lender: Lender, tmp_path: Path) -> None:
    state = {"large": torch.arange(100_000), "small": torch.arange(5000.0)}
    with AsyncSaver("thread") as saver:
        for step in (1, 2):
            seen: list[Any] = []
            state["large"] += 1
            save(saver, state, LendingWriter(tmp_path / str(step), lender, seen))
            (memory,) = lender.made
            where = {found[0] for found, nbytes in seen if found is not None}
            assert where == {memory.file}
            assert sum(nbytes for found, nbytes in seen if found is not None) >= 800_000
            assert memory.returned == step
    template = {"large": torch.zeros(100_000, dtype=torch.int64), "small": torch.zeros(5000)}
    load(template, storage_reader=FileSystemReader(tmp_path / "2"), no_dist=True)
    assert all(torch.equal(template[key], state[key]) for key in state)


def test_waves_into_lent_memory_are_refused_by_name(lender: Lender, tmp_path: Path) -> None:
    options = SaverOptions(max_staging_bytes=1 << 20, staging="waves")
    with AsyncSaver("thread", options=options) as saver, pytest.raises(NotEnoughMemoryError, match="another storage"):
        save(saver, {"x": torch.zeros(1 << 20)}, LendingWriter(tmp_path / "1", lender, []))
    assert lender.made == []


def test_compressed_bytes_are_made_elsewhere(lender: Lender, tmp_path: Path) -> None:
    assert lender_for(None, LendingWriter(tmp_path, lender, [])) is lender
    assert lender_for(None, LendingWriter(tmp_path, lender, [], compression="zstd")) is None
    assert lender_for(tmp_path) is lender_for("nothing://x") is lender_for(None) is None
