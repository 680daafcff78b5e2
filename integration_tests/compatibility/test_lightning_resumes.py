"""The proof on a Lightning module finds each part that its checkpoints lack, and nothing where nothing is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch", reason="nox -s frameworks installs Lightning")

from dcp_prove import processes
from dcp_prove import prove_script as module
from integration_tests.resume.forked import run_forked_ranks

SCRIPT = Path(__file__).parents[1] / "resume" / "lightning_module.py"
OMISSIONS = (
    *("scheduler", "scaler", "ema", "batchnorm", "accumulation", "epoch", "position"),
    *("numpy-rng", "torch-rng", "one-rank-rng", "worker-seeds"),
)


@pytest.mark.parametrize(
    ("omit", "ranks"), [(None, 1), (None, 2), *((omit, 2 if omit == "one-rank-rng" else 1) for omit in OMISSIONS)]
)
def test_each_omission_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, omit: str | None, ranks: int) -> None:
    monkeypatch.setattr(processes, "run_ranks", run_forked_ranks)
    monkeypatch.chdir(tmp_path)
    report = module.prove_script(SCRIPT, [omit] if omit else [], world_sizes=[ranks])
    assert report.omissions == ([omit] if omit else []), str(report)
    assert report.ok is (omit is None)
    assert (report.steps, report.results[0].kill_at) == (9, 4)
