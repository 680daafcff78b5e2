"""Keepers where memory is short: control groups (containers) with a limit, and machines with a small /dev/shm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from dcp_io import StorageError
from dcp_memory import keeper_status, start_keeper
from dcp_memory.client.store import KeeperStore

MIB = 1 << 20
_GROUPS = Path("/sys/fs/cgroup")
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'

root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


class Group:
    """A control group with a memory limit, of version 1 or 2."""

    def __init__(self, limit_bytes: int) -> None:
        line = next(
            line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line or "::" in line
        )
        _, controllers, path = line.split(":", 2)
        self._first = controllers == "memory"
        above = _GROUPS / ("memory" if self._first else "") / path.lstrip("/")
        self.path = above / f"dcp-test-{os.getpid()}-{time.monotonic_ns()}"
        self.path.mkdir()
        try:
            (self.path / ("memory.limit_in_bytes" if self._first else "memory.max")).write_text(str(limit_bytes))
        except OSError:
            self.path.rmdir()
            raise

    def command(self, *words: str) -> list[str]:
        """The words of a command that runs in the group."""
        return ["sh", "-c", _ENTER, str(self.path), *words]

    @property
    def kills(self) -> int:
        """Number of processes that the kernel has killed, as the group had no memory left."""
        text = (self.path / ("memory.oom_control" if self._first else "memory.events")).read_text()
        return int(text.split("oom_kill ")[1].split()[0])

    def remove(self) -> None:
        for _ in range(500):
            with suppress(OSError):
                self.path.rmdir()
                return
            time.sleep(0.01)


@pytest.fixture
def make_group() -> Iterator[Callable[[int], Group]]:
    made: list[Group] = []

    def make(limit_bytes: int) -> Group:
        try:
            made.append(Group(limit_bytes))
        except OSError as error:
            pytest.skip(f"control groups cannot be made here: {error}")
        return made[-1]

    yield make
    for each in made:
        each.remove()


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Context manager that ends a process, also when the test has failed."""
    try:
        yield
    finally:
        process.terminate()


def fill(store: KeeperStore, names: list[str]) -> None:
    """Write objects until there is no memory left."""
    while len(names) < 250:
        sink = store.create(f"{len(names)}")
        try:
            sink.write([bytes([len(names)]) * MIB])
            sink.close()
        except StorageError:
            sink.abort()
            raise
        names.append(sink.name)


@root
def test_a_keeper_at_the_limit_of_its_group_refuses_and_is_not_killed(
    run: str, folder: Path, make_group: Callable[[int], Group]
) -> None:
    group = make_group(160 * MIB)
    keeper = [sys.executable, "-m", "dcp_memory.keeper", run, "--max-bytes", "8G"]
    with subprocess.Popen(group.command(*keeper)) as process, ended(process):
        while keeper_status(run) is None:
            time.sleep(0.01)
        store, names = KeeperStore(run, "step"), list[str]()
        with pytest.raises(StorageError, match=r"control group \(container\) of the keeper|no memory is left"):
            fill(store, names)
        assert 50 <= len(names) < 160
        with pytest.raises(StorageError):
            store.lender().lend(100 * MIB, timeout_seconds=0)
        for number, name in enumerate(names):
            with closing(store.open(name)) as source:
                assert bytes(source.fetch(0, MIB)) == bytes([number]) * MIB
            store.delete(name)
        loan = store.lender().lend(60 * MIB, timeout_seconds=0)
        loan.memory[: 60 * MIB] = b"x" * (60 * MIB)
        loan.give_back()
        assert process.poll() is None
        assert group.kills == 0


STAGE = """
import sys
from dcp_memory.client.store import KeeperStore
store, size = KeeperStore(sys.argv[1]), int(sys.argv[2])
loan = store.lender().lend(size, timeout_seconds=0)
for start in range(0, size, 1 << 20):
    loan.memory[start : start + (1 << 20)] = b"x" * (1 << 20)
sink = store.create("x")
sink.write([memoryview(loan.memory)[:size]])
sink.close()
"""


@root
def test_the_keepers_group_pays_and_not_the_trainers(
    run: str, folder: Path, make_group: Callable[[int], Group]
) -> None:
    start_keeper(run)
    group = make_group(160 * MIB)
    subprocess.run(group.command(sys.executable, "-c", STAGE, run, str(300 * MIB)), check=True)
    assert KeeperStore(run).size("x") == 300 * MIB
    assert group.kills == 0


@root
def test_dev_shm_may_be_small(run: str, folder: Path) -> None:
    """As in containers, where it has 64 MiB; here it has one page, and so has the folder for temporary files."""
    script = 'mount -t tmpfs -o size=4k none /dev/shm && mount -t tmpfs -o size=64k none /var/tmp && exec "$@"'
    code = f"{STAGE}\nfrom dcp_memory import stop_keeper\nassert store.size('x') == size and stop_keeper(sys.argv[1])"
    command = ["unshare", "-m", "sh", "-c", script, "sh", sys.executable, "-c", code, run, str(64 * MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr


SAVE = """
import sys
from dcp_memory.client.store import KeeperStore
KeeperStore(sys.argv[1]).publish("x", b"1")
print(flush=True)
sys.stdin.read()
"""


@root
@pytest.mark.parametrize("apart", [False, True])
def test_a_keeper_lives_as_long_as_the_control_group_in_which_it_was_started(
    run: str, folder: Path, make_group: Callable[[int], Group], apart: bool
) -> None:
    """As the step of a Slurm job, all of whose processes are killed at its end."""
    if apart:
        start_keeper(run)
    step = make_group(1 << 30)
    command = step.command(sys.executable, "-c", SAVE, run)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.readline()
        processes = [int(pid) for pid in (step.path / "cgroup.procs").read_text().split()]
        assert len(processes) == (1 if apart else 2)
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
    if apart:
        assert KeeperStore(run).read("x") == b"1"
    else:
        while keeper_status(run) is not None:
            time.sleep(0.01)
