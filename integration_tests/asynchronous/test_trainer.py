"""The trainer as users write it: no `__main__` guard, killed at any time, few descriptors, many saves."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from dcp_async import AsyncSaver
from dcp_core import load
from integration_tests.asynchronous import scripts
from integration_tests.process_end import has_ended

PLAIN = """
import torch
from dcp_async import AsyncCheckpointerType, async_save

future = async_save(
    {"w": torch.arange(10.0), "step": 3}, checkpoint_id="checkpoint", async_checkpointer_type=AsyncCheckpointerType.KIND
)
"""


@pytest.mark.parametrize("kind", ["THREAD", "PROCESS"])
def test_a_script_without_a_guard_that_just_ends(tmp_path: Path, kind: str) -> None:
    ran = scripts.run(PLAIN.replace("KIND", kind), tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    found = {"w": torch.zeros(10), "step": 0}
    load(found, checkpoint_id=tmp_path / "checkpoint")
    assert found["step"] == 3
    assert torch.equal(found["w"], torch.arange(10.0))


OWN_CLASSES = """
import enum, warnings
import torch
from dcp_async import AsyncSaver
from dcp_fs import FileSystemWriter

class Name(str, enum.Enum):
    A = "a"

class Number(enum.IntEnum):
    ONE = 1

class Writer(FileSystemWriter):
    pass

warnings.filterwarnings("ignore", "a key of class (Name|Number) is recorded as its text")
state = {Name.A: torch.ones(2), Number.ONE: {Name.A: 3}}
for kind in ("thread", "process"):
    with AsyncSaver(kind) as saver:
        for _ in range(2):
            found = saver.save(state, checkpoint_id=kind).result()
        print(*found.state_dict_metadata)
        if kind == "process":
            error = saver.save(state, storage_writer=Writer("w")).exception()
            print(type(error).__name__, "__main__" in str(error), "Writer" in str(error))
"""


def test_classes_of_the_script_as_keys(tmp_path: Path) -> None:
    """Named as by the thread saver, which has the very objects; a writer of such a class is refused clearly."""
    ran = scripts.run(OWN_CLASSES, tmp_path)
    thread, process, *refused = ran.stdout.splitlines()
    assert (thread, refused) == (process, ["WorkerError True True"]), ran.stderr
    assert len(thread.split()) == 2


DYING = """
import multiprocessing, os, sys, time
import torch
from dcp_async import AsyncSaver
from dcp_fs import FileSystemWriter
sys.path.insert(0, os.getcwd())
import slow

saver = AsyncSaver("process")
saver.warm_up()
# A process that loads data, forked: it has everything that this one has.
child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
child.start()
print(saver.backend.worker.pid, child.pid)
saver.save({"w": torch.ones(1 << 20)}, storage_writer=slow.Writer("checkpoint"))
print("saving")
time.sleep(600)
"""
SLOW = """
import os, time
from dcp_fs import FileSystemWriter

class Writer(FileSystemWriter):
    def write_data(self, plan, planner):
        open("writing", "w").close()
        time.sleep(600)
"""


def _open_files(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except OSError:
            continue
    return found


def _memory_files(pid: int) -> list[str]:
    return [name for name in _open_files(pid) if "dcp-staging" in name]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_nothing_is_left_of_a_trainer_that_was_killed(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    shared_before = set(os.listdir("/dev/shm"))
    with scripts.running(DYING, tmp_path) as process:
        worker, child = map(int, scripts.line(process).split())
        try:
            assert scripts.line(process) == "saving"
            assert scripts.eventually((tmp_path / "writing").exists)
            assert _memory_files(process.pid)
            scripts.end(process, how)
            assert scripts.eventually(lambda: has_ended(worker)), "the worker outlives its trainer"
            assert _memory_files(child) == [] or has_ended(child)
        finally:
            if not has_ended(child):
                os.kill(child, signal.SIGKILL)
    assert {name for name in os.listdir("/dev/shm") if "dcp" in name} - shared_before == set()


MANY = """
import gc, os
import torch
from dcp_async import AsyncSaver, SaverOptions

def measure(pid):
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status"))
    return (int(fields["VmRSS"].split()[0]) // 1024, int(fields["RssShmem"].split()[0]) // 1024,
            len(os.listdir(f"/proc/{pid}/fd")))

state = {f"p{n}": torch.ones(1 << 16) for n in range(32)}
with AsyncSaver("KIND", options=SaverOptions(copy_threads=2)) as saver:
    for number in range(200):
        state["step"] = number
        saver.save(state, checkpoint_id=f"checkpoint-{number % 3}").result()
        if number in (40, 199):
            gc.collect()
            pids = [os.getpid()] + ([saver.backend.worker.pid] if "KIND" == "process" else [])
            print(*[figure for pid in pids for figure in measure(pid)])
    print(saver.staging_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_two_hundred_saves_take_no_more_than_forty(tmp_path: Path, kind: str) -> None:
    ran = scripts.run(MANY.replace("KIND", kind), tmp_path)
    assert ran.returncode == 0, ran.stderr
    early, late, staging = ([int(word) for word in text.split()] for text in ran.stdout.splitlines())
    for at in range(0, len(early), 3):
        resident, shared, descriptors = (
            after - before for before, after in zip(early[at : at + 3], late[at : at + 3], strict=True)
        )
        assert resident <= 8, (early, late)
        assert max(shared, descriptors) <= 0, (early, late)
    assert staging == [32 * 4 * (1 << 16)]


FEW = """
import torch
from dcp_async import AsyncSaver
with AsyncSaver("process") as saver:
    for number in range(2):
        state = {f"p{n}": torch.full((4,), float(number)) for n in range(10_000)}
        saver.save(state, checkpoint_id="checkpoint").result()
print("done")
"""


@pytest.mark.slow
def test_ten_thousand_tensors_with_256_descriptors(tmp_path: Path) -> None:
    ran = scripts.run(FEW, tmp_path, prefix="ulimit -n 256;")
    assert ran.stdout == "done\n", ran.stderr
    found = {"p9999": torch.zeros(4)}
    load(found, checkpoint_id=tmp_path / "checkpoint")
    assert found["p9999"].tolist() == [1.0] * 4


def _listening(pid: int) -> list[str]:
    """The sockets of a process on which it accepts connections."""
    sockets = {name.removeprefix("socket:").strip("[]") for name in _open_files(pid) if name.startswith("socket:")}
    tables = [Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return [line[9] for line in lines if line[3] == "0A" and line[9] in sockets]


def test_no_port_is_opened(tmp_path: Path) -> None:
    before = _listening(os.getpid())
    with socket.create_server(("127.0.0.1", 0)):
        assert len(_listening(os.getpid())) == len(before) + 1  # it would be found
    with AsyncSaver("process") as saver:
        saver.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "checkpoint").result()
        assert _listening(saver.backend.worker.pid) == []  # type: ignore[attr-defined]
        assert _listening(os.getpid()) == before
