"""What an import of everything leaves for later: import time is paid by every script, worker and command."""

from __future__ import annotations

import subprocess
import sys

import pytest

# DTensor brings sympy: together they take longer to import than all packages of ours.
LARGE = ("sympy", "torch.distributed.tensor", "torch.distributed.checkpoint", "safetensors.torch", "rich")
# What only other calls than `save` and `load` need.
OTHERS = (
    *("dcp_bridge", "dcp_format", "dcp_fsspec", "dcp_inspect", "dcp_manager", "dcp_object", "dcp_state"),
    *("click", "fsspec", "obstore", "asyncio", "configparser", "html", "importlib.metadata", "multiprocessing", "ssl"),
)
MOST = 270
"""Modules that `save` and `load` may import beside torch's; when this was written, there were 217."""


def imported(statement: str, *, beside: str = "torch, torch.distributed, torch.utils.data") -> set[str]:
    """The modules that a statement imports, in a process that has imported others."""
    code = f"import sys, {beside}; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return {*ran.stdout.split()}


def test_everything_is_imported_on_first_use() -> None:
    packages = {"dcp_all", "dcp_base", "dcp_base.imports"}
    found = imported("import dcp_all", beside="importlib, typing")
    assert found - sys.stdlib_module_names == packages
    assert len(found) < len(packages) + 10
    assert imported("import dcp_all") == packages


def test_save_and_load_import_little() -> None:
    found = imported("import dcp_all; dcp_all.save, dcp_all.load")
    assert "dcp_core.saving" in found
    assert sorted(found.intersection(LARGE + OTHERS)) == []
    assert len(found) <= MOST


@pytest.mark.parametrize("module", ["dcp_core", "dcp_state", "dcp_manager"])
def test_large_libraries_are_imported_when_they_are_needed(module: str) -> None:
    assert sorted(imported(f"import {module}").intersection(LARGE)) == []
