"""A job of a story: its lives, what each must find, and where it resumes after a fault."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Literal

from dcp_io import open_store, verify_checkpoint
from dcp_io.saves.save_files import temporary_of
from integration_tests.memory.faults import Fault, Layout, Story, struck_hosts
from integration_tests.memory.hosts import Hosts
from integration_tests.memory.lives import Life
from integration_tests.memory.model import Found, Known, look, newest
from integration_tests.memory.watching import Lived, live

__all__ = ["Job"]

_TRACES = "DCP_CAMPAIGN_TRACE" in os.environ

_EXPECTED = {
    "PeerLostError",
    "CoordinatorLostError",
    "CheckpointException of PeerLostError",
    "CheckpointException of CoordinatorLostError",
}
"""What ranks may raise that live when others are killed."""
_WITHOUT_KEEPER = {
    name
    for error in ("KeeperLostError", "SaveInProgressError", "CheckpointNotFoundError")
    for name in (error, f"CheckpointException of {error}")
}
"""What ranks may raise, too, when the keeper of their host is killed, and they are not, or later."""


class Job:
    """A job of a story, which is killed and resumes."""

    def __init__(self, story: Story, root: Path) -> None:
        self.story = story
        self.hosts = Hosts(root, story.near, story.rate)
        self.layout = story.layout
        self.known = Known()
        self.chance = random.Random(1000 + story.number)
        self.begun_ns: list[int] = []
        """Time at which each life began."""
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.last: Fault | None = None
        """The fault that the life before has met."""
        self.fresh = 0

    def run(self) -> None:
        """Live through the story, and end it well."""
        self._live(calm(2, "thread"))
        for fault in self.story.faults:
            self._live(fault)
            self.layout = self._next_layout(fault)
        self._live(calm(3, "none"))
        self._live(calm(2, "none"))
        self.problems += [f"story {self.story.number}: {problem}" for problem in self._strange()]

    def _live(self, fault: Fault) -> None:
        number = len(self.begun_ns)
        found = look(self.hosts, self.layout.hosts)
        self.begun_ns.append(time.time_ns())
        started = time.monotonic()
        life = Life(self.hosts, self.layout, fault, number)
        seen = live(life, self.chance)
        if _TRACES:
            print(f"life {number} {time.monotonic() - started:.1f} s {seen} {life}", file=sys.stderr, flush=True)
        for problem in self._judge(life, seen, found):
            self.problems.append(f"story {self.story.number}, life {number}: {problem}; {fault} on {self.layout}")
            print(self.problems[-1], file=sys.stderr, flush=True)
        begun = {step for step, _, _ in seen.resumed.values()}
        lives_on = fault.kind == "memory"
        self.known.lived(
            self.layout, min(begun, default=None), *(seen.before if lives_on else (seen.saved, seen.protected))
        )
        for host in life.lost:
            self.known.lost(host)
        if lives_on:  # what the other ranks were told of after that
            self.known.lived(
                self.layout,
                None,
                seen.saved if seen.saved > seen.before[0] else 0,
                seen.protected if seen.protected > seen.before[1] else 0,
            )
        self.last = fault if life.strikes else None
        if life.strikes:
            self.counts[f"at the {seen.struck}"] += 1

    def _judge(self, life: Life, seen: Lived, found: dict[str, list[Found]]) -> list[str]:
        """Return what is not as it must be."""
        problems = [*seen.problems]
        expected = newest([one for each in found.values() for one in each])
        step, of = (0, 0) if expected is None else (expected.step, self._life_of(expected))
        limit = self.known.at_least(self.layout)
        if step < limit:
            problems.append(f"of the step {limit} that ranks were told of only {step} is there")
        for rank, resumed in seen.resumed.items():
            if resumed != (step, of, True):
                problems.append(f"rank {rank} resumed (step, life, right) {resumed}, not step {step} of life {of}")
        without_keeper = life.fault.kind == "memory" or (life.lost and life.fault.keeper_first)
        expected_errors = _EXPECTED | (_WITHOUT_KEEPER if without_keeper else set())
        raised = [error for error in seen.errors if error.partition(" | ")[0] not in expected_errors]
        problems += [f"a rank raised {error}" for error in raised]
        if life.paces and seen.saved > max(seen.protected, step) + 1:
            problems.append(f"step {seen.saved} was saved before {seen.saved - 1} was protected: {seen.unprotected}")
        if self.last is not None and seen.resumed:
            near = newest([one for name, each in found.items() if name for one in each])
            self._count(self.last, step, near)
        return problems

    def _count(self, fault: Fault, step: int, near: Found | None) -> None:
        """Count a resumption after a fault by what it lost."""
        last = self.known.newest
        back = 0 if last is None else max(0, last.step - step)
        covered = (
            last is None
            or not last.gone_from(self.layout)
            or (self.story.near == "partner" and last.is_covered(self.layout))
        )
        # The save before may be one that was resumed from, with the copies of a host that has been replaced.
        covered = covered and (last is None or self.known.at_least(self.layout) >= last.step - 1)
        place = "memory" if near is not None and near.step >= step else "the next tier"
        self.counts[f"{fault.kind}: {'covered' if covered else 'not covered'}, {back} back, from {place}"] += 1

    def _life_of(self, save: Found) -> int:
        return sum(begun <= save.created for begun in self.begun_ns) - 1

    def _next_layout(self, fault: Fault) -> Layout:
        """Return where the job resumes."""
        hosts, each = [*self.layout.hosts], self.layout.each
        struck = struck_hosts(fault, self.layout)
        if fault.resume == "replaced":
            for host in struck:
                self.fresh += 1
                hosts[hosts.index(host)] = f"n{self.fresh}"
        elif fault.resume == "fewer" and len(hosts) > len(struck):
            hosts = [host for host in hosts if host not in struck]
        elif fault.resume == "other":
            each = 1 + each % 2
            self.chance.shuffle(hosts)
            wanted = self.story.layout.hosts
            hosts += [host for host in wanted if host not in hosts][: max(0, len(wanted) - len(hosts))]
        return Layout(tuple(hosts), each)

    def _strange(self) -> list[str]:
        """Return what is in the tiers at the end of the story and must not be."""
        last = max((save.step for save in self.known.saves), default=0)
        problems = []
        for host in self.layout.hosts:
            with self.hosts.on(host):
                root = open_store(self.hosts.near_url)
                steps = {f"step-{step}" for step in (last - 1, last)}
                if {*root.folders()} != steps:
                    problems.append(f"host {host} has {root.folders()}, not {steps}")
                names = [entry.name for folder in (root, *map(root.child, root.folders())) for entry in folder.list()]
                problems += [f"{name} is on host {host}" for name in names if not is_expected(name)]
        far = last - last % 2
        report = verify_checkpoint(open_store(self.hosts.far).child(f"step-{far}"))
        if not report.ok:
            problems.append(f"the promoted step {far}: {report.problems}")
        problems += [
            f"{path} is left" for path in self.hosts.far.rglob("*") if not path.is_dir() and not is_expected(path.name)
        ]
        return problems


def calm(saves: int, saver: Literal["none", "thread"]) -> Fault:
    """Return no fault: a life that saves, promotes, and ends well."""
    return Fault("none", 0, "time", 0, 0.0, saves, saver, paced=True, drains=True, resume="same")


def is_expected(name: str) -> bool:
    """Whether a name belongs to a tier in which nothing is going on."""
    known = {".metadata", ".dcp-note.json", ".dcp-run", ".dcp-host", ".dcp-hosts.json", ".dcp-copies.json", "latest"}
    known |= {"run.tiers.toml", ".dcp-promoter.lock"}
    if name in known or name.endswith(".distcp") or name.startswith((".dcp-promoted-", ".dcp-protected")):
        return True
    # Left by processes that were killed, and removed when they are old enough to be no living one's.
    return name.startswith(".dcp-here-") or temporary_of(name) is not None
