"""Tensor parallelism inside DDP, whose parameters are local tensors that stand for DTensors. Ranks are fake groups."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_core import save
from dcp_core.errors import UnsupportedValueError
from dcp_core.shards.shards import written_tensor
from dcp_state import get_model_state_dict, set_model_state_dict

FULL = {"0.weight": torch.arange(128.0).reshape(16, 8), "2.weight": torch.arange(128.0).reshape(8, 16)}


@contextlib.contextmanager
def on_rank_1() -> Iterator[nn.Module]:
    # Always the same rank: DTensor's caches would give a later rank the mesh of an earlier one.
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        mesh = DeviceMesh("cpu", torch.arange(2))
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        _pre_dp_module_transform(model)
        yield model
    finally:
        dist.destroy_process_group()


def test_parameters_are_the_dtensors_for_which_they_stand() -> None:
    parts = {"0.weight": FULL["0.weight"].chunk(2)[1], "2.weight": FULL["2.weight"].chunk(2, dim=1)[1]}
    with on_rank_1() as model:
        for values in (FULL, None):
            set_model_state_dict(model, values or get_model_state_dict(model))
            state = get_model_state_dict(model)
            for name, part in parts.items():
                assert isinstance(state[name], DTensor)
                assert state[name].shape == FULL[name].shape
                assert torch.equal(state[name].to_local(), part)
                parameter = model.get_parameter(name)
                assert torch.equal(parameter, part)
                assert state[name].to_local().data_ptr() == parameter.data_ptr()
                held = written_tensor(name, parameter)
                assert held is not None
                assert held.size == FULL[name].shape


def test_a_state_dict_that_hides_the_parts_is_refused() -> None:
    with on_rank_1() as model, pytest.raises(UnsupportedValueError, match=r"'model' has the parameter '0\.weight'"):
        save({"model": model}, checkpoint_id="unused", no_dist=True)


def test_parameters_that_forward_takes_out_are_refused_by_key() -> None:
    with on_rank_1() as model:
        model(torch.ones(2, 8))
        if len(model.state_dict()) == len(FULL):
            pytest.skip("this version of torch keeps them")
        with pytest.raises(UnsupportedValueError, match=r"'0\.weight' is an attribute"):
            get_model_state_dict(model)
