"""Ranks that arrive late: who says so, when, and from when on the timeout counts. Ranks are threads here."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_ranks.options import PeerOptions
from dcp_ranks.peers.roster import own_identity
from dcp_ranks.phases import store_phase
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.phases.store_phase import Waiting
from dcp_ranks.store_connections import make_peers
from dcp_ranks.transport.store_wire import connect_store

LEADERS = {"store": 256, "relay": 1}
names = threading.local()


def waiting(clock, arrivals, timeout_seconds, report=lambda: "somebody"):
    """A wait for ranks that arrive at these seconds."""
    return Waiting(
        "'plan'", len(arrivals), timeout_seconds, lambda: sum(at <= clock.now for at in arrivals), report, 0.0, 0.0
    )


class Clock:
    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock():
    made = Clock()
    with mock.patch.object(store_phase, "time", made):
        yield made


@pytest.mark.parametrize(
    ("arrivals", "ends"),
    [
        ([0, 0, 0, 9_999], 100),
        ([0, 0, 9_999, 9_999], 100),
        ([0, 9_999, 9_999, 9_999], 200),  # half of the ranks never came
        ([0, 50, 9_999, 9_999], 150),
        ([0, 150, 9_999, 9_999], 250),
        ([0, 201, 201, 201], 200),
        ([0, 9_999], 100),
    ],
)
def test_the_timeout_counts_from_the_arrival_of_half_of_the_ranks(clock, arrivals, ends):
    wait = waiting(clock, arrivals, 100.0)
    while not wait.over():
        clock.now = max(clock.now, wait.due)
    assert ends - 1 <= clock.now <= ends


def test_lines_come_at_growing_intervals(clock, caplog):
    wait = waiting(clock, [0, 0, 9_999], 1800.0)
    seconds = []
    while not wait.over():
        before = len(caplog.records)
        clock.now += 1.0
        wait.over()
        seconds += [clock.now] * (len(caplog.records) - before)
    assert seconds == [30, 60, 120, 240, 480, 960]
    assert caplog.messages[0] == "phase 'plan': waiting for somebody; 30 s so far"


def test_a_rank_that_leaves_the_line_to_another_logs_none(clock, caplog):
    wait = waiting(clock, [0, 0, 9_999], 1800.0, str)
    clock.now = 100.0
    assert not wait.over()
    assert caplog.messages == []


class Lines(logging.Handler):
    """Collects log lines."""

    def __init__(self):
        super().__init__()
        self.texts = []
        self.changed = threading.Condition()

    def emit(self, record):
        with self.changed:
            self.texts.append(record.getMessage())
            self.changed.notify_all()

    def wait_for(self, text):
        with self.changed:
            assert self.changed.wait_for(lambda: any(text in line for line in self.texts), 40), self.texts


@pytest.fixture
def lines():
    made = Lines()
    logger = logging.getLogger("dcp_ranks.phases.store_phase")
    logger.addHandler(made)
    with mock.patch.object(store_phase, "_FIRST_LINE_SECONDS", 2.0):
        yield made
    logger.removeHandler(made)


def play(kind, arrive, reduce=sum):
    """What each of eight ranks, threads on two hosts, returns or raises; `arrive` runs before the second phase."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = PeerOptions(leaders_above=LEADERS[kind])

    def run(rank):
        names.host = f"node-{rank // 4}"
        store = connect_store("127.0.0.1", served.port)
        identity = replace(own_identity(), host=names.host)
        peers = make_peers(store, 0, rank, 8, 0, options=options, process=identity)
        try:
            with StoreCoordinator(store, rank, 8, timeout_seconds=60.0, peers=peers) as them:
                them.barrier("begin")
                arrive(rank)
                return them.all_reduce("plan", lambda: 1, reduce)
        finally:
            peers.close()

    with mock.patch("socket.gethostname", side_effect=lambda: names.host), ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(run, rank) for rank in range(8)]
        return [future.exception() or future.result() for future in futures]


@pytest.mark.parametrize("kind", LEADERS)
@pytest.mark.parametrize(
    ("late", "named"),
    [
        ([5], "1 of 8 ranks: 5 (node-1); "),
        ([1, 2, 3, 4, 6], "5 of 8 ranks: 1-3 (node-0), 4 (node-1), 6 (node-1); "),
        ([0], "1 of 8 ranks: 0 (node-0); "),
        ([0, 1, 2, 3], "4 of 8 ranks: 0-3 (node-0); "),
    ],
)
def test_a_line_names_the_late_ranks_and_their_hosts(lines, kind, late, named):
    """The late ranks come once they were named: in the end all succeed."""
    text = f"phase 'plan': waiting for {named}"
    assert play(kind, lambda rank: rank in late and lines.wait_for(text)) == [8] * 8
    same = [line for line in lines.texts if line.startswith(text)]
    assert len(same) == len(set(same))  # one rank logs, and each line has other seconds


@pytest.mark.parametrize(
    ("kind", "named"), [("store", "the decision of rank 0 (node-0); "), ("relay", "1 of 8 ranks: 0 (node-0); ")]
)
def test_a_coordinator_that_does_not_decide_is_named(lines, kind, named):
    def reduce(values):
        lines.wait_for(f"phase 'plan': waiting for {named}")
        return sum(values)

    assert play(kind, lambda _: None, reduce) == [8] * 8
