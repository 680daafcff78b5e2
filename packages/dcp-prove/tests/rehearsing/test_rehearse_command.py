"""`dcp rehearse`: a small run, its seed, its picture, and wrong arguments."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.dom import minidom

import pytest
from click.testing import CliRunner

from dcp_prove.rehearsing.rehearse_command import command

STATE = """
[tensors]
"layers.weight" = { shape = [4096, 1024], dtype = "bfloat16", count = 3 }
"norm" = { shape = [1024] }
"scale" = { shape = [] }
"""
SMALL = ["--ranks", "16", "--host-storage", "0.5"]


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.toml").write_text(STATE)
    return str(tmp_path / "job.toml")


def run(*arguments: str) -> str:
    ran = CliRunner().invoke(command, [*arguments])
    assert ran.exit_code == 0, ran.output
    return ran.output


def figures(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    assert found.pop("measured")["coordinator_bytes"] >= 0
    return found


def test_a_seed_repeats_every_figure_also_in_another_process(job: str) -> None:
    arguments = (*SMALL, "--state", job, "--stragglers", "3")
    found = figures(*arguments)
    assert figures(*arguments) == found
    assert figures(*arguments, "--seed", "1") != found
    code = f"from {command.callback.__module__} import command; command()"
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--json"],
        env={**os.environ, "PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    elsewhere = json.loads(ran.stdout)
    del elsewhere["measured"]
    assert elsewhere == found


def test_a_small_job_takes_what_it_took(job: str) -> None:
    """A change of the protocol, the plan or the format changes these figures."""
    found = figures(*SMALL, "--state", job)
    phases = {"agree": 0.0095, "plan": 0.0188, "write": 0.0172, "publish": 0.0232, "total": 0.0701}
    assert {name: median for name, (median, _) in found["phases"].items()} == pytest.approx(phases, rel=0.02)
    assert found["deaths"]["noticed_seconds"] == pytest.approx([0.0134, 1.0422], rel=0.02)
    assert found["deaths"]["ranks"] == [12]
    assert found["sent_bytes"] == pytest.approx(61_235, rel=0.02)
    assert found["index_bytes"] == pytest.approx(13_113, rel=0.02)
    # Of each rank its rows, frames, and a mark; on host 0 the index, too.
    assert found["bytes"] == 3 * 4096 * 1024 * 2 + 1024 * 4 + 4
    assert found["bytes_per_host"] == pytest.approx(found["bytes"] / 2, rel=0.01)
    assert [found[name] for name in ("files_per_host", "links", "store_connections", "whole_ranks")] == [8, 8, 48, 1]


def test_a_late_rank_is_waited_for(job: str) -> None:
    usual = figures(*SMALL, "--state", job, "--deaths", "0")
    late = figures(*SMALL, "--state", job, "--deaths", "0", "--stragglers", "1", "--late-seconds", "5")
    assert late["phases"]["agree"][0] > 5 > usual["phases"]["agree"][1]
    assert late["phases"]["write"] == pytest.approx(usual["phases"]["write"], rel=0.1)
    assert usual["deaths"] is None


def test_the_slowest_device_is_named_first(job: str) -> None:
    assert next(iter(figures(*SMALL, "--state", job)["busy"])) == "a host's path to storage"
    assert next(iter(figures(*SMALL, "--state", job, "--storage", "0.1")["busy"])) == "shared storage"


def test_a_picture_has_a_row_per_percentile(job: str, tmp_path: Path) -> None:
    run(*SMALL, "--state", job, "--svg", str(tmp_path / "save.svg"))
    picture = minidom.parse(str(tmp_path / "save.svg"))
    texts = [node.firstChild.data for node in picture.getElementsByTagName("text")]  # type: ignore[union-attr]
    assert sum("% have written: rank" in text for text in texts) == 9
    assert {"agree", "plan", "write", "publish"} <= {*texts}


def test_the_help_names_the_states() -> None:
    assert "llama-3-405b" in run("--help")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "16"], "--state"),
        (["--ranks", "1", "--state", "llama-3-8b"], "--ranks"),
        (["--ranks", "16", "--hosts", "3", "--state", "llama-3-8b"], "16 ranks cannot be divided evenly among 3 hosts"),
        (["--ranks", "20000", "--state", "llama-3-8b"], "16384"),
        (["--ranks", "2", "--deaths", "2", "--state", "llama-3-8b"], "one must survive"),
        (["--ranks", "2", "--state", "llama-3-9b"], "neither a model"),
        (["--ranks", "2", "--storage", "0", "--state", "llama-3-8b"], "--storage"),
    ],
)
def test_wrong_arguments_have_status_2_and_a_message(arguments: list[str], message: str) -> None:
    ran = CliRunner().invoke(command, arguments)
    assert ran.exit_code == 2
    assert message in re.sub(r"\s+", " ", ran.stderr)
