"""The memory for staged copies."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from dcp_async.errors import StagingLimitError
from dcp_async.staging.arena import Arena
from dcp_async.staging.arena_pool import ArenaPool


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
    with pytest.raises(StagingLimitError, match=r"8,192 bytes are to be staged.*max_staging_bytes=12,288"):
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
    with pytest.raises(StagingLimitError, match=r"still read take 16,384"):
        pool.take(2 * mmap.PAGESIZE)
    assert not third.closed
