"""Stagers under stock's names."""

from __future__ import annotations

import collections
from concurrent.futures import Future

import pytest
import torch
from torch.distributed.tensor import DTensor, init_device_mesh

from dcp_async import DefaultStager, StagingOptions, StateDictStager
from dcp_async.staging.stagers import is_plain_blocking
from dcp_core import AsyncStager, BlockingAsyncStager
from dcp_ranks.testing.ranks import RankPool
from integration_tests.kits.memory import MemoryWriter

NOW = StagingOptions(use_async_staging=False)


def test_default_options_work_without_cuda() -> None:
    stager = DefaultStager()
    assert isinstance(stager, AsyncStager)
    staged = stager.stage({"a": torch.ones(3)})
    assert isinstance(staged, Future)
    assert staged.result()["a"].tolist() == [1.0] * 3
    stager.synchronize_staging()
    stager.close()


@pytest.mark.parametrize("shared", [False, True])
def test_copies_keep_types_sharing_and_views(shared: bool) -> None:
    base = torch.arange(10.0)
    state = {"o": collections.OrderedDict(a=base, v=base[2:4]), "t": (torch.ones(1), "x"), "set": {1}}
    stager = DefaultStager(StagingOptions(use_shared_memory=shared, use_async_staging=False))
    staged = stager.stage(state)
    assert isinstance(staged, dict)
    base.zero_()
    assert type(staged["o"]) is collections.OrderedDict
    assert staged["o"]["a"].tolist() == list(range(10))
    assert staged["o"]["v"].data_ptr() == staged["o"]["a"].data_ptr() + 8
    assert isinstance(staged["t"], tuple)
    assert staged["set"] is not state["set"]
    stager.close()
    assert staged["o"]["v"].tolist() == [2.0, 3.0]


def test_the_copy_before_is_left_alone() -> None:
    """Stock overwrites the earlier copy although it may still be in use by a save (weakness A7)."""
    stager, source = DefaultStager(NOW), torch.ones(1000)
    first = stager.stage({"a": source})
    source.fill_(2)
    second = stager.stage({"a": source})
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    assert (first["a"].sum(), second["a"].sum()) == (1000, 2000)
    address = first["a"].data_ptr()
    del first
    third = stager.stage({"a": source})
    assert isinstance(third, dict)
    assert third["a"].data_ptr() == address  # used again, once nobody holds it


def _dtensor() -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (1,))
    source = DTensor.from_local(torch.ones(4), mesh)
    staged = DefaultStager(NOW).stage({"d": source})
    assert isinstance(staged, dict)
    source.to_local().zero_()
    copied = staged["d"]
    return type(copied).__name__, bool(copied.to_local().sum() == 4) and copied.placements == source.placements


def test_dtensors_stay_what_they_are(ranks: RankPool) -> None:
    assert ranks.run(1, _dtensor) == [("DTensor", True)]


def test_state_dict_stager() -> None:
    stager = StateDictStager(pin_memory=False, share_memory=True)
    assert stager.stage({"a": torch.ones(3)}, non_blocking=True)["a"].sum() == 3
    stager.close()


def test_which_stagers_only_copy() -> None:
    class Other(BlockingAsyncStager):
        def stage(self, state_dict: dict[str, object]) -> dict[str, object]:
            return state_dict

    class Waits(BlockingAsyncStager):
        _synchronize_after_execute = True

    class WaitsInItsOwnWay(BlockingAsyncStager):
        def synchronize_staging(self) -> None:
            raise AssertionError

    assert not is_plain_blocking(Waits())
    assert not is_plain_blocking(WaitsInItsOwnWay())
    assert is_plain_blocking(BlockingAsyncStager())
    assert not is_plain_blocking(BlockingAsyncStager(cache_staged_state_dict=True))
    assert not is_plain_blocking(BlockingAsyncStager(type_check=True))
    assert not is_plain_blocking(Other())
    assert not is_plain_blocking(MemoryWriter("x"))
