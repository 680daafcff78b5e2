"""A launcher of lives: forks the ranks and promoters of a job from this process, watches them, and strikes.

Not in this module: what must come of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from integration_tests.forking import join_group
from integration_tests.memory.faults import struck_hosts
from integration_tests.memory.hosts import is_alive, is_stopped, keepers_of, kill, processes_of
from integration_tests.memory.lives import PATIENCE_SECONDS, Life, describe, promote_while, train

__all__ = ["Lived", "adopt_orphans", "live"]

_LIFE_SECONDS = 120.0
_DRAIN_SECONDS = 1.5


@dataclass
class Lived:
    """What came of a life, as seen from outside."""

    resumed: dict[int, tuple[int, int, bool]] = field(default_factory=dict)
    """Rank → step that it resumed from, the life that had saved it, and whether all values were right."""
    began: int = 0
    """The highest step of which a save began."""
    saved: int = 0
    """The highest step of which some rank was told that it is saved."""
    protected: int = 0
    """The highest step of which some rank was told that it is protected."""
    unprotected: list[str] = field(default_factory=list)
    """Steps of which ranks were told that they are not protected, with the reasons."""
    before: tuple[int, int] = (0, 0)
    """`saved` and `protected` at the strike."""
    errors: list[str] = field(default_factory=list)
    """What ranks raised that were not killed."""
    struck: str = ""
    """How the fault struck: at its `moment`, after its `delay`, or at the `end`."""
    problems: list[str] = field(default_factory=list)
    """What must never be: processes that hang, or end in another way."""
    seconds: float = 0.0
    """From the strike until all ranks had ended."""


def adopt_orphans() -> None:
    """Make this process the parent of whatever its descendants leave, so that nothing is missed."""
    pr_set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def live(life: Life, chance: random.Random) -> Lived:
    """Live through one life of a job, with its fault; returns what was seen."""
    return _Watch(life, chance).run()


class _Watch:
    def __init__(self, life: Life, chance: random.Random) -> None:
        self._life, self._chance = life, chance
        self._seen = Lived()
        self._reader, self._writer = os.pipe()
        self._ranks: dict[int, int] = {}
        """Rank → process, of those that have not ended."""
        self._promoters: dict[str, int] = {}
        self._text = b""
        self._due: float | None = None
        self._struck: float | None = None
        self._stopped: int | None = None

    def run(self) -> Lived:
        """Fork the processes, watch them until all have ended, and strike meanwhile."""
        wakes = self._start()
        begun = time.monotonic()
        while self._ranks:
            self._read(0.02)
            self._reap()
            if self._struck is None and (self._stopped is not None or self._is_due()):
                self._strike("moment" if self._stopped is not None else "delay")
            if time.monotonic() - (self._struck or begun) > (PATIENCE_SECONDS if self._struck else _LIFE_SECONDS):
                self._give_up()
        if self._struck is None:
            self._strike("end")
        self._seen.seconds = time.monotonic() - (self._struck or begun)
        for wake in wakes.values():
            os.close(wake)
        self._end_promoters()
        self._read(0.0)
        os.close(self._reader)
        os.close(self._writer)
        return self._seen

    def _start(self) -> dict[str, int]:
        layout = self._life.layout
        port = os.pipe()
        pipes = {host: os.pipe() for host in layout.hosts}
        wakes = {host: writer for host, (_, writer) in pipes.items()}

        def without(*descriptors: int) -> None:
            for descriptor in descriptors:
                os.close(descriptor)

        for rank in range(layout.world):

            def be_rank(rank: int = rank) -> None:
                without(self._reader, *(reader for reader, _ in pipes.values()))
                if layout.world > 1:
                    join_group(layout.world, rank, *port)
                train(self._life, rank, lambda text: self._tell(f"{rank} {text}"), wakes)

            self._ranks[rank] = self._fork(be_rank)
        for host, (reader, _) in pipes.items():

            def be_promoter(host: str = host, reader: int = reader) -> None:
                without(self._reader, *port, *wakes.values(), *({one for one, _ in pipes.values()} - {reader}))
                promote_while(self._life, host, reader, lambda text: self._tell(f"-1 {text}"))

            self._promoters[host] = self._fork(be_promoter)
        without(*port, *(reader for reader, _ in pipes.values()))
        return wakes

    def _tell(self, text: str) -> None:
        os.write(self._writer, f"{text}\n".encode()[: select.PIPE_BUF])

    def _fork(self, work: Callable[[], None]) -> int:
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            work()
            code = 0
        except BaseException as error:  # noqa: BLE001 - told, and judged by the one that watches
            self._tell(f"-1 raised {describe(error)}")
            code = 3
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _read(self, seconds: float) -> None:
        while select.select([self._reader], [], [], seconds)[0]:
            self._text += os.read(self._reader, 1 << 16)
            *lines, self._text = self._text.split(b"\n")
            for line in lines:
                rank, word, rest = (*line.decode().split(" ", 2), "")[:3]
                self._hear(int(rank), word, rest)
            seconds = 0.0

    def _hear(self, rank: int, word: str, rest: str) -> None:
        seen = self._seen
        if word == "resumed":
            step, life, right = map(int, rest.split())
            seen.resumed[rank] = step, life, bool(right)
            if self._due is None and self._life.fault.moment == "time":
                self._due = time.monotonic() + self._life.fault.delay
        elif word == "saves":
            seen.began = max(seen.began, int(rest))
        elif word == "saved":
            seen.saved = max(seen.saved, int(rest))
        elif word == "protected":
            seen.protected = max(seen.protected, int(rest))
        elif word == "unprotected":
            seen.unprotected.append(rest)
        elif word == "raised":
            seen.errors.append(rest)
        elif word == "strikes":
            self._stopped = int(rest)

    def _is_due(self) -> bool:
        return self._due is not None and time.monotonic() >= self._due and self._life.strikes

    def _strike(self, how: str) -> None:
        """Kill what the fault kills, in an order drawn at random; a victim at its moment is stopped already."""
        life, seen = self._life, self._seen
        self._struck = time.monotonic()
        if not life.strikes:
            return
        seen.struck = how
        fault, layout = life.fault, life.layout
        if fault.kind == "memory":
            self._kill_keepers()
            return
        victim = fault.victim % layout.world
        hosts = struck_hosts(fault, layout)
        ranks = [victim] if fault.kind == "rank" else [rank for host in hosts for rank in layout.ranks_of(host)]
        if fault.kind == "all":
            ranks = [*range(layout.world)]
        pids = [self._ranks.pop(rank) for rank in ranks if rank in self._ranks]
        self._chance.shuffle(pids)
        if life.lost and fault.keeper_first:
            kill([pid for host in hosts for pid in processes_of(life.hosts.folder(host))])
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if life.lost:
            pids += [self._promoters.pop(host) for host in hosts if host in self._promoters]
        kill(pids)
        for host in life.lost:
            life.hosts.lose(host)
        if self._stopped is not None and self._stopped not in pids and is_alive(self._stopped):
            kill([self._stopped])  # a promoter dies at its moment, whatever else does
            self._promoters = {host: pid for host, pid in self._promoters.items() if pid != self._stopped}

    def _kill_keepers(self) -> None:
        """Kill the keepers of the hosts that the fault is about; all ranks go on."""
        stopped = self._stopped
        while stopped is not None and is_alive(stopped) and not is_stopped(stopped):
            time.sleep(0.001)
        kill([pid for host in self._life.lost for pid in keepers_of(self._life.hosts.folder(host))])
        self._read(0.0)
        self._seen.before = self._seen.saved, self._seen.protected
        if stopped is not None:
            os.kill(stopped, signal.SIGCONT)

    def _reap(self) -> None:
        for rank, pid in [*self._ranks.items()]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del self._ranks[rank]
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, 3) or (code == 3 and self._struck is None):
                self._seen.problems.append(f"rank {rank} ended with {code} (struck: {self._struck is not None})")

    def _give_up(self) -> None:
        """End ranks that hang, and show their stacks."""
        for rank, pid in [*self._ranks.items()]:
            self._seen.problems.append(f"rank {rank} did not end")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        kill([*self._ranks.values()])
        self._ranks.clear()
        self._struck = self._struck or time.monotonic()

    def _end_promoters(self) -> None:
        seconds = _DRAIN_SECONDS if self._life.fault.drains else 0.0
        until = time.monotonic() + (seconds if self._life.strikes else PATIENCE_SECONDS)
        while any(map(is_alive, self._promoters.values())) and time.monotonic() < until:
            time.sleep(0.01)
        kill([*self._promoters.values()])
