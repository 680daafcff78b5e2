"""Owners at the scale of jobs: level, and near to who wants the bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dcp_exchange.assignment.assign import Assignment, assign, choose_owners
from dcp_exchange.assignment.kinds import IMPOSSIBLE, Kinds, level
from dcp_io.reading.crc_checks import Demands

MIB = 1 << 20
Groups = list[tuple[Demands, Sequence[int]]]


def readers_of(found: Assignment, piece: int) -> np.ndarray[Any, Any]:
    of = found.classes[piece]
    return found.readers[found.borders[of] : found.borders[of + 1]]


def count_crossing_bytes(found: Assignment, hosts: Sequence[int]) -> int:
    """Bytes between hosts if each piece is sent once to each host that wants it."""
    sizes = found.stops - found.starts
    readers = [readers_of(found, piece) for piece in range(len(sizes))]
    receivers = [
        {hosts[rank] for rank in wanting} - {hosts[owner]} for wanting, owner in zip(readers, found.owners, strict=True)
    ]
    return sum(len(others) * int(size) for others, size in zip(receivers, sizes, strict=True))


def rows(name: str, count: int, size: int, *, first: int = 0, step: int | None = None) -> Demands:
    starts = first + np.arange(count) * (step or size)
    return Demands.of((name,), np.zeros(count), starts, starts + size, np.full(count, 64 << 10))


def replicated(ranks: int) -> Groups:
    return [(rows("a", 300, 3 * MIB), range(ranks))]


def hybrid(ranks: int) -> Groups:
    """Eight shards, each wanted by one rank of each host."""
    return [(rows(f"shard-{shard}", 40 + shard, 3 * MIB), range(shard, ranks, 8)) for shard in range(8)]


def stages(ranks: int) -> Groups:
    """Hosts that want different things, one much more than the others."""
    return [(rows(f"stage-{low}", 900 if low == 0 else 30, MIB), range(low, low + 8)) for low in range(0, ranks, 8)]


def neighbours(ranks: int) -> Groups:
    """Ranges that begin and end in a block that the neighbour wants, too."""
    return [(rows("a", 50, 8 * MIB, first=rank * 6 * MIB, step=ranks * 8 * MIB), [rank]) for rank in range(ranks)]


def one_with_much(ranks: int) -> Groups:
    """All want something; one rank wants more for itself alone than all that is shared."""
    shared, alone = rows("a", 100, MIB), rows("b", 300, MIB)
    both = Demands.of(
        ("a", "b"),
        np.repeat([0, 1], [100, 300]),
        np.concatenate((shared.starts, alone.starts)),
        np.concatenate((shared.stops, alone.stops)),
        np.full(400, 64 << 10),
    )
    return [(both, [0]), (shared, range(1, ranks))]


def random_pairs(ranks: int) -> Groups:
    """Very many sets of ranks, each of which wants little."""
    random = np.random.default_rng(0)
    wanted: list[list[int]] = [[] for _ in range(ranks)]
    for item in range(4000):
        for rank in random.choice(ranks, 2, replace=False):
            wanted[rank].append(item)
    demands = [np.array(items) * MIB for items in wanted]
    return [
        (Demands.of(("a",), np.zeros(len(each)), each, each + MIB, np.full(len(each), 64 << 10)), [rank])
        for rank, each in enumerate(demands)
    ]


def demanded(groups: Groups, world_size: int) -> Any:
    found = np.zeros(world_size, np.int64)
    for demands, ranks in groups:
        found[[*ranks]] = demands.total_bytes
    return found


def loads(found: Assignment, groups: Groups, world_size: int) -> tuple[Any, Any]:
    """Bytes that each rank reads for others and itself, and those that it reads for itself alone."""
    sizes = found.stops - found.starts
    assigned, own = np.zeros(world_size, np.int64), demanded(groups, world_size)
    np.add.at(assigned, found.owners, sizes)
    for rank in range(world_size):
        wanted = np.zeros(len(found.borders) - 1, bool)
        wanted[np.searchsorted(found.borders, np.flatnonzero(found.readers == rank), "right") - 1] = True
        own[rank] -= sizes[wanted[found.classes]].sum()
    return assigned, own


CASES = [replicated, hybrid, stages, neighbours, one_with_much, random_pairs]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [16, 64])
def test_every_rank_reads_about_the_mean(case: Callable[[int], Groups], ranks: int) -> None:
    groups = case(ranks)
    found = assign(groups, [rank // 8 for rank in range(ranks)])
    assigned, own = loads(found, groups, ranks)
    mean = (assigned.sum() + own.sum()) / ranks
    piece = (found.stops - found.starts).max()
    takers = assigned > 0
    assert (own + assigned)[takers].max() <= 1.05 * mean + piece
    # Who gets nothing has enough already; the others share what is left about evenly.
    level = assigned.sum() + own[takers].sum()
    assert own[~takers].min(initial=2**62) >= level / takers.sum() * 0.9 - piece
    assert (own + assigned)[takers].min() >= level / takers.sum() * 0.9 - piece
    assert own.min() >= 0


def test_a_rank_that_reads_much_for_itself_reads_nothing_for_others() -> None:
    groups = one_with_much(8)
    assigned, own = loads(assign(groups, [0] * 8), groups, 8)
    assert own.tolist() == [300 * MIB, *[0] * 7]
    assert assigned[0] == 0


@pytest.mark.parametrize("case", [replicated, hybrid, neighbours])
def test_level_ranks_read_what_they_want_themselves(case: Callable[[int], Groups]) -> None:
    found = assign(case(64), [rank // 8 for rank in range(64)])
    wants = [found.owners[piece] in readers_of(found, piece) for piece in range(len(found.starts))]
    assert np.mean(wants) > 0.97


def test_the_host_reads_where_most_ranks_want_it() -> None:
    """Host 0 and one rank of host 1 want something; that rank reads as much for itself as the others for all."""
    groups: Groups = [
        (rows("a", 64, MIB), range(8)),
        (Demands.of(("a", "c"), [0, 1], [0, 0], [64 * MIB, 8 * MIB], [MIB, MIB]), [8]),
        (rows("b", 56, MIB), range(9, 16)),
    ]
    found = assign(groups, [rank // 8 for rank in range(16)])
    for piece in range(len(found.starts)):
        assert (found.names[found.objects[piece]] == "a") == (found.owners[piece] < 8)


def test_replicated_state_crosses_to_each_other_host_once() -> None:
    hosts = [rank // 2 for rank in range(8)]
    found = assign(replicated(8), hosts)
    assert count_crossing_bytes(found, hosts) == 900 * MIB * 3


def test_pieces_of_an_owner_are_neighbours() -> None:
    found = assign(replicated(8), [0] * 8)
    changes = np.count_nonzero(np.diff(found.owners))
    assert changes == 7


@pytest.mark.parametrize("seed", range(60))
def test_no_rank_has_more_than_its_level_and_one_piece(seed: int) -> None:
    """Kinds of few pieces, of which each rank can read only some: whole pieces seldom fit the levels."""
    random = np.random.default_rng(seed)
    kinds, ranks = 12, 6
    of_pieces = np.sort(np.append(np.arange(kinds), random.integers(0, kinds, 12)))
    tiers = random.choice([0, 0, 1, 2, 3, IMPOSSIBLE], (kinds, ranks)).astype(np.int8)
    tiers[:, 0] = 0
    sizes = random.integers(1, MIB, len(of_pieces))
    own = random.integers(0, 4 * MIB, ranks) * (random.random(ranks) < 0.3)
    loads = own.copy()
    owners = choose_owners(Kinds(of_pieces, tiers), sizes, own)
    np.add.at(loads, owners, sizes)
    kind_bytes = np.bincount(of_pieces, sizes).astype(np.int64)
    assert (loads - own - level(kind_bytes, tiers, own).sum(axis=0)).max() <= sizes.max()
    assert (tiers[of_pieces, owners] < IMPOSSIBLE).all()


def test_objects_are_read_where_they_are() -> None:
    """Each host has its own file, a copy of its neighbour's, and all ranks want all files."""
    ranks, count = 32, 4
    sizes = [10, 200, 40, 90]
    names = [f"file-{host}" for host in range(count)]
    all_rows = [np.arange(size) * MIB for size in sizes]
    starts = np.concatenate(all_rows)
    everything = Demands.of(names, np.repeat(range(count), sizes), starts, starts + MIB, np.full(sum(sizes), 64 << 10))
    holders = {name: [host, (host + 1) % count] for host, name in enumerate(names)}
    hosts = [rank // 8 for rank in range(ranks)]
    found = assign([(everything, range(ranks))], hosts, holders=holders)
    assigned, _ = loads(found, [(everything, range(ranks))], ranks)
    for piece in range(len(found.starts)):
        assert hosts[found.owners[piece]] in holders[found.names[found.objects[piece]]]
    # Hosts 1 and 2 alone can read the largest file, host 0 and 3 the last one.
    best = max(200 / 16, 90 / 16, sum(sizes) / 32) * MIB
    assert assigned.max() <= 1.05 * best + (found.stops - found.starts).max()


def test_what_the_only_rank_that_wants_it_cannot_read_is_read_by_another() -> None:
    groups: Groups = [(rows("a", 4, MIB), [0]), (rows("b", 4, MIB), [3])]
    found = assign(groups, [0, 0, 1, 1], holders={"a": [1], "b": [1]})
    assert [*found.names] == ["a", "b"]
    assert [found.names[place] for place in found.objects] == ["a"] * len(found.objects)
    assert {*found.owners.tolist()} <= {2, 3}
    assert readers_of(found, 0).tolist() == [0]
    assert (found.stops - found.starts).sum() == 4 * MIB


@pytest.mark.parametrize(
    ("groups", "holders", "message"),
    [
        ([(rows("a", 1, MIB), [0, 1]), (rows("b", 1, MIB), [1])], None, "rank 1 has two demands"),
        ([(rows("a", 1, MIB), [2])], None, "demands are given for rank 2; there are the ranks 0 to 1"),
        ([(rows("a", 1, MIB), [])], None, "demands are given that no rank has"),
        ([(rows("a", 1, MIB), [0])], {}, "no host of this job has 'a': no host has it"),
        ([(rows("a", 1, MIB), [0])], {"a": [9]}, r"no host of this job has 'a': \[9\] has it"),
    ],
)
def test_impossible_jobs_are_refused(groups: Groups, holders: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        assign(groups, [0, 1], holders=holders)


@pytest.mark.parametrize("groups", [[], [(rows("a", 0, MIB), [0, 1])], [(rows("a", 3, MIB), [1])]])
def test_nothing_shared_is_no_piece(groups: Groups) -> None:
    found = assign(groups, [0, 1])
    assert len(found.starts) == len(found.owners) == len(found.readers) == 0
    assert found.borders.tolist() == [0]
