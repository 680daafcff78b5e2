"""The command that proves the resume of a script: its arguments, and a script that it cannot prove."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcp_manager.prove import main


def test_the_help_says_how_to_pass_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--out {root}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--kill-at-save", "0", "x.py"], ["--world-sizes", "2,0", "x.py"], []])
def test_wrong_arguments_have_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)


def test_a_script_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "none.py")]) == 2
    assert "there is no such script" in capsys.readouterr().err


def test_the_output_of_a_script_that_fails_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fails.py").write_text("raise RuntimeError('no data')")
    assert main([str(tmp_path / "fails.py")]) == 2
    assert "RuntimeError: no data" in capsys.readouterr().err
