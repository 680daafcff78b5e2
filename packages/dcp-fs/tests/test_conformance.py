"""Local folders pass the suite that third parties run against their storages, in both layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_core.testing.conformance import Door, LocalFolder, StorageConformance
from dcp_fs import FileSystemReader, FileSystemWriter


class TestFileSystem(StorageConformance):
    @pytest.fixture
    def checkpoint_id(self, tmp_path: Path) -> str:
        return f"file://{tmp_path}/checkpoint"

    @pytest.fixture
    def raw(self, tmp_path: Path) -> LocalFolder:
        return LocalFolder(tmp_path / "checkpoint")

    def make_writer(self, checkpoint_id: str) -> FileSystemWriter:
        return FileSystemWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> FileSystemReader:
        return FileSystemReader(checkpoint_id)


class TestRawLayout(TestFileSystem):
    @pytest.fixture
    def door(self, storage: Door) -> Door:
        return storage  # ids alone choose the other layout

    def make_writer(self, checkpoint_id: str) -> FileSystemWriter:
        return FileSystemWriter(checkpoint_id, single_file_per_rank=False, layout="raw")
