"""Errors with `--json`: one JSON object on stdout, the message on stderr, and the exit code as without it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_inspect.cli import COMMANDS, run
from dcp_inspect.errors import KINDS

Dcp = Callable[..., tuple[int, str, str]]
Write = Callable[..., Path]

ERRORS: dict[str, str] = {
    # what is typed → kind
    "ls nowhere": "not_found",
    "ls damaged extra": "usage",
    "ls xyz://a/b": "unsupported",
    "show nowhere": "not_found",
    "show good zz*": "not_found",
    "show damaged": "failed",
    "show text": "unsupported",
    "show": "usage",
    "cat nowhere a": "not_found",
    "cat good zz": "not_found",
    "cat good step[0]": "usage",
    "cat good": "usage",
    "verify nowhere": "not_found",
    "verify -r nowhere": "not_found",
    "verify text": "unsupported",
    "verify --threads 0 good": "usage",
    "verify s3:/a": "usage",
    "diff good nowhere": "not_found",
    "diff good": "usage",
    "diff good damaged": "failed",
    "convert nowhere out": "not_found",
    "convert good": "usage",
    "convert good good2": "exists",
    "convert good out --rename x": "usage",
    "plan good": "usage",
    "plan nowhere --world 2": "not_found",
    "plan damaged --world 2": "failed",
    "verify --since 1d good": "usage",
    "verify -r --since soon good": "usage",
    "verify --rate fast good": "usage",
    "verify --skip-verified text good": "usage",
    "latest nowhere": "not_found",
    "latest empty": "not_found",
    "latest damaged": "not_found",
    "latest damaged --deep": "not_found",
    "dedupe nowhere": "not_found",
    "dedupe s3://bucket/runs": "usage",
    "unquarantine nowhere": "not_found",
    "unquarantine good": "not_found",
    "ls empty": "not_found",
    "du nowhere": "not_found",
    "du empty": "not_found",
    "du good --keep 3": "usage",
    "rm nowhere": "not_found",
    "rm empty --yes": "not_found",
    "rm damaged --yes": "failed",
    "rm good": "interrupted",
    "prune nowhere --keep 1": "not_found",
    "prune .": "usage",
    "plugins --nothing": "usage",
    "help nothing": "usage",
    "completion nothing": "usage",
    "nothing": "usage",
}


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "good2", "damaged"):
        write(tmp_path / name)
    index = (tmp_path / "damaged" / ".metadata").read_bytes()
    (tmp_path / "damaged" / ".metadata").write_bytes(index[:-40])
    (tmp_path / "text").write_text("neither")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return tmp_path


def test_every_command_is_tried() -> None:
    assert {typed.split()[0] for typed in ERRORS} >= set(COMMANDS)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("typed", ERRORS)
def test_errors(typed: str, dcp: Dcp) -> None:
    if typed.startswith("convert"):
        pytest.importorskip("dcp_format")
    plain, none, said = dcp(*typed.split())
    code, out, err = dcp(*typed.split(), "--json")
    error: dict[str, Any] = json.loads(out)["error"]
    assert none == ""
    if "such" not in error["message"]:  # commands without --json say so
        assert error["message"] in err
        assert said == err
    assert code == plain == error["exit_code"]
    assert error["kind"] == ERRORS[typed] == KINDS[code]
    assert set(error) == {"kind", "message", "exit_code"}
    assert "\n" not in error["message"]


@pytest.mark.usefixtures("places")
def test_results_that_are_no_errors_have_no_error(dcp: Dcp) -> None:
    for typed in ("ls .", "verify damaged", "diff good good2", "show good"):
        assert "error" not in json.loads(dcp(*typed.split(), "--json")[1])


@pytest.mark.usefixtures("places")
def test_json_after_two_dashes_is_a_path(dcp: Dcp) -> None:
    code, out, err = dcp("show", "--", "--json")
    assert (code, out) == (3, "")
    assert "there is nothing at --json" in err


@pytest.mark.usefixtures("places")
def test_a_bug_is_an_error_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("nobody thought of this")

    monkeypatch.setattr("dcp_inspect.commands.show.open_index", broken)
    with pytest.raises(ZeroDivisionError):
        run(["show", "good", "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == {"kind": "internal", "message": "nobody thought of this", "exit_code": 1}


def test_the_process_writes_one_document_to_stdout(places: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "dcp_inspect", "show", "nowhere", "--json"],
        capture_output=True, text=True, check=False, cwd=places,
    )  # fmt: skip
    assert (ran.returncode, json.loads(ran.stdout)["error"]["kind"]) == (3, "not_found")
    assert ran.stderr == "dcp: there is nothing at nowhere: check the path\n"
