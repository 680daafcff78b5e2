"""Names that no run of a keeper can have, runs that are not there, and rates of copies that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dcp_all as dcp
from dcp_base import InvalidPlaceError
from dcp_core import CheckpointNotFoundError
from dcp_memory import keeper_status


@pytest.mark.parametrize("run", ["", "..", ".x", "x" * 70, "run 1", "ü", "run\n", "a:b"])
def test_wrong_names_are_refused_without_noise(run: str, caplog: pytest.LogCaptureFixture) -> None:
    for call in (dcp.save, dcp.load):
        with pytest.raises(InvalidPlaceError, match="is not a name for a keeper's run"):
            call({"step": 1}, checkpoint_id=f"keeper://{run}/step-1")
    assert caplog.records == []


@pytest.mark.parametrize("rate", [0, -1, float("nan"), "1e6", True])
def test_wrong_rates_are_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match="it must be a positive number"):
        dcp.partner(rate_bytes_per_second=rate)


@pytest.mark.parametrize("place", ["keeper://no-such-run", "host://{tmp_path}/no-such-folder"])
def test_a_load_makes_no_place(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_KEEPER_DIR", str(tmp_path / "keepers"))
    with pytest.raises(CheckpointNotFoundError):
        dcp.load({"step": 1}, checkpoint_id=f"{place.format(tmp_path=tmp_path)}/step-1")
    assert [*tmp_path.iterdir()] == []
    assert keeper_status("no-such-run") is None
