"""Pieces of a chunk's bytes become the box's elements, whatever the piece borders, strides and dtypes are."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_core.tensors.box_copy import BoxCopy, element_boxes
from dcp_core.tensors.device_copy import DeviceCopies
from dcp_core.tensors.tensor_bytes import tensor_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64, torch.int64, torch.float8_e4m3fn]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 6), max_size=5))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.data())
def test_a_range_of_elements_is_few_boxes(sizes: list[int], data: st.DataObject) -> None:
    count = math.prod(sizes)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    flat = torch.arange(count).reshape(sizes)
    found = []
    for offsets, lengths in element_boxes(sizes, start, stop):
        part = flat[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        found.append(part.reshape(-1).tolist())
    assert list(itertools.chain(*found)) == list(range(start, stop))
    assert len(found) <= 2 * len(sizes) - 1


def filled(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    count = math.prod(sizes)
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.arange(count, dtype=torch.float32) % 120).to(dtype).reshape(sizes)
    return torch.arange(count).to(dtype).reshape(sizes)


def target_of(lengths: list[int], dtype: torch.dtype, order: list[int], *, gaps: bool) -> torch.Tensor:
    """A tensor of zeros whose dimensions lie in memory in that order, with or without room between elements."""
    stretch = 2 if gaps else 1
    memory = torch.zeros([lengths[dim] * stretch for dim in order], dtype=dtype)
    view = memory[tuple(slice(None, None, stretch) for _ in order)]
    return view.permute([order.index(dim) for dim in range(len(order))])


@given(boxes(), st.sampled_from(DTYPES), st.booleans(), st.booleans(), st.data())
def test_pieces_in_any_order_fill_any_target(
    box: tuple[list[int], list[int], list[int]], dtype: torch.dtype, cast: bool, gaps: bool, data: st.DataObject
) -> None:
    sizes, offsets, lengths = box
    chunk = filled(sizes, dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
    order = data.draw(st.permutations(range(len(sizes))))
    target = target_of(lengths, wide if cast else dtype, list(order), gaps=gaps)
    count = math.prod(sizes)
    borders = sorted({0, count, *data.draw(st.lists(st.integers(0, count), max_size=5))})
    pieces = data.draw(st.permutations(list(itertools.pairwise(borders))))
    copier = BoxCopy(sizes, dtype, offsets, target, DeviceCopies().copy)
    for start, stop in pieces:
        stored = bytearray(tensor_bytes(chunk)[start * dtype.itemsize : stop * dtype.itemsize])
        copier.piece(start * dtype.itemsize, memoryview(stored))
    wanted = chunk[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
    assert torch.equal(target.to(wide), wanted.to(wide))


def test_what_is_outside_of_the_box_is_not_touched() -> None:
    whole = torch.full((4, 6), -1)
    copier = BoxCopy((4, 6), torch.int64, (1, 2), whole[1:3, 2:5], DeviceCopies().copy)
    copier.piece(0, tensor_bytes(torch.arange(24)))
    assert whole[1:3, 2:5].tolist() == [[8, 9, 10], [14, 15, 16]]
    assert (whole == -1).sum() == 24 - 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["plain", "cast"])
@pytest.mark.parametrize("strided", [False, True])
def test_pieces_reach_a_device_through_reused_buffers(dtype: torch.dtype, strided: bool) -> None:
    chunk = torch.rand(512, 1024)
    memory = torch.zeros(512, 1024, dtype=dtype, device="cuda")
    target = memory.t()[:, :512].t() if strided else memory[:, :512].contiguous()
    copies = DeviceCopies()
    copies.prepare(target.device)
    copier = BoxCopy((512, 1024), torch.float32, (0, 0), target, copies.copy)
    scratch = torch.empty(64 << 10, dtype=torch.uint8)
    stored = tensor_bytes(chunk)
    for start in range(0, len(stored), len(scratch)):
        scratch.numpy()[:] = stored[start : start + len(scratch)]
        copier.piece(start, tensor_bytes(scratch))
    copies.finish(target.device)
    assert torch.equal(target.cpu(), chunk[:, :512].to(dtype))
