"""Lent memory: what is staged in it becomes an object without a copy; how much is allocated, and when it is free."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from dcp_io import StorageError
from dcp_io.lent_memory import FileId
from dcp_memory import keeper_status, start_keeper, stop_keeper
from dcp_memory.client.store import KeeperStore

MIB = 1 << 20
SIZE = 2 * MIB


def stage(store: KeeperStore, name: str, letter: bytes, nbytes: int = SIZE) -> None:
    """Save an object as a saver does that stages in lent memory."""
    loan = store.lender().lend(nbytes, timeout_seconds=0)
    loan.memory[:nbytes] = letter * nbytes
    write(store, name, memoryview(loan.memory)[:nbytes])
    loan.give_back()


def write(store: KeeperStore, name: str, data: memoryview) -> None:
    sink = store.create(name)
    sink.write([b"head", data[: MIB + 5], b"between", data[MIB + 5 :], b"tail"])
    sink.close()


def whole(letter: bytes, nbytes: int = SIZE) -> bytes:
    return b"head" + letter * (MIB + 5) + b"between" + letter * (nbytes - MIB - 5) + b"tail"


def test_what_is_staged_in_lent_memory_is_not_copied(run: str) -> None:
    store = KeeperStore(run, "step-1")
    stage(store, "x", b"a")
    status = keeper_status(run)
    assert status is not None
    assert (status.arenas, status.arena_bytes, status.lent_bytes, status.free_arena_bytes) == (1, SIZE, 0, 0)
    assert status.used_slab_bytes < MIB  # for the small pieces
    assert store.read("x") == whole(b"a")
    with closing(store.open("x")) as source:
        views = [source.fetch(4, 100), source.fetch(5, 100)]
        first, second = (FileId.find(view) for view in views)
    assert first is not None
    assert second == (first[0], first[1] + 1)


def test_memory_goes_round(run: str) -> None:
    """Two checkpoints are kept and one is written: three arenas for any number of saves."""
    store = KeeperStore(run)
    lender, seen = store.lender(), set()
    for step in range(8):
        stage(store.child(f"step-{step}"), "x", b"%d" % step)
        lender.prepare(SIZE)
        if step >= 2:
            store.child(f"step-{step - 2}").delete("x")
        loan = lender.lend(SIZE, timeout_seconds=0)
        seen.add(id(loan))
        assert not loan.closed
        loan.give_back()
    status = keeper_status(run)
    assert status is not None
    assert (status.arenas, len(seen), status.objects) == (3, 3, 2)
    assert [store.child(f"step-{step}").read("x") for step in (6, 7)] == [whole(b"6"), whole(b"7")]


def test_a_loan_waits_for_its_allowance(run: str) -> None:
    store = KeeperStore(run)
    for step in range(3):
        stage(store.child(f"step-{step}"), "x", b"a")
    lender = store.lender()
    lender.prepare(SIZE)
    assert keeper_status(run).arenas == 3  # type: ignore[union-attr]
    begun = threading.Event()
    freed: list[object] = []

    def free() -> None:
        begun.wait()
        freed.append(store.child("step-0").delete("x"))

    thread = threading.Thread(target=free)
    thread.start()
    begun.set()
    loan = lender.lend(SIZE, timeout_seconds=60)
    thread.join()
    assert freed
    assert keeper_status(run).arenas == 3  # type: ignore[union-attr]
    loan.give_back()
    stage(store.child("step-3"), "x", b"a")
    stage(store.child("step-4"), "x", b"a")  # without patience, more is taken
    assert keeper_status(run).arenas == 4  # type: ignore[union-attr]


def test_objects_keep_what_they_refer_to(run: str) -> None:
    """Memory is lent again only when no object, sink or reader has it."""
    store = KeeperStore(run)
    stage(store, "x", b"a")
    with closing(store.open("x")) as source:
        kept = source.fetch(4, 1000)
        store.delete("x")
        stage(store, "y", b"b")
        assert bytes(source.fetch(4, 1000)) == b"a" * 1000
    assert bytes(kept) == b"a" * 1000  # a view keeps it, too
    stage(store, "z", b"c")
    assert bytes(kept) == b"a" * 1000
    assert keeper_status(run).arenas == 3  # type: ignore[union-attr]
    del kept
    store.delete("y")
    store.delete("z")
    assert keeper_status(run).free_arena_bytes == 3 * SIZE  # type: ignore[union-attr]


def test_an_object_is_copied_without_a_copy(run: str) -> None:
    store = KeeperStore(run)
    stage(store, "x", b"a")
    with closing(store.open("x")) as source:
        sink = store.create("y")
        sink.write([source.fetch(4, MIB)])
        store.delete("x")
    sink.close()
    assert store.read("y") == b"a" * MIB
    status = keeper_status(run)
    assert status is not None
    assert (status.arenas, status.free_arena_bytes) == (1, 0)


def test_memory_that_is_not_lent_is_copied(run: str) -> None:
    """A buffer of a loan that has been given back may be overwritten by the next one."""
    store = KeeperStore(run)
    loan = store.lender().lend(SIZE, timeout_seconds=0)
    loan.memory[:] = b"a" * SIZE
    loan.give_back()
    sink = store.create("x")
    sink.write([memoryview(loan.memory)])
    sink.close()
    again = store.lender().lend(SIZE, timeout_seconds=0)
    assert again is loan
    again.memory[:] = b"b" * SIZE
    assert store.read("x") == b"a" * SIZE


def test_other_sizes_replace_what_is_free(run: str) -> None:
    store = KeeperStore(run)
    loans = [store.lender().lend(SIZE, timeout_seconds=0) for _ in range(3)]
    for loan in loans:
        loan.give_back()
    large = [store.lender().lend(3 * SIZE, timeout_seconds=0) for _ in range(3)]
    status = keeper_status(run)
    assert status is not None
    assert (status.arenas, status.arena_bytes) == (3, 9 * SIZE)
    assert all(loan.closed for loan in loans)
    for loan in large:
        loan.give_back()
    small = store.lender().lend(MIB, timeout_seconds=0)
    assert MIB <= small.nbytes <= 3 * MIB


def test_more_than_there_is_is_refused(run: str) -> None:
    start_keeper(run, max_bytes=8 * MIB)
    lender = KeeperStore(run).lender()
    loan = lender.lend(6 * MIB, timeout_seconds=0)
    with pytest.raises(StorageError, match=r"6,291,456 bytes in use|--max-bytes") as caught:
        lender.lend(4 * MIB, timeout_seconds=0.05)
    assert caught.value.errno == 28
    lender.prepare(4 * MIB)
    loan.give_back()
    assert lender.lend(8 * MIB - 4096, timeout_seconds=0).nbytes >= 8 * MIB - 4096
    assert loan.closed


def test_the_lender_is_one_for_all_stores_of_a_keeper(run: str) -> None:
    lender = KeeperStore(run, "a").lender()
    assert KeeperStore(run, "b").lender() is lender
    assert lender.lend(1, timeout_seconds=0).nbytes >= 1
    stop_keeper(run)
    assert lender.lend(1, timeout_seconds=0).nbytes >= 1  # of a new keeper


BORROW = """
import subprocess, sys
from dcp_memory.client.store import KeeperStore
loan = KeeperStore(sys.argv[1]).lender().lend(int(sys.argv[2]), timeout_seconds=0)
loan.memory[:4] = b"mine"
if sys.argv[3] == "child":  # a process that the borrower has passed its memory to
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[loan.descriptor])
    print(child.pid, end=" ")
print(loan.inode, flush=True)
sys.stdin.read()
"""


def borrow(run: str, kind: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BORROW, run, str(SIZE), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_the_loan_of_a_killed_process_is_free(run: str, folder: Path) -> None:
    with borrow(run, "alone") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        process.wait()
    while not keeper_status(run).free_arena_bytes:  # type: ignore[union-attr]
        time.sleep(0.01)
    loan = KeeperStore(run).lender().lend(SIZE, timeout_seconds=60)
    assert keeper_status(run).arenas == 1  # type: ignore[union-attr]
    loan.give_back()


def test_what_a_dead_process_has_passed_on_is_not_lent_again(run: str) -> None:
    """The worker of a killed trainer may still write from the memory in which the trainer has staged."""
    with borrow(run, "child") as process:
        assert process.stdout is not None
        child, inode = map(int, process.stdout.readline().split())
        process.kill()
        process.wait()
    other = KeeperStore(run).lender().lend(SIZE, timeout_seconds=0)
    assert other.inode != inode
    os.kill(child, 9)
    while not keeper_status(run).free_arena_bytes:  # type: ignore[union-attr]
        time.sleep(0.01)
    assert KeeperStore(run).lender().lend(SIZE, timeout_seconds=60).inode == inode


def test_a_forked_child_keeps_no_memory(run: str) -> None:
    """Memory of a trainer is free when the trainer ends, though a process for loading data lives on."""
    store = KeeperStore(run)
    loan = store.lender().lend(SIZE, timeout_seconds=0)
    inode = loan.inode
    child = os.fork()
    if not child:
        files = [
            os.readlink(f"/proc/self/fd/{name}")
            for name in os.listdir("/proc/self/fd")
            if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}")
        ]
        held = sum("dcp-keeper" in name for name in files)
        with open("/proc/self/maps") as maps:
            held += sum("dcp-keeper" in line for line in maps)
        try:
            fresh = KeeperStore(run).lender().lend(SIZE, timeout_seconds=0).inode != inode
        except BaseException:
            fresh = False
        os._exit(0 if fresh and not held else 1)
    _, code = os.waitpid(child, 0)
    assert code == 0
    loan.memory[:1] = b"x"
    loan.give_back()


@pytest.mark.parametrize("lent", [True, False])
def test_memory_that_is_read_is_not_reused_though_the_connection_is_lost(run: str, lent: bool) -> None:
    """After an interrupt, say, or when the keeper was stopped for a while, a load goes on with what it has mapped."""
    store = KeeperStore(run)
    data = b"a" * SIZE

    def save(name: str, letter: bytes) -> None:
        if lent:
            stage(store, name, letter)
        else:
            sink = store.create(name)
            sink.write([letter * SIZE])
            sink.close()

    save("x", b"a")
    with closing(store.open("x")) as source:
        view = source.fetch(4 if lent else 0, MIB)
        store._connection().link.close()
        store.delete("x")
        for number in range(3):
            save(f"{number}", b"b")
        assert bytes(view) == data[:MIB]
    for number in range(3):
        store.delete(f"{number}")
    del view, source
    store._connection().segments.forget()
    gc.collect()
    while (status := keeper_status(run)) is None or status.used_slab_bytes:
        time.sleep(0.01)
    assert status.free_arena_bytes == status.arena_bytes
