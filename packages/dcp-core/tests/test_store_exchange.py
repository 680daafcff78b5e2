"""Phases on real ranks: what they return, how they fail, and that nobody hangs and nothing stays behind."""

from __future__ import annotations

import os
import pickle
import select
import signal
import threading
import time
import uuid
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_core.coordination import CollectiveCoordinator, StoreCoordinator, make_coordinator
from dcp_core.errors import (
    CheckpointException,
    CoordinatorLostError,
    CoordinatorTimeoutError,
    DcpError,
    PeerLostError,
    RankDisagreementError,
)
from dcp_core.fence import check_fence
from dcp_core.peers import PeerOptions
from dcp_core.process_identity import own_identity
from dcp_core.store_wire import CHUNK_BYTES
from dcp_core.testing.group_store import group_store, keys_of_group

KINDS = ["store", "relay", "collective"]
# Two ranks on each host; what is above the leaders' number goes from rank to rank, one leader below each.
RELAYING = PeerOptions(leaders_above=1, fan_out=1)


class LockedError(Exception):
    """Cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


class PickyError(Exception):
    """Pickles, but cannot be unpickled."""

    def __init__(self, text, more):
        super().__init__(text)


class MuteError(Exception):
    """Cannot even be described."""

    def __str__(self):
        raise RuntimeError("no words")


class BombError(Exception):
    """Its pickling raises something unusual."""

    def __reduce__(self):
        raise RecursionError("pickling goes wrong")


class Unloadable:
    """Pickles, and raises wherever it is unpickled."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("not here")


def coordinator(kind, **options):
    """The coordinator of the default group, of the kind that a test asks for."""
    if kind == "collective":
        return CollectiveCoordinator(**{"group": dist.group.WORLD, **options})
    if kind == "relay":
        with mock.patch("dcp_core.peers.own_identity", pretended_host):
            made = make_coordinator(peers=RELAYING, **options)
        made.barrier("start")  # the first phase of an operation is never relayed
    else:
        made = make_coordinator(**options)
    assert type(made) is StoreCoordinator
    return made


def pretended_host():
    """The identity of this process, as if each two ranks had a host."""
    own = own_identity()
    return replace(own, host=f"{own.host} {dist.get_rank() // 2}")


def keys():
    """What is left in the group's store of operations that have ended, once all ranks are here."""
    dist.barrier()
    left = [key for key in keys_of_group() if "dcp/" in key]
    dist.barrier()
    lasting = ("dcp/drawn/", "dcp/usable", "dcp/peers/")
    return [key for key in left if not any(each in key for each in lasting)]


def caught(call):
    """What `call` raises."""
    try:
        call()
    except BaseException as error:
        return error
    return None


def raise_(error):
    """Raise within an expression."""
    raise error


def every_move(kind, coordinator_rank):
    rank = dist.get_rank()
    with coordinator(kind, coordinator_rank=coordinator_rank) as them:
        return (
            them.is_coordinator,
            them.reduce_scatter("a", lambda: rank * 10, lambda values: [value + 1 for value in values]),
            them.all_reduce("a", lambda: rank, lambda values: (values, rank)),
            them.all_gather("b", lambda: "x" * rank),
            them.broadcast("c", lambda: f"from {rank}"),
            them.barrier("d"),
            them.all_gather("nothing", lambda: None),
            them.agree("same", {"id": "a"}, "ids"),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("world_size", "lead"), [(2, 0), (4, 0), (4, 3)])
def test_values(ranks, kind, world_size, lead):
    numbers = list(range(world_size))
    for rank, found in enumerate(ranks.run(world_size, every_move, kind, lead)):
        assert found == (
            rank == lead,
            rank * 10 + 1,
            (numbers, lead),
            ["x" * number for number in numbers],
            f"from {lead}",
            None,
            [None] * world_size,
            None,
        )


def big_values(kind, sizes):
    with coordinator(kind) as them:
        rank = dist.get_rank()
        gathered = [them.all_gather("big", lambda size=size: bytes([rank]) * size) for size in sizes]
        scattered = [
            them.reduce_scatter("big", lambda: None, lambda _, size=size: [bytes([r]) * size for r in range(2)])
            for size in sizes
        ]
    return gathered == [[bytes([r]) * size for r in range(2)] for size in sizes] and scattered == [
        bytes([rank]) * size for size in sizes
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_size(ranks, kind):
    around = [CHUNK_BYTES * number + more for number in (1, 3) for more in (-100, -1, 0, 1)]
    assert all(ranks.run(2, big_values, kind, [0, 1, *around, 20_000_000]))


def nothing_left(kind):
    for number in range(3):
        with coordinator(kind) as them:
            them.save_nonce()
            them.reduce_scatter("plan", lambda: bytes(3_000_000), lambda values: values)
            them.all_gather("write", lambda: bytes(1_500_000))
            if number == 1:
                caught(lambda: them.barrier("x") if dist.get_rank() else them.all_gather("y", lambda: 1))
            if number == 2:
                caught(lambda: them.all_gather("x", lambda: bytes(3_000_000) if dist.get_rank() else 1 / 0))
    return keys()


@pytest.mark.parametrize("kind", ["store", "relay"])
def test_keys_are_removed(ranks, kind):
    assert ranks.run(4, nothing_left, kind) == [[]] * 4


def fail_in_map(kind, failing, make_error):
    rank = dist.get_rank()
    with coordinator(kind) as them:
        them.barrier("before")
        error = caught(lambda: them.all_gather("write", lambda: raise_(make_error(rank)) if rank in failing else rank))
        after = caught(lambda: them.barrier("after"))
    with coordinator(kind) as them:  # the group is fine
        assert them.all_gather("next", lambda: rank) == list(range(dist.get_world_size()))
    return error, error.__cause__, after


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [(0,), (1,), (3,), (1, 3), (0, 1, 2, 3)])
def test_an_error_is_raised_on_every_rank(ranks, kind, failing):
    found = ranks.run(4, fail_in_map, kind, failing, lambda rank: ValueError(f"bad {rank}"))
    for rank, (error, cause, after) in enumerate(found):
        assert type(error) is CheckpointException
        assert tuple(error.failures) == failing
        for failed in failing:
            exception, text = error.failures[failed]
            assert repr(exception) == f"ValueError('bad {failed}')"
            assert "raise_(make_error(rank))" in text
            assert text.rstrip() in str(error)
        assert "'write'" in str(error)
        assert f"rank {failing[0]}" in str(error)
        assert repr(cause) == (f"ValueError('bad {rank}')" if rank in failing else "None")
        assert isinstance(after, DcpError)
        assert "ended" in str(after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("error_type", [LockedError, PickyError, MuteError, BombError])
def test_an_exception_that_cannot_travel_is_reported_as_text(ranks, kind, failing, error_type):
    arguments = ("original words", "more") if error_type is PickyError else ("original words",)
    found = ranks.run(3, report_of, kind, failing, error_type, arguments)
    for rank, (texts, exceptions, kinds) in enumerate(found):
        assert list(texts) == [failing]
        assert error_type.__name__ in texts[failing]
        assert error_type is MuteError or "original words" in texts[failing]
        assert exceptions[failing] == (error_type.__name__ if rank == failing or error_type is MuteError else None)
        assert kinds == CheckpointException.__name__


def report_of(kind, failing, error_type, arguments):
    with coordinator(kind) as them:
        error = caught(
            lambda: them.all_reduce(
                "write",
                lambda: raise_(error_type(*arguments)) if them.rank == failing else 1,
                sum,
            )
        )
    texts = {rank: text for rank, (_, text) in error.failures.items()}
    names = {rank: type(one).__name__ if one is not None else None for rank, (one, _) in error.failures.items()}
    return texts, names, type(error).__name__


def fail_elsewhere(kind, where):
    with coordinator(kind, coordinator_rank=1) as them:
        calls = {
            "reduce": lambda: them.all_reduce("p", lambda: 1, lambda values: values[5]),
            "scatter": lambda: them.reduce_scatter("p", lambda: 1, lambda values: values[:-1]),
            "broadcast": lambda: them.broadcast("p", lambda: 1 / 0),
            "unpicklable value": lambda: them.all_gather("p", lambda: threading.Lock() if them.rank == 2 else 1),
            "unpicklable answer": lambda: them.all_reduce("p", lambda: 1, lambda _: threading.Lock()),
            "unloadable value": lambda: them.all_gather("p", lambda: Unloadable() if them.rank == 2 else 1),
        }
        return caught(calls[where])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("where", "failed", "words"),
    [
        ("reduce", 1, "IndexError"),
        ("scatter", 1, "2 results for 3 ranks"),
        ("broadcast", 1, "ZeroDivisionError"),
        ("unpicklable value", 2, "cannot pickle"),
        ("unpicklable answer", 1, "cannot pickle"),
        ("unloadable value", 1, "not here"),
    ],
)
def test_errors_beside_the_map_function(ranks, kind, where, failed, words):
    for error in ranks.run(3, fail_elsewhere, kind, where):
        assert isinstance(error, CheckpointException)
        assert list(error.failures) == [failed]
        assert words in str(error)


def interrupted(kind, error_type, where):
    with coordinator(kind) as them:
        if where == "map":
            return caught(lambda: them.all_gather("write", lambda: raise_(error_type("stop")) if them.rank == 1 else 1))
        return caught(lambda: them.all_reduce("write", lambda: 1, lambda _: raise_(error_type("stop"))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error_type", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("where", "stopped"), [("map", 1), ("reduce", 0)])
def test_an_interrupt_passes_through_and_the_others_hear_of_it(ranks, kind, error_type, where, stopped):
    found = ranks.run(3, interrupted, kind, error_type, where)
    assert type(found.pop(stopped)) is error_type
    for error in found:
        assert type(error) is CheckpointException
        assert list(error.failures) == [stopped]
        assert error_type.__name__ in str(error)


def say(word):
    group_store().set(f"said {word}", "yes")


def hear(word):
    """Be busy until another rank has said this; most tests say it where they have raised."""
    store = group_store()
    deadline = time.monotonic() + 40
    while not store.check([f"said {word}"]):
        assert time.monotonic() < deadline, "no other rank came so far while this one was busy"
        time.sleep(0.01)


def test_an_interrupt_while_waiting_is_heard_by_the_others(ranks):
    def call():
        with make_coordinator() as them:
            if them.rank == 1:
                signal.signal(signal.SIGALRM, lambda *_: raise_(KeyboardInterrupt("alarm")))
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            error = caught(lambda: them.all_gather("p", lambda: hear(word) if them.rank == 2 else None))
            say(word)
            return error

    word = uuid.uuid4()
    found = ranks.run(3, call)
    assert type(found[1]) is KeyboardInterrupt
    for error in (found[0], found[2]):
        assert type(error) is CheckpointException
        assert list(error.failures) == [1]


def one_fails_while_another_is_busy(kind, failing, busy, word):
    def work():
        if dist.get_rank() == busy:
            hear(word)
        return 1 / 0 if dist.get_rank() == failing else 1

    with coordinator(kind) as them:
        error = caught(lambda: them.all_gather("p", work))
        say(word)
    return error, keys()


@pytest.mark.parametrize("kind", ["store", "relay"])
@pytest.mark.parametrize(("failing", "busy"), [(0, 2), (1, 2), (1, 0), (3, 2)])
def test_nobody_waits_for_a_busy_rank_once_another_has_failed(ranks, kind, failing, busy):
    for error, left in ranks.run(4, one_fails_while_another_is_busy, kind, failing, busy, uuid.uuid4()):
        assert type(error) is CheckpointException
        assert list(error.failures) == [failing]
        assert f"rank {busy} had not finished" in str(error)
        assert left == []


def disagree(kind, what):
    with coordinator(kind) as them:
        if what == "value":
            return caught(lambda: them.agree("start", "b" if them.rank == 2 else "a", "checkpoint ids"))
        if what == "phase":
            return caught(lambda: them.barrier("load" if them.rank == 2 else "save"))
        return caught(lambda: them.all_gather("p", lambda: 1) if them.rank == 2 else them.barrier("p"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("value", "different checkpoint ids: ranks 0-1, 3: 'a'; rank 2: 'b'"),
        ("phase", "ranks 0-1, 3: barrier 'save'; rank 2: barrier 'load'"),
        ("move", "ranks 0-1, 3: barrier 'p'; rank 2: all_gather 'p'"),
    ],
)
def test_disagreement_is_named_on_every_rank(ranks, kind, what, words):
    for error in ranks.run(4, disagree, kind, what):
        assert type(error) is RankDisagreementError
        assert words in str(error)


def late(kind, late_rank, coordinator_rank, word):
    rank = dist.get_rank()
    dist.barrier()
    with coordinator(kind, timeout_seconds=2, coordinator_rank=coordinator_rank) as them:
        if rank == late_rank:
            hear(word)
        error = caught(lambda: them.all_gather("plan", lambda: rank))
        say(word)
    left = keys()
    with coordinator(kind, coordinator_rank=coordinator_rank) as them:
        return error, left, them.all_gather("again", lambda: rank)


@pytest.mark.parametrize("kind", ["store", "relay"])
@pytest.mark.parametrize(("late_rank", "lead"), [(2, 0), (0, 0), (0, 1)])
def test_a_deadline_names_the_late_rank_and_the_next_operation_works(ranks, kind, late_rank, lead):
    for error, left, again in ranks.run(4, late, kind, late_rank, lead, uuid.uuid4()):
        assert type(error) is CoordinatorTimeoutError
        assert error.ranks == (late_rank,)
        assert error.phase == "plan"
        assert f"for rank {late_rank};" in str(error)
        assert left == []
        assert again == [0, 1, 2, 3]


def slow_reduce(kind, word):
    published = []

    def publish(_):
        check_fence()
        hear(word)
        check_fence()
        published.append(1)

    with coordinator(kind, timeout_seconds=2) as them:
        dist.barrier()
        error = caught(lambda: them.all_reduce("publish", lambda: 1, publish))
        say(word)
        assert published == []
        return error


@pytest.mark.parametrize("kind", ["store", "relay"])
def test_a_deadline_names_the_coordinator_when_all_wait_for_it(ranks, kind):
    for error in ranks.run(3, slow_reduce, kind, uuid.uuid4()):
        assert type(error) is CoordinatorTimeoutError
        assert error.ranks == (0,)


def killed(victim, timeout_seconds, word):
    def work():
        rank = dist.get_rank()
        say(f"{word} {rank}")
        if rank == victim:
            for other in {*range(dist.get_world_size())} - {victim}:
                hear(f"{word} {other}")
            os.kill(os.getpid(), signal.SIGKILL)

    def operation():
        with make_coordinator(timeout_seconds=timeout_seconds) as them:
            them.all_gather("write", work)

    dist.barrier()
    return caught(operation)


def test_a_killed_rank_is_named_long_before_the_deadline(ranks):
    """In the first phase of a group's first operation, when not all ranks have met."""
    found = ranks.run(4, killed, 2, 1800.0, uuid.uuid4(), expect_death=[2])
    for error in (found[0], found[1], found[3]):
        assert type(error) is PeerLostError
        assert (error.phase, error.ranks, error.how) == ("write", (2,), ("its process has ended",))
        for part in ("phase 'write'", "rank 2 is gone", "restart the job"):
            assert part in str(error)


def test_a_lost_store_is_noticed_long_before_the_deadline(ranks):
    found = ranks.run(4, killed, 0, 1800.0, uuid.uuid4(), expect_death=[0])
    assert [type(error) for error in found[1:]] == [CoordinatorLostError] * 3
    assert all("phase 'write'" in str(error) for error in found[1:])


def lost_before_the_start():
    """Rank 0, with the store, ends once rank 1 is out of the first operation; rank 1 begins another after that."""
    with make_coordinator() as them:
        first = them.broadcast("before", os.getpid)
    if them.rank == 0:
        hear("rank 1 is out")
        os.kill(os.getpid(), signal.SIGKILL)
    end = os.pidfd_open(first)
    say("rank 1 is out")
    select.select([end], [], [])
    os.close(end)
    return caught(make_coordinator)


def test_an_operation_on_a_lost_store_does_not_start(ranks):
    assert type(ranks.run(2, lost_before_the_start, expect_death=[0])[1]) is CoordinatorLostError


def sub_groups(kind):
    rank = dist.get_rank()
    groups = [dist.new_group([0, 2]), dist.new_group([3, 1])]
    group = groups[rank % 2]
    options = {"process_group": group} if kind != "collective" else {"group": group}
    with coordinator(kind, coordinator_rank=1, **options) as them:
        values = them.all_gather("x", lambda: rank)
        lead = them.broadcast("y", lambda: rank)
        error = caught(lambda: them.barrier("z") if rank != 2 else them.all_gather("z", lambda: 1 / 0))
    outside = caught(lambda: make_coordinator(groups[1 - rank % 2]))
    return values, lead, error, outside


@pytest.mark.parametrize("kind", KINDS)
def test_sub_groups(ranks, kind):
    for rank, (values, lead, error, outside) in enumerate(ranks.run(4, sub_groups, kind)):
        members = [0, 2] if rank % 2 == 0 else [1, 3]
        assert values == members
        assert lead == members[1]
        assert type(outside) is ValueError
        assert (list(error.failures) == [1]) if rank % 2 == 0 else (error is None)


def many_in_flight(kind, count):
    rank = dist.get_rank()
    found = {}
    open_ones = [coordinator(kind) for _ in range(count)]

    def run(number, them):
        with them:
            got = []
            for step in range(4):
                time.sleep(0.001 * ((number * 7 + step * 5 + rank * 3) % 11))
                got.append(them.all_gather(f"step {step}", lambda step=step: (number, step, rank)))
            nonces = them.all_gather("nonces", them.save_nonce) if kind != "collective" else None
            fails = number % 3 == 0 and rank == 0
            error = caught(lambda: them.all_gather("last", lambda: 1 / 0 if fails else 1))
            found[number] = (got, nonces, error)

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(open_ones)]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    return found, keys() if kind != "collective" else []


@pytest.mark.parametrize("kind", KINDS)
def test_several_operations_in_flight_do_not_mix(ranks, kind):
    count = 6
    everything = ranks.run(3, many_in_flight, kind, count)
    nonces = set()
    for found, left in everything:
        assert left == []
        for number in range(count):
            got, nonce, error = found[number]
            assert got == [[(number, step, rank) for rank in range(3)] for step in range(4)]
            assert (list(error.failures) == [0]) if number % 3 == 0 else (error is None)
            if nonce is not None:
                assert len(set(nonce)) == 1
                nonces.add(nonce[0])
    assert len(nonces) == (0 if kind == "collective" else count)


def nonce_alone():
    """Rank 0 ends its operation before rank 1 starts it."""
    store = group_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 is done"])
    with make_coordinator() as them:
        nonce = them.save_nonce()
    store.set("rank 0 is done", "yes")
    return nonce, keys()


def test_a_nonce_waits_for_no_rank(ranks):
    (first, left), (second, _) = ranks.run(2, nonce_alone)
    assert first == second
    assert len(first) == 16
    assert left == []


def raises_between_phases():
    with make_coordinator() as them:
        them.barrier("first")
        if them.rank == 1:
            raise KeyError("between")
        them.barrier("second")


def test_an_error_between_phases_reaches_the_other_ranks(ranks):
    def call():
        return caught(raises_between_phases), keys()

    found = ranks.run(3, call)
    assert type(found[1][0]) is KeyError
    assert all(left == [] for _, left in found)
    for error, _ in (found[0], found[2]):
        assert type(error) is CheckpointException
        assert list(error.failures) == [1]
        assert "between" in str(error)


def over_another_store(path, word):
    store = dist.FileStore(path, 2)
    them = StoreCoordinator(dist.PrefixStore("mine", store.clone()), dist.get_rank(), 2, timeout_seconds=2)
    with them:
        values = them.all_gather("x", lambda: bytes(CHUNK_BYTES + 1))
        nonce = them.all_gather("y", them.save_nonce)
        error = caught(lambda: them.barrier("z") if them.rank else hear(word))
        say(word)
    return len(values), len(set(nonce)), error


@pytest.mark.newest
def test_a_file_store_will_do(ranks, tmp_path):
    found = ranks.run(2, over_another_store, str(tmp_path / "store"), uuid.uuid4())
    assert [(count, nonces) for count, nonces, _ in found] == [(2, 1)] * 2
    assert type(found[1][2]) is CoordinatorTimeoutError
    assert found[1][2].ranks == (0,)


@pytest.mark.newest
def test_threads_over_a_hash_store():
    store = dist.HashStore()
    found = {}

    def run(rank):
        with StoreCoordinator(store.clone(), rank, 3, timeout_seconds=5) as them:
            found[rank] = them.reduce_scatter("x", lambda: rank, lambda values: [value * 2 for value in values])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 0, 1: 2, 2: 4}
    assert store.num_keys() == 3  # only how many operations each rank has begun


def test_errors_survive_pickling():
    error = CoordinatorTimeoutError("plan", [1, 2], 3.0)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.ranks, again.phase) == (str(error), (1, 2), "plan")
