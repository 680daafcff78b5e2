"""The thread that renews a marker: it starts when the first renewal is due, and no other store delays it."""

from __future__ import annotations

import os
import threading
import time
import warnings

import pytest

from dcp_io.saves.save_files import Renewal


class Touched:
    """A store that counts its touches; the first one hangs until `free` is set."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.free = threading.Event()
        if not hangs:
            self.free.set()
        self.count = 0

    def touch(self, name: str) -> None:
        self.count += 1
        self.free.wait()


def wait_for(fact):
    deadline = time.monotonic() + 100
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def renewal():
    """Make renewals, which end with the test."""
    made = []

    def make(store: Touched, stale_after_seconds: float) -> Renewal:
        made.append((store, Renewal(store, "marker", stale_after_seconds)))  # type: ignore[arg-type]
        return made[-1][1]

    yield make
    for store, one in made:
        store.free.set()
        one.stop()


def test_a_renewal_that_ends_before_it_is_due_starts_no_thread_of_its_own(renewal):
    store = Touched()
    one = renewal(store, 3600)
    one.begin()
    assert not one.is_alive()
    one.stop()
    one.stop()
    assert (one.ident, store.count) == (None, 0)


def test_a_later_renewal_that_is_due_earlier_starts_first(renewal):
    late, early = renewal(Touched(), 3600), renewal(store := Touched(), 0.1)
    late.begin()
    early.begin()
    wait_for(lambda: store.count >= 2)
    assert not late.is_alive()


def test_a_store_that_hangs_delays_no_other_renewal(renewal):
    hanging, store = Touched(hangs=True), Touched()
    renewal(hanging, 0.1).begin()
    wait_for(lambda: hanging.count)
    renewal(store, 0.1).begin()
    wait_for(lambda: store.count >= 3)
    assert hanging.count == 1


def test_a_forked_child_renews_its_own_markers_and_none_of_its_parent(renewal):
    parents, childs = Touched(), Touched()
    renewal(parents, 5).begin()  # due in half a second
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of other threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            renewal(childs, 0.1).begin()
            wait_for(lambda: childs.count >= 10)  # a second
            code = 0 if parents.count == 0 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    wait_for(lambda: parents.count)
