"""The page of the docs and the README say what works."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan: nox -s frameworks")

from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides

from dcp_torchtitan import DcpCheckpointManager

ROOT = Path(__file__).resolve().parents[3]
PAGE, README = ROOT / "docs" / "frameworks" / "torchtitan.md", ROOT / "packages" / "dcp-torchtitan" / "README.md"


def block(page: Path, language: str, containing: str) -> str:
    found = re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return next(text for text in found if containing in text)


def test_the_configuration_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_run.py").write_text(block(PAGE, "py", "llama3_8b_by_dcp"))
    monkeypatch.syspath_prepend(tmp_path)
    config = ConfigManager().parse_args(["--module", "my_run", "--config", "llama3_8b_by_dcp"])
    assert type(config.checkpoint) is DcpCheckpointManager.Config
    assert (config.checkpoint.interval, config.checkpoint.tolerated_failures) == (500, 2)


def test_the_command_of_the_page() -> None:
    command = shlex.split(block(PAGE, "sh", "torchrun").replace("\\\n", ""))
    config = ConfigManager().parse_args(command[command.index("--module") :])
    apply_overrides(config.override, config)
    assert type(config.checkpoint) is DcpCheckpointManager.Config
    assert config.checkpoint.async_mode == "async_with_pinned_mem"


def test_the_example_of_the_readme() -> None:
    names: dict[str, Any] = {}
    exec(block(README, "py", "DcpCheckpointManager"), names)
    assert names["config"].checkpoint._owner is DcpCheckpointManager


def test_every_option_is_on_the_page() -> None:
    page = PAGE.read_text()
    options = {field.name for field in dataclasses.fields(DcpCheckpointManager.Config)} - {"enable", "folder"}
    assert {name for name in options if name not in page} == set()
