"""The trainer's working folder and environment, as messages to a worker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_async.queue.jobs import Surroundings, SurroundingsChange


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("DCP_TEST_A", "DCP_TEST_B"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_has_changed() -> None:
    assert Surroundings.now().since(Surroundings.now()) is None


def test_what_has_changed_is_made_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_TEST_A", "1")
    before = Surroundings.now()
    monkeypatch.setenv("DCP_TEST_B", "2")
    monkeypatch.delenv("DCP_TEST_A")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    change = Surroundings.now().since(before)
    assert change == SurroundingsChange(str(tmp_path / "below"), {"DCP_TEST_B": "2", "DCP_TEST_A": None})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DCP_TEST_A", "1")
    monkeypatch.delenv("DCP_TEST_B")
    change.apply()
    assert (os.getcwd(), os.environ["DCP_TEST_B"], os.environ.get("DCP_TEST_A")) == (str(tmp_path / "below"), "2", None)


def test_an_unknown_folder_is_told_and_one_that_is_gone_is_not_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Surroundings.now()
    assert here.since(Surroundings(None, here.environment)) == SurroundingsChange(str(tmp_path), {})
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert Surroundings.now().since(here) is None
    monkeypatch.chdir(tmp_path)
    SurroundingsChange(str(tmp_path / "gone"), {}).apply()
    assert os.getcwd() == str(tmp_path)
