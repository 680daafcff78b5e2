"""Shared memory in slots: purposes, users, and what another process would see of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dcp_exchange.arena import Arena, Window

SLOT = 8192


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(SLOT, [2, 1])
    yield made
    made.close()


def test_slots_are_taken_for_their_purpose(arena: Arena) -> None:
    own = [arena.take(), arena.take()]
    assert not arena.has_free()
    assert arena.has_free(1)
    arriving = arena.take(1)
    assert not arena.has_free(1)
    assert sorted([*own, arriving]) == [0, 1, 2]
    assert arena.taken == 3
    assert arena.release(arriving)
    assert arena.has_free(1)
    assert not arena.has_free(), "a slot of one purpose must not serve another"


def test_a_slot_is_free_after_its_last_user(arena: Arena) -> None:
    slot = arena.take()
    arena.share(slot, 2)
    assert [arena.release(slot) for _ in range(3)] == [False, False, True]
    assert arena.taken == 0
    assert arena.take() == slot, "the slot freed last has its pages"
    with pytest.raises(KeyError):
        arena.release(1 - slot)


def test_a_window_shows_what_the_arena_holds(arena: Arena) -> None:
    window = Window(os.dup(arena.descriptor), SLOT)
    for slot in range(3):
        arena.view(slot, 5)[:] = bytes([slot]) * 5
    assert [bytes(window.view(slot, 6)) for slot in range(3)] == [bytes([slot]) * 5 + b"\0" for slot in range(3)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        Window(-1, SLOT)


def test_neither_keeps_a_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))
    made = Arena(SLOT, [1])
    window = Window(os.dup(made.descriptor), SLOT)
    made.view(0, 3)[:] = b"yes"
    made.close()
    assert bytes(window.view(0, 3)) == b"yes", "the memory lives as long as its last user"
    del window
    assert before.issuperset(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"."):
        Arena(1 << 62, [1])
    assert before.issuperset(os.listdir("/proc/self/fd"))
