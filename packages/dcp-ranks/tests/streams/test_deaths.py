"""Ranks that are killed are noticed at once, those that are stopped by the deadline of who waits for them."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch.distributed as dist

from dcp_ranks import PeerOptions, StreamError, Streams
from integration_tests.kits.coordinators import group_store, hear, pretended_host, say
from integration_tests.kits.streams import SECRET, Inbox

WAYS = pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])


@contextlib.contextmanager
def streams_of(local, **options):
    with pretended_host("" if local else dist.get_rank()), Streams(dist.get_rank(), SECRET, **options) as made:
        cards = [None] * dist.get_world_size()
        dist.all_gather_object(cards, made.card)
        made.meet(cards)
        yield made


def others():
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def die(local, victim):
    """What the others notice of a rank that is killed in the middle of a payload, and after how long."""
    inbox = Inbox()
    with streams_of(local, options=PeerOptions(peer_timeout_seconds=120)) as made, made.dispatch(inbox):
        found = made.connect_many(others(), 60)
        assert {stream.same_host for stream in found.values()} == {local}
        if dist.get_rank() == victim:
            for other in others():
                hear(f"{other} is ready")
            for stream in found.values():
                stream.connection.sendall(b"\1\0\0\0\0\0" + (1 << 30).to_bytes(8, "little") + bytes(10))
            group_store().set("died at", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        say(f"{dist.get_rank()} is ready")
        inbox.wait(lambda: inbox.lost)
        seconds = time.monotonic() - float(group_store().get("died at"))
        with pytest.raises(StreamError, match=f"rank {victim} at"):
            found[victim].send(b"anyone?")
        return inbox.lost, seconds


@WAYS
def test_a_killed_rank_is_noticed_long_before_its_lease_ends(ranks, local):
    victim = 1  # which listens for one of the others, and connects to the other
    for rank, result in enumerate(ranks.run(3, die, local, victim, expect_death=[victim])):
        if rank != victim:
            lost, seconds = result
            assert [other for other, _ in lost] == [victim]
            assert seconds < 60, "its lease is what ended"


def stop(local, when):
    """What rank 0 is told of rank 1, which is suspended, and what comes once it is continued."""
    rank = dist.get_rank()
    inbox = Inbox()
    pids = [None] * 2
    dist.all_gather_object(pids, os.getpid())
    with streams_of(local, timeout_seconds=1 if when == "send" else 60) as made:
        if rank == 0 and when == "connect":
            os.kill(pids[1], signal.SIGSTOP)
        if when == "send":
            (stream,) = made.connect_many(others(), 60).values()
        if rank == 1:
            if when == "connect":
                hear("continue")
                return None
            with made.dispatch(inbox):
                say("ready")
                inbox.wait(lambda: inbox.lost)
                return inbox.lost
        try:
            if when == "send":
                hear("ready")
                os.kill(pids[1], signal.SIGSTOP)
                stream.send(b"", [memoryview(bytes(256 << 20))])
            else:
                made.connect(1, 1)
        except StreamError as error:
            return error
        finally:
            os.kill(pids[1], signal.SIGCONT)
            say("continue")
    return None


@WAYS
@pytest.mark.parametrize("when", ["connect", "send"])
def test_a_stopped_rank_is_given_up_at_the_deadline(ranks, local, when):
    error, lost = ranks.run(2, stop, local, when)
    assert isinstance(error, StreamError)
    assert error.rank == 1
    assert "it is stopped" in error.reason
    if when == "send":
        assert [rank for rank, _ in lost] == [0]  # which is told when it goes on
