"""The blocking stager."""

import collections

import pytest
import torch

from dcp_core.tensors.staging import AsyncStager, BlockingAsyncStager


def test_is_a_stager() -> None:
    assert isinstance(BlockingAsyncStager(), AsyncStager)
    assert not BlockingAsyncStager().should_synchronize_after_execute


def test_copies_tensors_and_containers_not_other_values() -> None:
    marker = object()
    source = {"a": torch.ones(3), "n": collections.OrderedDict(b=[torch.zeros(2)]), "t": (torch.ones(1),), "o": marker}
    staged = BlockingAsyncStager().stage(source)
    source["a"].add_(1)
    source["n"]["b"][0].add_(1)
    assert torch.equal(staged["a"], torch.ones(3))
    assert torch.equal(staged["n"]["b"][0], torch.zeros(2))
    assert type(staged["n"]) is collections.OrderedDict
    assert staged["o"] is marker


def test_fresh_copies_unless_cached() -> None:
    source = {"a": torch.ones(3)}
    fresh, cached = BlockingAsyncStager(), BlockingAsyncStager(cache_staged_state_dict=True)
    assert fresh.stage(source)["a"].data_ptr() != fresh.stage(source)["a"].data_ptr()
    first = cached.stage(source)["a"]
    source["a"].add_(1)
    second = cached.stage(source)["a"]
    assert first.data_ptr() == second.data_ptr()
    assert torch.equal(second, torch.full((3,), 2.0))
    cached.close()
    assert cached.stage(source)["a"].data_ptr() != first.data_ptr()


def test_cache_follows_changed_shapes() -> None:
    stager = BlockingAsyncStager(cache_staged_state_dict=True)
    stager.stage({"a": torch.ones(3)})
    assert torch.equal(stager.stage({"a": torch.ones(4)})["a"], torch.ones(4))


def test_type_check_refuses_what_it_cannot_copy() -> None:
    with pytest.raises(TypeError, match="object"):
        BlockingAsyncStager(type_check=True).stage({"o": object()})
