"""Files that ranks share: who writes the header, which hosts may share a file, and checks before publishing."""

from __future__ import annotations

import errno

import pytest
import torch

from dcp_core import (
    ChunkStorageMetadata,
    MetadataIndex,
    SavePlan,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    WriteResult,
)
from dcp_core.errors import DcpError
from dcp_format.export.file_map import lay_out, tensors_of
from dcp_format.export.shared_files import distribute, host_conflict, share_out
from dcp_format.export.write_files import check_complete, create_files
from dcp_io import LocalStore


def rows(name: str, begin: int, end: int, of: int) -> WriteItem:
    """A part of a tensor whose rows have a KiB each."""
    chunk = ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([end - begin, 1024]))
    data = TensorWriteData(chunk, TensorProperties(torch.uint8), torch.Size([of, 1024]))
    return WriteItem(MetadataIndex(name), WriteItemType.SHARD, tensor_data=data)


def placed(*ranks: list[WriteItem]):
    plans = [SavePlan(items) for items in ranks]
    names = sorted({item.index.fqn for items in ranks for item in items})
    by_name = {tensor.fqn: tensor for tensor in tensors_of(plans, names)}
    files = [lay_out(f"{name}.safetensors", [by_name[name]], {}) for name in names]
    return distribute(plans, files), files


def test_the_rank_with_the_first_bytes_writes_the_header():
    plans, files = placed([rows("a", 5, 9, 9)], [rows("a", 0, 5, 9), rows("b", 4, 8, 8)], [rows("b", 0, 4, 8)])
    assert [sorted(plan.storage_data.headers) for plan in plans] == [[], [files[0].temporary], [files[1].temporary]]


@pytest.mark.parametrize(
    ("split", "hosts", "shared"),
    [
        (4096, ["a", "a"], False),
        (4096, ["a", "b"], True),  # the header moves the border into a block
        (100, ["a", "b"], True),
        (100, ["a", "a"], False),
    ],
)
def test_hosts_do_not_share_a_block(split, hosts, shared):
    plans, files = placed([rows("a", 0, split, 8192)], [rows("a", split, 8192, 8192)])
    assert host_conflict(plans, hosts) == (files[0].temporary if shared else None)


def test_hosts_may_share_an_export_by_whole_files():
    plans, files = placed([rows("a", 0, 8, 8)], [rows("b", 0, 4, 8)], [rows("b", 4, 8, 8)])
    assert host_conflict(plans, ["x", "y", "y"]) is None
    assert host_conflict(plans, ["x", "y", "z"]) == files[1].temporary


def test_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    _, files = placed([rows("a", 0, 8, 8), rows("b", 0, 8, 8)])
    store = LocalStore(tmp_path)
    create = LocalStore.create_sized

    def full(self, name, size):
        if name == files[1].temporary:
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return create(self, name, size)

    monkeypatch.setattr(LocalStore, "create_sized", full)
    with pytest.raises(OSError, match="No space"):
        create_files(store, files)
    assert store.list() == []


def test_an_incomplete_tensor_is_noticed():
    _, files = placed([rows("a", 0, 8, 8)])
    part = WriteResult(MetadataIndex("a"), 7 * 1024, None)
    with pytest.raises(DcpError, match="'a' has 8192 bytes, and the ranks wrote 7168"):
        check_complete(files, [[part], []])
    check_complete(files, [[part], [WriteResult(MetadataIndex("a"), 1024, None)]])


def columns(name: str, begin: int, end: int) -> WriteItem:
    """A part of a tensor of 12,000 columns, of 1,000 rows."""
    chunk = ChunkStorageMetadata(torch.Size([0, begin]), torch.Size([1000, end - begin]))
    data = TensorWriteData(chunk, TensorProperties(torch.uint8), torch.Size([1000, 12000]))
    return WriteItem(MetadataIndex(name), WriteItemType.SHARD, tensor_data=data)


SHARING = {
    "rows": ([[rows("a", 0, 5, 9)], [rows("a", 5, 9, 9)]], ["x", "x"], True, []),
    "columns": ([[columns("a", 0, 5000)], [columns("a", 5000, 12000)]], ["x", "x"], True, [0, 1, 0]),
    "columns of one rank": ([[columns("a", 0, 12000)], []], ["x", "x"], True, []),
    "hosts": ([[rows("a", 0, 5000, 12000)], [rows("a", 5000, 12000, 12000)]], ["x", "y"], True, [0, 0, 1]),
    "objects": ([[], [rows("a", 0, 12000, 12000)]], ["x", "x"], False, [0, 0, 0]),
}


@pytest.mark.parametrize("case", SHARING)
def test_which_rank_writes_which_4_mib(case):
    ranks, hosts, ranges, owners = SHARING[case]
    plans = [SavePlan(items) for items in ranks]
    (tensor,) = tensors_of(plans, ["a"])
    file = lay_out("a.safetensors", [tensor], {}, renamed=ranges)
    placed = share_out(plans, [file], hosts, ranges=ranges)
    gathers = [gather for plan in placed for gather in plan.storage_data.gathers]
    assert [[*gather.owners] for gather in gathers] == ([owners] * 2 if owners else [])
    assert len({plan.storage_data.secret for plan in placed}) == 1
    assert bool(placed[0].storage_data.secret) == bool(owners)
    for gather in gathers:
        assert gather.stops[-1] == tensor.nbytes
        assert all((stop + gather.place.offset) % (4 << 20) == 0 for stop in gather.stops[:-1])
    assert sum(len(plan.storage_data.headers) for plan in placed) == 1
