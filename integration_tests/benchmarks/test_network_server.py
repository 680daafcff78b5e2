"""The object server of a pretended host is reached over its network."""

from __future__ import annotations

import urllib.request

import pytest

from integration_tests.benchmarks.network_server import open_object_server
from integration_tests.kits.networks import network_hosts, networks_missing


def test_another_host_reaches_the_server() -> None:
    if reason := networks_missing():
        pytest.skip(reason)
    with network_hosts(2) as (hosts, _), open_object_server(hosts[1]) as server, hosts[0].entered():
        address = server.environment_from(hosts[1])["AWS_ENDPOINT_URL"]
        with urllib.request.urlopen(f"{address}/{server.bucket}", timeout=10) as answer:
            assert answer.status == 200
