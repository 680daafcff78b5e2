"""Model state dicts in one process: options, mistakes, `load_sharded_optimizer_state_dict` without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dcp_core import MissingKeyError, save
from dcp_state import (
    StateDictOptions,
    StateMismatchError,
    get_model_state_dict,
    get_optimizer_state_dict,
    load_sharded_optimizer_state_dict,
    set_model_state_dict,
)
from integration_tests.kits.memory import MemoryReader, MemoryWriter


def test_frozen_parameters_can_be_left_out() -> None:
    net = nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    assert list(get_model_state_dict(net, options=StateDictOptions(ignore_frozen_params=True))) == ["weight"]


def test_submodules() -> None:
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    with pytest.warns(
        FutureWarning, match="^Getting submodules only model/optim state_dict is deprecated"
    ):  # stock's words
        assert list(get_model_state_dict(net, submodules={net[1]})) == ["1.weight", "1.bias"]
    options = StateDictOptions(keep_submodule_prefixes=False)
    with pytest.warns(FutureWarning, match="submodules"):
        assert list(get_model_state_dict(net, submodules={net[1]}, options=options)) == ["weight", "bias"]


def test_missing_and_unexpected_names() -> None:
    net = torch.compile(nn.Linear(2, 2), backend="eager")
    with pytest.raises(StateMismatchError, match=r"Missing key 'bias'.*; did you mean 'biass'") as raised:
        set_model_state_dict(net, {"weight": torch.ones(2, 2), "biass": torch.ones(2)})
    assert len(raised.value.problems) == 2
    assert "Unexpected key 'biass'" in str(raised.value)
    keys = set_model_state_dict(net, {"weight": torch.ones(2, 2), "b": 1}, options=StateDictOptions(strict=False))
    assert (keys.missing_keys, keys.unexpected_keys) == (["bias"], ["b"])
    assert keys.report.restored == ["weight"]
    with pytest.raises(StateMismatchError, match="size mismatch"):
        set_model_state_dict(net, {"weight": torch.ones(3, 2), "bias": torch.ones(2)})
    with pytest.raises(StateMismatchError, match="empty"):
        set_model_state_dict(net, {})


def test_a_model_on_the_meta_device_takes_tensors_as_they_are() -> None:
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    given = nn.Linear(2, 2).state_dict()
    set_model_state_dict(net, given)
    assert torch.equal(net.weight, given["weight"])


def test_broadcast_needs_whole_tensors() -> None:
    with pytest.raises(ValueError, match="full_state_dict=True"):
        get_model_state_dict(nn.Linear(1, 1), options=StateDictOptions(broadcast_from_rank0=True))


def test_optimizer_state_without_an_optimizer(request: pytest.FixtureRequest) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(net, optimizer)
    save({"optim": state, "other": 1}, storage_writer=MemoryWriter(request.node.name))
    reader = MemoryReader(request.node.name)
    loaded = load_sharded_optimizer_state_dict(net.state_dict(), "optim", reader)
    assert list(loaded) == ["optim"]
    assert torch.equal(loaded["optim"]["state"]["weight"]["exp_avg"], state["state"]["weight"]["exp_avg"])
    assert loaded["optim"]["param_groups"] == state["param_groups"]
    with pytest.raises(MissingKeyError, match="'optimizer'"):
        load_sharded_optimizer_state_dict(net.state_dict(), "optimizer", reader)


def test_names_that_only_rank_0_has_are_dropped_if_that_is_allowed() -> None:
    """Regression test for pytorch/pytorch#149516."""
    net = torch.nn.Linear(2, 2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True, strict=False)
    state = {"weight": torch.ones(2, 2), "bias": torch.ones(2), "extra": torch.ones(1)}
    keys = set_model_state_dict(net, state, options=options)
    assert keys.unexpected_keys == ["extra"]
    assert "extra" in keys.report.dropped
    assert bool((net.weight == 1).all())


def test_a_state_dict_of_submodules_is_taken() -> None:
    """Submodules as keys, as in stock: with its warning, under any wrapper, at every place of a shared module."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager"), shared, shared)
    inner = model[0]._orig_mod[0]
    wanted = {name: torch.full_like(value, 7.0) for name, value in shared.state_dict().items()}
    with pytest.warns(FutureWarning, match="^Passing model_state_dict as a .* modules as keys"):
        keys = set_model_state_dict(model, {inner: wanted, shared: wanted})  # type: ignore[dict-item]
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert all(bool((parameter == 7.0).all()) for parameter in model.parameters())
    with pytest.warns(FutureWarning):
        keys = set_model_state_dict(model, {inner: wanted}, options=StateDictOptions(strict=False))  # type: ignore[dict-item]
    assert keys.missing_keys == ["1.weight", "1.bias", "2.weight", "2.bias"]
    with pytest.warns(FutureWarning), pytest.raises(StateMismatchError, match="a Linear that the model does not hold"):
        set_model_state_dict(model, {nn.Linear(2, 2): wanted})  # type: ignore[dict-item]
