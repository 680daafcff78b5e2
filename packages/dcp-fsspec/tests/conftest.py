"""One S3 server on loopback for all tests of this package, found by the environment; and the ranks of the suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_core.testing.ranks import RankPool
from dcp_io.testing.s3_server import S3Server


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    pytest.importorskip("moto", reason="needs moto[s3]")
    with S3Server() as server, server.in_environment():
        yield server


@pytest.fixture(scope="session")
def ranks(s3: S3Server) -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool
