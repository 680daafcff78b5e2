"""Which frames are kept: those of operations that have begun or will begin, in each series of operations."""

from __future__ import annotations

import pytest

from dcp_ranks.transport.connection import Frame
from dcp_ranks.transport.mailbox import Mail, series_number


def frame(series: int, sequence: int, body: bytes = b"x") -> Frame:
    return Frame(0, series_number(series, sequence), 1, 3, body)


def keys(mail: Mail, *numbers: tuple[int, int]) -> list[int]:
    """How many frames of each operation there are."""
    return [len(mail.take((series_number(*number), 1))) for number in numbers]


def test_frames_come_before_their_operation_and_not_after_its_end() -> None:
    mail = Mail()
    mail.put(1, frame(0, 7))
    mail.begin(7)
    mail.put(2, frame(0, 7))
    assert keys(mail, (0, 7)) == [2]
    mail.end(7)
    mail.put(1, frame(0, 7))
    mail.put(1, frame(0, 6))  # left out on this rank
    assert keys(mail, (0, 7), (0, 6)) == [0, 0]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_series_that_is_ahead_discards_no_frames_of_others(ahead: int) -> None:
    mail = Mail()
    mail.begin(series_number(ahead, 1000))
    for series in range(3):
        mail.put(1, frame(series, 2))
    assert keys(mail, (0, 2), (1, 2), (2, 2)) == [int(series != ahead) for series in range(3)]


def test_the_end_of_an_operation_leaves_those_of_other_series() -> None:
    mail = Mail()
    for series in range(2):
        mail.begin(series_number(series, 5))
        mail.put(1, frame(series, 5))
        mail.keep_for_above(frame(series, 5))
    mail.end(series_number(1, 5))
    assert keys(mail, (0, 5), (1, 5)) == [1, 0]
    assert [kept.sequence for kept in mail.ready_for_above()] == [5]
