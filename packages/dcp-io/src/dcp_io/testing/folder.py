"""Fixtures that a user of the suite provides: an empty parent folder per test, stores in it, and raw access to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from typing import Any, Protocol

import pytest

from dcp_io.stores.store import Store

__all__ = ["RawFolder", "StoreFixtures", "read_range", "write_object"]


class RawFolder(Protocol):
    """Protocol of direct access to a store's folder, without the store under test."""

    def names(self) -> list[str]:
        """Return the names of all objects, also in subfolders, including temporary objects."""
        ...

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        ...

    def delete(self, name: str) -> None: ...


class StoreFixtures(ABC):
    """Base class of the test classes: a derived class overrides `place`, `open_store` and `open_raw`."""

    listed_objects = 250
    """Number of objects in tests of listing: more than one page of the storage."""
    clock_seconds = 0.05
    """Pause after which time stamps of the storage certainly differ."""

    @pytest.fixture
    def place(self) -> Any:
        """Fixture: an empty parent of the folders of one test. To be overridden."""
        raise NotImplementedError("override the fixture `place`")

    @abstractmethod
    def open_store(self, place: Any, folder: str) -> Store:
        """Return a new store object for a folder in `place`. The folder need not exist and is not made."""

    @abstractmethod
    def open_raw(self, place: Any, folder: str) -> RawFolder:
        """Return raw access to the folder that `open_store` opens."""

    @pytest.fixture
    def store(self, place: Any) -> Store:
        """Fixture: a store with an existing folder."""
        store = self.open_store(place, "checkpoint")
        store.make()
        return store

    @pytest.fixture
    def twin(self, place: Any, store: Store) -> Store:
        """Return a second `Store` object for the folder of `store`, such as another rank would open."""
        del store
        return self.open_store(place, "checkpoint")

    @pytest.fixture
    def raw(self, place: Any) -> RawFolder:
        """Fixture: direct access to the folder of `store`."""
        return self.open_raw(place, "checkpoint")


def write_object(store: Store, name: str, data: bytes) -> None:
    """Create an object with `Store.create`."""
    sink = store.create(name)
    sink.write([data])
    sink.close()


def read_range(store: Store, name: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer from an object."""
    with closing(store.open(name)) as source:
        source.read_into(offset, [buffer])
