"""What a replacement requires: a version of torch that was tested, and all packages of `dcp-all`."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

import pytest
import torch

import dcp_core
from dcp_bridge import original_stock, replace_stock
from dcp_bridge.replacement import replacement
from dcp_core import DcpError

STOCK = "torch.distributed.checkpoint"


@pytest.mark.parametrize("version", ["2.5.1", "2.16.0", "3.0.0.dev20261101+cpu", "unknown"])
def test_other_versions_of_torch_are_refused_unless_asked_for(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(
        DcpError, match=f"torch is {re.escape(version)}, .* 2.6 to 2.15.*any_torch=True.*, or add --any-torch"
    ):
        replace_stock()
    assert sys.modules[STOCK] is original_stock()
    with replace_stock(any_torch=True) as made:
        assert made.torch_version == version


@pytest.mark.parametrize("version", ["2.6.0", "2.13.0+cpu", "2.15.0.dev20260101+cu132"])
def test_known_versions(version):
    replacement._check_torch(version)


@pytest.mark.parametrize(("lost", "named"), [("dcp_all", "dcp-all"), ("dcp_state.model", "dcp-state")])
def test_a_missing_package_is_named(monkeypatch, lost, named):
    real = importlib.import_module

    def without(name: str) -> Any:
        if name == "dcp_all":
            raise ModuleNotFoundError(f"No module named {lost!r}", name=lost)
        return real(name)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(dcp_core.errors.PluginNotFoundError, match=f"{named} is not installed: install dcp-all"):
        replace_stock()
