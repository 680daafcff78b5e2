"""The coordinator dies, stops or vanishes with its host: what all other ranks, on other hosts, are told."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_ranks.errors import CoordinatorLostError, PeerLostError
from dcp_ranks.options import PeerOptions
from dcp_ranks.peers.roster import own_identity
from dcp_ranks.phases.store_coordinator import StoreCoordinator
from dcp_ranks.store_connections import make_peers
from dcp_ranks.transport.store_wire import TimedStore, connect_store
from integration_tests.kits.coordinators import caught
from integration_tests.kits.networks import network_hosts, networks_missing

WORLD_SIZE = 6
TIMEOUT_SECONDS = 1800.0  # longer than these tests: no rank is told by a deadline


@pytest.fixture(scope="module", autouse=True)
def networks():
    """Skip where no hosts can be pretended."""
    if reason := networks_missing():
        pytest.skip(reason)


def wait_for(path):
    end = time.monotonic() + 50
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.02)
    return path.read_text()


def say(path, text=""):
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def vanish(how, hosts, folder):
    """End as the test wants; a stopped coordinator goes on later."""
    for rank in range(1, WORLD_SIZE):
        wait_for(folder / f"waits-{rank}")
    if how == "gone":
        hosts[0].block()
        wait_for(folder / "done")
        raise SystemExit
    say(folder / "stopped", str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return 1


class TellingPeers:
    """Says once that a rank waits, and has been connected to the coordinator."""

    def __init__(self, peers, path):
        self.peers, self.path = peers, path

    def __call__(self, seconds, store=None):
        type(self.peers).pause(self.peers, seconds, store)
        connected = self.peers._above is not None and self.peers._above.reached
        if connected and not self.path.exists():
            say(self.path)


def play(how, where, point, leaders_above, hosts, folder):
    """Rank 0 is this process's only rank, or all others are its threads; what each raised."""
    me = dist.get_rank()
    served_by = 0 if where == "with rank 0" else 1
    options = PeerOptions(leaders_above=leaders_above, fan_out=2, peer_timeout_seconds=4.0)

    def run(rank):
        store = TimedStore(connect_store(hosts[served_by].addresses[0], port, 4.0), TIMEOUT_SECONDS)
        identity = replace(own_identity(), host=f"host {(rank + 1) // 2}")
        peers = make_peers(store, 0, rank, WORLD_SIZE, 0, options=options, process=identity)
        peers.pause = TellingPeers(peers, folder / f"waits-{rank}")

        def part(here):
            return vanish(how, hosts, folder) if rank == 0 and point == here else 1

        def operation():
            with StoreCoordinator(store, rank, WORLD_SIZE, timeout_seconds=TIMEOUT_SECONDS, peers=peers) as them:
                them.all_gather("first", lambda: part("first"))
                return them.all_reduce("second", lambda: part("map"), lambda found: part("reduce") and sum(found))

        try:
            return caught(operation)
        finally:
            peers.close()

    with hosts[me].entered():
        if me == served_by:
            served = dist.TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
            say(folder / "port", str(served.port))
        port = int(wait_for(folder / "port"))
        ranks = range(1, WORLD_SIZE) if me else [0]
        with ThreadPoolExecutor(len(ranks)) as pool:
            found = [*pool.map(run, ranks)]
        say(folder / ("done" if me else "ended"))
        if me == served_by:
            wait_for(folder / ("ended" if me and how == "stop" else "done"))
    return found


@pytest.mark.parametrize(
    ("how", "where", "point", "leaders_above"),
    [
        ("kill", "with rank 0", "first", 1),
        ("kill", "elsewhere", "first", 256),
        ("kill", "elsewhere", "first", 1),
        ("kill", "elsewhere", "map", 1),
        ("kill", "elsewhere", "reduce", 1),
        ("gone", "with rank 0", "first", 256),
        ("gone", "with rank 0", "reduce", 1),
        ("gone", "elsewhere", "first", 1),
        ("gone", "elsewhere", "map", 256),
    ],
)
def test_all_ranks_are_told_long_before_the_deadline(ranks, tmp_path, how, where, point, leaders_above):
    death = [0] if how == "kill" else []
    with network_hosts(2) as (hosts, _):
        _, errors = ranks.run(2, play, how, where, point, leaders_above, hosts, tmp_path, expect_death=death)
    for error in errors:
        assert type(error) is (CoordinatorLostError if where == "with rank 0" else PeerLostError)
        assert where == "with rank 0" or error.ranks == (0,)
        assert "does not answer" not in str(error)  # as if a silent host had been called again, which takes longer


def stop(leaders_above, hosts, folder):
    """A stopped coordinator serves the store; it goes on once all other ranks have logged that."""
    told = set()

    def note(record):
        told.add(threading.current_thread())
        if "has not answered for" in record.getMessage() and len(told) == WORLD_SIZE - 1:
            os.kill(int(wait_for(folder / "stopped")), signal.SIGCONT)

    handler = logging.Handler()
    handler.emit = note
    logger = logging.getLogger("dcp_ranks.transport.store_wire")
    logger.addHandler(handler)
    with mock.patch("dcp_ranks.transport.store_wire._SILENT_SECONDS", 1.0):
        found = play("stop", "with rank 0", "map", leaders_above, hosts, folder)
    logger.removeHandler(handler)
    return found


@pytest.mark.parametrize("leaders_above", [256, 1])
def test_a_stopped_coordinator_is_logged_and_may_go_on(ranks, tmp_path, leaders_above):
    with network_hosts(2) as (hosts, _):
        assert ranks.run(2, stop, leaders_above, hosts, tmp_path) == [[None], [None] * (WORLD_SIZE - 1)]
