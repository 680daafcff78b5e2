"""Which rank reads which piece: each is read once, whoever is slow."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_exchange.piece_queue import PieceQueue, helped


class Tickets:
    """Numbers that a store would give."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.queues: defaultdict[int, itertools.count[int]] = defaultdict(itertools.count)
        self.taken = 0

    def __call__(self, queue: int) -> int:
        with self.lock:
            self.taken += 1
            return next(self.queues[queue])


def queues(
    owners: Sequence[int], hosts: Sequence[Sequence[int]], take: Callable[[int], int] | None
) -> list[PieceQueue]:
    ranks = sorted(rank for host in hosts for rank in host)
    return [PieceQueue(owners, rank, take, helped(rank, hosts)) for rank in ranks]


def drain(queue: PieceQueue) -> list[int]:
    return [*iter(queue.next, None)]


@given(
    st.lists(st.integers(0, 3), max_size=300),
    st.sampled_from([((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0,), (1, 3), (2,))]),
    st.lists(st.integers(0, 3), max_size=400),
)
def test_each_piece_is_read_once_in_any_order_of_ranks(
    owners: list[int], hosts: tuple[tuple[int, ...], ...], turns: list[int]
) -> None:
    made = queues(owners, hosts, Tickets())
    read = [made[rank].next() for rank in turns]
    read += [piece for queue in made for piece in drain(queue)]
    assert sorted(piece for piece in read if piece is not None) == [*range(len(owners))]
    assert [queue.own for queue in made] == [owners.count(rank) for rank in range(4)]
    assert [queue.next() for queue in made] == [None] * 4


@pytest.mark.parametrize("pieces", [1, 63, 1000])
def test_each_piece_is_read_once_by_threads(pieces: int) -> None:
    owners = [number % 3 for number in range(pieces)]
    made = queues(owners, ((0, 1), (2,)), Tickets())
    read: list[list[int]] = [[] for _ in range(6)]
    threads = [
        threading.Thread(target=lambda number=number: read[number].extend(drain(made[number // 2])))
        for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(itertools.chain(*read)) == Counter(range(pieces))


def test_a_slow_owner_is_helped_with_all_but_its_first_run() -> None:
    owners = [0] * 640 + [1] * 5
    slow, fast = queues(owners, ((0, 1),), Tickets())
    begun = slow.next()
    assert begun == 0
    helping = drain(fast)
    assert helping[:5] == [*range(640, 645)], "its own pieces come first"
    assert helping[5:] == [*range(10, 640)]
    assert drain(slow) == [*range(1, 10)]


def test_each_reads_its_own_without_tickets() -> None:
    owners = [0, 1, 1, 0, 2]
    assert [drain(queue) for queue in queues(owners, ((0, 1), (2,)), None)] == [[0, 3], [1, 2], [4]]


def test_the_store_is_asked_a_bounded_number_of_times() -> None:
    take = Tickets()
    (queue,) = queues([0] * 100_000, ((0,),), take)
    assert len(drain(queue)) == 100_000
    assert take.taken <= 65


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80))
def test_who_is_helped(hosts: list[int]) -> None:
    by_host = [[rank for rank, host in enumerate(hosts) if host == each] for each in sorted({*hosts})]
    for rank, host in enumerate(hosts):
        order = helped(rank, by_host)
        near = {other for other, its in enumerate(hosts) if its == host} - {rank}
        assert {*order[: len(near)]} == near, "those of the own host come first"
        assert len({*order}) == len(order), "nobody is named twice"
        assert rank not in order
        assert len(order) - len(near) == min(16, len(hosts) - 1 - len(near))
