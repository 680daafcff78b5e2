"""torchtitan's own trainer, stopped and continued on other numbers of ranks; its losses are those of one run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchtitan", reason="needs torchtitan: nox -s frameworks")

pytestmark = pytest.mark.timeout(600)  # several runs each, whose ranks end by themselves if they take too long

SCRIPT = Path(__file__).with_name("cpu_trainer.py")
OURS, STOCK = "DcpCheckpointManager", "CheckpointManager"


def train(folder: Path, ranks: int, steps: int, manager: str = OURS, **options: Any) -> dict[str, float]:
    """Train up to a step on some ranks; returns the losses of the steps that this run did."""
    asked = {"interval": 2, "last_save_model_only": False, "by_dcp": manager == OURS, **options}
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(ranks), str(steps), json.dumps(asked)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    told = json.loads((folder / f"up-to-{steps}.json").read_text())
    assert told["manager"] == manager
    return told["losses"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps that was not interrupted, with a checkpoint after every second one."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    train(folder, 2, 6)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(run: Path) -> dict[str, float]:
    return json.loads((run / "up-to-6.json").read_text())["losses"]


@pytest.mark.parametrize(
    ("managers", "mode"),
    [
        ([OURS, OURS, OURS], "async_with_pinned_mem"),
        ([STOCK, OURS, STOCK], "disabled"),
    ],
    ids=["ours", "in turns with torchtitan's own"],
)
def test_a_run_goes_on_on_other_numbers_of_ranks(
    tmp_path: Path, uninterrupted: dict[str, float], managers: list[str], mode: str
) -> None:
    losses: dict[str, float] = {}
    for ranks, steps, manager in zip((2, 4, 1), (2, 4, 6), managers, strict=True):
        done = train(tmp_path, ranks, steps, manager, async_mode=mode)
        assert [*done] == [str(steps - 1), str(steps)], "it did not go on where the last run had stopped"
        losses |= done
    assert losses == pytest.approx(uninterrupted, rel=1e-5)


def test_the_same_number_of_ranks_gives_the_same_bits(
    run: Path, tmp_path: Path, uninterrupted: dict[str, float]
) -> None:
    """The run is continued from its fourth step; there, too, the learning rate's schedule goes on to step 100."""
    shutil.copytree(run / "checkpoint" / "step-4", tmp_path / "checkpoint" / "step-4")
    assert train(tmp_path, 2, 6) == {step: uninterrupted[step] for step in ("5", "6")}
