"""Faults in the middle of a cooperative load: a rank that is killed, stopped or cut off, a file that goes bad.

Each strikes on one rank, the victim, at a moment that is counted in calls of the exchange's own methods, so that the
same fault strikes at the same place each time. Not in this module: what must come of it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import dcp_all as dcp
from dcp_exchange.piece_queue import PieceReader
from dcp_exchange.transfer import Transfer
from dcp_ranks import Streams
from dcp_ranks.streams import streams as streams_module
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import ApartReader, blank, hosts_of, same, whole

__all__ = ["KINDS", "LAYOUTS", "MOMENTS", "Fault", "Told", "check", "load_with", "save_checkpoints", "told_of"]

KINDS = ("kill", "stop", "cut", "damage", "missing", "replace", "holder")
MOMENTS = {
    "meet": (Streams, "meet"),
    "connect": (Streams, "connect_many"),
    "start": (Transfer, "start"),
    "read": (PieceReader, "read"),
    "take": (Transfer, "_take"),
    "close": (Transfer, "close"),
}
LAYOUTS = ("torch", "raw", "zstd")
_PATIENCE_SECONDS = 60.0
_PIECE_BYTES = 64 << 10
_warm: list[int] = []


@dataclass(frozen=True)
class Fault:
    """What happens to which rank, and when."""

    kind: str
    """One of `KINDS`; "holder": each host has a copy of its own, and that of the victim's host goes missing."""
    victim: int
    moment: str
    count: int = 0
    """Number of calls of the method of `MOMENTS` that go well before."""
    ranks_of_host: int = 4
    indirect: bool = False
    template: str = "ddp"
    layout: str = "torch"

    def folder_of(self, rank: int, folder: str) -> str:
        """Return the folder from which a rank loads, of a run that has a folder."""
        return f"{folder}/host-{rank // self.ranks_of_host}" if self.kind == "holder" else folder

    @property
    def is_harmless(self) -> bool:
        """Whether the load brings the right tensors all the same."""
        return self.kind in ("cut", "replace", "holder")

    @property
    def lasts(self) -> bool:
        """Whether the victim lives on, and takes part in what follows."""
        return self.kind != "kill"


@dataclass(frozen=True)
class Told:
    """What one rank saw of it."""

    error: str
    """Type of the error, with the types of the errors of all failing ranks; empty if there was none."""
    text: str
    seconds: float | None
    """Seconds from the strike to the end of the load on this rank; None if nothing struck."""
    state: str
    """Whether the tensors are those of the `old` checkpoint, of the `new` one, or `mixed`."""
    left: list[str]
    """Threads, memory and sockets that the load has left behind."""
    again: bool | None
    """Whether the next load was right; None if there was none."""


def _newer() -> dict[str, Any]:
    """The state of the checkpoint that replaces the one of `whole`."""
    return {key: value + 1 if isinstance(value, torch.Tensor) else value for key, value in whole().items()}


def save_checkpoints(root: Path) -> None:
    """Save the checkpoints that faults are tried on, in one folder for each layout."""
    for layout in LAYOUTS:
        options: dict[str, Any] = {"compression": "zstd"} if layout == "zstd" else {"layout": layout}
        writer = dcp.FileSystemWriter(root / layout, thread_count=2, **options)
        dcp.save(whole(), storage_writer=writer, no_dist=True)


# What the ranks that live may raise, by kind. Where nothing is raised, the tensors must be right.
_ERRORS = {
    "kill": {"PeerLostError", "CoordinatorLostError"},
    "stop": {"CheckpointException of ExchangeError", "CoordinatorTimeoutError", "CoordinatorLostError"},
    "damage": {"CheckpointException of CorruptCheckpointError"},
    "missing": {"CheckpointException of CheckpointNotFoundError"},
}
STOPPED_SECONDS = 2.0


def told_of(pool: RankPool, root: Path, folder: Path, fault: Fault) -> list[Told]:
    """Load with a fault on four ranks; returns what the ranks that live saw, without a victim that was stopped."""
    seconds = STOPPED_SECONDS if fault.kind == "stop" else 60.0
    dies = [fault.victim] if fault.kind == "kill" else []
    try:
        found = pool.run(4, load_with, str(root), str(folder), fault, seconds, expect_death=dies)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [told for rank, told in enumerate(found) if fault.kind not in ("kill", "stop") or rank != fault.victim]


def check(fault: Fault, found: list[Told], *, patience: float = 1.0) -> None:
    """Check that a load with a fault ended as it is promised, the same on all ranks, and left nothing behind.

    Args:
        fault: The fault.
        found: What the ranks saw.
        patience: What the promised times are multiplied by.
    """
    for told in found:
        assert told.left == [], fault
        assert told.again is not False, fault
        assert told.error == found[0].error, (fault, told, found[0])
        assert told.state == found[0].state, (fault, told, found[0])
    first = found[0]
    assert not (fault.is_harmless and first.error), (fault, first)
    if not first.error:
        assert first.state in (("old", "new") if fault.kind == "replace" else ("old",)), fault
        return
    assert first.error in _ERRORS[fault.kind], (fault, first)
    if fault.kind in ("kill", "stop") and first.error != "CoordinatorLostError":
        assert re.search(rf"ranks? (\d+, )*{fault.victim}\b", first.text), (fault, first)
    if fault.kind in ("damage", "missing"):
        assert ".distcp" in first.text, (fault, first)
    limit = 2 * STOPPED_SECONDS + 4 if fault.kind == "stop" else 5.0
    for told in found:
        assert told.seconds is not None, (fault, told)
        assert told.seconds <= limit * patience, (fault, told)


def load_with(root: str, folder: str, fault: Fault, timeout_seconds: float) -> Told:
    """Load a copy of a checkpoint, with a fault; then load it again, if all ranks live."""
    if dist.get_rank() == 0:
        for copy in {fault.folder_of(rank, folder) for rank in range(dist.get_world_size())}:
            shutil.copytree(Path(root, fault.layout), copy)
    template, expected = blank(fault.template, whole()), blank(fault.template, whole())
    dcp.load(expected, checkpoint_id=Path(root, fault.layout), cooperative=False)
    fresh: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fresh, os.getpid() not in _warm)
    if any(fresh):  # there is what lasts between loads
        _load(str(Path(root, fault.layout)), blank(fault.template, whole()), fault, 60.0)
        _warm.append(os.getpid())
    before = _open_now()
    dist.barrier()
    error: BaseException | None = None
    with _armed(fault, folder):
        try:
            _load(fault.folder_of(dist.get_rank(), folder), template, fault, timeout_seconds)
        except dcp.DcpError as caught:
            error = caught
        ended = time.monotonic()
    if fault.kind == "kill" and dist.get_rank() == fault.victim:
        os.kill(os.getpid(), signal.SIGKILL)  # it was expected to die, and did not get as far as that
    struck = _when(folder)
    if fault.kind == "stop" and struck is not None:
        _continue_victim(folder, fault)
    state = _state_of(template, expected) if error is None else ""
    error_types = "" if error is None else _types(error)
    text = str(error)
    del error  # its traceback has frames of the load, and these have its memory
    left = _wait_for_nothing(before)
    again = None
    if fault.lasts and not (fault.kind == "stop" and fault.victim == 0):
        again = _is_right_again(root, fault, expected)
    return Told(error_types, text, None if struck is None else ended - struck, state, left, again)


def _is_right_again(root: str, fault: Fault, expected: dict[str, Any]) -> bool:
    template = blank(fault.template, whole())
    _load(str(Path(root, fault.layout)), template, fault, 60.0)
    return same(template, expected)


def _load(folder: str, template: dict[str, Any], fault: Fault, timeout_seconds: float) -> None:
    with (
        hosts_of(fault.ranks_of_host, indirect=fault.indirect),
        mock.patch("dcp_exchange.assignment.assign.SMALLEST_PIECE_BYTES", _PIECE_BYTES),
    ):
        reader = dcp.FileSystemReader(folder)
        if fault.kind == "holder":
            reader = ApartReader("/a/folder/of/each/host", folder)
        dcp.load(template, storage_reader=reader, cooperative=True, timeout_seconds=timeout_seconds)


@contextlib.contextmanager
def _armed(fault: Fault, folder: str) -> Iterator[None]:
    """Context manager in which the fault strikes, once, on the victim."""
    if dist.get_rank() != fault.victim:
        yield
        return
    owner, name = MOMENTS[fault.moment]
    method = getattr(owner, name)
    left, lock = [fault.count], threading.Lock()

    def call(*args: Any, **options: Any) -> Any:
        with lock:
            left[0] -= 1
            strikes = left[0] == -1
        if strikes:
            _strike(fault, folder)
        return method(*args, **options)

    with mock.patch.object(owner, name, call):
        yield


def _strike(fault: Fault, folder: str) -> None:
    Path(f"{folder}.struck").write_text(f"{time.monotonic()} {os.getpid()}")
    if fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif fault.kind == "cut":
        for streams in list(streams_module._alive):
            for stream in streams.made.values():
                with contextlib.suppress(OSError):
                    stream.connection.shutdown(2)
    elif fault.kind in ("missing", "holder"):
        for file in Path(fault.folder_of(fault.victim, folder)).glob("*.distcp"):
            file.unlink()
    elif fault.kind == "damage":
        for file in Path(folder).glob("*.distcp"):
            _damage(file)
    else:
        dcp.save(_newer(), storage_writer=dcp.FileSystemWriter(folder, overwrite=True), no_dist=True)


def _damage(file: Path) -> None:
    """Change a byte in each KiB: some of them are of what is still to be read."""
    with file.open("r+b") as handle:
        data = bytearray(handle.read())
        for place in range(512, len(data), 1024):
            data[place] ^= 1
        handle.seek(0)
        handle.write(data)


def _when(folder: str) -> float | None:
    try:
        return float(Path(f"{folder}.struck").read_text().split()[0])
    except FileNotFoundError:
        return None


def _continue_victim(folder: str, fault: Fault) -> None:
    """Continue the stopped rank when all others have ended their loads."""
    rank = dist.get_rank()
    Path(f"{folder}.ended-{rank}").touch()
    others = {Path(f"{folder}.ended-{other}") for other in range(dist.get_world_size()) if other != fault.victim}
    until = time.monotonic() + _PATIENCE_SECONDS
    while rank != fault.victim and not all(map(os.path.exists, others)) and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(int(Path(f"{folder}.struck").read_text().split()[1]), signal.SIGCONT)


def _state_of(template: dict[str, Any], expected: dict[str, Any]) -> str:
    if same(template, expected):
        return "old"
    moved = {key: value + 1 if isinstance(value, torch.Tensor) else value for key, value in expected.items()}
    return "new" if same(template, moved) else "mixed"


def _types(error: BaseException) -> str:
    failures = getattr(error, "failures", {})
    inner = sorted({type(each[0]).__name__ for each in failures.values()})
    return type(error).__name__ + (f" of {', '.join(inner)}" if inner else "")


def _open_now() -> list[str]:
    """Return what a load uses: its threads, shared memory, and the sockets of this process."""
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp-exchange")]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if "memfd:dcp" in target:
                found.append(target)
            elif target.startswith(("socket:", "anon_inode:")):
                found.append(target.partition(":")[0])
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted([*found, *(f"mapped {line.split()[-2]}" for line in maps if "memfd:dcp" in line)])


def _wait_for_nothing(before: list[str]) -> list[str]:
    """Return what is open now and was not before, once it is nothing or a minute has gone by."""
    until = time.monotonic() + 60.0
    while True:
        rest = _open_now()
        for each in before:
            with contextlib.suppress(ValueError):
                rest.remove(each)
        if not rest or time.monotonic() > until:
            return rest
        time.sleep(0.02)
