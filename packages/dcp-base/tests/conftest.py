"""Folders that look like installed distributions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dcp_base import PluginRegistry, installed

GROUP = "dcp-test-plugins"
"""The environment may hold real plug-ins; only those of a test are in this group."""

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install(name, code)` makes a distribution with a plug-in module, found before everything else."""
    made: list[str] = []

    def install(name: str, code: str) -> None:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{name} = {name}_plugin\n")
        (tmp_path / f"{name}_plugin.py").write_text(f"from dcp_base import *\n{code}")
        made.append(f"{name}_plugin")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(installed, "__dict__", vars(PluginRegistry(GROUP)))
    yield install
    for name in made:
        sys.modules.pop(name, None)
