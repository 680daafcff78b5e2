"""Which steps policies keep."""

from __future__ import annotations

import math

import pytest

from dcp_io import CheckpointRecord, KeepAll, KeepBest, KeepEvery, KeepFor, KeepLast, KeepPolicy

RECORDS = [
    CheckpointRecord(10, 100.0, {"loss": 3.0, "accuracy": 0.1}),
    CheckpointRecord(20, 200.0, {"loss": 1.0}),
    CheckpointRecord(30, 300.0, {"loss": math.nan, "accuracy": 0.5}),
    CheckpointRecord(45, 400.0, {"loss": 1.0, "accuracy": 0.3}),
    CheckpointRecord(60, 500.0),
]


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        (KeepAll(), {10, 20, 30, 45, 60}),
        (KeepLast(1), {60}),
        (KeepLast(2), {45, 60}),
        (KeepLast(9), {10, 20, 30, 45, 60}),
        (KeepBest(1, "loss"), {45}),
        (KeepBest(2, "loss"), {20, 45}),
        (KeepBest(9, "loss"), {10, 20, 45}),
        (KeepBest(1, "accuracy", "max"), {30}),
        (KeepBest(3, "nothing"), set()),
        (KeepEvery(20), {20, 60}),
        (KeepFor(150), {45, 60}),
        (KeepFor(0.5), set()),
        (KeepLast(1) | KeepEvery(30), {30, 60}),
        (KeepLast(1) | KeepBest(1, "loss") | KeepEvery(100), {45, 60}),
    ],
    ids=repr,
)
def test_keeps(policy: KeepPolicy, kept: set[int]) -> None:
    assert policy.keep(RECORDS, now_seconds=501.0) == kept
    assert policy.keep([], now_seconds=501.0) == set()


@pytest.mark.parametrize(
    ("policy", "kept"), [(KeepLast(1), {60}), (KeepLast(2), {60, 200}), (KeepBest(1, "loss"), {60})], ids=repr
)
def test_later_means_made_later(policy: KeepPolicy, kept: set[int]) -> None:
    back_again = [
        CheckpointRecord(60, 900.0, {"loss": 1.0}),
        CheckpointRecord(100, 100.0, {"loss": 1.0}),
        CheckpointRecord(200, 200.0, {"loss": 1.0}),
    ]
    assert policy.keep(back_again, now_seconds=901.0) == kept


def test_combinations_are_flat() -> None:
    both = (KeepLast(1) | KeepAll()) | KeepEvery(2)
    assert both.policies == (KeepLast(1), KeepAll(), KeepEvery(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast(0),
        lambda: KeepBest(0, "loss"),
        lambda: KeepBest(1, "loss", "least"),  # type: ignore[arg-type]
        lambda: KeepEvery(0),
        lambda: KeepFor(0),
    ],
)
def test_nonsense_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="Keep"):
        make()  # type: ignore[operator]


def test_policies_name_the_metrics_by_which_they_select() -> None:
    assert KeepLast(1).metrics == frozenset()
    assert (KeepLast(1) | KeepBest(1, "loss") | KeepBest(2, "bleu", "max")).metrics == {"loss", "bleu"}
