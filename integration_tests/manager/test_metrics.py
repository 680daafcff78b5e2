"""Metrics of a save: numbers of any library are stored, anything else is refused by name before the save begins."""

from __future__ import annotations

import decimal
import fractions
import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from dcp_core import CheckpointException
from dcp_core.testing.sharding import distribute
from dcp_manager import CheckpointManager, KeepBest, KeepLast
from dcp_tiers import KeepWaiting, Tier, Tiers
from integration_tests.manager.checkpoints import state, steps

NUMBERS = [
    3,
    True,
    0.5,
    math.nan,
    math.inf,
    torch.tensor(0.5),
    torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
    torch.tensor(3),
    np.float32(0.5),
    np.int64(3),
    np.array(0.5),
    np.bool_(True),
    np.longdouble(0.5),
    np.ma.array(0.5),
    fractions.Fraction(1, 2),
    torch.tensor(2.0, requires_grad=True) * 2,
]
OTHERS = [None, "0.5", np.str_("0.5"), [1.0], {}, b"1", 1j, torch.tensor(1j), np.complex64(1j), 10**400, torch.ones(1)]
OTHERS += [np.ones(1), torch.ones((), device="meta"), decimal.Decimal(1), np.datetime64("2020")]
# Values with an item that is a number, and values that look like one.
OTHERS += [np.ma.masked, np.ma.array(0.5, mask=True), np.ma.array([0.5], mask=[True])[0]]
OTHERS += [
    np.datetime64(5, "ns"),
    np.datetime64("NaT"),
    np.timedelta64(5, "ns"),
    np.timedelta64(5),
    np.timedelta64(5, "s"),
]
OTHERS += [np.array((0.5,), dtype=[("loss", "f4")]), np.array((0.5,), dtype=[("loss", "f4")])[()], np.array("0.5")]
OTHERS += [np.array(None), np.array(1, object)[None], complex(1, 0), np.complex128(1), torch.tensor(1 + 0j)]
OTHERS += [torch.ones(1, requires_grad=True), torch.ones(1, 1), torch.ones(0), fractions.Fraction(10**400), float]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_number_of_any_library_is_a_metric(tmp_path: Path, value: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state(1), metrics={"loss": 0.25, "other": value})
        found = manager.checkpoints()[0].metrics
    json.loads((tmp_path / "step-1" / ".dcp-note.json").read_bytes(), parse_constant=pytest.fail)
    assert found["loss"] == 0.25
    assert found["other"] == pytest.approx(float(getattr(value, "item", lambda: value)()), nan_ok=True)


def not_asked() -> dict[str, Any]:
    raise AssertionError("the state was asked for")


@pytest.mark.parametrize("value", OTHERS, ids=repr)
def test_anything_else_is_refused_by_name_and_the_best_stays(tmp_path: Path, value: Any) -> None:
    with CheckpointManager(tmp_path, keep_policy=KeepLast(1) | KeepBest(1, "loss"), tolerated_failures=3) as manager:
        manager.save(1, state(1), metrics={"loss": 0.1})
        with pytest.raises(TypeError, match="the metric 'val_loss'"):
            manager.maybe_save(2, not_asked, metrics={"loss": 9, "val_loss": value})
        assert steps(tmp_path) == {"step-1"}
        for step in (3, 4):
            manager.save(step, state(step), metrics={"loss": 2.0})
        assert [record.step for record in manager.checkpoints()] == [1, 4]


@pytest.mark.parametrize("metrics", [[1.0], 5, {1: 2.0}, "loss"], ids=repr)
def test_metrics_are_a_dict_of_names(tmp_path: Path, metrics: Any) -> None:
    with CheckpointManager(tmp_path) as manager, pytest.raises(TypeError, match="a dict of names and numbers"):
        manager.save(1, state(1), metrics=metrics)


def test_nan_is_never_the_best(tmp_path: Path) -> None:
    for mode in ("min", "max"):
        with CheckpointManager(tmp_path / mode, keep_policy=KeepLast(1) | KeepBest(1, "loss", mode)) as manager:  # type: ignore[arg-type]
            for step, loss in enumerate([math.nan, 0.5, np.float32("nan"), torch.tensor(math.nan)]):
                manager.save(step, state(step), metrics={"loss": loss})
            assert [record.step for record in manager.checkpoints()] == [1, 3]


def test_keep_best_says_once_that_its_metric_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiers = Tiers([Tier(str(tmp_path / "near")), Tier(str(tmp_path / "far"), keep=KeepBest(1, "bleu", "max"))])
    policy = KeepLast(1) | KeepBest(1, "val_loss") | KeepWaiting(tiers)
    with caplog.at_level(logging.WARNING), CheckpointManager(tmp_path / "near", keep_policy=policy) as manager:
        manager.save(1, state(1), metrics={"val_loss": 1, "bleu": 2})
        assert not caplog.records
        for step in (2, 3):
            manager.save(step, state(step), metrics={"loss": 0.1})
    (told,) = [record.getMessage() for record in caplog.records]
    assert "step 2" in told
    assert "'bleu', 'val_loss'" in told
    assert "it has 'loss'" in told


def save_metric(root: str, metrics: dict[int, Any]) -> str:
    """Save with the metrics of this rank, by rank; returns the error, or the stored metrics."""
    if not metrics:
        mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
        metrics = {0: {"norm": distribute(torch.tensor(0.5), mesh, [Replicate()])}}
    with CheckpointManager(root) as manager:
        try:
            manager.save(1, state(1), metrics=metrics.get(dist.get_rank()))
        except CheckpointException as error:
            return str(error)
        return str(manager.checkpoints()[0].metrics)


def test_on_several_ranks_the_coordinators_metrics_count(ranks: Any, tmp_path: Path) -> None:
    # A rank that did not evaluate has none.
    saved = ranks.run(2, save_metric, str(tmp_path / "a"), {0: {"loss": torch.tensor(0.5)}, 1: {"loss": None}})
    assert saved == ["{'loss': 0.5}"] * 2
    for metrics in ({0: {"val_loss": None}, 1: {"val_loss": 1.0}}, {}):
        for told in ranks.run(2, save_metric, str(tmp_path / "b"), metrics):
            assert "the metric '" in told
            assert "Nothing was saved" in told
    assert not list((tmp_path / "b").glob("step-*"))
