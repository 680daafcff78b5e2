"""FSDP1's own state dicts: bare modules under each state dict type, and optimizer state allocated from metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

import dcp_state
from dcp_core import load, save
from dcp_fs import FileSystemReader
from dcp_ranks.testing.ranks import RankPool
from integration_tests.state.compare import differences
from integration_tests.state.nets import Run, build

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
TYPES = [
    ("fsdp1", StateDictType.FULL_STATE_DICT),
    ("fsdp1", StateDictType.SHARDED_STATE_DICT),
    ("fsdp1-flat", StateDictType.FULL_STATE_DICT),
    ("fsdp1-flat", StateDictType.SHARDED_STATE_DICT),
    ("fsdp1-flat", StateDictType.LOCAL_STATE_DICT),
]
WRITERS_AND_READERS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours")]


def _savers(who: str) -> tuple[Callable[..., object], Callable[..., object]]:
    if who == "ours":
        return save, load
    from torch.distributed import checkpoint as stock

    return stock.save, stock.load


def _trained(kind: str, seed: int = 0) -> Run:
    run = build(kind, "adamw", seed=seed)
    run.step(0)
    return run


def _bare_module(kind: str, state_type: StateDictType, writer: str, reader: str, folder: str) -> list[str]:
    """Save a module as it is, load it into another one; what differs."""
    first, second = _trained(kind), build(kind, "adamw", seed=1)
    with FullyShardedDataParallel.state_dict_type(first.parts[0], state_type):
        _savers(writer)[0]({"model": first.parts[0]}, checkpoint_id=folder)
    with FullyShardedDataParallel.state_dict_type(second.parts[0], state_type):
        _savers(reader)[1]({"model": second.parts[0]}, checkpoint_id=folder)
    pairs = zip(first.parts[0].named_parameters(), second.parts[0].named_parameters(), strict=True)
    return [name for (name, wanted), (_, found) in pairs if not torch.equal(wanted, found)]


@pytest.mark.parametrize(("writer", "reader"), WRITERS_AND_READERS)
@pytest.mark.parametrize(("kind", "state_type"), TYPES, ids=lambda value: getattr(value, "name", value))
def test_bare_modules(
    ranks: RankPool, tmp_path: Path, kind: str, state_type: StateDictType, writer: str, reader: str
) -> None:
    assert ranks.run(2, _bare_module, kind, state_type, writer, reader, str(tmp_path / "checkpoint")) == [[], []]


def _optimizer_state(kind: str, folder: str) -> list[str]:
    """Load optimizer state without an optimizer, as ours and as stock's; what differs, or does not fit."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader as StockReader
    from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as stock_load

    first = _trained(kind)
    model = first.parts[0]
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded: dict[str, Any] = model.state_dict()
        optimizer = FullyShardedDataParallel.optim_state_dict(model, first.optimizer)
        save({"model": sharded, "optim": optimizer}, checkpoint_id=folder)
        ours = dcp_state.load_sharded_optimizer_state_dict(sharded, "optim", FileSystemReader(folder))
        theirs = stock_load(sharded, "optim", StockReader(folder))
        told = list(differences(ours, theirs))
        second = build(kind, "adamw", seed=1)
        fitting = FullyShardedDataParallel.optim_state_dict_to_load(second.parts[0], second.optimizer, ours["optim"])
    second.optimizer.load_state_dict(fitting)
    second.parts[0].load_state_dict(model.state_dict())
    if first.step(1) != second.step(1) or first.step(2) != second.step(2):
        told.append("other losses")
    dist.barrier()
    return told


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1-flat"])
def test_optimizer_state_without_an_optimizer(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert ranks.run(2, _optimizer_state, kind, str(tmp_path / "checkpoint")) == [[], []]
