"""Fixtures of the storage conformance suite, and raw access to checkpoint files."""

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
    """Raw access to one checkpoint's files."""

    def names(self) -> list[str]:
        """Return all file names, including hidden ones; empty without a directory."""
        ...

    def get(self, name: str) -> bytes: ...

    def put(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...


class LocalFolder:
    """`RawFolder` for a local directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        return sorted(path.relative_to(self._path).as_posix() for path in self._path.rglob("*") if not path.is_dir())

    def get(self, name: str) -> bytes:
        return (self._path / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self._path / name).write_bytes(data)

    def delete(self, name: str) -> None:
        (self._path / name).unlink()


@dataclass(frozen=True, slots=True)
class Door:
    """Access to a storage, by checkpoint id or with reader and writer."""

    checkpoint_id: str
    make_writer: Callable[[str], StorageWriter] | None
    make_reader: Callable[[str], StorageReader] | None

    def save(self, state: dict[str, Any], **options: Any) -> Metadata:
        if self.make_writer is None:
            return save(state, checkpoint_id=self.checkpoint_id, **options)
        return save(state, storage_writer=self.make_writer(self.checkpoint_id), **options)

    def load(self, template: dict[str, Any], **options: Any) -> LoadReport:
        if self.make_reader is None:
            return load(template, checkpoint_id=self.checkpoint_id, **options)
        return load(template, storage_reader=self.make_reader(self.checkpoint_id), **options)


class StorageFixtures(ABC):
    """Fixtures of the suite, some to override."""

    registered = True
    """Whether a plug-in registers the ids' URI scheme; if not, only readers and writers are tested."""

    needs_collectives: str | None = None
    """Reason why saves with `use_collectives=False` are refused, or None."""
    needs_all_files: str | None = None
    """Reason why a load fails if any file is missing, or None."""

    @pytest.fixture
    def checkpoint_id(self) -> str:
        """Return a new checkpoint id with a URI scheme. To be overridden."""
        raise NotImplementedError("override the fixture `checkpoint_id`")

    @pytest.fixture
    def raw(self) -> RawFolder:
        """Return raw access to the files of `checkpoint_id`. To be overridden."""
        raise NotImplementedError("override the fixture `raw`")

    @pytest.fixture
    def bytes_given(self) -> Callable[[], int] | None:
        """Return a function of the bytes that all ranks read; None to use `bytes_read`."""
        return None

    @abstractmethod
    def make_writer(self, checkpoint_id: str) -> StorageWriter:
        """Return a new storage writer, also in rank processes. To be overridden."""

    @abstractmethod
    def make_reader(self, checkpoint_id: str) -> StorageReader:
        """Return a new storage reader, also in rank processes. To be overridden."""

    def file_of(self, place: Any) -> str:
        return str(place.relative_path)

    @pytest.fixture(params=["by id", "explicit"])
    def door(self, request: pytest.FixtureRequest, checkpoint_id: str) -> Door:
        """Return access by id, then with reader and writer."""
        if request.param == "explicit":
            return Door(checkpoint_id, self.make_writer, self.make_reader)
        if not self.registered:
            pytest.skip("no plug-in registers the scheme of these ids")
        return Door(checkpoint_id, None, None)

    @pytest.fixture
    def storage(self, checkpoint_id: str) -> Door:
        return Door(checkpoint_id, self.make_writer, self.make_reader)

    def data_files(self, checkpoint_id: str) -> dict[str, set[str]]:
        """Return data file → FQNs."""
        places = self.make_reader(checkpoint_id).read_metadata().storage_data or {}
        files: dict[str, set[str]] = {}
        for index, place in places.items():
            files.setdefault(self.file_of(place), set()).add(index.fqn)
        return files

    def index_files(self, checkpoint_id: str, raw: RawFolder) -> list[str]:
        return sorted(set(raw.names()) - self.data_files(checkpoint_id).keys())
