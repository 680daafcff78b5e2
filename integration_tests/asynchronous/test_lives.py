"""Savers in lives that end or divide: dropped without close, forked, at the interpreter's end, without their group."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from dcp_async import WorkerError
from dcp_async.savers.worker_messages import NewArena
from integration_tests.asynchronous import scripts

DROPPED = """
import gc, os, sys, time, threading, warnings, weakref
import psutil, torch
from dcp_async import AsyncSaver, SaverOptions
from integration_tests.kits.memory import MemoryWriter

gc.disable()  # as trainers do: what is freed is freed without it
warnings.simplefilter("default")
me = psutil.Process()

def drop(kind):
    saver = AsyncSaver(kind, options=SaverOptions(copy_threads=2))
    saver.save({"w": torch.ones(10)}, checkpoint_id="first").result()
    last = saver.save({"w": torch.ones(1 << 20)}, checkpoint_id="last")
    return weakref.ref(saver), last

def memory_files():
    return [one for one in os.listdir("/proc/self/fd") if "dcp-staging" in os.path.realpath(f"/proc/self/fd/{one}")]

for kind in ("thread", "process"):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gone, last = drop(kind)
    saved = "w" in last.result().state_dict_metadata
    print(kind, gone() is None, [each.category.__name__ for each in caught], saved)
    end = time.monotonic() + 100
    while (me.children() or threading.active_count() > 1 or memory_files()) and time.monotonic() < end:
        time.sleep(0.05)
    print(len(me.children()), threading.active_count(), len(memory_files()))
"""


def test_a_dropped_saver_completes_its_saves_and_frees_everything(tmp_path: Path) -> None:
    ran = scripts.run(DROPPED, tmp_path)
    expected = [line for kind in ("thread", "process") for line in (f"{kind} True ['ResourceWarning'] True", "0 1 0")]
    assert (ran.stdout.splitlines(), ran.stderr) == (expected, "")


FORKED = """
import os, sys, threading, time, warnings
import torch
from dcp_async import AsyncCheckpointerType, AsyncSaver, async_save
from dcp_async.saver import shared_saver
from integration_tests.kits.memory import MemoryWriter
warnings.filterwarnings("ignore", "This process", DeprecationWarning)

class Slow(MemoryWriter):
    gate = threading.Event()
    def write_data(self, plan, planner):
        Slow.gate.wait(60)
        return super().write_data(plan, planner)

def told(call):
    try:
        return type(call()).__name__
    except BaseException as error:
        return type(error).__name__ + (" here" if "forked" in str(error) else "")

def child(saver, future):
    calls = [lambda: saver.save({"w": torch.ones(3)}, checkpoint_id="child"), saver.warm_up, saver.wait,
             lambda: saver.lock().__enter__(), lambda: future.result(1), lambda: future.exception(1),
             saver.close, saver.end]
    print(*map(told, calls), saver.closed)
    files = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    print("memory files", len([one for one in files if "dcp-staging" in one]))
    made = async_save({"w": torch.ones(3)}, storage_writer=MemoryWriter("child")).result()  # a saver of its own
    print("own", list(made.state_dict_metadata), flush=True)
    sys.exit(0)  # leaves the parent's `with`

process = AsyncSaver("process")
process.save({"w": torch.ones(3)}, checkpoint_id="process").result()
shared_saver("thread")
with AsyncSaver("thread") as saver:
    saver.save({"w": torch.ones(3)}, storage_writer=MemoryWriter("a")).result()
    future = saver.save({"w": torch.ones(3)}, storage_writer=Slow("b"))
    pid = os.fork()
    if pid == 0:
        child(saver, future)
    print("child", os.waitpid(pid, 0)[1])
    Slow.gate.set()
    print("parent", list(future.result().state_dict_metadata))
process.save({"w": torch.ones(3)}, checkpoint_id="process").result()
process.close()
print("closed")
"""


def test_a_forked_child_is_told_and_leaves_its_parents_saver_alone(tmp_path: Path) -> None:
    ran = scripts.run(FORKED, tmp_path)
    refused = "SaverClosedError here"
    assert (ran.stdout.splitlines(), ran.stderr) == (
        [
            f"{' '.join([refused] * 6)} NoneType NoneType True",
            "memory files 0",
            "own ['w']",
            "child 0",
            "parent ['w']",
            "closed",
        ],
        "",
    )


AT_EXIT = """
import atexit, threading
import torch
from dcp_async import AsyncSaver, async_save, AsyncCheckpointerType

state = {"w": torch.ones(1 << 20)}

def late(begin):
    try:
        begin().result()
        print("saved")
    except BaseException as error:
        print(type(error).__name__, "the interpreter is ending" in str(error))

thread = AsyncSaver("thread")
begun = AsyncSaver("thread")
begun.save(state, checkpoint_id="begun").result()
for begin in (
    lambda: thread.save(state, checkpoint_id="late"),
    lambda: begun.save(state, checkpoint_id="late"),
    lambda: AsyncSaver("process").save(state, checkpoint_id="late"),
    lambda: async_save(state, checkpoint_id="late", async_checkpointer_type=AsyncCheckpointerType.THREAD),
):
    atexit.register(late, begin)
"""


def test_a_save_that_begins_while_the_interpreter_ends_is_refused(tmp_path: Path) -> None:
    ran = scripts.run("import warnings; warnings.simplefilter('ignore')\n" + AT_EXIT, tmp_path)
    assert (ran.stdout.splitlines(), ran.stderr) == (["SaverClosedError True"] * 4, "")
    assert not (tmp_path / "late").exists()


DESTROYED = """
import multiprocessing, os, sys, warnings
import torch
import torch.distributed as dist
import dcp_async, dcp_fs
from dcp_async import AsyncSaver
warnings.filterwarnings("ignore", "This process", DeprecationWarning)

def rank(number, port, door):
    torch.set_num_threads(1)
    for kind, who in CASES:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if number == 0 else None
        if number == 0:
            door.put(store.port)
        else:
            store = dist.TCPStore("127.0.0.1", door.get(), None, False)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        del store
        saver = AsyncSaver(kind)
        future = saver.save({"w": torch.ones(3), f"r{number}": torch.ones(9)}, checkpoint_id=f"{kind} {who}")
        if who == "all" or number == 0:
            dist.destroy_process_group()
        line = f"{number} {kind} {who} {sorted(future.result().state_dict_metadata)}\\n"
        print(line, end="", flush=True)  # in one piece: several ranks write into one pipe
        saver.close()
        if dist.is_initialized():
            dist.destroy_process_group()

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    door = context.SimpleQueue()
    ranks = [context.Process(target=rank, args=(number, 0, door)) for number in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(each.exitcode for each in ranks))
"""


@pytest.mark.parametrize(
    "cases",
    [
        [("thread", "all"), ("thread", "the first"), ("process", "all")],
        pytest.param([("process", "the first")], marks=pytest.mark.slow),
    ],
)
def test_a_save_outlives_its_process_group(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    ran = scripts.run(DESTROYED.replace("CASES", repr(cases)), tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == sorted(
        f"{number} {kind} {who} ['r0', 'r1', 'w']" for number in range(2) for kind, who in cases
    )


def test_a_worker_that_cannot_do_its_part_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only in a save: what comes before one, such as mapping memory, is not answered by itself."""
    with dcp.AsyncSaver("process") as saver:
        saver.warm_up()
        backend: Any = saver.backend
        worker = backend.worker
        send = worker.send

        def grown(message: Any, descriptor: int | None = None) -> None:
            send(NewArena(message.number, 1 << 62) if isinstance(message, NewArena) else message, descriptor)

        monkeypatch.setattr(worker, "send", grown)
        failed: Any = saver.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
        error = failed.exception()
        assert isinstance(error, OSError | OverflowError | ValueError), error
        assert isinstance(error.__cause__, WorkerError)
        assert re.search(r"in the saver's process:(.|\n)*mmap", str(error.__cause__))
        assert not worker.alive
        again: Any = saver.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
        again.result()


def test_a_closed_saver_is_not_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    for end in (dcp.AsyncSaver.close, dcp.AsyncSaver.end):
        saver = dcp.AsyncSaver("thread")
        end(saver)
        del saver
    assert not [each for each in recwarn if each.category is ResourceWarning]
