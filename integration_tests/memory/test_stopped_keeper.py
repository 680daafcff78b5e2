"""A keeper whose process is stopped: each call that asks places waits for it once, and goes on without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_all as dcp
from dcp_memory import KeeperLostError
from dcp_memory.client import link
from dcp_memory.client.connection import forget_connections
from dcp_tiers.commands import survey_tiers
from integration_tests.hosts.pretended import without_promoter


def state(value: int) -> dict[str, Any]:
    return {"w": torch.full((10_000,), float(value)), "step": value}


def tiers(slow: Path) -> dcp.Tiers:
    return dcp.Tiers([dcp.Tier("keeper://stopped", keep=dcp.KeepLast(2), per_host=True), dcp.Tier(slow)])


def manager(slow: Path) -> dcp.CheckpointManager:
    return dcp.CheckpointManager(tiers(slow), no_dist=True, close_timeout_seconds=0.1)


def restored(slow: Path, **options: Any) -> int:
    template = state(0)
    with manager(slow) as made:
        found = made.restore(template, **options)
    assert found is not None
    assert found.step == template["step"]
    return found.step


def loaded(slow: Path) -> int:
    dcp.load(template := state(0), checkpoint_id=tiers(slow).find(2), no_dist=True)
    return int(template["step"])


# What asks the places of a run whose slow tier has steps 1 and 2, and the answer.
_CALLS: dict[str, tuple[Callable[[Path], object], object]] = {
    "Tiers.latest": (lambda slow: tiers(slow).latest(), 2),
    "latest_valid": (lambda slow: dcp.latest_valid(tiers(slow)).step, 2),  # type: ignore[union-attr]
    "find_checkpoints": (lambda slow: [found.step for found in dcp.find_checkpoints(tiers(slow))], [2, 1]),
    "restore": (restored, 2),
    "restore(step=1)": (lambda slow: restored(slow, step=1), 1),
    "load": (loaded, 2),
    "where": (lambda slow: str(manager(slow).where(2)), "step 2: in {slow}"),
    "close": (lambda slow: manager(slow).close(), None),
    "dcp tiers": (lambda slow: [problem is None for problem in survey_tiers(tiers(slow)).problems], [False, True]),
}
# What cannot go on without it.
_FAILS: dict[str, Callable[[Path], object]] = {
    "save": lambda slow: manager(slow).save(3, state(3)),
    "checkpoints": lambda slow: manager(slow).checkpoints(),
    "steps": lambda slow: tiers(slow).steps(),
    "load of the near copy": lambda _: dcp.load(state(0), checkpoint_id="keeper://stopped/step-2", no_dist=True),
    "start_keeper": lambda _: dcp.start_keeper("stopped"),
    "restore, if no tier has any": lambda slow: manager(slow / "empty").restore(state(0)),
}


_pids: list[int] = []


def stopped_pid() -> int:
    return _pids[0]


@pytest.fixture
def waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """List of the connections on which the stopped keeper was waited for in vain."""
    monkeypatch.setenv("DCP_KEEPER_DIR", str(tmp_path / "keepers"))
    seen: list[str] = []
    with without_promoter():
        for place in ("keeper://stopped", f"{tmp_path}/slow"):
            for step in (1, 2):
                dcp.save(state(step), checkpoint_id=f"{place}/step-{step}", no_dist=True)
        status = dcp.keeper_status("stopped")
        assert status is not None
        _pids[:] = [status.pid]
        receive = link.Link._receive

        def counted(self: Any, connection: Any) -> Any:
            connection.settimeout(link.ANSWER_TIMEOUT_SECONDS)  # connections of the saves above have the default
            try:
                return receive(self, connection)
            except TimeoutError:
                seen.append(self.name)
                raise

        monkeypatch.setattr(link.Link, "_receive", counted)
        os.kill(status.pid, signal.SIGSTOP)
        monkeypatch.setattr(link, "ANSWER_TIMEOUT_SECONDS", 0.5)
        try:
            yield seen
        finally:
            monkeypatch.undo()
            monkeypatch.setenv("DCP_KEEPER_DIR", str(tmp_path / "keepers"))
            os.kill(status.pid, signal.SIGCONT)
            dcp.stop_keeper("stopped")
            forget_connections(str(tmp_path / "keepers"))


@pytest.mark.parametrize("connected", [False, True], ids=["fresh", "connected before"])
@pytest.mark.parametrize("call", _CALLS)
def test_a_stopped_keeper_is_passed_over(call: str, connected: bool, waits: list[str], tmp_path: Path) -> None:
    if not connected:
        forget_connections(str(tmp_path / "keepers"))
    function, expected = _CALLS[call]
    found = function(tmp_path / "slow")
    assert found == (expected.format(slow=tmp_path / "slow") if isinstance(expected, str) else expected)
    assert waits == ["keeper://stopped"]


@pytest.mark.parametrize("call", _FAILS)
def test_what_needs_it_fails_after_one_wait(call: str, waits: list[str], tmp_path: Path) -> None:
    with pytest.raises(KeeperLostError, match=r"has not answered for 0\.5 s: is its process stopped"):
        _FAILS[call](tmp_path / "slow")
    assert waits == ["keeper://stopped"]


def test_it_is_asked_again_when_it_has_answered(
    waits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    assert tiers(slow).latest() == 2
    with pytest.raises(KeeperLostError):
        tiers(slow).steps()
    monkeypatch.setattr(link, "ANSWER_TIMEOUT_SECONDS", 60.0)
    os.kill(stopped_pid(), signal.SIGCONT)
    deadline = time.monotonic() + 60
    while True:
        try:
            assert len(tiers(slow).steps()) == 2
        except KeeperLostError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            break
    assert waits == ["keeper://stopped"]
    assert restored(slow) == 2
