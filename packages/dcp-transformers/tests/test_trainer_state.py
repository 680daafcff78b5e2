"""The random states of a Trainer's ranks, resumed on more ranks than saved them."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import torch.distributed as dist

from dcp_core import PerRank, load, save
from dcp_transformers.trainer import RandomStates

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

IN_EPOCH = SimpleNamespace(args=SimpleNamespace(ignore_data_skip=False), state=SimpleNamespace(epoch=1.5))


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


def saved_in_an_epoch(folder: Path) -> tuple[Any, ...]:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(10 + dist.get_rank())
    states = RandomStates()
    states.on_epoch_begin()
    begin = draw()
    save({"random": PerRank(states)}, checkpoint_id=folder)
    return begin, draw()


def resumed_in_the_epoch(folder: Path) -> tuple[Any, ...]:
    states = RandomStates()
    report = load({"random": PerRank(states)}, checkpoint_id=folder)
    states.on_epoch_begin()
    begin = draw()
    states.set_loaded(IN_EPOCH)
    return begin, draw(), dict(report.derived)


def test_ranks_that_did_not_save_derive_all_but_what_samplers_draw_from(ranks: Any, tmp_path: Path) -> None:
    saved = ranks.run(2, saved_in_an_epoch, tmp_path / "save")
    found = ranks.run(4, resumed_in_the_epoch, tmp_path / "save")
    for rank, (begin, now, derived) in enumerate(found):
        assert begin == saved[rank % 2][0], "the epoch's order is drawn from it"
        assert now[0] == saved[rank % 2][1][0]
        assert derived == ({} if rank < 2 else {"random": rank - 2})
    assert [now for _, now, _ in found[:2]] == [now for _, now in saved]
    for generator in (1, 2):
        assert len({now[generator] for _, now, _ in found}) == 4
    assert ranks.run(4, resumed_in_the_epoch, tmp_path / "save") == found
