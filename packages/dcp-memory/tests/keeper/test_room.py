"""How much memory a keeper may still take: of the machine, and of its control groups, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_memory.keeper.room import available_bytes

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
