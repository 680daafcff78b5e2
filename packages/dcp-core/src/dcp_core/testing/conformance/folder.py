"""Fixtures of the storage conformance suite, and raw access to the files of a checkpoint."""

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
    """Contract of raw access to the files of one checkpoint, without the code under test."""

    def names(self) -> list[str]:
        """Return the names of all files, including hidden and temporary files; an empty list if there is no folder."""
        ...

    def get(self, name: str) -> bytes:
        """Return all bytes of the file with this name."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Create or replace the file with this name."""
        ...

    def delete(self, name: str) -> None:
        """Remove the file with this name."""
        ...


class LocalFolder:
    """Raw access (`RawFolder`) to a checkpoint with files in a local folder.

    Args:
        path: Path of the folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        """Return the paths of all files, relative to the local folder."""
        return sorted(path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if not path.is_dir())

    def get(self, name: str) -> bytes:
        """Return all bytes of the file at this relative path."""
        return (self._path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        """Create or replace the file at this relative path."""
        (self._path / name).write_bytes(data)

    def delete(self, name: str) -> None:
        """Remove the file at this relative path."""
        (self._path / name).unlink()


@dataclass(frozen=True, slots=True)
class Door:
    """Access to a storage under test: saves and loads by checkpoint id alone, or with an explicit reader and writer."""

    checkpoint_id: str
    make_writer: Callable[[str], StorageWriter] | None
    make_reader: Callable[[str], StorageReader] | None

    def save(self, state: dict[str, Any], **options: Any) -> Metadata:
        """Save a state dict with `dcp_core.save` to the storage under test."""
        if self.make_writer is None:
            return save(state, checkpoint_id=self.checkpoint_id, **options)
        return save(state, storage_writer=self.make_writer(self.checkpoint_id), **options)

    def load(self, template: dict[str, Any], **options: Any) -> LoadReport:
        """Load into a template with `dcp_core.load` from the storage under test."""
        if self.make_reader is None:
            return load(template, checkpoint_id=self.checkpoint_id, **options)
        return load(template, storage_reader=self.make_reader(self.checkpoint_id), **options)


class StorageFixtures(ABC):
    """Fixtures of the conformance suite: some are overridden in the derived test class, the others use those."""

    registered = True
    """Whether an installed plug-in registers the URI scheme of the checkpoint ids; if not, only explicit readers and
    writers are tested."""

    needs_collectives: str | None = None
    """Reason why saves with `use_collectives=False` are refused, as those of each host's own stores are; None if the
    storage takes them."""
    needs_all_files: str | None = None
    """Reason why no part of a checkpoint that lacks a file is loaded, as where ranks choose a save that hosts have
    as a whole; None if a load needs only the files that it reads."""

    @pytest.fixture
    def checkpoint_id(self) -> str:
        """Return a checkpoint id with a URI scheme, unused and different for each test. To be overridden."""
        raise NotImplementedError("override the fixture `checkpoint_id`")

    @pytest.fixture
    def raw(self) -> RawFolder:
        """Return raw access to the files of the checkpoint `checkpoint_id`. To be overridden."""
        raise NotImplementedError("override the fixture `raw`")

    @pytest.fixture
    def bytes_given(self) -> Callable[[], int] | None:
        """Return a function that returns how many bytes this process and its ranks have read from the storage so far.

        Returns None (the default) if bytes cannot be counted; the tests then use the reader's `bytes_read`.
        """
        return None

    @abstractmethod
    def make_writer(self, checkpoint_id: str) -> StorageWriter:
        """Return a new storage writer. To be overridden. Also called in rank processes, without fixtures."""

    @abstractmethod
    def make_reader(self, checkpoint_id: str) -> StorageReader:
        """Return a new storage reader. To be overridden. Also called in rank processes, without fixtures."""

    def file_of(self, place: Any) -> str:
        """Return the name of the data file that contains an item, from the item's value in `Metadata.storage_data`."""
        return str(place.relative_path)

    @pytest.fixture(params=["by id", "explicit"])
    def door(self, request: pytest.FixtureRequest, checkpoint_id: str) -> Door:
        """Return access to the storage; tests run by checkpoint id alone, and with an explicit reader and writer."""
        if request.param == "explicit":
            return Door(checkpoint_id, self.make_writer, self.make_reader)
        if not self.registered:
            pytest.skip("no plug-in registers the scheme of these ids")
        return Door(checkpoint_id, None, None)

    @pytest.fixture
    def storage(self, checkpoint_id: str) -> Door:
        """Return access to the storage with an explicit reader and writer only."""
        return Door(checkpoint_id, self.make_writer, self.make_reader)

    def data_files(self, checkpoint_id: str) -> dict[str, set[str]]:
        """Return the data files in a checkpoint's index: file name → FQNs of the tensors and objects in the file."""
        places = self.make_reader(checkpoint_id).read_metadata().storage_data or {}
        files: dict[str, set[str]] = {}
        for index, place in places.items():
            files.setdefault(self.file_of(place), set()).add(index.fqn)
        return files

    def index_files(self, checkpoint_id: str, raw: RawFolder) -> list[str]:
        """Return the names of all files that are no data files: the index, and leftover files."""
        return sorted(set(raw.names()) - self.data_files(checkpoint_id).keys())
