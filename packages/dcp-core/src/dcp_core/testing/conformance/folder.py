"""What the suite asks of whoever runs it, and helpers that look at a storage past the code under test."""

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
    """The objects (or files) of one checkpoint as the storage really holds them. Must not use the code under test."""

    def names(self) -> list[str]:
        """Names of all objects, hidden and temporary ones included; none if there is no folder."""
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


class LocalFolder:
    """The `RawFolder` of a storage that keeps files in a folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        """Paths of all files, relative to the folder."""
        return sorted(path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if not path.is_dir())

    def get(self, name: str) -> bytes:
        """All bytes of a file."""
        return (self._path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """Write a file."""
        (self._path / name).write_bytes(data)

    def delete(self, name: str) -> None:
        """Remove a file."""
        (self._path / name).unlink()


@dataclass(frozen=True, slots=True)
class Door:
    """One of the two ways to a storage: by nothing but the checkpoint's id, or with its reader and writer."""

    checkpoint_id: str
    make_writer: Callable[[str], StorageWriter] | None
    make_reader: Callable[[str], StorageReader] | None

    def save(self, state: dict[str, Any], **options: Any) -> Metadata:
        """`dcp_core.save`."""
        if self.make_writer is None:
            return save(state, checkpoint_id=self.checkpoint_id, **options)
        return save(state, storage_writer=self.make_writer(self.checkpoint_id), **options)

    def load(self, template: dict[str, Any], **options: Any) -> LoadReport:
        """`dcp_core.load`."""
        if self.make_reader is None:
            return load(template, checkpoint_id=self.checkpoint_id, **options)
        return load(template, storage_reader=self.make_reader(self.checkpoint_id), **options)


class StorageFixtures(ABC):
    """What a derived class provides, and what the tests make of it."""

    registered = True
    """Whether an installed plugin registers the scheme of the ids; without it only explicit readers are judged."""

    @pytest.fixture
    def checkpoint_id(self) -> str:
        """An id with a scheme, under which there is nothing yet; another one for each test. To be overridden."""
        raise NotImplementedError("override the fixture `checkpoint_id`")

    @pytest.fixture
    def raw(self) -> RawFolder:
        """The objects under `checkpoint_id`. To be overridden."""
        raise NotImplementedError("override the fixture `raw`")

    @pytest.fixture
    def bytes_given(self) -> Callable[[], int] | None:
        """What counts the bytes that the storage has given to this process and its ranks so far.

        None (the default) where that cannot be told; then the reader's own figures must do.
        """
        return None

    @abstractmethod
    def make_writer(self, checkpoint_id: str) -> StorageWriter:
        """A new writer. Also called on ranks, where no fixture is at hand."""

    @abstractmethod
    def make_reader(self, checkpoint_id: str) -> StorageReader:
        """A new reader. Also called on ranks."""

    def file_of(self, place: Any) -> str:
        """Name of the object that holds an item, given a value of `Metadata.storage_data`."""
        return str(place.relative_path)

    @pytest.fixture(params=["by id", "explicit"])
    def door(self, request: pytest.FixtureRequest, checkpoint_id: str) -> Door:
        """Both ways to the storage, one after the other."""
        if request.param == "explicit":
            return Door(checkpoint_id, self.make_writer, self.make_reader)
        if not self.registered:
            pytest.skip("no plugin registers the scheme of these ids")
        return Door(checkpoint_id, None, None)

    @pytest.fixture
    def storage(self, checkpoint_id: str) -> Door:
        """One way to the storage, where the way does not matter."""
        return Door(checkpoint_id, self.make_writer, self.make_reader)

    def data_files(self, checkpoint_id: str) -> dict[str, set[str]]:
        """The names of the objects that the checkpoint's index names → the keys that they hold parts of."""
        places = self.make_reader(checkpoint_id).read_metadata().storage_data or {}
        files: dict[str, set[str]] = {}
        for index, place in places.items():
            files.setdefault(self.file_of(place), set()).add(index.fqn)
        return files

    def index_files(self, checkpoint_id: str, raw: RawFolder) -> list[str]:
        """The names of all other objects: the index, and any debris."""
        return sorted(set(raw.names()) - self.data_files(checkpoint_id).keys())
