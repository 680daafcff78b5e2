"""Ranks that die are named by those that wait; ranks that are slow, or have left, are not taken for dead."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import logging
import os
import resource
import select
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_ranks import make_coordinator
from dcp_ranks.errors import CheckpointException, PeerLostError
from dcp_ranks.options import PeerOptions
from dcp_ranks.peers.monitor import Peers
from dcp_ranks.phases.leaders import RelayRound
from dcp_ranks.store_connections import borrow_store, shared_peers
from integration_tests.kits.coordinators import caught, group_store, hear, keys_of_group, pretended_host, say

# How ranks stand to each other: all on one host, each on its own, pairs on a host with leaders in between.
PLACES = {
    "one host": (lambda rank: "", PeerOptions()),
    "own hosts": (str, PeerOptions(peer_timeout_seconds=120)),
    "relay": (lambda rank: str(rank // 2), PeerOptions(leaders_above=1, fan_out=1)),
}


def placed(place, **options):
    """A coordinator of ranks that stand so."""
    name, peers = PLACES[place]
    with pretended_host(name(dist.get_rank())):
        return make_coordinator(peers=peers, **options)


def die_in(place, victim, lead, prepare=lambda: None, busy=None):
    """What this rank is told when a rank is killed in the second phase of an operation, and after how long."""
    store = group_store()
    others = {*range(dist.get_world_size())} - {victim}

    def wait_for(what, ranks):
        store.wait([f"{rank} {what}" for rank in ranks], timedelta(seconds=40))

    def work():
        rank = dist.get_rank()
        store.set(f"{rank} works", "yes")
        if rank == victim:
            prepare()
            wait_for("works", others)
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == busy:
            wait_for("was told", others - {busy})

    with placed(place, coordinator_rank=lead) as them:
        them.barrier("begin")
        start = time.monotonic()
        error = caught(lambda: them.all_gather("write", work))
        seconds = time.monotonic() - start
        store.set(f"{them.rank} was told", "yes")
        return error, seconds


@pytest.mark.parametrize(
    ("place", "victim", "lead"),
    [("own hosts", 1, 1), ("own hosts", 3, 0), ("relay", 2, 3), ("relay", 1, 1), ("relay", 3, 0)],
)
def test_a_rank_that_dies_is_named_on_all_others(ranks, place, victim, lead):
    for rank, found in enumerate(ranks.run(4, die_in, place, victim, lead, expect_death=[victim])):
        if rank != victim:
            error, seconds = found
            assert type(error) is PeerLostError
            assert (error.phase, error.ranks) == ("write", (victim,))
            assert "process has ended" in error.how[0]
            assert seconds < 60  # a lease lasts longer: its end is not what told them


def die_before_one_that_cannot_watch():
    """The coordinator's death, in the eyes of a rank whose sandbox refuses to watch processes."""
    if dist.get_rank() == 0:
        with mock.patch.object(os, "pidfd_open", side_effect=OSError(errno.ENOSYS, "not implemented")):
            return die_in("one host", 1, 1)
    return die_in("one host", 1, 1)


def test_a_rank_that_cannot_watch_the_coordinator_connects_to_it(ranks):
    """The coordinator, which can watch that rank, waits for its connection all the same."""
    error, seconds = ranks.run(2, die_before_one_that_cannot_watch, expect_death=[1])[0]
    assert (type(error), error.ranks) == (PeerLostError, (1,))
    assert seconds < 60


def test_those_who_wait_need_no_busy_coordinator_to_learn_of_a_death(ranks):
    """It is busy until they have been told."""
    found = ranks.run(4, die_in, "one host", 3, 0, lambda: None, 0, expect_death=[3])
    assert [type(error) for error, _ in found[:3]] == [PeerLostError] * 3


def leave_a_child():
    """A child that lives until the rank that was told ends it."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        while True:
            signal.pause()
    group_store().set("child", str(pid))


def die_and_leave_a_child():
    error, _ = die_in("own hosts", 1, 0, leave_a_child)
    child = int(group_store().get("child"))
    end = os.pidfd_open(child)
    lives = not select.select([end], [], [], 0)[0]
    os.close(end)
    os.kill(child, signal.SIGKILL)
    return type(error), lives


def test_a_forked_child_does_not_stand_for_its_parent(ranks):
    assert ranks.run(2, die_and_leave_a_child, expect_death=[1])[0] == (PeerLostError, True)


def hold_the_interpreter(place):
    with placed(place) as them:
        them.barrier("begin")
        still = them.rank == them.world_size - 1
        return them.all_gather("x", lambda: ctypes.PyDLL(None).usleep(6_000_000) if still else None)


@pytest.mark.parametrize("place", ["one host", "own hosts", "relay"])
def test_a_rank_whose_interpreter_stands_still_is_alive(ranks, place):
    brief = {place: (PLACES[place][0], replace(PLACES[place][1], peer_timeout_seconds=3.0))}
    with mock.patch.dict(PLACES, brief):
        for found in ranks.run(4, hold_the_interpreter, place):
            assert found == [None, None, None, 0]


def large_values_to_a_busy_rank():
    with placed("relay") as them:
        them.barrier("begin")

        def work():
            if them.rank in (0, 2):  # above others, and not reading for longer than the peer timeout
                time.sleep(8)
            return bytes(8_000_000)

        return them.all_reduce("x", work, lambda values: sum(map(len, values)))


def test_a_busy_rank_that_does_not_take_what_is_sent_is_alive(ranks):
    brief = {"relay": (PLACES["relay"][0], replace(PLACES["relay"][1], peer_timeout_seconds=6.0))}
    with mock.patch.dict(PLACES, brief):
        assert ranks.run(4, large_values_to_a_busy_rank) == [32_000_000] * 4


def later_operations(how, victim):
    """Of two operations after the first, in which `victim` was interrupted: first values, and how they travelled."""
    mine = dist.get_rank() == victim
    if how == "before it knew the others":
        with mock.patch.object(Peers, "meet") if mine else contextlib.nullcontext(), placed("relay") as them:
            them.barrier("begin")
    else:  # before it had a monitor
        failing = mock.patch("dcp_ranks.choose_coordinator.shared_peers", side_effect=OSError("interrupted"))
        with failing if mine else contextlib.nullcontext():
            assert type(caught(lambda: placed("relay").barrier("begin"))) is CheckpointException
    found = []
    for _ in range(3):
        with placed("relay") as them:
            value = them.reduce_scatter("x", lambda: them.rank, lambda values: [value * 100 for value in values])
            found.append((value, type(them._phase) is RelayRound, them.all_gather("y", lambda: them.rank)))
    return found


@pytest.mark.parametrize("how", ["before it knew the others", "before it had a monitor"])
@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_the_first_phase_of_a_later_operation_travels_alike_on_all_ranks(ranks, how, victim):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    found = ranks.run(4, later_operations, how, victim)
    ranks.run(1, dist.is_initialized, backend=None)
    for rank, operations in enumerate(found):
        assert [value for value, _, _ in operations] == [rank * 100] * 3
        assert [values for _, _, values in operations] == [[0, 1, 2, 3]] * 3
    relayed = {tuple(relayed for _, relayed, _ in operations) for operations in found}
    assert relayed in ({(True, True, True)}, {(False, True, True)})
    assert how == "before it had a monitor" or relayed == {(True, True, True)}


def descriptors():
    gc.collect()  # what earlier tests have left may go at any time
    return len(os.listdir("/proc/self/fd"))


def reuse(place, folder):
    group = dist.new_group(list(range(dist.get_world_size())))
    counts = []

    def come_after_rank_0(mark):
        """Rank 0 comes last to no phase: it takes connections while it waits."""
        if dist.get_rank() == 0:
            mark.touch()
        else:
            while not mark.exists():
                time.sleep(0.01)
            time.sleep(0.05)
        return bytes(100_000)

    for number in range(4):
        with placed(place, process_group=group) as them:
            them.barrier("a")
            them.all_gather("b", lambda: come_after_rank_0(folder / f"{number}"))  # noqa: B023 - called now
        dist.barrier()
        counts.append(descriptors())
    return counts


@pytest.mark.parametrize("place", PLACES)
def test_what_is_set_up_is_used_again(ranks, tmp_path, place):
    for counts in ranks.run(4, reuse, place, tmp_path):
        assert max(counts[2:]) <= counts[1], counts  # fewer if sockets of an earlier test's group are closed late


def end_group(place):
    """Descriptors before a group, with it, and after it; the group has its own store."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    before = descriptors()
    path = f"{os.environ['TMPDIR']}/store"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=4)
    with placed(place) as them:
        them.barrier("a")
        them.barrier("b")
        dist.barrier()
    with_group = descriptors()
    del them
    dist.destroy_process_group()
    return before, with_group, descriptors()


@pytest.mark.parametrize("place", PLACES)
def test_nothing_stays_open_after_the_group(ranks, place, tmp_path, monkeypatch):
    def call():
        os.environ["TMPDIR"] = str(tmp_path)
        return end_group(place)

    for before, with_group, after in ranks.run(4, call):
        assert with_group > before
        assert after <= before
    ranks.run(1, dist.is_initialized, backend=None)  # the pool's own group is gone


def unreachable(place):
    """Every move where no connection leads anywhere."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("dcp_ranks.peers.monitor").addHandler(handler)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and does not listen
        port = unused.getsockname()[1]
        with mock.patch("dcp_ranks.peers.monitor.Peers._open_door", return_value=(("127.0.0.1",), port)):
            them = placed(place)
        rank = them.rank
        with them:
            them.barrier("begin")
            found = (
                them.reduce_scatter("a", lambda: rank, lambda values: [bytes([value]) * 200_000 for value in values]),
                them.all_gather("b", lambda: rank),
                them.all_reduce("c", lambda: rank, lambda values: bytes(3_000_000)),
            )
            error = caught(lambda: them.all_gather("d", lambda: 1 / 0 if rank == 3 else rank))
    logging.getLogger("dcp_ranks.peers.monitor").removeHandler(handler)
    dist.barrier()
    left = [key for key in keys_of_group() if "/up/" in key or "stray" in key]
    dist.barrier()
    right = found == (bytes([rank]) * 200_000, [0, 1, 2, 3], bytes(3_000_000))
    return right, error, messages, left


@pytest.mark.parametrize("place", ["own hosts", "relay"])
def test_ranks_that_cannot_connect_use_the_store_and_say_so(ranks, place):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    for rank, (right, error, messages, left) in enumerate(ranks.run(4, unreachable, place)):
        assert right
        assert type(error) is CheckpointException
        assert list(error.failures) == [3]
        assert left == []
        assert len(messages) == (0 if rank == 0 else 1)
        assert all("no connection to rank" in message for message in messages)
    ranks.run(1, dist.is_initialized, backend=None)


def short_of_descriptors(place):
    """The coordinator cannot open a descriptor from the first phase on."""
    with placed(place) as them:
        dist.barrier()  # rank 0 serves the store: it needs descriptors until all are connected to that
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if them.rank == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1 + max(map(int, os.listdir("/proc/self/fd"))), hard))
            spare = []
            with contextlib.suppress(OSError):
                while True:
                    spare.append(os.open("/dev/null", os.O_RDONLY))
        try:
            return caught(lambda: [them.all_gather(f"phase {n}", lambda: time.sleep(0.05)) for n in range(3)])
        finally:
            if them.rank == 0:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                for each in spare:
                    os.close(each)


@pytest.mark.parametrize("place", ["own hosts", "relay"])
def test_a_coordinator_without_descriptors_does_not_hang(ranks, place):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    errors = ranks.run(4, short_of_descriptors, place)
    ranks.run(1, dist.is_initialized, backend=None)
    if place == "own hosts":  # phases go through the store
        assert errors == [None] * 4
        return
    assert isinstance(errors[0], OSError)
    assert "raise it with `ulimit -n`" in str(errors[0])
    for error in errors[1:]:
        assert type(error) is CheckpointException
        assert list(error.failures) == [0]
        assert "raise it with `ulimit -n`" in str(error)


def stranger():
    """A connection that does not know the job's secret, and one that says nothing."""
    with placed("own hosts") as them:
        them.barrier("begin")
        if them.rank == 1:
            above = them._peers._above_card
            with (
                socket.create_connection(("127.0.0.1", above.port)) as one,
                socket.create_connection(("127.0.0.1", above.port)),
            ):
                one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
                values = them.all_gather("x", lambda: time.sleep(0.2))
        else:
            values = them.all_gather("x", lambda: time.sleep(0.5))
        return values, them.all_gather("y", lambda: them.rank)


def test_a_stranger_at_the_door_changes_nothing(ranks):
    assert ranks.run(3, stranger) == [([None] * 3, [0, 1, 2])] * 3


def crowd():
    """Strangers of every kind, more than a rank keeps, while a rank that is called late finds its way in."""
    kinds = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 100,
        b"\x02",
        bytes(25),
        b"\xff" * 25,
        b"\x02" + bytes(16) + b"\x40" + bytes(71),
    ]
    with placed("own hosts") as them:
        peers = them._peers
        door = peers._listener.challenge if them.rank else next(iter(peers._held.doors.values())).getsockname()
        store = group_store()
        if them.rank == 0:
            store.set("door", f"{door[0]} {door[1]}")
            ends = [socket.create_connection(door) for _ in range(100)]
            for number, end in enumerate(ends):
                with contextlib.suppress(OSError):
                    end.sendall(kinds[number % len(kinds)])
                    if number % 3 == 0:
                        end.shutdown(socket.SHUT_WR)
            before = descriptors()
            store.set("crowded", "yes")
        else:
            store.get("crowded")
        values = [them.all_gather(f"phase {n}", lambda n=n: (them.rank, n)) for n in range(3)]
        if them.rank == 0:
            until = time.monotonic() + 60  # ranks that had to go with the crowd come again
            while them._peers._held.doors and time.monotonic() < until:
                them._peers.pause(0.05)
            doors = len(them._peers._held.doors)
        them.barrier("seen out")
        if them.rank == 0:
            grown = descriptors() - before
            for end in ends:
                end.close()
            return values, grown, doors, dict(them._peers.lost)
        return values, 0, 0, dict(them._peers.lost)


def test_a_crowd_of_strangers_costs_little_and_hurts_nobody(ranks):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    for values, grown, doors, lost in ranks.run(3, crowd):
        assert values == [[(rank, n) for rank in range(3)] for n in range(3)]
        assert grown <= 3  # the crowd has gone with the doors
        assert (doors, lost) == (0, {})  # all who are to come have come


def answered_while_another_thread_listens():
    """Return the error of rank 3. A second thread of it receives the answer of rank 2, and then notices its end."""
    if dist.get_rank() == 3:
        hear("rank 2 leads its host")
    with placed("relay") as them:
        if them.rank == 2:
            say("rank 2 leads its host")
        them.barrier("begin")
        them.barrier("meet")
        if them.rank == 2:
            them.barrier("end")
            os.kill(os.getpid(), signal.SIGKILL)
        if them.rank < 2:
            them.barrier("end")
            return None
        peers, turn = them._peers, RelayRound._turn

        def late(phase, end):
            ended = turn(phase, time.monotonic())
            deadline = time.monotonic() + 40
            while not peers.lost and time.monotonic() < deadline:
                time.sleep(0.01)
            return ended

        def listen():
            while not peers.lost:
                peers.pause(0.05)

        other = threading.Thread(target=listen)
        other.start()
        with mock.patch.object(RelayRound, "_turn", late):
            error = caught(lambda: them.barrier("end"))
        other.join()
        return error


def test_an_answer_counts_whose_sender_has_ended_since(ranks):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    assert ranks.run(4, answered_while_another_thread_listens, expect_death=[2])[3] is None


def requests_of_a_second_look():
    """Number of requests to the store with which a rank looks whether others have come, once all of its host have."""
    store, _ = borrow_store(dist.group.WORLD)
    peers = shared_peers(dist.group.WORLD, store, 0, PeerOptions())
    dist.barrier()
    peers.meet(store, complete=False)
    with mock.patch.object(type(store), "ask", autospec=True, side_effect=type(store).ask) as asked:
        peers.meet(store, complete=False)
    return asked.call_count


def test_looking_for_others_again_costs_one_request(ranks):
    ranks.run(1, dist.is_initialized, backend=None)  # a new group
    assert ranks.run(4, requests_of_a_second_look) == [1, 1, 1, 1]


def test_a_descriptor_that_another_thread_has_closed_shows_no_end():
    """Its number may be that of another process by the time the event is handled."""
    peers = Peers(dist.HashStore(), 0, 0, 2, 0)
    descriptor = os.pidfd_open(os.getpid())
    peers._held.watched[descriptor] = 1
    peers._held.poller.register(descriptor, select.EPOLLIN)
    peers._attend(descriptor, select.EPOLLIN)
    assert peers.lost == {}
    peers.close()


def test_losses_can_be_read_while_others_are_noticed():
    peers = Peers(dist.HashStore(), 0, 0, 4, 0)
    peers._lose(1, "gone")
    for _ in peers.lost:
        peers._lose(2, "gone")
    assert peers.lost == {1: "gone", 2: "gone"}
    peers.close()


def test_the_error_says_what_to_do_and_travels():
    import pickle

    error = PeerLostError("plan", [1, 4], ["its process has ended", "its host is gone"])
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert "rank 1 is gone (its process has ended); rank 4 is gone (its host is gone)" in str(error)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("peer_timeout_seconds", [0, -5, float("inf"), float("nan"), 1e7]),
        ("leaders_above", [-1]),
        ("fan_out", [0, -3]),
    ],
)
def test_numbers_out_of_range_are_refused(option, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{option}={value!r}: pass "):
            PeerOptions(**{option: value})


def test_a_coordinator_that_is_not_in_the_list_of_its_host_yet_is_watched():
    """It closes its door to ranks that it watches: a connection would look as if it were gone."""
    store = dist.HashStore()
    first, second = (Peers(store, 0, rank, 2, 0) for rank in range(2))
    with mock.patch.object(second._cards, "of_host", return_value={}):  # as between its two writes
        second.meet(store, complete=False)
    first.meet(store)
    second.meet(store)
    for peers in (first, second):
        for _ in range(5):
            peers.pause(0.1, store)
    assert (first.lost, second.lost) == ({}, {})
    assert [*second._held.watched.values()] == [0]
    assert second._above is None
    first.close()
    second.close()
