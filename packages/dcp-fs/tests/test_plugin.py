"""The storage that this package registers."""

import sys

from dcp_core import plugins
from dcp_fs import FileSystemReader, FileSystemWriter, plugin


def test_registers_local_folders() -> None:
    assert [spec.scheme for spec in plugin.dcp_register_storage()] == ["host", "file", "local"]
    for place in ("some/folder", "file:///some/folder", "local:///some/folder"):
        backend = plugins.storage_for(place)
        assert backend.load_writer() is FileSystemWriter
        assert backend.load_reader() is FileSystemReader


def test_is_found_by_entry_point() -> None:
    assert any("dcp-fs" in str(info) for info in plugins.list())
    assert "dcp_fs.plugin" in sys.modules
