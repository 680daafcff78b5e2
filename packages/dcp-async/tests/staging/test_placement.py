"""Placements of tensors that overlap in any way, checked by copying and comparing."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_async.staging import placement
from dcp_async.staging.arenas import ArenaPool
from dcp_async.staging.copy_state import Copier, Stager
from dcp_async.staging.placement import Budget, place, sources_of


@st.composite
def views(draw: st.DrawFn) -> list[torch.Tensor]:
    """Views of a few buffers: slices, columns, transposed, expanded, empty, as bytes from any of them on."""
    buffers = [torch.randperm(60).float(), torch.randperm(600).float().reshape(20, 30)]
    raw = torch.frombuffer(bytearray(range(200)), dtype=torch.uint8)
    found = []
    for _ in range(draw(st.integers(0, 8))):
        base = buffers[draw(st.integers(0, 1))]
        if draw(st.booleans()):
            base = _reinterpreted(raw, draw(st.integers(0, 20)), draw(st.sampled_from(WIDTHS)))
        for dim in range(base.dim()):
            start = draw(st.integers(0, base.size(dim)))
            base = base.narrow(dim, start, draw(st.integers(0, base.size(dim) - start)))
        if base.dim() == 2 and draw(st.booleans()):
            base = base.t()
        if base.dim() == 2 and base.size(1) and draw(st.booleans()):
            base = base[:, 0]
        if draw(st.booleans()):
            base = base.unsqueeze(0).expand(2, *base.shape)
        found.append(base)
    return found


WIDTHS = [torch.uint8, torch.int16, torch.float32, torch.complex64, torch.complex128]


def _reinterpreted(raw: torch.Tensor, start: int, dtype: torch.dtype) -> torch.Tensor:
    """View of raw bytes from `start` on as a tensor, even if that is not aligned for the dtype."""
    return torch.frombuffer(raw.numpy().data, dtype=dtype, offset=start, count=100 // dtype.itemsize)


@given(views())
def test_copies_equal_their_sources_and_overlap_alike(tensors: list[torch.Tensor]) -> None:
    stager = Stager(ArenaPool(shared=False, pinned=False), Copier(1))
    copied = stager.stage({str(number): tensor for number, tensor in enumerate(tensors)}).state_dict()
    for number, tensor in enumerate(tensors):
        found = copied[str(number)]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.numpy().tobytes() == tensor.numpy().tobytes()  # torch's own copy of what is not aligned may crash
    placement = place(sources_of(tensors))
    for at, one in enumerate(tensors):
        for other_at, other in enumerate(tensors[:at]):
            if one.numel() and other.numel() and one.data_ptr() <= other.data_ptr() and not placement.compact[at]:
                inside = other.data_ptr() - one.data_ptr()
                last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
                aligned = all(each.data_ptr() % each.dtype.itemsize == 0 for each in (one, other))
                if inside < (last + 1) * one.dtype.itemsize and aligned:
                    assert placement.offsets[other_at] - placement.offsets[at] == inside


@given(views(), st.integers(8 * 64, 3000))
def test_with_a_budget_no_copy_leaves_its_part_of_the_arena(tensors: list[torch.Tensor], budget_bytes: int) -> None:
    with mock.patch.multiple(placement, _WAVE_MIN_BYTES=64, _PIECE_MIN_BYTES=64):
        found = place(sources_of(tensors), Budget(budget_bytes))
    resident = [number for number, tensor in enumerate(tensors) if found.offsets[number] < found.resident_bytes]
    sources, offsets, lengths = (each.tolist() for each in found.pieces)
    copied = [*found.by_tensor.tolist()]
    for number in resident:
        tensor = tensors[number]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = found.offsets[number] + (tensor.numel() if found.compact[number] else extent) * tensor.dtype.itemsize
        assert not tensor.numel() or end <= found.resident_bytes
        # What is copied as it is lies as far into its piece as in the source.
        for source, offset, length in zip(sources, offsets, lengths, strict=True):
            same = tensor.data_ptr() - source == found.offsets[number] - offset
            if same and found.offsets[number] - offset >= 0 and end <= offset + length and not found.compact[number]:
                copied.append(number)
    assert {number for number in resident if tensors[number].numel()} <= {*copied}
    assert found.nbytes - found.resident_bytes == found.wave_bytes >= 0


def test_only_what_is_used_of_a_large_buffer_is_copied() -> None:
    buffer = torch.zeros(1000, 1000)
    assert place(sources_of([buffer[5, :10]])).nbytes == 64
    assert place(sources_of([buffer[:, 5]])).nbytes == 4032  # a column, without what lies between
    assert place(sources_of([buffer[0], buffer[0], buffer[0, 2:5]])).nbytes == 4032
    assert place(sources_of([torch.zeros(1).expand(10_000)])).nbytes == 64


def test_tensors_side_by_side_are_not_one() -> None:
    buffer = torch.zeros(64)
    placement = place(sources_of([buffer[:10], buffer[10:20]]))
    assert placement.nbytes == 128


def test_views_of_other_widths_stay_views_where_they_are_aligned() -> None:
    raw = torch.arange(100, dtype=torch.uint8)
    tensors = [raw[1:100], raw[4:24].view(torch.int32), raw[16:32].view(torch.complex128)]
    placement = place(sources_of(tensors))
    assert not placement.compact.any()
    assert (placement.offsets - placement.offsets[0]).tolist() == [0, 3, 15]


def test_the_largest_go_in_waves_and_the_budget_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "_WAVE_MIN_BYTES", 1)
    monkeypatch.setattr(placement, "_PIECE_MIN_BYTES", 512)
    sizes = [100, 3000, 200, 5000, 1000]
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    found = place(sources_of(tensors), Budget(8 * 512 + 1500))
    assert (found.offsets >= found.resident_bytes).tolist() == [False, True, False, True, False]
    assert found.resident_bytes <= 1500 < found.nbytes
    assert place(sources_of(tensors), Budget(found.nbytes)).wave_bytes == 0
