"""The command `dcp keeper`: what it shows, starts and stops, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from dcp_memory import keeper_status
from dcp_memory.client import link
from dcp_memory.client.store import KeeperStore
from dcp_memory.command import command


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(command, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.return_value, result.output


def call_json(*arguments: str) -> tuple[int, Any]:
    code, text = call(*arguments, "--json")
    return code, json.loads(text)


def test_a_keeper_from_start_to_end(run: str, folder: Path) -> None:
    assert call_json("status") == (0, [])
    code, (started,) = call_json(
        "start", run, "--max-bytes", "64M", "--generations", "3", "--idle-timeout-seconds", "99"
    )
    assert (code, started["max_bytes"], started["generations"], started["idle_timeout_seconds"]) == (0, 64 << 20, 3, 99)
    KeeperStore(run).publish("x", bytes(2000))
    code, (found,) = call_json("status", run)
    assert (code, found["objects"], found["object_bytes"], found["pid"]) == (0, 1, 2000, started["pid"])
    code, text = call("status")
    assert code == 0
    assert text.splitlines()[0].startswith(f"keeper://{run}  process {started['pid']}, ")
    assert "  objects  1, " in text
    assert call("start", run)[1].splitlines()[0].startswith(f"keeper://{run}  process {started['pid']}, ")
    assert call("stop", run, "another") == (0, f"{run}: stopped\nanother: no keeper runs here\n")
    assert keeper_status(run) is None
    assert call_json("stop", run) == (0, [{"run": run, "stopped": False}])


def test_a_run_without_a_keeper(run: str) -> None:
    assert call_json("start", "another")[0] == 0
    code, found = call("status", run, "another")
    assert (code, f"{run}: no keeper runs on this host" in found, "keeper://another" in found) == (3, True, True)


def test_a_keeper_that_does_not_answer_hides_no_other(run: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_SECONDS", 0.1)
    monkeypatch.setattr(link.connect_to, "__defaults__", (0.1,))
    call_json("start", run)
    (stopped,) = call_json("start", "another")[1]
    os.kill(stopped["pid"], signal.SIGSTOP)
    code, text = call("status")
    assert (code, f"keeper://{run}  process" in text) == (3, True)
    assert "keeper://another has not answered" in text


def test_json_has_no_infinity(run: str, folder: Path) -> None:
    code, (found,) = call_json("start", run, "--idle-timeout-seconds", "inf")
    assert (code, found["idle_timeout_seconds"]) == (0, None)


@pytest.mark.parametrize(
    "arguments",
    [
        ("start", "--", "-h"),
        ("start", "a b"),
        ("stop", "x", "a/b"),
        ("status", ""),
        ("stop", "x", "--timeout-seconds", "nan"),
        ("start", "x", "--idle-timeout-seconds", "nan"),
    ],
)
def test_wrong_arguments_are_wrong_use_and_start_nothing(folder: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(click.BadParameter, match="is not a n"):
        call(*arguments)
    assert not folder.exists()
