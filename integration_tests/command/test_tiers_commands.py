"""`dcp tiers`, `dcp promote` and `run.tiers.toml` by the command `dcp` itself: what dcp-tiers brings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dcp_core import save
from dcp_inspect.cli import run
from dcp_tiers import Tier, Tiers


def test_commands_of_another_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = Tiers([Tier(near), Tier(far)])
    tiers.write()
    save({"weight": torch.ones(1000)}, checkpoint_id=tiers.step(10), no_dist=True)
    assert run(["--help"]) == 0
    assert "\n  promote " in capsys.readouterr().out
    assert run(["help", "tiers"]) == 0
    assert "dcp tiers [OPTIONS] ROOT..." in capsys.readouterr().out
    assert run(["promote", str(near)]) == 0
    assert f"arrived  {far}/step-10" in capsys.readouterr().out
    assert run(["tiers", str(near / "run.tiers.toml"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert [copy["state"] for copy in found["steps"][0]["copies"]] == ["complete"] * 2
    assert run(["ls", str(near / "run.tiers.toml"), "--json"]) == 0
    assert {one["path"] for one in json.loads(capsys.readouterr().out)} == {f"{near}/step-10", f"{far}/step-10"}
    assert run(["verify", "-r", str(near / "run.tiers.toml")]) == 0
    assert "2 of 2 checkpoints sound" in capsys.readouterr().out
    assert run(["tiers", str(tmp_path), "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "not_found"
