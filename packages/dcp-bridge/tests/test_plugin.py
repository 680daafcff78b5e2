"""The bridge is found by entry point; without it stock's objects are refused with the package's name."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp_core
from dcp_core import plugins
from dcp_core.adopt_foreign import adopt_writer
from dcp_hooks import PluginRegistry, installed


def test_the_bridge_is_installed():
    assert "torch.distributed.checkpoint" in plugins.names("bridges")
    assert plugins.bridge("torch.distributed.checkpoint").__module__ == "dcp_bridge.bridging"


def test_without_it_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry("dcp-nothing-installed")))
    with pytest.raises(dcp_core.DcpError, match="install dcp-bridge"):
        dcp_core.save({"w": torch.ones(1)}, storage_writer=stock.FileSystemWriter(tmp_path), no_dist=True)
    with pytest.raises(dcp_core.DcpError, match="install dcp-bridge"):
        dcp_core.load({}, storage_reader=stock.FileSystemReader(tmp_path), no_dist=True)


def test_what_only_has_the_methods_stays_what_it_is():
    class Duck:
        """Not of any library."""

    duck = Duck()
    assert adopt_writer(duck) is duck  # type: ignore[arg-type,comparison-overlap]


def test_nothing_heavy_is_imported_to_find_it():
    code = (
        "import sys; from dcp_core import plugins; plugins.list(); "
        "print([name for name in sys.modules if name == 'dcp_bridge.bridging' or 'distributed.checkpoint' in name])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
