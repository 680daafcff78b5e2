"""The store in a keeper passes the suite of stores."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dcp_io import Store
from dcp_io.testing import StoreConformance
from dcp_memory import KeeperStore, stop_keeper
from dcp_memory.client import keepers
from dcp_memory.places import FOLDER_VARIABLE

_numbers = itertools.count()


class RawFolder:
    """A folder of a keeper by a connection of its own for each call."""

    def __init__(self, store: KeeperStore) -> None:
        self._store = store

    def names(self) -> list[str]:
        return sorted(self._names(self._store, ""))

    def _names(self, store: Store, above: str) -> Iterator[str]:
        yield from (above + entry.name for entry in store.list())
        for name in store.folders():
            yield from self._names(store.child(name), f"{above}{name}/")

    def get(self, name: str) -> bytes:
        return self._store.read(name)

    def put(self, name: str, data: bytes) -> None:
        self._store.publish(name, data)

    def delete(self, name: str) -> None:
        self._store.delete(name)


@pytest.fixture(scope="module", autouse=True)
def _keeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    place: Path = tmp_path_factory.mktemp("conformance") / "keepers"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER_VARIABLE, str(place))
        patch.setenv("DCP_KEEPER_MAX_BYTES", str(1 << 30))
        yield
        assert stop_keeper("conformance")
        assert [*place.iterdir()] == []
        keepers.forget_connections(str(place))


class TestKeeperStore(StoreConformance):
    @pytest.fixture
    def place(self) -> Any:
        return f"place-{next(_numbers)}"

    def open_store(self, place: Any, folder: str) -> KeeperStore:
        return KeeperStore("conformance", f"{place}/{folder}")

    def open_raw(self, place: Any, folder: str) -> RawFolder:
        return RawFolder(self.open_store(place, folder))
