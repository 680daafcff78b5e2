"""Fixtures for the tests of all packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dcp_core.testing.ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # noqa: PLC0415 - the packages without torch are tested without it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real ranks, kept between tests: `ranks.run(world_size, function, *args)` gives each rank's result."""
    pool_type = pytest.importorskip("dcp_core.testing.ranks", reason="needs dcp-core[testing]").RankPool
    with pool_type() as pool:
        yield pool
