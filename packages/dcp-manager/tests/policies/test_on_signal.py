"""Which signals are recorded, and which go to the previous handler. Handlers of this process, no training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from dcp_manager.policies.on_signal import SignalWatch

came: list[int] = []


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    came.clear()
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    watch = SignalWatch({signal.SIGTERM, signal.SIGUSR1}, {signal.SIGTERM})
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()
        signal.signal(signal.SIGTERM, before)


def send(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def test_the_first_one_here_is_noted_though_others_were_heard_of(watch: SignalWatch) -> None:
    watch.heard_of_stop()
    heard = watch.stopped_at
    send()
    assert came == []
    assert watch.noted == {signal.SIGTERM}
    assert watch.stopped_at == heard  # what is left of the time counts from the first signal anywhere
    send()
    assert came == [signal.SIGTERM]


def test_others_may_come_again_and_again(watch: SignalWatch) -> None:
    for _ in range(3):
        send(signal.SIGUSR1)
    assert watch.noted == {signal.SIGUSR1}
    assert watch.stopped_at is None
    send()
    assert came == []
    assert watch.stopped_at is not None
