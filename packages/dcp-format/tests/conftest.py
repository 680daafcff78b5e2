"""Checkpoints in folders for these tests, also where `dcp-fs` is not installed."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from dcp_base.hookspecs import StorageBackendSpec
from dcp_core import ByteStorageReader, ByteStorageWriter, hookimpl, plugins
from dcp_io import LocalStore, StoreBackend


class FolderWriter(ByteStorageWriter):
    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return StoreBackend(LocalStore(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class FolderReader(ByteStorageReader):
    def _open(self, checkpoint_id: Any) -> StoreBackend:
        return StoreBackend(LocalStore(checkpoint_id))


class Plugin:
    @hookimpl
    def dcp_register_storage(self) -> list[StorageBackendSpec]:
        return [StorageBackendSpec("file", "format_test_storage:FolderReader", "format_test_storage:FolderWriter")]


@pytest.fixture(autouse=True, scope="session")
def _folders() -> Iterator[None]:
    if "file" in plugins.names("storage"):
        yield
        return
    module = types.ModuleType("format_test_storage")
    vars(module).update(FolderWriter=FolderWriter, FolderReader=FolderReader)
    sys.modules[module.__name__] = module
    plugins.register(Plugin(), name="format-test-folders")
    yield
    plugins.unregister("format-test-folders")
