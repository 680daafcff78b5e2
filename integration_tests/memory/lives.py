"""One life of a job, as its processes live it: ranks that resume and save steps, promoters of their hosts."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard

import dcp_all as dcp
from dcp_base import CheckpointEvent, installed
from dcp_core.testing.sharding import distribute
from dcp_tiers.promote import _Worker
from dcp_tiers.promoter_process import PromoterProcess
from dcp_tiers.promotion import Promotion
from integration_tests.memory.faults import Fault, Layout, struck_hosts
from integration_tests.memory.hosts import Hosts
from integration_tests.memory.moments import MOMENTS, striking

__all__ = ["PATIENCE_SECONDS", "Life", "holds", "promote_while", "state_of", "train"]

PATIENCE_SECONDS = 60.0
"""Limit of the time in which the ranks that live must have ended after a fault."""
_STEP_SECONDS = 0.01
_PACE_SECONDS = PATIENCE_SECONDS / 2
_ROWS, _COLUMNS = 96, 700


@dataclass(frozen=True)
class Life:
    """One start of the job, until its end."""

    hosts: Hosts
    layout: Layout
    fault: Fault
    number: int
    """Number of the life in its story."""

    @property
    def strikes(self) -> bool:
        """Whether there is a fault."""
        return self.fault.kind != "none"

    @property
    def lost(self) -> list[str]:
        """Hosts whose memory is lost with the fault."""
        return struck_hosts(self.fault, self.layout) if self.fault.kind in ("keeper", "two", "memory") else []

    @property
    def paces(self) -> bool:
        """Whether each save is protected before the next begins."""
        return self.fault.paced and self.hosts.near == "partner" and len(self.layout.hosts) > 1


def state_of(step: int, life: int) -> dict[str, Any]:
    """The state after a step of a life, as this rank has it: rows of matrices, replicas, and what is not a tensor."""
    version = 1000 * life + step
    state: dict[str, Any] = {"step": step, "life": life, "bias": _values(37, 5) + version}
    mesh = (
        DeviceMesh("cpu", torch.arange(dist.get_world_size()), _init_backend=False) if dist.is_initialized() else None
    )
    for number in range(3):
        rows = _values(_ROWS + number, _COLUMNS)
        if mesh is None:
            state[f"w{number}"] = rows + version
            continue
        state[f"w{number}"] = distribute(rows + version, mesh, [Shard(0)])  # the last ranks may have no rows
    if mesh is not None:
        state["norm"] = DTensor.from_local(_values(3, 2000) * version, mesh, [Replicate()], run_check=False)
    else:
        state["norm"] = _values(3, 2000) * version
    return state


def _values(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float64).reshape(shape)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def holds(state: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Whether this rank's part of a state has these values."""
    return all(
        torch.equal(_local(state[key]), _local(value)) if isinstance(value, torch.Tensor) else state[key] == value
        for key, value in wanted.items()
    )


def train(life: Life, rank: int, tell: Callable[[str], None], wakes: dict[str, int]) -> None:
    """Be a rank of the job: resume, save steps, and meet the fault if this rank is its victim."""
    faulthandler.register(signal.SIGUSR1)
    fault, layout = life.fault, life.layout
    host = layout.hosts[rank // layout.each]
    told = _Told(tell)
    installed.divert_events(told.event)
    # Never left: threads in the background may outlive the job's last call.
    os.environ["DCP_KEEPER_DIR"] = str(life.hosts.folder(host))
    with contextlib.ExitStack() as stack:
        stack.enter_context(life.hosts.job(layout.hosts, layout.each, rank))
        stack.enter_context(_promoter_of(wakes[host]))
        moment = MOMENTS.get(fault.moment)
        if life.strikes and moment is not None and moment.where == "rank" and rank == fault.victim % layout.world:
            stack.enter_context(striking(moment, fault.count, lambda: stop_here(tell)))
        saver = None
        if fault.saver != "none":
            saver = stack.enter_context(dcp.AsyncSaver(fault.saver))
        _train(life, saver, told)
    tell("done")


def stop_here(tell: Callable[[str], None]) -> None:
    """Stop this process, all of its threads, for the one that watches to kill."""
    tell(f"strikes {os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


class _Told:
    """What a rank tells of, and what it knows itself."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell
        self.protected = -1

    def event(self, event: CheckpointEvent) -> None:
        """Tell of a checkpoint that is protected."""
        if (event.operation, event.phase, event.state) == ("protect", "total", "finished"):
            self.protected = max(self.protected, int((event.checkpoint_id or "").rpartition("-")[2]))
            self.tell(f"protected {self.protected}")
        elif event.operation == "protect" and event.state == "failed":
            self.tell(f"unprotected {(event.checkpoint_id or '').rpartition('-')[2]} {event.phase}: {event.error}")


def _train(life: Life, saver: Any, told: _Told) -> None:
    fault, tell = life.fault, told.tell
    with dcp.CheckpointManager(life.hosts.tiers(), saver=saver, timeout_seconds=60) as manager:
        template = state_of(-1, -1)
        restored = manager.restore(template)
        begun = 0
        if restored is None:
            tell("resumed 0 0 1")
        else:
            begun = restored.step
            right = template["step"] == begun and holds(template, state_of(begun, template["life"]))
            tell(f"resumed {begun} {template['life']} {int(right)}")
        for step in range(begun + 1, begun + 1 + fault.saves):
            time.sleep(_STEP_SECONDS)
            tell(f"saves {step}")
            future = manager.save(step, state_of(step, life.number))
            if future is None:
                tell(f"saved {step}")
            else:
                future.add_done_callback(lambda done, step=step: _tell_saved(tell, step, done))
            if life.paces:
                if future is not None:
                    future.exception()
                protection = manager._upkeep._protection
                assert protection is None or protection.wait(_PACE_SECONDS), f"step {step} is not protected in time"
        manager.wait()


def _tell_saved(tell: Callable[[str], None], step: int, done: Any) -> None:
    if not done.cancelled() and done.exception() is None:
        tell(f"saved {step}")


@contextlib.contextmanager
def _promoter_of(wake: int) -> Iterator[None]:
    """Context manager: managers wake the promoter of this host, which runs already, and start none."""

    def woken(_: PromoterProcess) -> bool:
        with contextlib.suppress(BrokenPipeError):
            os.write(wake, b"saved\n")
        return True

    with mock.patch.multiple(PromoterProcess, start=mock.DEFAULT, wake=woken, end=lambda *_: True):
        yield


def promote_while(life: Life, host: str, lines: int, tell: Callable[[str], None]) -> None:
    """Be the promoter of a host, which works until the ranks of the job have ended, and then a little longer."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(life.hosts.on(host))
        moment = MOMENTS.get(life.fault.moment)
        victim = life.layout.hosts[life.fault.victim % life.layout.world // life.layout.each]
        if life.strikes and moment is not None and moment.where == "promoter" and host == victim:
            stack.enter_context(striking(moment, life.fault.count, lambda: stop_here(tell)))
        tiers = life.hosts.tiers()
        worker = _Worker(Promotion(tiers, 1))
        worker.start()
        with os.fdopen(lines) as woken:
            for _ in woken:
                tiers.write()
                worker.wake()
        worker.end(0.3 if life.strikes else PATIENCE_SECONDS / 2)
        while worker.is_alive() and not worker.has_given_up:
            worker.join(0.05)


def describe(error: BaseException) -> str:
    """The types of an error, of those of the ranks in it, and its text in one line."""
    failures = getattr(error, "failures", {})
    inner = sorted({type(each[0]).__name__ for each in failures.values()})
    name = type(error).__name__ + (f" of {'+'.join(inner)}" if inner else "")
    where = traceback.format_exception(error)[-3:]
    return f"{name} | {' '.join(' '.join(where).split())[:1500]}"
