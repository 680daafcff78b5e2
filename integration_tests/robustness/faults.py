"""Faults of one rank at a chosen place of a save or load, and what the other ranks say of it.

The places are those of `integration_tests.failing`; here a rank may also be killed there, or stay for too long.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

import dcp_all as dcp
from dcp_base.hookspecs import CheckpointEvent
from dcp_core import hookimpl, plugins
from dcp_ranks import PeerOptions
from integration_tests import failing
from integration_tests.kits.coordinators import pretended_host

__all__ = [
    "Fault",
    "Told",
    "hold_the_interpreter",
    "save_beside_a_holder",
    "strike_load",
    "strike_save",
]

_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where, and on which rank."""

    kind: str
    """`raise`, `unpicklable`, `kill` or `stall`."""
    place: str
    phase: str
    """To which the place belongs."""
    rank: int
    deadline_seconds: float
    """How long ranks wait for each other."""
    news: str
    """A folder in which each rank that has raised leaves a file; whoever stalls waits for those of all others.

    So does each rank that begins a phase; whoever is killed in it waits for those.
    """


@dataclass(frozen=True)
class Told:
    """What one rank saw."""

    error: str
    text: str
    seconds: float


def strike_save(folder: str, fault: Fault, value: float) -> Told:
    """Save, with a fault."""
    place = fault.place if dist.get_rank() == fault.rank else None
    with _struck(fault):
        writer = failing._failing(dcp.FileSystemWriter, failing._STORAGE_PLACES, place)(folder)
        planner = failing._failing(dcp.DefaultSavePlanner, failing._PLANNER_PLACES, place)()
        state = failing.state(value, fails=place)
        options = {"timeout_seconds": fault.deadline_seconds}
        return _tell(fault, lambda: dcp.save(state, storage_writer=writer, planner=planner, **options))


def strike_load(folder: str, fault: Fault, value: float) -> Told:
    """Load, with a fault."""
    del value
    place = fault.place if dist.get_rank() == fault.rank else None
    with _struck(fault):
        reader = failing._failing(dcp.FileSystemReader, failing._STORAGE_PLACES, place)(folder)
        planner = failing._failing(dcp.DefaultLoadPlanner, failing._PLANNER_PLACES, place)()
        state = failing.state(0.0, fails=place)
        options = {"timeout_seconds": fault.deadline_seconds}
        return _tell(fault, lambda: dcp.load(state, storage_reader=reader, planner=planner, **options))


def save_beside_a_holder(folder: str, seconds: float, peer_timeout_seconds: float) -> Told:
    """Save, while the last rank's interpreter stands still in `state_dict`; each rank as if on a host of its own."""
    holder = dist.get_rank() == dist.get_world_size() - 1
    state = failing.state(1.0, fails="state_dict" if holder else None)
    options = PeerOptions(peer_timeout_seconds=peer_timeout_seconds)
    with (
        mock.patch.object(failing, "_fail_if", lambda wanted: hold_the_interpreter(seconds) if wanted else None),
        pretended_host(dist.get_rank()),
    ):
        start = time.monotonic()
        dcp.save(state, checkpoint_id=folder, peers=options)
        return Told("nothing", "", time.monotonic() - start)


def hold_the_interpreter(seconds: float) -> None:
    """Keep the GIL: no other thread of this process runs meanwhile."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


@contextlib.contextmanager
def _struck(fault: Fault) -> Iterator[None]:
    observer = _Observer(fault.news)
    plugins.register(observer, name="news")
    try:
        with mock.patch.object(failing, "_fail_if", lambda wanted: _strike(fault) if wanted else None):
            dist.barrier()
            yield
    finally:
        plugins.unregister("news")


class _Observer:
    """Leaves the news that this rank begins a phase."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    @hookimpl
    def dcp_on_event(self, event: CheckpointEvent) -> None:
        if event.state == "started":
            Path(self._folder, f"{dist.get_rank()} begins {event.phase}").touch()


def _strike(fault: Fault) -> None:
    if fault.kind == "kill":
        _wait_for_others(fault, f" begins {fault.phase}")  # before, they would name another phase
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.kind == "stall":
        _wait_for_others(fault, " has raised")
    elif fault.kind == "raise":
        raise ValueError("failed on purpose")
    else:
        raise failing.UnpicklableError("failed on purpose")


def _wait_for_others(fault: Fault, news: str) -> None:
    wanted = {f"{rank}{news}" for rank in range(dist.get_world_size()) if rank != fault.rank}
    end = time.monotonic() + _PATIENCE_SECONDS
    while missing := wanted - set(os.listdir(fault.news)):
        if time.monotonic() >= end:
            raise TimeoutError(f"rank {fault.rank} waited for {sorted(missing)}")
        time.sleep(0.02)


def _tell(fault: Fault, action: Callable[[], Any]) -> Told:
    start = time.monotonic()
    try:
        action()
    except dcp.DcpError as error:
        return Told(type(error).__name__, str(error), time.monotonic() - start)
    finally:
        if dist.get_rank() != fault.rank:
            Path(fault.news, f"{dist.get_rank()} has raised").touch()
    return Told("nothing", "", time.monotonic() - start)
