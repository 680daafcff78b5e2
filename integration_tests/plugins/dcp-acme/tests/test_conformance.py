"""The store, the storage and the transform, tested by the suites of other packages."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from dcp_acme.deflate import BlockDeflate
from dcp_acme.storage import VaultReader, VaultWriter
from dcp_acme.vault import folder_of, open_store
from dcp_core.testing.conformance import (
    BlockTransformConformance,
    LocalFolder,
    StorageConformance,
)
from dcp_io import LocalStore
from dcp_io.testing import FoldersConformance, StoreConformance

_numbers = itertools.count()


class TestStore(StoreConformance, FoldersConformance):
    @pytest.fixture
    def place(self, root: Path) -> str:
        return f"acme://stores/{next(_numbers)}"

    def open_store(self, place: str, folder: str) -> LocalStore:
        return open_store(f"{place}/{folder}")

    def open_raw(self, place: str, folder: str) -> LocalFolder:
        return LocalFolder(folder_of(f"{place}/{folder}"))


@pytest.mark.slow  # the same engine as dcp-fs, which the short suite tests
class TestStorage(StorageConformance):
    @pytest.fixture
    def checkpoint_id(self, root: Path) -> str:
        return f"acme://team/run-{next(_numbers)}"

    @pytest.fixture
    def raw(self, checkpoint_id: str) -> LocalFolder:
        return LocalFolder(folder_of(checkpoint_id))

    def make_writer(self, checkpoint_id: str) -> VaultWriter:
        return VaultWriter(checkpoint_id)

    def make_reader(self, checkpoint_id: str) -> VaultReader:
        return VaultReader(checkpoint_id)


class TestDeflate(BlockTransformConformance):
    def make(self) -> BlockDeflate:
        return BlockDeflate(6)
