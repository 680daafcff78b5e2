from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcp_base import CheckpointEvent, PluginRegistry, registry
from dcp_inspect.visuals import progress_bar

Write = Callable[..., Path]

STARTED = CheckpointEvent("save", "total", "started", 0, "run/step-100", world_size=1, operation_id="a")


CLOSED = io.StringIO()
CLOSED.close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """What a terminal gets; bars appear at once."""
    stream = Terminal()
    # In that module only: pytest sets the stream of this process again before each test.
    seen = SimpleNamespace(stderr=stream, modules=sys.modules)
    for module in (progress_bar, registry):
        monkeypatch.setattr(module, "sys", seen)
    monkeypatch.setattr(progress_bar, "AFTER_SECONDS", 0)
    monkeypatch.setattr(progress_bar, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(progress_bar._state, "enabled", True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("DCP_PROGRESS", "NO_COLOR", *progress_bar._RANKS):
        monkeypatch.delenv(name, raising=False)
    yield stream
    assert progress_bar._state.bar is None


def play(start: CheckpointEvent, *, end: str = "finished") -> None:
    """The events of a save of 3 GiB."""
    progress_bar.observe(start)
    for done in (1 << 30, 2 << 30):
        progress_bar.observe(replace(start, phase="write", state="progress", bytes=done, expected_bytes=3 << 30))
    progress_bar.observe(replace(start, phase="write", state=end))
    progress_bar.observe(replace(start, state=end))


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_a_bar_is_drawn_now_and_then(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "PAUSE_SECONDS", 60)
    play(STARTED)
    assert terminal.getvalue().count("GiB") == 1


@pytest.mark.parametrize("end", ["finished", "failed"])
def test_a_line_is_drawn_again_and_erased_at_the_end(terminal: Terminal, end: str) -> None:
    play(STARTED, end=end)
    nothing, first, second, after = plain(terminal.getvalue()).split("\r\x1b[2K")
    assert (nothing, after) == ("", "")
    assert first.startswith("saving step-100 ━")
    assert "1.0/3.0 GiB" in first
    assert "2.0/3.0 GiB" in second
    assert re.search(r"[GT]iB/s +\d:\d\d:\d\d", second)
    assert "\n" not in terminal.getvalue()
    assert "\x1b[?25l" not in terminal.getvalue()  # a process that is killed leaves the cursor visible


def test_a_listing_counts_its_checkpoints(terminal: Terminal) -> None:
    assert [*progress_bar.count_listed("abc", "runs")] == ["a", "b", "c"]
    shown = plain(terminal.getvalue()).split("\r\x1b[2K")
    assert all(line.startswith("listing runs ") for line in shown[1:-1])
    assert "1/3" in shown[-3]
    assert "2/3" in shown[-2]
    assert shown[-1] == ""  # nothing stays above the table


def test_a_listing_that_ends_early_leaves_no_bar(terminal: Terminal) -> None:
    listing = progress_bar.count_listed("abc", "runs")
    assert [next(listing), next(listing)] == ["a", "b"]
    listing.close()  # type: ignore[attr-defined]
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_other_ranks_are_counted(terminal: Terminal) -> None:
    play(replace(STARTED, world_size=8))
    assert "saving step-100 (rank 0 of 8)" in plain(terminal.getvalue())


def test_a_name_cannot_steer_the_terminal(terminal: Terminal) -> None:
    play(replace(STARTED, checkpoint_id="a/\x1b]0;x\x07" + "y" * 50))
    assert "\x1b]" not in terminal.getvalue()
    assert f"saving �]0;x�{'y' * 17}… " in plain(terminal.getvalue())


def test_a_short_operation_shows_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_bar, "AFTER_SECONDS", 60)
    play(STARTED)
    assert terminal.getvalue() == ""


def test_only_the_first_of_two_operations_has_a_bar(terminal: Terminal) -> None:
    progress_bar.observe(STARTED)
    play(replace(STARTED, operation_id="b", checkpoint_id="other"))
    assert terminal.getvalue() == ""
    play(STARTED)
    assert "step-100" in terminal.getvalue()


@pytest.mark.parametrize(
    ("name", "value"),
    [("DCP_PROGRESS", "0"), ("DCP_PROGRESS", "off"), ("TERM", "dumb"), ("RANK", "3"), ("SLURM_PROCID", "1")],
)
def test_the_environment_switches_bars_off(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    play(STARTED)
    assert terminal.getvalue() == ""


def test_bars_are_switched_off_and_on_by_a_call(terminal: Terminal) -> None:
    progress_bar.show_progress(False)
    play(STARTED)
    assert terminal.getvalue() == ""
    progress_bar.show_progress(True)
    play(STARTED)
    assert terminal.getvalue() != ""


def test_pipes_other_ranks_and_the_background_show_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    play(replace(STARTED, rank=1))
    play(replace(STARTED, operation="manage"))
    thread = threading.Thread(target=play, args=(STARTED,))
    thread.start()
    thread.join()
    assert terminal.getvalue() == ""
    pipe = io.StringIO()
    monkeypatch.setattr(progress_bar.sys, "stderr", pipe)
    play(STARTED)
    monkeypatch.setattr(progress_bar.sys, "stderr", None)
    play(STARTED)
    assert pipe.getvalue() == ""


def test_a_terminal_that_is_gone_costs_one_error(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    progress_bar.observe(STARTED)
    terminal.close()
    event = replace(STARTED, phase="write", state="progress", bytes=1, expected_bytes=2)
    with pytest.raises(ValueError, match="closed"):
        progress_bar.observe(event)
    progress_bar.observe(event)
    progress_bar.observe(replace(STARTED, state="finished"))


def test_events_are_observed_where_somebody_looks(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = PluginRegistry("dcp-no-such-plugins")
    assert registry.observed
    registry.emit(STARTED)
    assert progress_bar._state.bar is not None
    registry.emit(replace(STARTED, state="finished"))
    monkeypatch.setenv("DCP_PROGRESS", "0")
    assert not registry.observed


@pytest.mark.parametrize("stream", [None, io.StringIO(), object(), CLOSED])
def test_nothing_is_observed_without_a_screen(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, stream: object
) -> None:
    monkeypatch.setattr(registry.sys, "stderr", stream)
    assert not PluginRegistry("dcp-no-such-plugins").observed


def test_a_notebook_gets_one_output_that_changes(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append(data)

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        shown.append(data)
        return Handle()

    class ZMQInteractiveShell: ...

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=ZMQInteractiveShell))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    play(STARTED)
    assert [("1.0/3.0 GiB" in each["text/plain"], "2.0/3.0 GiB" in each["text/html"]) for each in shown] == [
        (True, False),
        (False, True),
        (False, False),
    ]
    assert terminal.getvalue() == ""


SCRIPT = """
import sys
import dcp_base.progress, dcp_inspect.visuals.progress_bar
from dcp_inspect.cli import main
dcp_base.progress.INTERVAL_SECONDS = dcp_inspect.visuals.progress_bar.AFTER_SECONDS = 0
main()
"""


def test_the_command_shows_a_bar_in_a_terminal_and_none_in_a_pipe(write: Write, tmp_path: Path) -> None:
    place = write(tmp_path / "step-7", rows=40_000)
    command = [sys.executable, "-c", SCRIPT, "verify", str(place)]
    environment: dict[str, Any] = {**os.environ, "TERM": "xterm", "COLUMNS": "90"}
    main, side = pty.openpty()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=side, env=environment, check=False, timeout=250)
        shown = os.read(main, 100_000).decode()
    finally:
        os.close(side)
        os.close(main)
    assert "verifying step-7" in plain(shown)
    assert shown.endswith("\r\x1b[2K")
    quiet = subprocess.run(command, capture_output=True, env=environment, check=False, timeout=250)
    assert quiet.stderr == b""
    assert quiet.stdout == done.stdout
