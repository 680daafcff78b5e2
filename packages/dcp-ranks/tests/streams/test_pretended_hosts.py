"""Ranks on several hosts, which are network namespaces: interfaces, firewalls, hosts that vanish."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch.distributed as dist

from dcp_ranks import PeerOptions, StreamError, Streams
from integration_tests.kits.networks import network_hosts, networks_missing
from integration_tests.kits.streams import SECRET, Inbox


@pytest.fixture(scope="module", autouse=True)
def networks():
    """Skip where no hosts can be pretended."""
    if reason := networks_missing():
        pytest.skip(reason)


@contextlib.contextmanager
def streams_on(hosts, options=None, **more):
    """The streams of this rank on its pretended host; the ranks talk to their store as always."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with hosts[rank % len(hosts)].entered(), Streams(rank, SECRET, options=options, **more) as made:
        cards = [None] * world_size
        dist.all_gather_object(cards, made.card)
        made.meet(cards)
        yield made


def others():
    return [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]


def exchange(hosts, options=None):
    """Each rank sends to each; returns addresses, same-host ranks, and what came."""
    inbox = Inbox()
    with streams_on(hosts, options) as made, made.dispatch(inbox):
        found = made.connect_many(others(), 30)
        for stream in found.values():
            if not isinstance(stream, StreamError):
                stream.send(b"from %d" % dist.get_rank(), [memoryview(bytes(1 << 20))])
        live = [stream for stream in found.values() if not isinstance(stream, StreamError)]
        inbox.wait(lambda: len(inbox.payloads) == len(live))
        dist.barrier()
        addresses = {rank: getattr(stream, "address", None) or str(stream) for rank, stream in found.items()}
        return addresses, [stream.rank for stream in live if stream.same_host], sorted(made.card.addresses)


def test_only_ranks_of_one_host_share_memory(ranks):
    """All four have the same boot id."""
    with network_hosts(2) as (hosts, _):
        results = ranks.run(4, exchange, hosts)
    for rank, (addresses, same, _) in enumerate(results):
        assert same == [(rank + 2) % 4]
        for other, address in addresses.items():
            assert ("Unix" in address) == (other in same), addresses
            assert other in same or hosts[other % 2].addresses[0] in address


@pytest.mark.parametrize("number", [0, 1])
def test_the_network_that_is_named_is_used(ranks, number):
    with network_hosts(2, networks=2) as (hosts, networks):
        results = ranks.run(2, exchange, hosts, PeerOptions(network=networks[number].text))
    for rank, (addresses, _, announced) in enumerate(results):
        assert announced == [hosts[rank].addresses[number]]
        assert hosts[1 - rank].addresses[number] in addresses[1 - rank]


def test_a_network_that_drops_packets_is_left_for_another(ranks):
    with network_hosts(2, networks=2) as (hosts, _):
        hosts[0].block(0)  # its answers do not leave
        results = ranks.run(2, exchange, hosts)
    assert hosts[0].addresses[1] in results[1][0][0]


def refused(hosts, seconds):
    """What this rank is told, and after how long."""
    with streams_on(hosts) as made:
        start = time.monotonic()
        (found,) = made.connect_many(others(), seconds).values()
        took = time.monotonic() - start
        dist.barrier()
        return found, took


def test_a_firewall_ends_in_an_error_that_names_rank_and_address(ranks):
    with network_hosts(2) as (hosts, _):
        hosts[0].block()
        (waiting, waited), (calling, took) = ranks.run(2, refused, hosts, 8)
    assert isinstance(waiting, StreamError)
    assert waiting.rank == 1
    assert "did not connect to this rank within" in waiting.reason
    assert isinstance(calling, StreamError)
    assert calling.rank == 0
    assert f"{hosts[0].addresses[0]}:" in calling.reason
    assert "firewall" in calling.reason
    assert took < waited  # 3 s of it were for the firewall


def vanish(hosts, seconds):
    """A host goes away in the middle; what this rank notices of the other, and how."""
    inbox = Inbox()
    options = PeerOptions(peer_timeout_seconds=seconds)
    with streams_on(hosts, options) as made, made.dispatch(inbox):
        (stream,) = made.connect_many(others(), 30).values()
        stream.send(b"here")
        inbox.wait(lambda: inbox.messages)
        dist.barrier()
        if dist.get_rank() == 0:
            for host in hosts:
                host.block()
        dist.barrier()
        start = time.monotonic()
        inbox.wait(lambda: inbox.lost)
        dist.barrier()
        return inbox.lost, time.monotonic() - start


def test_a_host_that_does_not_answer_is_noticed_by_its_lease(ranks):
    with network_hosts(2) as (hosts, _):
        results = ranks.run(2, vanish, hosts, 3)
    for rank, (lost, _) in enumerate(results):
        assert [other for other, _ in lost] == [1 - rank]
        assert "timed out" in lost[0][1]
