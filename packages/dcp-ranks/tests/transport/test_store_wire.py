"""Values on a store; and requests to a store that answers, fails, or is silent."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch.distributed as dist

from dcp_ranks import CoordinatorLostError
from dcp_ranks.transport.store_wire import CHUNK_BYTES, StoreWire, TimedStore, innermost_store, open_leased


@pytest.fixture
def wire():
    return StoreWire(dist.HashStore(), "p/", 2)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_values_come_back_and_go_away(size):
    store = dist.HashStore()
    wire = StoreWire(store, "p/", 2)
    data = bytes(range(256)) * (size // 256) + b"w" * (size % 256)
    written = wire.put("key", data)
    assert wire.get("key") == (data, written)
    assert len(written) == (1 if size <= CHUNK_BYTES else -(-size // CHUNK_BYTES) + 1)
    wire.delete(written)
    wire.delete(written)
    assert store.num_keys() == 0


def test_the_first_claim_wins(wire):
    assert not wire.has("key")
    assert wire.claim("key", "a") == "a"
    assert wire.claim("key", "b") == "a"
    assert wire.get_text("key") == "a"
    assert wire.has("key")
    assert not wire.has("key", "other")


def test_counters(wire):
    assert [wire.add("n"), wire.add("n"), wire.add("m")] == [1, 2, 1]


def test_waiting_ends_at_once_or_at_the_deadline(wire):
    assert wire.wait(lambda: True, time.monotonic() - 1)
    assert not wire.wait(lambda: False, time.monotonic() + 0.01)


def test_a_value_that_is_not_there_is_not_waited_for():
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    start = time.monotonic()
    with pytest.raises(CoordinatorLostError, match="'key'"):
        StoreWire(store, "p/", 2).get("key")
    assert time.monotonic() - start < 60  # the store itself would wait for 300
    assert not store.check(["p/key"])


def test_a_value_that_goes_away_while_it_is_read(wire):
    keys = wire.put("key", bytes(CHUNK_BYTES + 1))
    wire.delete(keys[1:2])
    with pytest.raises(CoordinatorLostError, match="'key'"):
        wire.get("key")


class Gone:
    """A store that ended: what is connected is told at once."""

    def check(self, keys):
        raise dist.DistNetworkError("gone")


def test_a_lost_store_says_which_key_and_why():
    with pytest.raises(CoordinatorLostError, match=r"key 'a': gone\)"):
        StoreWire(Gone(), "p/", 2).has("a")


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
    threading.Event().wait(600)


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
        assert 1.0 < time.monotonic() - start < 60
        with pytest.raises(CoordinatorLostError, match=r"has not answered"):
            wire.put("key", b"")
        assert store._thread.requests.empty()  # it was not sent, so that there is nothing to wait for
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
    until = time.monotonic() + 200
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


def names_of_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "dcp-store"]


def test_no_thread_is_left_while_the_connection_rests():
    until = time.monotonic() + 200
    while names_of_threads():  # of the tests before
        gc.collect()
        assert time.monotonic() < until
        time.sleep(0.01)
    store = TimedStore(dist.HashStore(), 5.0)
    store.rest()
    for number in range(3):
        assert store.add("n", 1) == number + 1
        assert names_of_threads() == ["dcp-store"]
        store.rest()
        store.rest()
        assert names_of_threads() == []


def test_without_threads_requests_are_made_in_the_callers(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    store = TimedStore(dist.HashStore(), 5.0)
    assert [store.add("n", 1), store.add("n", 1)] == [1, 2]
    store.rest()


# The request is answered when the interpreter is ending already: its thread must not return then.
ENDS = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
from dcp_ranks.transport.store_wire import TimedStore
from dcp_ranks.transport import store_wire

class Late:
    def __del__(self, go_on=os.kill, sleep=time.sleep, pid=int(sys.argv[2]), number=signal.SIGCONT):
        go_on(pid, number)
        sleep(0.5)

late = Late()
store = TimedStore(dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False), 600)
store.check(["a"])
store.timeout_seconds = 0.1
os.kill(int(sys.argv[2]), signal.SIGSTOP)
states = lambda: {path.read_text().rpartition(") ")[2][0] for path in Path("/proc", sys.argv[2], "task").glob("*/stat")}
while states() != {"T"}:  # the signal may take effect after one more answer
    time.sleep(0.01)
call = store.check if sys.argv[3] == "request" else lambda _: store.ask(store.underlying_store.clone)
try:
    call(["a"])
except RuntimeError as error:
    assert "has not answered" in str(error)
else:
    raise SystemExit("the store has answered")
sys.exit(7)
"""


@pytest.mark.parametrize("what", ["request", "connection"])
def test_a_process_ends_with_its_own_status_while_a_store_is_silent(what):
    context = multiprocessing.get_context("spawn")
    ports, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        command = [sys.executable, "-c", ENDS, str(ports.recv()), str(server.pid), what]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (7, "")
    finally:
        os.kill(server.pid, signal.SIGCONT)
        server.kill()
        server.join()


def test_descriptors_that_other_threads_close_fail_no_connection():
    """As the workers of a data loader do while a save connects."""
    ended = threading.Event()

    def open_and_close():
        while not ended.is_set():
            for descriptor in [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]:
                os.close(descriptor)

    thread = threading.Thread(target=open_and_close)
    thread.start()
    try:
        assert [open_leased(lambda: "a store", 120.0) for _ in range(300)] == ["a store"] * 300
    finally:
        ended.set()
        thread.join()
