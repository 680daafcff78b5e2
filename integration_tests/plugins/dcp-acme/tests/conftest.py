"""The vault of a test, and the ranks that the suite asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_acme.vault import VAULT_VARIABLE
from dcp_core.testing.ranks import RankPool


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "slow: takes minutes; leave it out with -m 'not slow'"
    )


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One vault for all tests: rank processes, which live as long, read it too."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("vault")
        patch.setenv(VAULT_VARIABLE, str(folder))
        yield folder


@pytest.fixture(scope="session")
def ranks(root: Path) -> Iterator[RankPool]:
    with RankPool(2, timeout_seconds=240) as pool:
        yield pool
