"""The package's public names are imported on first use, and all of them exist."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_io


def _imported() -> dict[str, str]:
    """Name → module, from the imports for type checkers."""
    tree = ast.parse(Path(dcp_io.__file__).read_text("utf-8"))
    return {
        alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("dcp_io.", "dcp_manifest."))
        for alias in node.names
    }


def test_every_name_is_what_type_checkers_are_told() -> None:
    told = _imported()
    assert sorted(told) == sorted(dcp_io.__all__)
    for name, module in told.items():
        assert getattr(dcp_io, name) is getattr(importlib.import_module(module), name), name
    assert {*dcp_io.__all__} <= {*dir(dcp_io)}


def test_other_names_are_missing() -> None:
    with pytest.raises(AttributeError, match="'dcp_io' has no attribute 'no_such_name'"):
        _ = dcp_io.no_such_name


def test_opening_a_folder_imports_no_engine() -> None:
    asked = "import sys; from dcp_io import open_store; open_store('x'); print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=250)
    modules = {*ran.stdout.split()}
    assert "dcp_io.stores.local_store" in modules
    assert (
        not {
            "dcp_io.writing.write_engine",
            "dcp_io.reading.read_engine",
            "dcp_io.saves.save_session",
            "importlib.metadata",
        }
        & modules
    )
