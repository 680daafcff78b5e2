"""Every box of a tensor, written run by run, gives the bytes that numpy gives."""

from __future__ import annotations

import pytest
import torch

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
from dcp_format.export.box_writes import write_box
from dcp_format.export.file_map import TensorPlace
from dcp_io import LocalStore


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
