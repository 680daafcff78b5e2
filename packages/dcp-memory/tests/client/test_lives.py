"""Lives of keepers and clients: killed, stopped, forked and interrupted at any moment; nothing grows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from dcp_io import StorageError
from dcp_memory import KeeperLostError, keeper_status, start_keeper, stop_keeper
from dcp_memory.client.store import KeeperStore

MIB = 1 << 20
WRITER = """
import sys, zlib
from dcp_memory.client.store import KeeperStore
store = KeeperStore(sys.argv[1], "step")
number = 0
while True:
    number += 1
    name = f"{sys.argv[2]}-{number % 7}"
    data = bytes([number % 251]) * (number * 77_777 % 3_000_000)
    store.delete(name)
    if number % 3:
        sink = store.create(name)
        for start in range(0, len(data), 500_000):
            sink.write([data[start : start + 500_000]])
        sink.close()
    else:
        loan = store.lender().lend(max(1, len(data)), timeout_seconds=0)
        loan.memory[: len(data)] = data
        sink = store.create(name)
        sink.write([memoryview(loan.memory)[: len(data)]])
        sink.close()
        loan.give_back()
    print(number, flush=True)
"""


def whole(data: memoryview) -> bool:
    """Whether an object of `WRITER` is one that it has written."""
    array = np.frombuffer(data, np.uint8)
    return len(array) == 0 or bool((array == array[0]).all())


@pytest.mark.parametrize("rounds", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_writers_leave_whole_objects_and_no_memory(run: str, rounds: int) -> None:
    dice, store = random.Random(rounds), KeeperStore(run, "step")
    start_keeper(run)
    for number in range(rounds):
        with subprocess.Popen([sys.executable, "-c", WRITER, run, str(number % 3)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(dice.randrange(1, 20)):
                writer.stdout.readline()
            time.sleep(dice.random() / 100)
            writer.kill()
        for entry in store.list():
            with closing(store.open(entry.name)) as source:
                assert source.size() == entry.bytes
                assert whole(source.fetch(0, entry.bytes))
    for entry in store.list():
        store.delete(entry.name)
    while (status := keeper_status(run)) is not None and (status.used_slab_bytes or status.lent_bytes):
        time.sleep(0.01)
    assert status is not None
    assert (status.objects, status.free_arena_bytes) == (0, status.arena_bytes)
    assert status.bytes == status.arena_bytes + status.slab_bytes


def test_a_stopped_client_holds_up_nobody(run: str) -> None:
    """Also one that is stopped in the middle of a request."""
    store = KeeperStore(run, "step")
    with subprocess.Popen([sys.executable, "-c", WRITER, run, "a"], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        for _ in range(20):
            writer.stdout.readline()
            os.kill(writer.pid, signal.SIGSTOP)
            store.publish("mine", b"x" * MIB)
            assert store.read("mine") == b"x" * MIB
            os.kill(writer.pid, signal.SIGCONT)
        writer.kill()


def test_a_keeper_that_is_killed_while_it_is_read_leaves_what_is_mapped(run: str) -> None:
    store = KeeperStore(run)
    sink = store.create("x")
    sink.write([b"a" * MIB])
    sink.close()
    with closing(store.open("x")) as source:
        view = source.fetch(0, MIB)
        os.kill(start_keeper(run).pid, signal.SIGKILL)
        assert bytes(view) == b"a" * MIB
        assert bytes(source.fetch(5, 10)) == b"a" * 10
        # A second segment cannot be had any more, but this one is there.
        target = bytearray(10)
        source.read_into(0, [memoryview(target)])
        assert target == b"a" * 10


def test_a_keeper_that_ends_while_it_is_read_gives_no_zeros(run: str) -> None:
    store = KeeperStore(run)
    loan = store.lender().lend(MIB, timeout_seconds=0)
    loan.memory[:MIB] = b"a" * MIB
    for name, data in (("lent", memoryview(loan.memory)[:MIB]), ("copied", memoryview(b"b" * MIB))):
        sink = store.create(name)
        sink.write([data])
        sink.close()
    loan.give_back()
    with closing(store.open("lent")) as lent, closing(store.open("copied")) as copied:
        views = [lent.fetch(0, MIB), copied.fetch(0, MIB)]
        stop_keeper(run)
        assert [bytes(view) for view in views] == [b"a" * MIB, b"b" * MIB]


def test_threads_share_a_connection(run: str) -> None:
    store = KeeperStore(run)
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                data = bytes([number]) * (turn * 40_000)
                store.publish(f"{number}", data)
                with closing(store.open(f"{number}")) as source:
                    if bytes(source.fetch(0, len(data))) != data:
                        wrong.append((number, turn))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_child_has_a_connection_of_its_own(run: str) -> None:
    store = KeeperStore(run)
    store.publish("x", bytes(MIB))
    sink = store.create("mine")
    sink.write([b"1" * MIB])
    with closing(store.open("x")) as source:
        child = os.fork()
        if not child:
            code = 1
            try:
                assert store.read("x") == bytes(MIB)
                store.publish("y", b"child")
                try:
                    sink.close()
                except KeeperLostError:
                    sink.abort()
                    code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert bytes(source.fetch(0, 10)) == bytes(10)
    sink.close()
    assert (store.read("y"), store.read("mine")) == (b"child", b"1" * MIB)


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_nothing_grows_over_many_saves(run: str, rounds: int) -> None:
    """Neither descriptors nor memory, threads or mappings, of the keeper or of its client."""
    store, keeper = KeeperStore(run), start_keeper(run).pid
    lender = store.lender()

    def save(step: int) -> None:
        folder = store.child(f"step-{step}")
        loan = lender.lend(MIB, timeout_seconds=0)
        loan.memory[:MIB] = bytes([step % 251]) * MIB
        for name in ("a", "b"):
            sink = folder.create(name)
            sink.write([b"head", memoryview(loan.memory)[:MIB], bytes(400_000)])
            sink.close()
        folder.publish(".metadata", bytes(300_000))
        loan.give_back()
        lender.prepare(MIB)
        with closing(folder.open("a")) as source:
            assert bytes(source.fetch(4, 1)) == bytes([step % 251])
        for entry in store.child(f"step-{step - 2}").list():
            store.child(f"step-{step - 2}").delete(entry.name)

    def sizes() -> tuple[int, ...]:
        found = []
        for pid in (os.getpid(), keeper):
            found += [len(os.listdir(f"/proc/{pid}/{each}")) for each in ("fd", "task")]
            found.append(len(Path(f"/proc/{pid}/maps").read_text().splitlines()) // 20)
        status = keeper_status(run)
        assert status is not None
        return (*found, status.arenas, status.bytes, status.objects)

    for step in range(10):
        save(step)
    before = sizes()
    for step in range(10, 10 + rounds):
        save(step)
    # The keeper may not have closed the last connection yet.
    assert any(time.sleep(0.05) or sizes() == before for _ in range(2000)), (before, sizes())


def test_many_objects_and_odd_sizes(run: str) -> None:
    store = KeeperStore(run, "many")
    for number in range(2000):
        store.publish(f"{number}", b"%d" % number)
    for size in (0, 1, 4095, 4096, 4097, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, MIB + 1):
        sink = store.create(f"size-{size}")
        sink.write([bytes(size)])
        sink.close()
    assert {entry.bytes for entry in store.list() if entry.name.startswith("size")} >= {0, 1, MIB + 1}
    assert len(store.list()) == 2009
    assert store.read("1999") == b"1999"
    assert len(KeeperStore(run).folders()) == 1
    for entry in store.list():
        store.delete(entry.name)
    status = keeper_status(run)
    assert status is not None
    assert (status.objects, status.used_slab_bytes, status.bytes) == (0, 0, status.slab_bytes)


def test_a_full_keeper_publishes_nothing_partial(run: str) -> None:
    start_keeper(run, max_bytes=4 * MIB)
    store = KeeperStore(run)
    store.publish("kept", b"k" * MIB)
    sink = store.create("large")
    with pytest.raises(StorageError, match=r"keeper://a-run: .* bytes more do not fit"):
        sink.write([bytes(MIB)] * 10)
    sink.abort()
    with pytest.raises(StorageError):
        store.publish("kept", bytes(10 * MIB))
    assert store.read("kept") == b"k" * MIB
    assert [entry.name for entry in store.list()] == ["kept"]
    sink = store.create("large")
    sink.write([bytes(MIB)])
    sink.close()
    assert store.size("large") == MIB


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a socket that was just made
def test_interrupted_requests_break_nothing(run: str) -> None:
    """A KeyboardInterrupt in the middle of an exchange ends the connection, not the next answer."""
    store = KeeperStore(run)
    store.publish("x", b"x" * 200_000)
    dice = random.Random(1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(60):
            try:
                signal.setitimer(signal.ITIMER_REAL, dice.random() / 500)
                while True:
                    assert store.read("x") == b"x" * 200_000
                    assert store.size("x") == 200_000
            except KeyboardInterrupt:
                continue
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert store.read("x") == b"x" * 200_000
