"""Policies as text: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import numpy as np
import pytest

from dcp_io import KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy


@pytest.mark.parametrize(
    "policy",
    [
        KeepAll(),
        KeepLast(2),
        KeepLast(1) | KeepEvery(10) | KeepFor(3600.0),
        KeepBest(1, "loss's \n", "max"),
        KeepLast(2) | KeepEvery(1000, parts=["app.model", "it's"]) | KeepAll(parts=("a",)),
    ],
    ids=repr,
)
def test_a_policy_is_read_back(policy: KeepPolicy) -> None:
    assert KeepPolicy.parse(policy.text()) == policy


@pytest.mark.parametrize(
    "text",
    ["", "KeepLast", "KeepLast()", "KeepLast(0)", "KeepLast('1')", "print(1)", "KeepLast(1) & KeepAll()", "(" * 999],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a policy to keep"):
        KeepPolicy.parse(text)


def test_a_policy_of_ones_own_has_no_text() -> None:
    class Own(KeepPolicy):
        def keep(self, records, now_seconds):
            return set()

    with pytest.raises(ValueError, match="Own cannot be written"):
        (KeepLast(1) | Own()).text()


@pytest.mark.parametrize("policy", [KeepFor(float("inf")), KeepLast(np.int64(2)), KeepFor(np.float32(1.5))], ids=repr)
def test_numbers_of_other_kinds_are_written_as_they_are_read(policy):
    assert KeepPolicy.parse(policy.text()) == policy


@pytest.mark.parametrize("wrong", [2.0, True, "2", float("inf"), float("nan"), 0])
def test_a_count_is_a_whole_number(wrong):
    with pytest.raises(ValueError, match="whole number"):
        KeepLast(wrong)
    with pytest.raises(ValueError, match="whole number"):
        KeepEvery(wrong)


def test_a_policy_prints_as_it_is_written():
    assert repr(KeepEvery(1000, parts=("app.model",))) == "KeepEvery(1000, parts=['app.model'])"
    assert repr(KeepBest(1, "loss")) == "KeepBest(1, 'loss', 'min')"


@pytest.mark.parametrize("parts", ["app.model", [], [""], [1], 5])
def test_parts_are_a_list_of_names(parts):
    with pytest.raises(ValueError, match="give a list of names"):
        KeepLast(2, parts=parts)
