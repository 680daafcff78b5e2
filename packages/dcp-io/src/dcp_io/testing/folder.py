"""Fixtures that a user of the suite provides: a parent folder per test, stores in it, and raw access to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from typing import Any, Protocol

import pytest

from dcp_io.stores.store import Store

__all__ = ["RawFolder", "StoreFixtures", "read_range", "write_object"]


class RawFolder(Protocol):
    """Direct access to a store's folder, without the store."""

    def names(self) -> list[str]:
        """Return all objects, also in subfolders, and temporary ones."""
        ...

    def get(self, name: str) -> bytes:
        """Return all bytes of an object."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object."""
        ...


class StoreFixtures(ABC):
    """Base class of the test classes: a derived class overrides `place`, `open_store` and `open_raw`."""

    listed_objects = 250
    """Objects in tests of listing: more than one page."""
    clock_seconds = 0.05
    """Pause after which the storage's time stamps differ."""

    @pytest.fixture
    def place(self) -> Any:
        """Fixture to override: an empty parent of one test's folders."""
        raise NotImplementedError("override the fixture `place`")

    @abstractmethod
    def open_store(self, place: Any, folder: str) -> Store:
        """Return a new store for a folder in `place`, which need not exist and is not made."""

    @abstractmethod
    def open_raw(self, place: Any, folder: str) -> RawFolder:
        """Return raw access to that folder."""

    @pytest.fixture
    def store(self, place: Any) -> Store:
        """Fixture: a store with an existing folder."""
        store = self.open_store(place, "checkpoint")
        store.make()
        return store

    @pytest.fixture
    def twin(self, place: Any, store: Store) -> Store:
        """A second `Store` object for the folder, as of another rank."""
        del store
        return self.open_store(place, "checkpoint")

    @pytest.fixture
    def raw(self, place: Any) -> RawFolder:
        """Fixture: raw access to the folder of `store`."""
        return self.open_raw(place, "checkpoint")


def write_object(store: Store, name: str, data: bytes) -> None:
    """Create an object with `Store.create`."""
    with store.create(name) as sink:
        sink.write([data])


def read_range(store: Store, name: str, offset: int, buffer: memoryview) -> None:
    """Fill a buffer from an object."""
    with closing(store.open(name)) as source:
        source.read_into(offset, [buffer])
