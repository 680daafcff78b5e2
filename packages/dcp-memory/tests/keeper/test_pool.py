"""The memory of a keeper where the machine, and not the keeper's budget, is the limit."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from dcp_memory.keeper import pool as pool_module
from dcp_memory.keeper.pool import MARGIN_BYTES, Pool, Segment, available_bytes

MIB = 1 << 20


class Machine:
    """A pool on a machine with so much memory, and what it has allocated."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.live: set[Segment] = set()
        self.woken = threading.Event()
        self.pool = Pool(1 << 40, self.available, self.woken.set)

    def available(self) -> int:
        return MARGIN_BYTES + self.nbytes - sum(each.nbytes for each in self.live)

    def make(self, nbytes: int) -> Segment | OSError:
        """Allocate a segment."""
        made: list[Segment | OSError] = []
        self.pool.make(nbytes, made.append, zeroed=False)
        while not made:
            self.woken.wait()
            self.woken.clear()
            self.pool.collect()
        return made[0]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made, make, free = Machine(8 * MIB), pool_module.make_segment, Segment.free

    def counted(*args: object, **options: object) -> Segment:
        segment = make(*args, **options)  # type: ignore[arg-type]
        made.live.add(segment)
        return segment

    def freed(segment: Segment) -> None:
        free(segment)
        made.live.discard(segment)

    monkeypatch.setattr(pool_module, "make_segment", counted)
    monkeypatch.setattr(Segment, "free", freed)
    yield made
    made.pool.close(lambda _: False)


def test_memory_that_is_about_to_be_free_is_given_again(machine: Machine) -> None:
    """Else a save would fail for want of memory whose objects have just been deleted."""
    segment = machine.make(6 * MIB)
    for _ in range(50):
        assert isinstance(segment, Segment)
        with pytest.raises(MemoryError, match=r"this machine, or the control group"):
            machine.pool.make(3 * MIB, lambda _: None, zeroed=False)
        machine.pool.destroy(segment)
        segment = machine.make(6 * MIB)


def test_less_memory_than_was_said_is_made_up_for(machine: Machine) -> None:
    """What the kernel says is free may be less than it was a moment ago."""
    kept = [machine.make(2 * MIB) for _ in range(3)]
    machine.pool.reclaim_with(lambda: bool(kept) and machine.pool.destroy(kept.pop()) is None)  # type: ignore[arg-type]
    exact, said = machine.available, iter([10 * MIB + MARGIN_BYTES])
    machine.pool._available = lambda: next(said, 0) or exact()
    assert isinstance(machine.make(5 * MIB), Segment)
    assert len(kept) == 1


def test_memory_is_counted_once(machine: Machine) -> None:
    segment = machine.make(6 * MIB)
    assert isinstance(segment, Segment)
    machine.pool.destroy(segment)
    first = machine.make(4 * MIB)
    assert isinstance(first, Segment)
    with pytest.raises(MemoryError):
        machine.pool.make(5 * MIB, lambda _: None, zeroed=False)
    assert machine.pool.total == 4 * MIB


def test_no_memory_of_its_own_does_not_end_the_thread_that_allocates(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(pool_module, "make_segment", mock.Mock(side_effect=MemoryError))
        failed = machine.make(MIB)
    assert isinstance(failed, OSError)
    assert failed.errno == errno.ENOMEM
    assert isinstance(machine.make(MIB), Segment)


GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemAvailable:   {32 << 20} kB\n")
    (folder / "self" / "cgroup").write_text("")
    return folder


def group(folder: Path, limit: str, usage: int, stat: str, *, version: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(stat)


def test_the_machine_is_the_limit_without_control_groups(tmp_path: Path, proc: Path) -> None:
    assert available_bytes(str(tmp_path / "groups"), str(proc)) == 32 * GIB


@pytest.mark.parametrize(("version", "line"), [(1, "4:cpu,memory:/job/step"), (2, "0::/job/step")])
def test_the_tightest_group_above_is_the_limit(tmp_path: Path, proc: Path, version: int, line: str) -> None:
    groups = tmp_path / "groups"
    mount = groups / "memory" if version == 1 else groups
    prefix = "total_" if version == 1 else ""
    none = str((1 << 63) - 4096) if version == 1 else "max"
    cache = f"{prefix}inactive_file {GIB}\n{prefix}active_file 0\n{prefix}shmem {GIB}\nodd\n"
    (proc / "self" / "cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    group(mount, none, 0, "", version=version)
    group(mount / "job", str(8 * GIB), 4 * GIB, cache, version=version)
    group(mount / "job" / "step", none, 3 * GIB, "", version=version)
    assert available_bytes(str(groups), str(proc)) == 5 * GIB  # files in the cache are given up
    group(mount / "job" / "step", str(2 * GIB), 3 * GIB, "", version=version)
    assert available_bytes(str(groups), str(proc)) == 0
    (proc / "self" / "cgroup").write_text(f"{line}-that-is-not-visible-here\n")
    assert available_bytes(str(groups), str(proc)) == 5 * GIB


def test_this_machine_has_some() -> None:
    assert 0 < available_bytes() < 1 << 60
