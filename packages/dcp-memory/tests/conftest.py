"""Keepers of tests: each test has a folder of keepers of its own, and nothing of them is left after it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_memory import stop_keeper
from dcp_memory.client.connection import forget_connections
from dcp_memory.places import FOLDER_VARIABLE, KeeperFolder


def keeper_processes(folder: Path) -> list[int]:
    """The processes whose environment has this folder of keepers, other than this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            environment = (path / "environ").read_bytes()
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if f"{FOLDER_VARIABLE}={folder}\0".encode() in environment and b"dcp_memory.keeper" in command:
            found.append(int(path.name))
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of keepers of this test."""
    place = tmp_path / "keepers"
    monkeypatch.setenv(FOLDER_VARIABLE, str(place))
    monkeypatch.setenv("DCP_KEEPER_MAX_BYTES", str(1 << 30))
    yield place
    _end_keepers(place)


def _end_keepers(place: Path) -> None:
    for pid in keeper_processes(place):  # also of those that a test has stopped
        os.kill(pid, signal.SIGCONT)
    if place.is_dir() and not place.is_symlink():
        with KeeperFolder(str(place)) as opened:
            runs = opened.runs()
        for run in runs:
            stop_keeper(run, kill=True)
        forget_connections(str(place))
    assert keeper_processes(place) == []


@pytest.fixture
def run(folder: Path) -> str:
    """Name of a run whose keeper is not started yet."""
    return "a-run"
