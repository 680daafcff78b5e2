"""The proof of an exact resume on a Lightning module, with parts of its state left out."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning")

from dcp_manager.testing.prove_script import prove_script

SCRIPT = Path(__file__).parent / "resumed_module.py"


@pytest.mark.parametrize("omit", ["nothing", "ema", "torch-rng", "scheduler"])
def test_each_omission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omit: str) -> None:
    monkeypatch.chdir(tmp_path)
    report = prove_script(SCRIPT, [omit], kill_at_save=2)
    assert report.omissions == ([] if omit == "nothing" else [omit]), str(report)
    assert report.ok is (omit == "nothing")
