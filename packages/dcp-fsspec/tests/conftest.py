"""The ranks of the storage suite are those that find the S3 server."""

from __future__ import annotations

import pytest

from dcp_ranks.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks(s3_ranks: RankPool) -> RankPool:
    return s3_ranks
