"""Wrong options, names, folders and times of keepers: said in one line, and nothing is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dcp_io import StorageError
from dcp_memory import keeper_status, start_keeper, stop_keeper
from dcp_memory.client.store import KeeperStore
from dcp_memory.places import FOLDER_VARIABLE


@pytest.mark.parametrize(
    "options",
    [{"max_bytes": 0}, {"max_bytes": "-5G"}, {"generations": 0}, {"generations": "²"}, {"idle_timeout_seconds": "x"}],
)
def test_wrong_options_are_said(run: str, options: dict[str, object]) -> None:
    with pytest.raises(StorageError, match=r"could not be started: argument .* is not a number of"):
        start_keeper(run, **options)
    with pytest.raises(ValueError, match="no option colour"):
        start_keeper(run, colour="red")


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "x" * 65, "größe", "a\n", "-h", "--"])
def test_wrong_names_are_refused(folder: Path, name: str) -> None:
    for call in (start_keeper, stop_keeper, keeper_status, KeeperStore):
        with pytest.raises(ValueError, match="run"):
            call(name)
    assert not folder.exists()


def test_what_cannot_be_made_is_said_without_a_traceback(
    run: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder / "deeper"))
    with pytest.raises(StorageError) as caught:
        start_keeper(run)
    said = f"[Errno 2] No such file or directory: '{folder}/deeper'"
    assert str(caught.value) == f"the keeper of {run} could not be started: {said}"


def test_a_fifo_in_the_place_of_the_log_holds_nobody_up(run: str, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.mkfifo(folder / f"{run}.log")
    with pytest.raises(StorageError, match=rf"No such device or address: '{run}\.log'"):
        start_keeper(run)


def test_seconds_to_stop_are_checked(run: str) -> None:
    for seconds in (-1, float("nan")):
        with pytest.raises(ValueError, match="at least 0"):
            stop_keeper(run, timeout_seconds=seconds)
    start_keeper(run)
    assert stop_keeper(run, timeout_seconds=float("inf"))
