"""The soak: lives of a run follow each other, faults strike at random, and a model knows what must be recoverable.

The model: a step of which any rank was told that it is saved must be there from then on, or a later one instead; what
is loaded is exactly one step's values; no save that nobody began is ever found.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import struct
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dcp_io import LocalStore, find_checkpoints, latest_valid, verify_checkpoint
from integration_tests.process_end import has_ended
from integration_tests.soak.life import Life, RankGoneError
from integration_tests.soak.processes import (
    adopt_orphans,
    children,
    descriptors,
    limit_files,
    resident_kib,
    shared_memory,
)
from integration_tests.soak.rank import KEEP

__all__ = ["Report", "soak"]

WORLDS = (2, 2, 2, 1, 3)
FULL_BYTES = 4096
# How many of each hundred saves meet a fault; each is met at least once.
FAULTS = {"worker killed": 5, "rank killed": 3, "disk full": 4, "clock jumps": 6, "restart": 1}
DAY_SECONDS = 86400.0
# Growth of one process over its life, after the first saves, that counts as none.
SETTLED_SAVES = 8
MAX_GROWTH_KIB = 32 << 10
MAX_GROWTH_DESCRIPTORS = 4
_END_SECONDS = 15.0


@dataclass
class Report:
    """What came of a soak."""

    seed: int
    saves: int = 0
    succeeded: int = 0
    failed: int = 0
    lives: int = 0
    restores: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    worlds: Counter[int] = field(default_factory=Counter)
    savers: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    shared_memory_left: list[str] = field(default_factory=list)
    debris: list[str] = field(default_factory=list)
    growth_kib: int = 0
    """The largest growth of one process over one life."""
    growth_descriptors: int = 0
    seconds: float = 0.0

    @property
    def problems(self) -> list[str]:
        """Everything that must not be."""
        found = [*self.losses, *self.orphans, *self.shared_memory_left, *self.debris]
        if self.growth_kib > MAX_GROWTH_KIB:
            found.append(f"a process has grown by {self.growth_kib} KiB over its life")
        if self.growth_descriptors > MAX_GROWTH_DESCRIPTORS:
            found.append(f"a process has {self.growth_descriptors} more files open at the end of its life")
        return found


def soak(folder: Path, *, saves: int, seed: int, progress: Callable[[str], object] = lambda _: None) -> Report:
    """Make so many saves in the background in an empty folder, with faults; what came of it."""
    adopt_orphans()
    run = _Run(folder, saves, seed, progress)
    start, before = time.monotonic(), shared_memory()
    while run.report.saves < saves:
        run.live()
    run.last_look()
    run.report.shared_memory_left = sorted(shared_memory() - before)
    run.report.seconds = time.monotonic() - start
    return run.report


class _Run:
    def __init__(self, folder: Path, saves: int, seed: int, progress: Callable[[str], object]) -> None:
        self._folder = folder
        self._saves = saves
        self._progress = progress
        self._chance = random.Random(seed)
        self._planned = self._plan()
        self._clock = folder / "clock"
        self._clock.write_bytes(struct.pack("<d", 0.0))
        self.report = Report(seed)
        # The model: the last step that is surely there, and the last one that was begun.
        self._sure: int | None = None
        self._begun = 0
        self._used: dict[int, list[tuple[int, int]]] = {}
        self._life: Life
        self._full = 0

    def live(self) -> None:
        """One life: resume, save until a rank is killed or it is time to restart."""
        world = self._chance.choice(WORLDS)
        saver = self._chance.choice(("process", "process", "thread"))
        self.report.lives += 1
        self.report.worlds[world] += 1
        self._used = {}
        self._life = Life(self._folder, world, saver, self._clock)
        try:
            self._resume()
            while self.report.saves < self._saves and self._one_save():
                pass
            self._end()
        except RankGoneError as error:
            self._lose(f"life {self.report.lives}: {error}")
            self._life.kill()
        finally:
            self._after()

    def _resume(self) -> None:
        for answer in self._life.answers():
            self.report.restores += 1
            step = answer["restored"]
            if not answer["intact"]:
                self._lose(f"step {step} was restored with wrong values")
            if answer["passed_over"]:
                self._lose(f"published checkpoints were damaged: {answer['passed_over']}")
            if (self._sure is not None and (step is None or step < self._sure)) or (step or 0) > self._begun:
                self._lose(f"restored step {step}; {self._sure} was surely saved, {self._begun} was begun last")

    def _one_save(self) -> bool:
        """Save once, with or without a fault; whether the life goes on."""
        self._begun += 1
        self.report.saves += 1
        self.report.savers[self._life.saver] += 1
        fault = self._fault()
        if fault is not None:
            self.report.faults[fault] += 1
        if fault == "clock jumps":
            self._jump()
        if fault == "disk full":
            self._full = self._chance.randint(1, 3)
        self._limit()
        self._life.tell("save", self._begun)
        if fault in {"worker killed", "rank killed"}:
            time.sleep(self._chance.uniform(0.0, 0.12))
        if fault == "rank killed":
            os.kill(self._chance.choice(self._life.pids), 9)
            time.sleep(self._chance.uniform(0.0, 0.1))
            self._life.kill()
            return False
        if fault == "worker killed" and (workers := self._life.workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._chance.choice(workers), 9)
        self._take(self._life.answers())
        if self._chance.random() < 0.3 or fault == "disk full":
            self._wait()
        self._tell_progress()
        return fault != "restart"

    def _plan(self) -> dict[int, str]:
        """Number of a save → its fault."""
        faults = [name for name, often in FAULTS.items() for _ in range(max(1, often * self._saves // 100))]
        places = self._chance.sample(range(2, self._saves + 1), len(faults))
        return dict(zip(places, faults, strict=True))

    def _fault(self) -> str | None:
        """What happens to the save that is about to be made; without a worker to kill that waits for the next one."""
        number = self.report.saves
        fault = self._planned.pop(number, None)
        if fault == "worker killed" and not self._life.workers:
            later = (place for place in range(number + 1, self._saves + 1) if place not in self._planned)
            self._planned[next(later, 0)] = fault
            return None
        return fault

    def _jump(self) -> None:
        """Set the clock: by some seconds or some days, to either side."""
        shift = self._chance.choice((-1, 1)) * self._chance.choice((3.0, 7200.0, 3 * DAY_SECONDS))
        self._clock.write_bytes(struct.pack("<d", shift))

    def _limit(self) -> None:
        """Have the disk be full for some saves: for whoever writes."""
        limit = FULL_BYTES if self._full else None
        for pid in self._life.pids if self._life.saver == "thread" else self._life.workers:
            limit_files(pid, limit)
        self._full = max(0, self._full - 1)

    def _wait(self) -> None:
        self._life.tell("wait")
        self._take(self._life.answers())

    def _take(self, answers: list[dict[str, object]]) -> None:
        """Note what processes use, and which steps are surely there."""
        for pid, answer in zip(self._life.pids, answers, strict=True):
            self._used.setdefault(pid, []).append((int(str(answer["resident_kib"])), int(str(answer["descriptors"]))))
        for pid in self._life.workers:
            self._used.setdefault(pid, []).append((resident_kib(pid), descriptors(pid)))
        self._note_saved()

    def _note_saved(self) -> None:
        if self._life.saved:
            self._sure = max(self._sure or 0, *self._life.saved)

    def _end(self) -> None:
        """The ranks end by themselves, unless they were killed."""
        if not any(has_ended(pid) for pid in self._life.pids):
            self._full = 0
            self._limit()
            self._life.tell("end")
            self._take(self._life.answers())
            self._life.answers()

    def _after(self) -> None:
        self._life.wait()
        self._note_saved()
        self.report.succeeded += len(self._life.saved)
        self.report.failed += len(self._life.told.keys() - self._life.saved)
        for used in self._used.values():
            self._compare(used[SETTLED_SAVES:])
        deadline = time.monotonic() + _END_SECONDS
        while (left := children(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.05)
        self.report.orphans += [f"process {pid} has outlived its rank" for pid in left]
        if self._sure is not None:
            latest = latest_valid(self._folder / "run", deep=True)
            if latest is None:
                self._lose(f"no checkpoint is valid; step {self._sure} was surely saved")

    def _compare(self, used: list[tuple[int, int]]) -> None:
        """The medians of the first and the last quarter of a process's life."""
        quarter = len(used) // 4
        if quarter < 3:
            return
        for index, name in enumerate(("growth_kib", "growth_descriptors")):
            first = statistics.median(each[index] for each in used[:quarter])
            last = statistics.median(each[index] for each in used[-quarter:])
            setattr(self.report, name, max(getattr(self.report, name), int(last - first)))

    def last_look(self) -> None:
        """What is on the disk in the end: checkpoints that are sound, as many as are to be kept, and nothing else."""
        found = list(find_checkpoints(LocalStore(self._folder / "run")))
        for each in found:
            problems = verify_checkpoint(each.store).problems
            if problems:
                self._lose(f"{each.store.url}: {problems[0]}")
            allowed = (".metadata", ".dcp-note.json")
            names = [entry.name for entry in each.store.list()]
            self.report.debris += [
                f"{each.path.name}/{name}" for name in names if name not in allowed and not name.endswith(".distcp")
            ]
        steps = {int(each.path.name.removeprefix("step-")) for each in found}
        if self._sure is not None and max(steps, default=-1) < self._sure:
            self._lose(f"step {self._sure} was surely saved; what is there is {sorted(steps)}")
        others = {path.name for path in (self._folder / "run").iterdir()} - {f"step-{step}" for step in steps}
        self.report.debris += sorted(others - {"latest"})
        if len(steps) > KEEP + 1:
            self.report.debris.append(f"{len(steps)} checkpoints are there, and {KEEP} are to be kept")

    def _lose(self, what: str) -> None:
        self.report.losses.append(what)
        self._progress(f"LOSS: {what}")

    def _tell_progress(self) -> None:
        if self.report.saves % 10 == 0:
            faults = ", ".join(f"{count} × {name}" for name, count in sorted(self.report.faults.items()))
            self._progress(f"{self.report.saves} saves in {self.report.lives} lives; {faults}")
