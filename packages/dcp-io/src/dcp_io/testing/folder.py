"""What the suite asks of whoever runs it: a fresh place per test, stores on it, and a way past the code under test."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import pytest

from dcp_io.stores.store import Store

__all__ = ["RawFolder", "StoreFixtures", "write_object"]


class RawFolder(Protocol):
    """A store's folder as its storage really holds it. Must not use the store."""

    def names(self) -> list[str]:
        """Names of all objects in the folder, temporary ones and those below further folders included."""
        ...

    def get(self, name: str) -> bytes:
        """All bytes of an object."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Make an object, or replace it."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object."""
        ...


class StoreFixtures(ABC):
    """The two methods and the fixture that a derived class provides, and what the tests make of them."""

    listed_objects = 250
    """Objects in the tests of listing: more than fit on one page of the storage, where it has pages."""
    clock_seconds = 0.05
    """A time after which the storage's time stamps surely differ."""

    @pytest.fixture
    def place(self) -> Any:
        """Where the folders of one test lie; empty and used by no other test. To be overridden."""
        raise NotImplementedError("override the fixture `place`")

    @abstractmethod
    def open_store(self, place: Any, folder: str) -> Store:
        """A new store object for a folder of a place. The folder need not exist; nothing is made."""

    @abstractmethod
    def open_raw(self, place: Any, folder: str) -> RawFolder:
        """The same folder, past the store."""

    @pytest.fixture
    def store(self, place: Any) -> Store:
        """A store whose folder exists."""
        store = self.open_store(place, "checkpoint")
        store.make()
        return store

    @pytest.fixture
    def twin(self, place: Any, store: Store) -> Store:
        """Another store object for the folder of `store`, as other ranks have it."""
        del store
        return self.open_store(place, "checkpoint")

    @pytest.fixture
    def raw(self, place: Any) -> RawFolder:
        """The folder of `store`, past it."""
        return self.open_raw(place, "checkpoint")


def write_object(store: Store, name: str, data: bytes) -> None:
    """Create an object with these bytes."""
    sink = store.create(name)
    sink.write([data])
    sink.close(sync=False)
