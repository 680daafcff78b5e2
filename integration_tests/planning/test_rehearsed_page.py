"""The rehearsal on `docs/planning.md` is what the command prints, but for what is measured on a machine."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from dcp_prove.rehearsing.rehearse_command import command

PAGE = (Path(__file__).parents[2] / "docs/planning.md").read_text()


def repeated(lines: list[str]) -> list[str]:
    """The lines without measured ones, and without the CPU seconds behind a phase; dead ranks are another save."""
    kept = [line for line in lines if not line.startswith(("memory", "dead ranks", "rehearsed", " " * 13))]
    return [re.sub(r"( s +[\d.]+ s) +[\d.]+ s$", r"\1", line) for line in kept]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_page_shows_what_the_command_prints() -> None:
    ((typed, printed),) = re.findall(r"```text\n\$ dcp rehearse (.+)\n((?:.*\n)+?)```", PAGE)
    ran = CliRunner().invoke(command, [*shlex.split(typed), "--deaths", "0"])
    assert ran.exit_code == 0, ran.output
    assert repeated(ran.output.splitlines()) == repeated(printed.splitlines())
    assert len(repeated(printed.splitlines())) > 12
