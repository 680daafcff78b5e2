"""Thousands of small tensors, which are written together: every kind of them comes back, also in stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as stock

import dcp_all as dcp
from dcp_core.testing.trees import same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated")

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8]
SHAPES = [(), (3,), (2, 2), (0,), (1, 5, 1)]


def small_tensors() -> dict[str, torch.Tensor]:
    """Of each dtype and shape some, among them views, conjugated ones and parameters."""
    state = {}
    for number in range(1500):
        dtype, shape = DTYPES[number % len(DTYPES)], SHAPES[number // 7 % len(SHAPES)]
        value = (torch.arange(torch.Size(shape).numel()) + number % 50).reshape(shape).to(dtype)
        if number % 3 == 1 and value.dim() == 2:
            value = value.t()
        if dtype is torch.complex64 and number % 2:
            value = (value * 1j).conj()
        if dtype is torch.float32 and number % 4 == 1:
            value = torch.nn.Parameter(value)
        state[f"layer.{number}.value"] = value
    return state


@pytest.mark.parametrize("layout", ["torch", "raw"])
@pytest.mark.parametrize("single_file", [True, False])
def test_they_come_back(tmp_path: Path, layout: Any, single_file: bool) -> None:
    state = small_tensors()
    writer = dcp.FileSystemWriter(tmp_path, layout=layout, single_file_per_rank=single_file, sync_files=False)
    dcp.save(state, storage_writer=writer)
    template = {key: torch.zeros_like(value.detach().resolve_conj()) for key, value in state.items()}
    dcp.load(template, checkpoint_id=tmp_path)
    assert [key for key, value in state.items() if not same(template[key], value)] == []
    if layout == "torch" and single_file:
        template = {key: torch.zeros_like(value) for key, value in template.items()}
        stock.load(template, checkpoint_id=tmp_path, no_dist=True)
        assert [key for key, value in state.items() if not same(template[key], value)] == []


def test_one_that_changes_its_size_after_planning_is_named(tmp_path: Path) -> None:
    state = {f"t{n}": torch.zeros(2) for n in range(40)}

    class Changing(dcp.DefaultSavePlanner):
        def finish_plan(self, new_plan: Any) -> Any:
            state["t7"].set_(torch.zeros(3))
            return super().finish_plan(new_plan)

    with pytest.raises(TypeError, match=r"'t7' was planned with sizes \(2,\) but has \(3,\)"):
        dcp.save(state, checkpoint_id=tmp_path, planner=Changing())
