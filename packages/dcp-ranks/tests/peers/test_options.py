"""Options for connections between ranks: values that nothing could be done with are refused."""

from __future__ import annotations

import pytest

from dcp_ranks import PeerOptions


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("peer_timeout_seconds", [0, -5, float("inf"), float("nan"), 1e7]),
        ("leaders_above", [-1]),
        ("fan_out", [0, -3]),
    ],
)
def test_numbers_out_of_range_are_refused(option, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{option}={value!r}: pass "):
            PeerOptions(**{option: value})
