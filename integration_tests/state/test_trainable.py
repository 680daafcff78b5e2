"""Trainable-only state on ranks: it resumes on other ranks, and every rank refuses another base."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from dcp_core import load, load_keys, save
from dcp_ranks import CheckpointException
from dcp_ranks.testing.ranks import RankPool
from dcp_state import TrainableOnly, app_state, base_model
from dcp_state.app import _FROZEN
from dcp_state.base_model import _part
from integration_tests.state.nets import Run, build

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
STEPS = 2
KINDS = ["plain", "ddp", "fsdp1", "fsdp1-hybrid", "fsdp2", "hsdp", "tp", "fsdp2-tp", "pp"]
WORLDS = [(2, 1), (2, 4), (4, 2), (2, 2)]
ONLY = TrainableOnly(base="tests/base")


def _app(run: Run, kind: str) -> object:
    model = run.parts if kind == "pp" else run.parts[0]
    return app_state(model, run.optimizer, trainable_only=ONLY)


def train(kind: str, folder: str) -> list[float]:
    run = build(kind, "frozen")
    for number in range(STEPS):
        run.step(number)
    save({"app": _app(run, kind)}, checkpoint_id=folder)
    return [run.step(number) for number in range(STEPS, 2 * STEPS)]


def resume(kind: str, folder: str, again: str, seed: int) -> list[float]:
    """Resume a run whose frozen values are those of `seed`, and whose trainable ones are wrong until the load."""
    run = build(kind, "frozen", seed=seed)
    with torch.no_grad():
        for part in run.parts:
            for parameter in part.parameters():
                if parameter.requires_grad:
                    parameter.add_(1)
    load({"app": _app(run, kind)}, checkpoint_id=folder)
    save({"app": _app(run, kind)}, checkpoint_id=again)
    return [run.step(number) for number in range(STEPS, 2 * STEPS)]


@pytest.mark.parametrize(
    ("kind", "worlds"), [(kind, WORLDS[number % len(WORLDS)]) for number, kind in enumerate(KINDS)]
)
def test_only_trainable_state_is_saved_and_resumes(
    ranks: RankPool, tmp_path: Path, kind: str, worlds: tuple[int, int]
) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    went_on = ranks.run(worlds[0], train, kind, first)[0]
    values = load_keys(checkpoint_id=first, no_dist=True)["app"]
    assert not [name for name in values["model"] if name.startswith("layers.0.")]
    assert any(name.startswith("layers.1.") for name in values["model"])
    assert not [name for name in values["optimizer"]["state"] if name.startswith("layers.0.")]
    resumed = ranks.run(worlds[1], resume, kind, first, second, 0)[0]
    assert resumed == (went_on if worlds[0] == worlds[1] else pytest.approx(went_on, abs=1e-5))
    again = load_keys(checkpoint_id=second, no_dist=True)["app"]
    assert again["base_model"] == values["base_model"]  # the digests do not depend on ranks


@pytest.mark.parametrize(("kind", "other"), [("fsdp2", "ddp"), ("ddp", "fsdp2-tp"), ("fsdp1", "fsdp2")])
def test_digests_do_not_depend_on_the_wrapper(ranks: RankPool, tmp_path: Path, kind: str, other: str) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    went_on = ranks.run(2, train, kind, first)[0]
    assert ranks.run(4, resume, other, first, second, 0)[0] == pytest.approx(went_on, abs=1e-5)


def refused(kind: str, folder: str) -> str:
    with pytest.raises(CheckpointException) as caught:
        resume(kind, folder, folder + "-again", 1)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_every_rank_refuses_another_base(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    ranks.run(2, train, kind, str(tmp_path / "first"))
    for message in ranks.run(2, refused, kind, str(tmp_path / "first")):
        assert "trained on tests/base (digest " in message
        assert "'layers.0.down.bias': saved " in message


def differing_base(kind: str, folder: str) -> str:
    """One rank alone has other frozen values."""
    run = build(kind, "frozen")
    if torch.distributed.get_rank() == 1:
        nn.init.ones_(run.parts[0].module.layers["0"].up.bias)
    ranks_alone = [app_state(run.parts, run.optimizer, trainable_only=ONLY)]
    with pytest.raises(CheckpointException) as caught:
        save({"app": ranks_alone[0]}, checkpoint_id=folder)
    return str(caught.value)


def test_a_rank_with_other_frozen_values_is_named(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(2, differing_base, "ddp", str(tmp_path / "first")):
        assert "'layers.0.up.bias' has another value on rank 1" in message


def change_between_saves(kind: str, folder: str) -> int:
    """Save, train, save, change the frozen values without torch's count, save, and save with new digests."""
    run = build(kind, "frozen")
    computed: list[str] = []
    with mock.patch.object(base_model, "_part", lambda name, *rest: computed.append(name) or _part(name, *rest)):
        save({"app": _app(run, kind)}, checkpoint_id=f"{folder}/first")
        count = len(computed)
        run.step(0)
        save({"app": _app(run, kind)}, checkpoint_id=f"{folder}/trained")
        unchanged = len(computed) - count
    for part in run.parts:
        for parameter in part.parameters():
            if not parameter.requires_grad:
                parameter.data.mul_(2)
    save({"app": _app(run, kind)}, checkpoint_id=f"{folder}/changed")
    _FROZEN.clear()
    save({"app": _app(run, kind)}, checkpoint_id=f"{folder}/again")
    return unchanged


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp1-hybrid", "fsdp2", "tp"])
def test_frozen_values_that_change_between_saves_have_new_digests(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, change_between_saves, kind, str(tmp_path)) == [0, 0]
    names = ("first", "trained", "changed", "again")
    first, trained, changed, again = (
        load_keys("app.base_model", checkpoint_id=tmp_path / name, no_dist=True)["app"]["base_model"] for name in names
    )
    assert first == trained != changed == again
