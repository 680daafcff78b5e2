"""`dcp prove`: its arguments, and a script that it cannot prove."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from dcp_base import DcpError
from dcp_prove.command import command


def test_the_help_says_how_to_pass_a_folder() -> None:
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    assert "--out '{root}'" in shown.output


@pytest.mark.parametrize(
    "arguments", [["--kill-at-save", "0", __file__], ["--world-sizes", "2,0", __file__], [], ["none.py"]]
)
def test_wrong_arguments_have_status_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(command, arguments).exit_code == 2


def test_the_output_of_a_script_that_fails_is_shown(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise RuntimeError('no data')")
    ran = CliRunner().invoke(command, [str(tmp_path / "fails.py")])
    assert isinstance(ran.exception, DcpError)
    assert "\nRuntimeError: no data\n" in ran.stderr
    assert "\n" not in str(ran.exception)


def test_options_after_the_script_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "prints.py").write_text("import sys; raise SystemExit(f'given {sys.argv[1:]}')")
    ran = CliRunner().invoke(command, [str(tmp_path / "prints.py"), "--json", "--keep", "x"])
    assert "given ['--json', '--keep', 'x']" in ran.stderr
