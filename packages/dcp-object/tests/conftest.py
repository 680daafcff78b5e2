"""The storage suite uses ranks that can reach the S3 server."""

from __future__ import annotations

import pytest

from dcp_ranks.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(s3_ranks: RankPool) -> RankPool:
    return s3_ranks
