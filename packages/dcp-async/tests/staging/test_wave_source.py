"""The trainer's part of waves: it answers what the save asks for, and every error reaches both sides."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dcp_async import SaverDeadlineError, StagingMismatchError
from dcp_async.staging import placement
from dcp_async.staging.placement import Budget, place, sources_of
from dcp_async.staging.wave_source import PACKET_BYTES, WaveSource

STEP = 512
BUDGET = 8 * STEP


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., tuple[WaveSource, Any]]:
    monkeypatch.setattr(placement, "_WAVE_MIN_BYTES", 1)
    monkeypatch.setattr(placement, "_PIECE_MIN_BYTES", STEP)

    def make(tensor: torch.Tensor, check: Callable[[], None] = lambda: None) -> tuple[WaveSource, torch.Tensor]:
        budget, memory = Budget(BUDGET), torch.zeros(BUDGET, dtype=torch.uint8)
        made = WaveSource([tensor], place(sources_of([tensor]), budget), memory, budget, check)
        request.addfinalizer(made.close)
        return made, memory

    return make


def _ask(end: socket.socket, *messages: Any) -> list[Any]:
    """Send messages, and return the answers to all but those that begin an item."""
    answers = []
    for message in messages:
        end.send(pickle.dumps(message))
        if message[0] != "begin":
            answers.append(pickle.loads(end.recv(PACKET_BYTES)))
    return answers


def _asked(made: WaveSource, *messages: Any) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(_ask(made.saver_end, *messages)))
    thread.start()
    try:
        made.serve(lambda: False, 20)
    finally:
        thread.join(20)
    return found


def test_pieces_are_copied_into_the_slots_that_were_asked_for(source: Callable[..., Any]) -> None:
    value = torch.arange(3000)
    made, memory = source(value)
    begin = ("begin", 0, 0, torch.int64, (3000,), (1,))
    assert _asked(made, begin, ("fill", 0, 2), ("fill", 0, 0), ("done",)) == [
        ("filled", 0, 2),
        ("filled", 0, 0),
        ("ok",),
    ]
    step = made.piece_bytes
    assert torch.equal(memory[2 * step : 3 * step].view(torch.int64), value[: step // 8])
    assert torch.equal(memory[:step].view(torch.int64), value[step // 8 : 2 * step // 8])
    assert made.copied_bytes == 2 * step


def test_an_item_that_no_tensor_has_fails_both_sides(source: Callable[..., Any]) -> None:
    made, _ = source(torch.arange(3000))
    found: list[Any] = []

    def ask() -> None:
        made.saver_end.send(pickle.dumps(("begin", 0, 0, torch.float32, (3000,), (1,))))
        found.append(pickle.loads(made.saver_end.recv(PACKET_BYTES)))

    thread = threading.Thread(target=ask)
    thread.start()
    with pytest.raises(StagingMismatchError, match="no tensor of this save"):
        made.serve(lambda: False, 20)
    thread.join(20)
    ((kind, error),) = found
    assert kind == "failed"
    assert isinstance(pickle.loads(error), StagingMismatchError)


class UnpicklableError(Exception):
    """Holds what cannot be sent."""

    def __init__(self) -> None:
        super().__init__("of the device")
        self.lock = threading.Lock()


def test_an_error_that_cannot_be_sent_arrives_by_its_text(source: Callable[..., Any]) -> None:
    def fail() -> None:
        raise UnpicklableError

    made, _ = source(torch.arange(3000), fail)
    with pytest.raises(UnpicklableError):
        _asked(made, ("done",))
    made, _ = source(torch.arange(3000))
    made.abort(UnpicklableError())
    kind, error = pickle.loads(made.saver_end.recv(PACKET_BYTES))
    assert (kind, repr(pickle.loads(error))) == ("failed", "RuntimeError('UnpicklableError: of the device')")


def test_a_save_that_ends_or_is_late_ends_the_wait(source: Callable[..., Any]) -> None:
    made, _ = source(torch.arange(3000))
    made.serve(lambda: True, 20)
    with pytest.raises(SaverDeadlineError, match=r"0\.1 s \(save_seconds\)"):
        made.serve(lambda: False, 0.1)
