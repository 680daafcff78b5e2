"""The command proves the resume of a script: on several ranks, with a manager and with plain saves, and as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dcp_inspect import cli
from dcp_prove import processes
from integration_tests.resume.forked import run_forked_ranks

SCRIPT = str(Path(__file__).with_name("script.py"))


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks are forks, which saves the seconds of imports."""
    monkeypatch.setattr(processes, "run_ranks", run_forked_ranks)
    monkeypatch.chdir(tmp_path)


def report_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = cli.run(["prove", "--json", *arguments])
    printed = capsys.readouterr()
    return status, printed.err or json.loads(printed.out)


def test_plain_saves_on_two_ranks_and_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Each save replaces the last one, and the third is in the second epoch."""
    status, report = report_of(capsys, "--world-sizes", "2,1", "--kill-at-save", "3", SCRIPT, "save")
    assert (status, report["ok"], report["steps"], report["omissions"]) == (0, True, 10, []), report
    same, other = report["results"]
    assert (same["world_size"], same["kill_at"], same["exact"]) == (2, 6, True)
    assert (other["world_size"], other["kill_at"], other["exact"]) == (1, 6, False)
    assert "sample ids of 8 steps, in order" in same["compared"]
    assert "the samples of 4 steps, as sets over all ranks" in other["compared"]


@pytest.mark.parametrize(
    ("how", "omitted", "omission"),
    [
        ("save", "scheduler", "scheduler"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *[("manager", "random", "torch-rng"), ("manager", "data", "position"), ("manager", "", None)],
                *[("thread", "scheduler", "scheduler"), ("thread", "", None)],
            ]
        ),
    ],
)
def test_what_a_script_leaves_out_is_named(
    capsys: pytest.CaptureFixture[str], how: str, omitted: str, omission: str | None
) -> None:
    status, report = report_of(capsys, "--kill-at-save", "2", SCRIPT, how, *filter(None, [omitted]))
    assert (status, report["omissions"]) == ((1, [omission]) if omission else (0, [])), report
    assert report["results"][0]["kill_at"] == 4
    if omission == "scheduler":
        assert report["results"][0]["differences"][0]["name"].startswith("scheduler.")


def test_a_save_in_the_background_that_is_not_seen_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, error = report_of(capsys, SCRIPT, "async")
    assert status == 4
    assert "save with a CheckpointManager" in error


def test_a_save_of_one_rank_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "alone.py"
    script.write_text(
        "import os, torch, dcp_all as dcp\n"
        "weight = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "for step in range(3):\n"
        "    weight.grad = torch.ones(2)\n"
        "    optimizer.step()\n"
        "    if os.environ['RANK'] == '0':\n"
        "        dcp.save({'weight': weight.detach()}, checkpoint_id='latest', no_dist=True)\n"
    )
    status, error = report_of(capsys, "--world-sizes", "2", str(script))
    assert status == 4
    assert "rank 0 saved alone" in error


@pytest.mark.slow
def test_the_command_in_processes_of_its_own(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "dcp_inspect",
        "prove",
        "--world-sizes",
        "2",
        "--kill-at-save",
        "2",
        SCRIPT,
        "save",
    ]
    ran = subprocess.run([*command, "scheduler"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert "likely omission: learning-rate scheduler (scheduler)" in ran.stdout
    assert "different: killed after step 4 of 10 on 2 ranks, resumed on 2 ranks" in ran.stdout
