"""Faults of the campaign: what is killed, at which moment, and onto which hosts the job resumes; drawn by number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from integration_tests.memory.hosts import Near
from integration_tests.memory.moments import MOMENTS

__all__ = ["KINDS", "Fault", "Layout", "Story", "draw_story", "struck_hosts"]

Kind = Literal["rank", "host", "keeper", "all", "two", "memory", "none"]
KINDS: dict[Kind, float] = {"rank": 3, "host": 3, "keeper": 4, "all": 2, "two": 2, "memory": 1}
"""What is killed, with weights: a rank, all ranks of a host, those and the keeper (and the promoter) of the host, all
ranks of the job, two neighbouring hosts with their keepers, the keeper of a host alone."""
RESUMES = {"same": 5, "replaced": 3, "fewer": 2, "other": 2}
"""Onto which hosts the job resumes, with weights: the same names, other names for the lost ones, without the lost ones
(or one fewer), all with another number of ranks on each."""


@dataclass(frozen=True)
class Layout:
    """Hosts of a job, in the order of their ranks, and the number of ranks on each."""

    hosts: tuple[str, ...]
    each: int

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.hosts) * self.each

    def ranks_of(self, host: str) -> range:
        """The ranks on a host."""
        first = self.hosts.index(host) * self.each
        return range(first, first + self.each)


@dataclass(frozen=True)
class Fault:
    """One life of a job: it resumes, saves some steps, and meets a fault."""

    kind: Kind
    victim: int
    """Number that selects the rank, modulo the world size; other kinds take its host, and the next one."""
    moment: str
    """A key of `MOMENTS`; or `time`: after a delay, counted from the resumption."""
    count: int
    """Number of calls of the moment's function on the victim that go well before."""
    delay: float
    """In seconds."""
    saves: int
    saver: Literal["none", "thread", "process"]
    paced: bool
    """Whether the job begins a save only when the one before is protected, as far as it may be."""
    drains: bool
    """Whether promoters of hosts that live may finish what they can, or are killed with the trainers."""
    resume: str
    """Onto which hosts the next life begins."""
    keeper_first: bool = False


def struck_hosts(fault: Fault, layout: Layout) -> list[str]:
    """Return the hosts that a fault is about."""
    first = fault.victim % layout.world // layout.each
    hosts = layout.hosts
    second = (first + 1) % len(hosts)  # the same where there is one host alone
    return [hosts[first], hosts[second]] if fault.kind == "two" and second != first else [hosts[first]]


@dataclass(frozen=True)
class Story:
    """Faults that one run of a job meets, one after another."""

    number: int
    near: Near
    rate: float | None
    layout: Layout
    faults: tuple[Fault, ...]


_LAYOUTS = [(4, 2), (1, 1), (4, 2), (3, 1), (2, 4), (4, 2), (2, 2), (4, 2), (8, 1), (4, 1)]
"""Numbers of hosts, and of ranks on each; four in ten stories are on four hosts with two ranks."""


def draw_story(number: int, near: Near, *, faults: int) -> Story:
    """Return the story with this number, the same each time."""
    chance = random.Random(number)
    hosts, each = _LAYOUTS[number % len(_LAYOUTS)]
    drawn = tuple(_draw(chance, near, hosts, each) for _ in range(faults))
    layout = Layout(tuple("abcdefgh"[:hosts]), each)
    return Story(number, near, chance.choice([None, 2e6, 20e6]), layout, drawn)


def _draw(chance: random.Random, near: Near, hosts: int, each: int) -> Fault:
    kinds = {**KINDS, "two": KINDS["two"] if hosts > 2 else 0, "memory": KINDS["memory"] if near != "folder" else 0}
    moments = [name for name, moment in MOMENTS.items() if moment.near in ("", near if hosts > 1 else "")]
    moment = chance.choice([*["time"] * 4, *moments])
    stages = moment != "time" and MOMENTS[moment].stages
    saver = chance.choices(["none", "thread", "process"], [0 if stages else 4, 8, 0.3 if hosts * each < 4 else 0])[0]
    return Fault(
        kind=chance.choices([*kinds], [*kinds.values()])[0],
        victim=chance.randrange(64),
        moment=moment,
        count=int(chance.random() ** 1.5 * MOMENTS[moment].calls) if moment != "time" else 0,
        delay=chance.uniform(0.0, 0.3),
        saves=chance.randint(2, 4),
        saver=saver,
        paced=chance.random() < 0.6,
        drains=chance.random() < 0.5,
        resume=chance.choices([*RESUMES], [*RESUMES.values()])[0],
        keeper_first=chance.random() < 0.5,
    )
