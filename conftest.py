"""Fixtures for the tests of all packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dcp_core.testing.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real ranks, kept between tests: `ranks.run(world_size, function, *args)` gives each rank's result."""
    pool_type = pytest.importorskip("dcp_core.testing.ranks", reason="needs dcp-core[testing]").RankPool
    with pool_type() as pool:
        yield pool
