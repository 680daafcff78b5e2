"""When policies want a save."""

from __future__ import annotations

import signal

import pytest

from dcp_manager import EverySeconds, EverySteps, Moment, OnRequest, OnSignal, SavePolicy


@pytest.mark.parametrize(
    ("policy", "moment", "due"),
    [
        (EverySteps(10), Moment(10, 0), True),
        (EverySteps(10), Moment(11, 0), False),
        (EverySteps(10), Moment(0, 0), False),
        (EverySteps(10, first=0), Moment(0, 0), True),
        (EverySteps(10, first=25), Moment(20, 0), False),
        (EverySteps(10, first=25), Moment(30, 0), True),
        (EverySeconds(60), Moment(1, 59.9), False),
        (EverySeconds(60), Moment(1, 60), True),
        (OnSignal(), Moment(1, 0, frozenset({signal.SIGTERM})), True),
        (OnSignal(), Moment(1, 0, frozenset({signal.SIGUSR1})), True),
        (OnSignal(), Moment(1, 0, frozenset({signal.SIGUSR2})), False),
        (OnRequest(), Moment(1, 0, requested=True), True),
        (OnRequest(), Moment(1, 0), False),
        (EverySteps(7) | OnRequest(), Moment(7, 0), True),
        (EverySteps(7) | OnRequest(), Moment(8, 0, requested=True), True),
        (EverySteps(7) | OnRequest(), Moment(8, 0), False),
    ],
)
def test_due(policy: SavePolicy, moment: Moment, due: bool) -> None:
    assert policy.due(moment) == due


def test_what_combinations_need() -> None:
    assert EverySteps(2).same_everywhere
    assert (EverySteps(2) | EverySteps(3)).same_everywhere
    mixed = EverySteps(2) | OnSignal(frozenset({signal.SIGUSR1}), frozenset())
    assert not mixed.same_everywhere
    assert (mixed.signals, mixed.stop_signals) == ({signal.SIGUSR1}, frozenset())
    assert OnSignal().stop_signals == {signal.SIGTERM}


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        EverySteps(0)
    with pytest.raises(ValueError, match="more than 0"):
        EverySeconds(0)
    for arguments in ((signal.SIGUSR1,), (frozenset({signal.SIGUSR1}), signal.SIGTERM)):
        with pytest.raises(TypeError, match="a set of signals"):
            OnSignal(*arguments)  # type: ignore[arg-type]
