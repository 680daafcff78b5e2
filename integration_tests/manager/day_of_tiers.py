"""A day of a job with two tiers, shortened: saves, preemptions, killed promoters, a slow tier that is away.

`python -m integration_tests.manager.day_of_tiers FOLDER HOURS SEED` prints what happened as JSON. Trainers and
promoters are forked from this process and killed at moments drawn at random. What must be there at any moment is said
by a `Model` that knows only which saves were acknowledged.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch

import dcp_all as dcp
from dcp_base import CheckpointEvent, installed
from dcp_io import KeepEvery, KeepLast
from dcp_tiers import Tier, Tiers
from dcp_tiers.promote import promote
from dcp_tiers.promoter_process import PromoterProcess

SAVES_PER_HOUR = 6
"""One each ten minutes."""
LONGEST_LIFE = 10.0
"""Longest time after which a process that is preempted dies: that of so many saves, whatever the machine."""
NEAR_BUDGET = 5
"""Checkpoints for which the fast tier has room."""
_VALUES = 2000


@dataclass
class Model:
    """What is known of the job from outside."""

    acknowledged: list[int] = field(default_factory=list)
    """Steps whose saves have returned, ascending."""
    dropped: set[int] = field(default_factory=set)
    """Steps that were removed from the full fast tier before the slow one had them, as an event said."""
    arrivals: list[int] = field(default_factory=list)
    """Steps in the order in which they appeared in the slow tier."""
    restarts: int = 0
    killed_promoters: int = 0
    outages: int = 0


class Day:
    """The job, in a folder.

    Args:
        folder: Folder for both tiers.
        seed: Of what is drawn at random.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.near, self.far, self.away = folder / "near", folder / "far", folder / "away"
        self.chance = random.Random(seed)
        self.model = Model()
        self.keep_far = KeepLast(3) | KeepEvery(10)
        self.far.mkdir(parents=True)
        self.bytes, self.save_seconds = measure(folder / "one")

    def tiers(self) -> Tiers:
        """The tiers as each process opens them."""
        near = Tier(self.near, KeepLast(2), max_bytes=NEAR_BUDGET * self.bytes, when_full="drop")
        return Tiers([near, Tier(self.far, self.keep_far)])

    def run(self, hours: float) -> None:
        """Live through so many hours, and check the model after each save, preemption and outage."""
        left, away_until = round(hours * SAVES_PER_HOUR), 0
        while left > 0:
            saves = self.chance.randint(1, 2 * SAVES_PER_HOUR // 3)
            self.train(saves, preempted=self.chance.random() < 0.5)
            left -= saves
            if self.is_away and left <= away_until:
                self.come_back()
            elif not self.is_away and self.chance.random() < 0.1:
                self.go_away()
                away_until = left - self.chance.randint(SAVES_PER_HOUR, 3 * SAVES_PER_HOUR)  # one to three hours
            self.promote(killed=self.chance.random() < 0.4)
            self.check()
        if self.is_away:
            self.come_back()
        self.train(1, preempted=False)
        self.promote(killed=False)
        self.train(1, preempted=False)  # whose retention removes what has arrived
        self.promote(killed=False)
        self.check()
        self.check_end()

    def train(self, saves: int, *, preempted: bool) -> None:
        """Resume, and save some steps; the process may be killed meanwhile."""

        def work(tell: Callable[[str], None]) -> None:
            with without_promoter(), dcp.CheckpointManager(self.tiers(), no_dist=True) as manager:
                template = {"values": torch.zeros(_VALUES, dtype=torch.int64), "step": 0}
                restored = manager.restore(template)
                begun = 0 if restored is None else restored.step
                assert (template["step"], int(template["values"].sum())) == (begun, begun * _VALUES)
                tell(f"resumed {begun}")
                for step in range(begun + 1, begun + 1 + saves):
                    manager.save(step, {"values": torch.full((_VALUES,), step), "step": step})
                    tell(f"saved {step}")

        for word, step in self._live(work, killed=preempted):
            last = self.model.acknowledged[-1] if self.model.acknowledged else 0
            if word == "resumed":
                self.model.restarts += 1
                assert step >= last, f"step {last} was acknowledged, and {step} restored"
            elif word == "saved":
                self.model.acknowledged.append(step)
            else:
                self.model.dropped.add(step)

    def promote(self, *, killed: bool) -> None:
        """Run a promoter, which may be killed. While the slow tier is away, it gives up soon."""

        def work(tell: Callable[[str], None]) -> None:
            promote(self.tiers(), progress_timeout_seconds=0.05 if self.is_away else 60.0)

        before = self.in_far()
        for _ in self._live(work, killed=killed):
            pass
        self.model.killed_promoters += killed
        new = sorted(self.in_far() - before)
        assert not new or not self.model.arrivals or new[0] > self.model.arrivals[-1], "not in ascending order"
        self.model.arrivals += new

    @property
    def is_away(self) -> bool:
        """Whether the slow tier cannot be reached."""
        return self.far.is_file()

    def go_away(self) -> None:
        """Let the slow tier refuse everything."""
        self.far.rename(self.away)
        self.far.write_text("not a folder")
        self.model.outages += 1

    def come_back(self) -> None:
        """Let the slow tier work again."""
        self.far.unlink()
        self.away.rename(self.far)

    def in_far(self) -> set[int]:
        """Steps with an index in the slow tier, which may be away."""
        return complete(self.away if self.is_away else self.far)

    def check(self) -> None:
        """Check that nothing is lost that the policies keep, and that the fast tier is within its budget."""
        known, near, far = self.model.acknowledged, complete(self.near), self.in_far()
        assert not known or known[-1] in near, f"step {known[-1]} is not in the fast tier"
        size = sum(path.stat().st_size for path in self.near.rglob("*") if path.is_file())
        assert size <= NEAR_BUDGET * self.bytes, f"{size} bytes in the fast tier"
        lost = self.wanted() - near - far - self.model.dropped
        assert not lost, f"steps {sorted(lost)} are in no tier; near: {sorted(near)}, far: {sorted(far)}"

    def wanted(self) -> set[int]:
        """Acknowledged steps that the slow tier's policy keeps."""
        return self.kept() & {*self.model.acknowledged}

    def kept(self) -> set[int]:
        """Steps that the slow tier's policy keeps; it counts those, too, that nobody was told of."""
        known = sorted({*self.model.acknowledged, *complete(self.near), *self.in_far()})
        return {*known[-3:], *(step for step in known if step % 10 == 0)}

    def check_end(self) -> None:
        """Check that all has arrived, bit-equal, and that nothing else is in any tier."""
        far, known = complete(self.far), self.model.acknowledged
        assert self.wanted() - self.model.dropped <= far
        assert far <= self.kept() | {step for step in range(known[-1]) if step % 10 == 0}, (far, self.kept())
        assert complete(self.near) == {*known[-2:]}
        for root in (self.near, self.far):
            for step in complete(root):
                state = {"values": torch.zeros(_VALUES, dtype=torch.int64), "step": 0}
                dcp.load(state, checkpoint_id=root / f"step-{step}", no_dist=True)
                assert (state["step"], int(state["values"].sum())) == (step, step * _VALUES)
                assert dcp.verify_checkpoint(root / f"step-{step}").ok
            assert all(is_expected(path) for path in root.rglob("*")), sorted(root.rglob("*"))
            assert {path.name for path in root.glob("step-*")} == {f"step-{step}" for step in complete(root)}

    def _live(self, work: Callable[[Callable[[str], None]], None], *, killed: bool) -> Iterator[tuple[str, int]]:
        """Run `work` in a forked process, which is killed after a while if `killed`; yield what it tells."""
        reader, writer = os.pipe()
        life = self.chance.uniform(0.0, LONGEST_LIFE) * self.save_seconds
        child = os.fork()
        if not child:
            code = 1
            try:
                os.close(reader)
                if killed:
                    signal.signal(signal.SIGPROF, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_PROF, max(life, 1e-6))
                installed.divert_events(lambda event: tell_drop(writer, event))
                work(lambda text: tell(writer, text))
                code = 0
            finally:
                os._exit(code)
        os.close(writer)
        with os.fdopen(reader) as lines:
            told = [line.split() for line in lines if line.endswith("\n")]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0 or (killed and status == -signal.SIGPROF), f"a process ended with {status}"
        for word, step in told:
            yield word, int(step)


def measure(place: Path) -> tuple[int, float]:
    """Return the size of a checkpoint, and how many seconds of processor a save takes."""
    seconds = []
    with dcp.CheckpointManager(place, keep_policy=KeepLast(1), no_dist=True) as manager:
        for step in range(1, 6):
            begun = time.process_time()
            manager.save(step, {"values": torch.full((_VALUES,), step), "step": step})
            seconds.append(time.process_time() - begun)
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    shutil.rmtree(place)
    return size + 2048, min(seconds)  # with notes of arrival, and the description of the tiers


@contextmanager
def without_promoter() -> Iterator[None]:
    """Context manager: managers start no promoter of their own."""
    with mock.patch.multiple(PromoterProcess, start=mock.DEFAULT, wake=lambda _: True, end=lambda *_: True):
        yield


def tell(writer: int, text: str) -> None:
    """Write a line to the process that watches."""
    os.write(writer, f"{text}\n".encode())


def tell_drop(writer: int, event: CheckpointEvent) -> None:
    """Tell of a checkpoint that was removed from the full tier before further tiers had it."""
    if (event.operation, event.phase) == ("promote", "drop"):
        tell(writer, f"dropped {(event.checkpoint_id or '').rpartition('-')[2]}")


def complete(root: Path) -> set[int]:
    """Steps with an index below a folder."""
    return {int(path.parent.name.removeprefix("step-")) for path in root.glob("step-*/.metadata")}


def is_expected(path: Path) -> bool:
    """Whether a path belongs to a tier in which nothing is going on."""
    return (
        path.is_dir()
        or path.suffix == ".distcp"
        or path.name in {".metadata", ".dcp-note.json", "latest", "run.tiers.toml", ".dcp-promoter.lock"}
        or path.name.startswith(".dcp-promoted-")
    )


def main(folder: str, hours: str, seed: str) -> None:
    """Live through a day, and print how it was."""
    begun = time.monotonic()
    day = Day(Path(folder), int(seed))
    day.run(float(hours))
    model = day.model
    found = {
        "saves": len(model.acknowledged),
        "restarts": model.restarts,
        "killed promoters": model.killed_promoters,
        "outages": model.outages,
        "arrived": len(model.arrivals),
        "dropped": len(model.dropped),
        "seconds": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
