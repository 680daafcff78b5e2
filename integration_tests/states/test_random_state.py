"""The random state on another number of ranks: kept where it can be, otherwise derived, and never the same twice."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock

import dcp_all as dcp

Draws = dict[str, float]


def draws() -> Draws:
    """The next number of each generator."""
    return {"torch": torch.rand(()).item(), "python": random.random(), "numpy": float(np.random.random())}


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def states(form: str) -> dict[str, Any]:
    state = dcp.RandomState()
    if form == "app":
        return {"app": dcp.app_state(torch.nn.LayerNorm(2), random=state)}
    return {"app": dcp.PerRank(state, otherwise="modulo") if form == "modulo" else dcp.PerRank(state)}


def save(folder: str, form: str) -> Draws:
    seed(100 + dist.get_rank())
    draws()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dcp.save(states(form), checkpoint_id=folder)
    return draws()


def load(folder: str, form: str) -> tuple[Draws, dict[str, int], str]:
    seed(0)  # all ranks alike, as in a job that relies on the checkpoint
    report = dcp.load(states(form), checkpoint_id=folder)
    return draws(), report.derived, report.summary()


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"),
    [(1, 2), (2, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 4), (4, 2)))],
)
@pytest.mark.parametrize("form", ["app", "per rank", "modulo"])
def test_ranks_keep_their_state_or_derive_one_of_their_own(
    ranks: Any, tmp_path: Path, saved_on: int, loaded_on: int, form: str
) -> None:
    following = ranks.run(saved_on, save, str(tmp_path), form)
    loaded = ranks.run(loaded_on, load, str(tmp_path), form)
    again = ranks.run(loaded_on, load, str(tmp_path), form)
    assert loaded == again
    key = "app.random" if form == "app" else "app"
    for rank, (drawn, derived, summary) in enumerate(loaded):
        if rank < saved_on:
            assert drawn == following[rank]
            assert derived == {}
        else:
            assert derived == {key: rank % saved_on}
            assert f"1 derived: {key} (from rank {rank % saved_on})" in summary
    for name in ("torch", "python", "numpy"):
        numbers = [drawn[name] for drawn, *_ in loaded]
        assert len(set(numbers)) == loaded_on
        assert not {*numbers[saved_on:]} & {drawn[name] for drawn in following}


def test_keep_leaves_the_state_of_further_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks.run(1, save, str(tmp_path), "per rank")

    def load_kept(folder: str) -> Draws:
        seed(5)
        report = dcp.load({"app": dcp.PerRank(dcp.RandomState(), otherwise="keep")}, checkpoint_id=folder)
        assert report.derived == {}
        return draws()

    kept = ranks.run(2, load_kept, str(tmp_path))
    seed(5)
    assert kept[1] == draws()


@pytest.mark.parametrize("form", ["app", "per rank"])
def test_a_state_that_was_saved_for_all_ranks_is_loaded_as_before(tmp_path: Path, form: str) -> None:
    """As `app_state(…, random=RandomState())` and a bare `RandomState` were saved at first: in parts, for all ranks."""
    seed(3)
    old: Any = {"random": dcp.RandomState().state_dict(), "model": torch.nn.LayerNorm(2).state_dict()}
    dcp.save({"app": old if form == "app" else old["random"]}, checkpoint_id=tmp_path)
    expected = draws()
    seed(0)
    dcp.load(states(form), checkpoint_id=tmp_path)
    assert draws() == expected


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorch_reads_the_saved_state(tmp_path: Path) -> None:
    dcp.save(states("app"), checkpoint_id=tmp_path)
    template: Any = {"app": {"random": {"rank_0": None}}}
    stock.load(template, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(template["app"]["random"]["rank_0"][0]["torch"], torch.get_rng_state())


@pytest.mark.device
def test_all_devices_in_use_are_restored(device: str) -> None:
    count = torch.get_device_module(device).device_count()
    tensors = [torch.ones(1, device=f"{device}:{number}") for number in range(count)]
    state = dcp.RandomState().state_dict()
    expected = [torch.rand(2, device=tensor.device) for tensor in tensors]
    dcp.RandomState().load_state_dict(state)
    for wanted in expected:
        assert torch.equal(torch.rand(2, device=wanted.device), wanted)
    dcp.RandomState().load_derived_state(state, 3)
    assert not torch.equal(torch.rand(2, device=device), expected[0])
