"""Runs of bytes of boxes: every box of a tensor, written run by run, gives the bytes that numpy gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcp_core import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from dcp_core.errors import DcpError
from dcp_format.export import box_writes
from dcp_format.export.box_writes import BoxRuns, write_box
from dcp_format.export.file_map import TensorPlace
from dcp_io import LocalStore


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True)]
    return shape, offsets, sizes


@given(boxes())
@settings(max_examples=200)
def test_runs_are_the_bytes_of_the_box(box):
    shape, offsets, sizes = box
    runs = BoxRuns(shape, offsets, sizes, 4)
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    inside = numbers[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].reshape(-1)
    found = [start // 4 + step for start in runs.starts(0, runs.count) for step in range(runs.run_bytes // 4)]
    assert found == inside.tolist()
    begin, end = runs.extent
    if len(inside):
        assert (begin, end) == (4 * inside[0], 4 * (inside[-1] + 1))
    else:
        assert begin == end


def test_runs_are_as_long_as_they_can_be():
    assert BoxRuns((8, 4, 5), (2, 0, 0), (3, 4, 5), 2).count == 1
    assert BoxRuns((8, 4, 5), (2, 1, 0), (3, 2, 5), 2).count == 3
    assert BoxRuns((8, 4, 5), (2, 1, 1), (3, 2, 3), 2).count == 6
    assert BoxRuns((), (), (), 8).run_bytes == 8


def item(shape, offsets, sizes, dtype):
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex("w"), WriteItemType.SHARD, tensor_data=data)


@pytest.mark.parametrize("piece_bytes", [64, 4 << 20])
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("box", [((3, 0, 0), (2, 7, 5)), ((0, 2, 0), (9, 3, 5)), ((1, 1, 1), (7, 5, 3))])
def test_boxes_are_written_and_cast(tmp_path, monkeypatch, piece_bytes, to, turned, box):
    monkeypatch.setattr(box_writes, "_PIECE_BYTES", piece_bytes)
    offsets, sizes = box
    whole = torch.randn(9, 7, 5)
    window = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
    part = whole[window]
    part = part.permute(2, 1, 0).contiguous().permute(2, 1, 0) if turned else part.contiguous()
    store = LocalStore(tmp_path)
    sink = store.create_sized("x", 10 + whole.numel() * to.itemsize)
    place = TensorPlace("x", 10, str(to).removeprefix("torch."))
    assert write_box(sink, place, item(whole.shape, offsets, sizes, torch.float32), part) == part.numel() * to.itemsize
    sink.close(sync=False)
    found = torch.frombuffer(bytearray(store.read("x"))[10:], dtype=to).view(whole.shape)
    wanted = torch.zeros_like(whole, dtype=to)
    wanted[window] = part.to(to)
    assert torch.equal(found, wanted)


def test_a_tensor_that_changed_is_refused(tmp_path):
    sink = LocalStore(tmp_path).create_sized("x", 100)
    planned = item((5, 5), (0, 0), (5, 5), torch.float32)
    with pytest.raises(DcpError, match="'w' was planned as float32"):
        write_box(sink, TensorPlace("x", 0, "float32"), planned, torch.ones(4, 5))
    sink.close(sync=False)
