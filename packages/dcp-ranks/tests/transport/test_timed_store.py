"""Requests to a store that answers, fails, or is silent."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from dcp_ranks import CoordinatorLostError, StoreWire, TimedStore, innermost_store


def test_answers_as_the_store_does():
    inner = dist.HashStore()
    store = TimedStore(inner, 5.0)
    store.set("a", b"1")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert [store.add("n", 2), store.add("n", 0)] == [2, 2]
    assert store.compare_set("c", "", "first") == b"first"
    assert store.compare_set("c", "", "second") == b"first"
    assert store.delete_key("c")
    assert not store.check(["c"])
    assert store.clone().check(["a"])
    assert innermost_store(store) is inner


def test_an_error_of_the_store_is_raised():
    class Failing:
        def check(self, keys):
            raise dist.DistNetworkError("gone")

    store = TimedStore(Failing(), 5.0)
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError, match="gone"):
            store.check(["a"])


def serve(ports):
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    ports.send(store.port)
    threading.Event().wait(60)


def test_a_stopped_server_is_given_up_in_time_and_said_to_be_lost():
    context = multiprocessing.get_context("spawn")
    ports, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        store = TimedStore(dist.TCPStore("127.0.0.1", ports.recv(), None, False, wait_for_workers=False), 0.2)
        assert not store.check(["a"])
        os.kill(server.pid, signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)  # the signal alone may take effect after one more answer
        wire, start = StoreWire(store, "p/", 2), time.monotonic()
        with pytest.raises(CoordinatorLostError, match=r"'key'.*has not answered for 1\.2 s.*or is stopped"):
            wire.has("key")
        assert 1.0 < time.monotonic() - start < 10
        start = time.monotonic()
        with pytest.raises(CoordinatorLostError, match=r"has not answered"):
            wire.mark("key")
        assert time.monotonic() - start < 0.5
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.kill()
        server.join()


def test_the_thread_ends_with_the_connection_and_keeps_nothing():
    class Keys(list):
        """A list, which can be watched."""

    store = TimedStore(dist.HashStore(), 5.0)
    keys = Keys(["a"])
    assert not store.check(keys)
    kept, given = weakref.ref(store._thread), weakref.ref(keys)
    del keys
    until = time.monotonic() + 10
    while given() is not None:
        assert time.monotonic() < until
        time.sleep(0.01)
    del store
    while (thread := kept()) is not None and thread.is_alive():
        del thread
        gc.collect()
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_forked_child_makes_its_own_thread():
    store = TimedStore(dist.HashStore(), 5.0)
    store.set("a", b"1")
    child = os.fork()
    if child == 0:
        os._exit(0 if store.check(["a"]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
