"""Tensors of every dtype that PyTorch has, every saver, whole and compressed, and templates of other strides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcp_all as dcp
from dcp_core import BlockingAsyncStager

_QUANTIZED = {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
# From the module itself: a dtype that a newer PyTorch brings is tested unasked.
DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)} - _QUANTIZED, key=str)

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda tensor: tensor,
    "empty": lambda tensor: tensor[:0],
    "scalar": lambda tensor: tensor[1, 2],
    "transposed": lambda tensor: tensor.t(),
    "strided": lambda tensor: tensor[::2],
    "box": lambda tensor: tensor[2:5, 1:3],
}
# More than is copied at once, so that pieces are made of it.
LARGE = {f"{dtype}/large": (torch.arange(160_000) % 2).to(torch.uint8).view(dtype).view(2, -1).t() for dtype in DTYPES}


def _filled(dtype: torch.dtype, rows: int = 10, columns: int = 7) -> torch.Tensor:
    data = torch.arange(rows * columns * dtype.itemsize, dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).view(rows, columns)


def _state() -> dict[str, torch.Tensor]:
    small = {f"{dtype}/{name}": view(_filled(dtype)) for dtype in DTYPES for name, view in VIEWS.items()}
    return {**small, **LARGE}


def _elements(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order, read as bytes: PyTorch cannot copy every dtype."""
    size = tensor.element_size()
    places = [stride * size for stride in tensor.stride()]
    memory = torch.empty(0, dtype=torch.uint8)
    memory.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (*tensor.shape, size), (*places, 1))
    return memory.contiguous().numpy().tobytes()


def _template(tensor: torch.Tensor, *, turned: bool) -> torch.Tensor:
    memory = torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8).view(tensor.dtype)
    return (
        memory.view(tensor.shape[::-1]).permute([*reversed(range(tensor.dim()))])
        if turned
        else memory.view(tensor.shape)
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("saver", ["sync", "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_every_dtype_and_stride_comes_back_by_its_bits(saver: str, compression: str | None, tmp_path: Path) -> None:
    state = _state()
    writer = dcp.FileSystemWriter(tmp_path, compression=compression)
    with contextlib.ExitStack() as stack:
        if saver == "sync":
            dcp.save(state, storage_writer=writer, no_dist=True)
        else:
            stack.enter_context(dcp.AsyncSaver(saver)).save(state, storage_writer=writer, no_dist=True).result()
    templates = [{name: _template(tensor, turned=turned) for name, tensor in state.items()} for turned in (False, True)]
    for template in templates:
        dcp.load(template, checkpoint_id=tmp_path, no_dist=True)
    for found in (*templates, dcp.load_keys(checkpoint_id=tmp_path, no_dist=True)):
        wrong = [name for name, tensor in state.items() if _elements(found[name]) != _elements(tensor)]
        assert wrong == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_stagers_copy_every_dtype() -> None:
    state, stager = _state(), BlockingAsyncStager(cache_staged_state_dict=True)
    for _ in range(2):  # the second time into the copies of the first
        staged = stager.stage(state)
        assert [name for name, tensor in state.items() if _elements(staged[name]) != _elements(tensor)] == []
