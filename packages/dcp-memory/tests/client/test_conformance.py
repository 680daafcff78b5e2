"""The store in a keeper passes the suite of stores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_io.testing import FoldersConformance, LendingConformance, StoreConformance
from dcp_memory import stop_keeper
from dcp_memory.client.connection import forget_connections
from dcp_memory.client.store import KeeperStore
from dcp_memory.places import FOLDER_VARIABLE
from integration_tests.kits.raw_store import RawStore

_numbers = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def _keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place: Path = tmp_path_factory.mktemp("conformance") / "keepers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(place))
        patch.setenv("DCP_KEEPER_MAX_BYTES", str(1 << 30))
        yield
        assert stop_keeper("conformance")
        assert [*place.iterdir()] == []
        forget_connections(str(place))


class TestKeeperStore(StoreConformance, FoldersConformance, LendingConformance):
    @pytest.fixture
    def place(self) -> Any:
        return f"place-{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> KeeperStore:
        return KeeperStore("conformance", f"{place}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawStore:
        return RawStore(self.open_store(place, folder))
