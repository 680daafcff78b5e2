"""N ranks → M ranks: stop between two steps, resume, and compare each sample with those of an uninterrupted run.

Ranks are explicit arguments here and run one after the other; workers are real processes. 200 cases, a tenth of them in
the tests of every change.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from dcp_data import ResumableSampler, ResumableStream

RANKS = (1, 2, 3, 4, 8)
KINDS = ("map", "stream")
WORKERS = (0, 1, 2, 4)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


@dataclass(frozen=True)
class Case:
    number: int
    ranks: int
    ranks_after: int
    kind: str
    workers: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.ranks}to{self.ranks_after}-{self.workers}workers-{self.number}"


class Generated:
    """Shards of unequal lengths, some of them empty, whose samples are numbered through; read from begin to end."""

    def __init__(self, lengths: list[int]) -> None:
        self.begins = [0, *itertools.accumulate(lengths)]

    def __call__(self, shard: int) -> Iterator[int]:
        yield from range(self.begins[shard], self.begins[shard + 1])


def cases() -> list[Case]:
    table = [*itertools.product(RANKS, RANKS, KINDS, WORKERS)]
    random.Random(21).shuffle(table)
    return [Case(number, *entry) for number, entry in enumerate(table)]


class Draws:
    """What is drawn at random for a case."""

    def __init__(self, case: Case) -> None:
        draw = random.Random(case.number)
        self.drop_last = draw.random() < 0.5
        self.workers_after = draw.choice(WORKERS)
        self.micro_batches = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
        self.global_batch_size = draw.choice((24, 24, 16, 7))
        self.seed = draw.randrange(1000)
        self.persistent = draw.random() < 0.5
        self.weights: list[float] | None = None
        if case.kind == "map":
            self.length = draw.choice((0, 5, 24, 96, draw.randrange(1, 300), draw.randrange(100, 300)))
            if draw.random() < 0.25 and self.length:
                self.weights = [draw.random() + 0.01 for _ in range(self.length)]
            self.shuffle = draw.random() < 0.8
            return
        self.lengths = [draw.choice((0, 1, draw.randrange(60))) for _ in range(draw.randrange(12))]
        self.length = sum(self.lengths)
        self.indexed = draw.random() < 0.3
        self.buffer = draw.choice((0, 1, 5, 1000))
        self.lanes = draw.choice((None, (1, 1), (3, 5), (48, 2)))

    def position(self, case: Case, rank: int, ranks: int, micro_batches: int) -> Any:
        common: dict[str, Any] = {"seed": self.seed, "drop_last": self.drop_last, "micro_batches": micro_batches}
        common |= {"rank": rank, "world_size": ranks}
        if case.kind == "map":
            shuffle = {"weights": self.weights} if self.weights else {"shuffle": self.shuffle}
            return ResumableSampler(self.length, self.global_batch_size, **shuffle, **common)
        common |= dict(zip(("lanes", "chunk"), self.lanes, strict=True)) if self.lanes else {}
        shards: Any = Generated(self.lengths)
        if self.indexed:
            shards = [[*shards(number)] for number in range(len(self.lengths))]
        return ResumableStream(
            shards, self.global_batch_size, lengths=self.lengths, shuffle_buffer=self.buffer, **common
        )


def trained_on(
    case: Case, draws: Draws, ranks: int, workers: int, micro_batches: int, state: Any, steps: int | None
) -> tuple[list[list[int]], Any]:
    """The samples of each step, in the order of their positions, and the state of all ranks after the last step."""
    batches: list[list[list[int]]] = []
    states = []
    for rank in range(ranks):
        position = draws.position(case, rank, ranks, micro_batches)
        if state is not None:
            position.load_state_dict(json.loads(state))
        options = {"persistent_workers": draws.persistent} if workers else {}
        if case.kind == "map":
            options["dataset"] = range(draws.length)
        loader = position.loader(num_workers=workers, **options)
        of_rank = []
        if steps != 0:  # a job that stops before its first step
            for batch in loader:
                of_rank.append(batch.tolist() if loader.weight else [])
                if steps is not None and len(of_rank) == steps * micro_batches:
                    break
        batches.append([joined(each) for each in zip(*[iter(of_rank)] * micro_batches, strict=True)])
        states.append(json.dumps(position.state_dict()))
    assert len(set(states)) == 1, "the state is not the same on all ranks"
    assert len({len(each) for each in batches}) == 1, "the ranks took different numbers of steps"
    return [joined(parts) for parts in zip(*batches, strict=True)], states[0]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(lists)]


def check(case: Case) -> None:
    draws = Draws(case)
    whole, end = trained_on(case, draws, 1, 0, 1, None, None)
    if not draws.drop_last and draws.weights is None:
        assert sorted(joined(whole)) == [*range(draws.length)]  # nothing twice, nothing left out
    stop = random.Random(-case.number).randint(0, len(whole))
    first, state = trained_on(case, draws, case.ranks, case.workers, draws.micro_batches[0], None, stop)
    consumed = sum(map(len, whole[:stop]))
    assert json.loads(state)["samples_in_epoch"] == consumed  # however many batches were in flight
    rest, end_after = trained_on(
        case, draws, case.ranks_after, draws.workers_after, draws.micro_batches[1], state, None
    )
    assert first + rest == whole
    assert end_after == end


@pytest.mark.parametrize("case", cases()[:20], ids=str)
def test_a_resumed_job_goes_on_where_it_stopped(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=str)
def test_all_resumed_jobs_go_on_where_they_stopped(case: Case) -> None:
    check(case)


def test_the_table_has_every_combination() -> None:
    table = cases()
    assert len(table) == len({(case.ranks, case.ranks_after, case.kind, case.workers) for case in table}) == 200
    drawn = [Draws(case) for case in table]
    assert 80 < sum(each.drop_last for each in drawn) < 120
    assert {each.workers_after for each in drawn} == {*WORKERS}
