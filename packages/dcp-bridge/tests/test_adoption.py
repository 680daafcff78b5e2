"""The bridge is found where it is installed; without it stock's objects are refused with the package's name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_core
from dcp_base import imports
from dcp_core import StorageWriter
from dcp_core.arguments import adopted
from dcp_core.errors import PluginNotFoundError


def test_without_it_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(imports, "is_installed", lambda part: False)
    with pytest.raises(PluginNotFoundError, match="Install dcp-bridge, from"):
        dcp_core.save({"w": torch.ones(1)}, storage_writer=stock.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(PluginNotFoundError, match="Install dcp-bridge, from"):
        dcp_core.load({}, storage_reader=stock.FileSystemReader(tmp_path), no_dist=True)


def test_what_only_has_the_methods_is_wrapped():
    class Duck:
        """Not of any library."""

    duck = Duck()
    assert isinstance(adopted(duck, StorageWriter), StorageWriter)  # type: ignore[arg-type]


def test_nothing_heavy_is_imported_to_find_it():
    code = (
        "import sys; from dcp_core import plugins; plugins.list(); "
        "print([name for name in sys.modules if name == 'dcp_bridge.bridging' or 'distributed.checkpoint' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
