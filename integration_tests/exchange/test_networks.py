"""Loads over pretended hosts that are network namespaces: firewalls, several networks, ports, a host that vanishes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import dcp_all as dcp
from dcp_exchange.piece_queue import PieceReader
from dcp_ranks import Streams
from dcp_ranks.streams import streams as streams_module
from dcp_ranks.testing.ranks import RankPool
from integration_tests.exchange.counting import blank, same, whole
from integration_tests.kits.networks import Network, NetworkHost, network_hosts, networks_missing

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FALLBACK = "each rank reads for itself, although the ranks were to read together"


@pytest.fixture(scope="module", autouse=True)
def networks() -> None:
    """Skip where no hosts can be pretended."""
    if reason := networks_missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("networks") / "saved")
    dcp.save(whole(), checkpoint_id=made, no_dist=True)
    return made


@contextlib.contextmanager
def on_host(host: NetworkHost) -> Iterator[list[Any]]:
    """The exchange's sockets are of a pretended host; the ranks talk to their store as always.

    Returns:
        A list that gets the port on which the rank listens, and the addresses of the ranks that it is connected to.
    """
    init, connect, found = Streams.__init__, Streams.connect_many, list[Any]()
    announce = streams_module.addresses_to_announce

    def make(streams: Streams, *arguments: Any, **options: Any) -> None:
        with host.entered():
            init(streams, *arguments, **options)
        found.append(streams.card.port)

    def connect_many(streams: Streams, *arguments: Any) -> Any:
        with host.entered():
            made = connect(streams, *arguments)
        found.extend(stream.address for stream in streams.made.values())
        return made

    with (
        mock.patch.object(Streams, "__init__", make),
        mock.patch.object(Streams, "connect_many", connect_many),
        mock.patch.object(streams_module, "addresses_to_announce", lambda _, network: announce(None, network)),
    ):
        yield found


class Heard(logging.Handler):
    """Keeps warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def load_on(hosts: list[NetworkHost], folder: str, options: dict[str, Any]) -> dict[str, Any]:
    template, heard = blank("ddp", whole()), Heard()
    logging.getLogger("dcp_exchange").addHandler(heard)
    started = time.monotonic()
    try:
        with on_host(hosts[dist.get_rank() % len(hosts)]) as found:
            report = dcp.load(
                template, checkpoint_id=folder, cooperative=True, timeout_seconds=60, peers=dcp.PeerOptions(**options)
            )
    finally:
        logging.getLogger("dcp_exchange").removeHandler(heard)
    return {
        "right": same(template, whole()),
        "together": report.cooperative,
        "reason": report.cooperative_reason,
        "summary": report.summary(),
        "warned": heard.texts,
        "found": found,
        "seconds": time.monotonic() - started,
    }


@pytest.mark.slow
def test_a_firewall_makes_each_rank_read_for_itself(ranks: RankPool, folder: str) -> None:
    with network_hosts(2) as (hosts, _):
        hosts[0].block()
        found = ranks.run(4, load_on, hosts, folder, {})
    address = hosts[0].addresses[0]
    for one in found:
        assert (one["right"], one["together"]) == (True, False)
        assert "firewall" in one["reason"] or "did not connect" in one["reason"]
        assert f"read alone ({one['reason']}" in one["summary"]
        assert one["seconds"] < 60
    warned = [text for one in found for text in one["warned"]]
    assert len(warned) == 1, "one warning for all ranks"
    assert warned[0].startswith(FALLBACK)
    assert "rank " in warned[0]
    assert any(address in one["reason"] or "did not connect" in one["reason"] for one in found)


def test_a_network_that_drops_packets_is_left_for_another(ranks: RankPool, folder: str) -> None:
    with network_hosts(2, networks=2) as (hosts, _):
        hosts[0].block(0)
        found = ranks.run(4, load_on, hosts, folder, {})
    for one in found:
        assert (one["right"], one["together"], one["warned"]) == (True, True, [])
        assert "from other ranks" in one["summary"]


@pytest.mark.parametrize("number", [0, 1])
def test_the_network_and_the_ports_that_are_named_are_used(ranks: RankPool, folder: str, number: int) -> None:
    with network_hosts(2, networks=2) as (hosts, made):
        network: Network = made[number]
        options = {"network": network.text, "ports": (42000, 42009)}
        found = ranks.run(4, load_on, hosts, folder, options)
    for one in found:
        assert (one["right"], one["together"], one["warned"]) == (True, True, [])
        port, *addresses = one["found"]
        assert 42000 <= port <= 42009
        assert all(f"10.77.{number}." in each or "Unix" in each for each in addresses)
    assert any("10.77." in str(one["found"]) for one in found)


def load_while_a_host_vanishes(hosts: list[NetworkHost], folder: str) -> tuple[str, bool]:
    """Why this rank read alone when host 0 was cut off as rank 0 read its second piece, and whether it read right."""
    read, left, lock = PieceReader.read, [1], threading.Lock()

    def vanish(*arguments: Any) -> None:
        with lock:
            left[0] -= 1
            vanishes = left[0] == -1
        if vanishes and dist.get_rank() == 0:
            hosts[0].block()
        read(*arguments)

    template = blank("ddp", whole())
    with (
        mock.patch.object(PieceReader, "read", vanish),
        mock.patch("dcp_exchange.assignment.assign.SMALLEST_PIECE_BYTES", 64 << 10),
        on_host(hosts[dist.get_rank() % 2]),
    ):
        peers = dcp.PeerOptions(peer_timeout_seconds=3)
        report = dcp.load(template, checkpoint_id=folder, cooperative=True, timeout_seconds=120, peers=peers)
    return report.cooperative_reason, same(template, whole())


def test_a_host_that_vanishes_is_noticed_by_its_lease(ranks: RankPool, folder: str) -> None:
    with network_hosts(2) as (hosts, _):
        found = ranks.run(4, load_while_a_host_vanishes, hosts, folder)
    for reason, is_right in found:
        assert "has lost the connection to rank" in reason  # not the load's timeout, which ends it with an error
        assert reason == found[0][0]
        assert is_right
