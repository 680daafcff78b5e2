"""Ranks of pretended hosts, which the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_ranks.testing.ranks import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks."""
    with RankPool(8, timeout_seconds=240) as made:
        yield made
