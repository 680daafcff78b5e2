"""Fixtures that a user of the suite provides, and raw access to a storage's objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from dcp_core.loading import load
from dcp_core.planning.load_report import LoadReport
from dcp_core.records.metadata import Metadata
from dcp_core.records.protocols import StorageReader, StorageWriter
from dcp_core.saving import save

__all__ = ["Door", "LocalFolder", "RawFolder", "StorageFixtures"]


class RawFolder(Protocol):
    """Protocol of raw access to the objects (or files) of one checkpoint, without the code under test."""

    def names(self) -> list[str]:
        """Return the names of all objects, including hidden and temporary ones; empty if there is no folder."""
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


class LocalFolder:
    """`RawFolder` for a storage with files in a local folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        """Return the paths of all files, relative to the folder."""
        return sorted(path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if not path.is_dir())

    def get(self, name: str) -> bytes:
        """Return all bytes of a file."""
        return (self._path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        (self._path / name).write_bytes(data)

    def delete(self, name: str) -> None:
        """Remove a file."""
        (self._path / name).unlink()


@dataclass(frozen=True, slots=True)
class Door:
    """Saves and loads in one of two ways: with the checkpoint id alone, or with an explicit reader and writer."""

    checkpoint_id: str
    make_writer: Callable[[str], StorageWriter] | None
    make_reader: Callable[[str], StorageReader] | None

    def save(self, state: dict[str, Any], **options: Any) -> Metadata:
        """Call `dcp_core.save`."""
        if self.make_writer is None:
            return save(state, checkpoint_id=self.checkpoint_id, **options)
        return save(state, storage_writer=self.make_writer(self.checkpoint_id), **options)

    def load(self, template: dict[str, Any], **options: Any) -> LoadReport:
        """Call `dcp_core.load`."""
        if self.make_reader is None:
            return load(template, checkpoint_id=self.checkpoint_id, **options)
        return load(template, storage_reader=self.make_reader(self.checkpoint_id), **options)


class StorageFixtures(ABC):
    """The fixtures and methods that a derived class provides, and the fixtures built on them."""

    registered = True
    """Whether an installed plug-in registers the scheme of the ids; if not, only explicit readers and writers are
    tested."""

    @pytest.fixture
    def checkpoint_id(self) -> str:
        """Return a checkpoint id with a scheme, unused and different for each test. To be overridden."""
        raise NotImplementedError("override the fixture `checkpoint_id`")

    @pytest.fixture
    def raw(self) -> RawFolder:
        """Return raw access to the objects under `checkpoint_id`. To be overridden."""
        raise NotImplementedError("override the fixture `raw`")

    @pytest.fixture
    def bytes_given(self) -> Callable[[], int] | None:
        """Return a function that counts the bytes that this process and its ranks have read from the storage so far.

        Returns None (the default) if the bytes cannot be counted; then the reader's own count is used.
        """
        return None

    @abstractmethod
    def make_writer(self, checkpoint_id: str) -> StorageWriter:
        """Return a new writer. Also called on ranks, where fixtures are not available."""

    @abstractmethod
    def make_reader(self, checkpoint_id: str) -> StorageReader:
        """Return a new reader. Also called on ranks."""

    def file_of(self, place: Any) -> str:
        """Return the name of the object that contains an item, given a value of `Metadata.storage_data`."""
        return str(place.relative_path)

    @pytest.fixture(params=["by id", "explicit"])
    def door(self, request: pytest.FixtureRequest, checkpoint_id: str) -> Door:
        """Return each way to use the storage, one after the other."""
        if request.param == "explicit":
            return Door(checkpoint_id, self.make_writer, self.make_reader)
        if not self.registered:
            pytest.skip("no plug-in registers the scheme of these ids")
        return Door(checkpoint_id, None, None)

    @pytest.fixture
    def storage(self, checkpoint_id: str) -> Door:
        """Return the reader and writer of a checkpoint, for tests that need no other way to the storage."""
        return Door(checkpoint_id, self.make_writer, self.make_reader)

    def data_files(self, checkpoint_id: str) -> dict[str, set[str]]:
        """Return the data files in the checkpoint's index: name → keys of the values in it."""
        places = self.make_reader(checkpoint_id).read_metadata().storage_data or {}
        files: dict[str, set[str]] = {}
        for index, place in places.items():
            files.setdefault(self.file_of(place), set()).add(index.fqn)
        return files

    def index_files(self, checkpoint_id: str, raw: RawFolder) -> list[str]:
        """Return the names of all other objects: the index, and any leftovers."""
        return sorted(set(raw.names()) - self.data_files(checkpoint_id).keys())
