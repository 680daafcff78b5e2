"""One server for all tests of this package, and the ranks that the suite asks for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_core.testing.ranks import RankPool
from dcp_http_example.server import ObjectServer


@pytest.fixture(scope="session")
def server() -> Iterator[ObjectServer]:
    """Answers take a moment, listings longer; a page is short."""
    with ObjectServer(latency_seconds=0.0005, list_latency_seconds=0.002, page_objects=20) as server:
        yield server


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(2, timeout_seconds=240) as pool:
        yield pool
