"""What a rank holds of a value. Ranks are fake process groups: nothing is sent."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_core.errors import ShardNotFoundError, UnsupportedValueError
from dcp_core.records.metadata import MetadataIndex, TensorProperties
from dcp_core.records.plan import WriteItemType
from dcp_core.shards.shards import find_shard, find_state_dict_object, find_tensor_shard, local_tensor
from dcp_core.tables.value_table import local_values
from dcp_core.testing.sharding import distribute

WORLD = 4


def write_items(fqn: str, value: object) -> list[Any]:
    return [*local_values({fqn: value}).items]


@contextlib.contextmanager
def as_rank(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make(whole: torch.Tensor, placements: list[Any], mesh_shape: tuple[int, ...] = (WORLD,)) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(WORLD).reshape(mesh_shape))
    return distribute(whole, mesh, placements)


LAYOUTS = [
    ((10, 3), [Shard(0)], (4,)),
    ((3, 10), [Shard(1)], (4,)),
    ((2, 3), [Shard(0)], (4,)),
    ((4, 4), [Replicate()], (4,)),
    ((9, 5), [Shard(0), Shard(1)], (2, 2)),
    ((9, 5), [Shard(0), Shard(0)], (2, 2)),
    ((9, 5), [Replicate(), Shard(1)], (2, 2)),
    pytest.param((9, 5), [_StridedShard(0, split_factor=2), Shard(0)], (2, 2), marks=pytest.mark.newest),
    pytest.param((9, 5), [_StridedShard(0, split_factor=3)], (4,), marks=pytest.mark.newest),
    ((), [Replicate()], (4,)),
]


@pytest.mark.parametrize(("shape", "placements", "mesh"), LAYOUTS)
def test_dtensor_shards_are_the_global_values(
    shape: tuple[int, ...], placements: list[Any], mesh: tuple[int, ...]
) -> None:
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    held = torch.zeros(shape)
    for rank in range(WORLD):
        with as_rank(rank):
            tensor = make(whole, placements, mesh)
            found = local_tensor("w", tensor)
            assert found is not None
            assert found.size == shape
            assert not found.whole
            for shard in found.shards:
                place = tuple(slice(o, o + s) for o, s in zip(shard.offsets, shard.sizes, strict=True))
                assert torch.equal(shard.get(), whole[place])
                held[place] += 1
                assert torch.equal(find_shard(tensor, MetadataIndex("w", shard.offsets)), whole[place])
            items = write_items("w", tensor)
            assert [item.index.offset for item in items] == [shard.offsets for shard in found.shards]
            assert {item.type for item in items} <= {WriteItemType.SHARD}
    assert (held >= 1).all()


def test_writing_into_a_shard_changes_the_dtensor() -> None:
    with as_rank(1):
        tensor = make(torch.zeros(8), [_StridedShard(0, split_factor=2)])
        for number, offset in enumerate((1, 5)):
            find_shard(tensor, MetadataIndex("w", (offset,))).fill_(number + 1)
        assert tensor.to_local().tolist() == [1, 2]


def test_parameters_keep_requires_grad_and_are_filled_without_autograd() -> None:
    with as_rank(0):
        parameter: Any = torch.nn.Parameter(make(torch.zeros(8), [Shard(0)]))
        found = local_tensor("w", parameter)
        assert found is not None
        assert found.properties == TensorProperties(torch.float32, requires_grad=True)
        found.shards[0].get().fill_(3)
        assert parameter.to_local().tolist() == [3, 3]


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with as_rank(1):
        mesh = DeviceMesh("cpu", torch.tensor([0, 2]))
        tensor = DTensor.from_local(
            torch.zeros(0), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,)
        )
        found = local_tensor("w", tensor)
        assert found is not None
        assert found.shards == ()
        assert write_items("w", tensor) == []


def test_an_empty_part_is_no_shard_but_an_empty_tensor_is_one() -> None:
    with as_rank(3):
        assert write_items("w", make(torch.ones(2), [Shard(0)])) == []
        (item,) = write_items("w", make(torch.ones(0, 3), [Shard(0)]))
        assert item.tensor_data is not None
        assert item.tensor_data.chunk.sizes == (0, 3)
        assert find_shard(make(torch.ones(0, 3), [Shard(0)]), item.index).shape == (0, 3)
    (item,) = write_items("w", torch.ones(0, 3))
    assert item.type is WriteItemType.TENSOR


def test_partial_and_false_shapes_are_refused() -> None:
    with as_rank(0):
        mesh = DeviceMesh("cpu", torch.arange(WORLD))
        partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
        with pytest.raises(UnsupportedValueError, match=r"'a\.b'.*redistribute"):
            write_items("a.b", partial)
        false = DTensor.from_local(
            torch.zeros(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([9]), stride=(1,)
        )
        assert local_tensor("a.b", false) is not None
        with as_hidden_rank(false), pytest.raises(UnsupportedValueError, match=r"'a\.b'.*should hold \(3,\)"):
            local_tensor("a.b", false)


@contextlib.contextmanager
def as_hidden_rank(tensor: DTensor) -> Iterator[None]:
    """The local tensor with a row too few, as a wrong from_local leaves it."""
    kept = tensor._local_tensor
    tensor._local_tensor = kept[:2]
    try:
        yield
    finally:
        tensor._local_tensor = kept


@pytest.mark.newest
def test_local_shards_wrapper_alone_and_in_a_dtensor() -> None:
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    parts = [torch.ones(2, 2), torch.full((3, 2), 2.0)]
    wrapper = LocalShardsWrapper(parts, [(0, 0), (4, 0)])
    with as_rank(0):
        mesh = DeviceMesh("cpu", torch.arange(WORLD))
        tensor = DTensor.from_local(
            wrapper, mesh, [Shard(0)], run_check=False, shape=torch.Size([20, 2]), stride=(2, 1)
        )
        nothing = DTensor.from_local(
            LocalShardsWrapper([], []), mesh, [Shard(0)], run_check=False, shape=torch.Size([20, 2]), stride=(2, 1)
        )
        for value, size in ((wrapper, (2, 4)), (tensor, (20, 2))):
            items = write_items("w", value)
            assert [type(item).__module__ for item in items] == ["dcp_core.records.plan"] * 2
            assert [tuple(item.index.offset or ()) for item in items] == [(0, 0), (4, 0)]
            assert {tuple(item.tensor_data.size) for item in items if item.tensor_data} == {size}
            found = local_tensor("w", value)
            assert found is not None
            assert [tuple(chunk.sizes) for chunk in found.chunks] == [(2, 2), (3, 2)]
            assert find_shard(value, MetadataIndex("w", (4, 0))).data_ptr() == parts[1].data_ptr()
            with pytest.raises(ShardNotFoundError, match=r"^'w'.*(shards here: \(0, 0\), \(4, 0\)|LocalShardsWrapper)"):
                find_shard(value, MetadataIndex("w", (1, 0)))
            with pytest.raises(ShardNotFoundError, match=r"^'w'.*(no offset was provided|LocalShardsWrapper)"):
                find_shard(value, MetadataIndex("w"))
        assert write_items("w", nothing) == []
        empty = local_tensor("w", nothing)
        assert empty is not None
        assert empty.shards == ()
        assert empty.size == (20, 2)


class Duck:
    """No tensor at all, but with stock's hooks and stock's records."""

    def __init__(self) -> None:
        self.data = torch.zeros(2)

    def __create_write_items__(self, fqn: str, value: object) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        data = planner.TensorWriteData(
            self.__create_chunk_list__()[0], metadata.TensorProperties(torch.float32), torch.Size([6])
        )
        return [planner.WriteItem(metadata.MetadataIndex(fqn, (2,)), planner.WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint import metadata

        return [metadata.ChunkStorageMetadata(torch.Size([2]), torch.Size([2]))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset == torch.Size([2])
        return self.data


def test_any_object_with_the_hooks() -> None:
    duck = Duck()
    (item,) = write_items("d", duck)
    assert item.index == MetadataIndex("d", (2,))
    found = local_tensor("d", duck)
    assert found is not None
    assert found.size == (6,)
    find_shard(duck, MetadataIndex("d", (2,))).fill_(4)
    assert duck.data.tolist() == [4, 4]
    assert find_state_dict_object({"d": duck}, MetadataIndex("d", (2,))).tolist() == [4, 4]


def sharded_tensor(
    parts: Sequence[tuple[tuple[int, ...], torch.Tensor]],
    size: tuple[int, ...],
    elsewhere: tuple[tuple[int, ...], tuple[int, ...]] | None = None,
) -> Any:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as StProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard as StShard

    shards = [StShard.from_tensor_and_offsets(tensor, list(offsets), dist.get_rank()) for offsets, tensor in parts]
    described = ShardedTensorMetadata(
        [shard.metadata for shard in shards], torch.Size(size), StProperties(parts[0][1].dtype)
    )
    if elsewhere is not None:
        described.shards_metadata.append(ShardMetadata(list(elsewhere[0]), list(elsewhere[1]), "rank:1/cpu"))
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, described)


def test_sharded_tensor() -> None:
    with as_rank(0):
        parts = [((0, 0), torch.ones(2, 3)), ((2, 0), torch.full((2, 3), 2.0))]
        tensor = sharded_tensor(parts, (4, 3))
        items = write_items("w", tensor)
        assert [tuple(item.index.offset or ()) for item in items] == [(0, 0), (2, 0)]
        assert find_shard(tensor, MetadataIndex("w", (2, 0))).data_ptr() == parts[1][1].data_ptr()
        assert find_tensor_shard(tensor, MetadataIndex("w", (2, 0), 1)).data_ptr() == parts[1][1].data_ptr()


def test_sharded_tensor_in_a_sharded_tensor() -> None:
    with as_rank(0):
        inner = sharded_tensor([((1, 0), torch.ones(2, 3))], (3, 3), ((0, 0), (1, 3)))
        outer = sharded_tensor([((0, 0), torch.zeros(3, 3))], (6, 3), ((3, 0), (3, 3)))
        shard = outer.local_shards()[0]
        shard.metadata.shard_offsets = [3, 0]
        shard.tensor = inner
        (item,) = write_items("w", outer)
        assert item.index.offset == (4, 0)
        assert item.tensor_data is not None
        assert item.tensor_data.chunk.sizes == (2, 3)
        assert item.tensor_data.size == (6, 3)


@pytest.mark.parametrize(
    "tensor", [torch.tensor(3.0), torch.arange(6).reshape(2, 3).t(), torch.nn.Parameter(torch.ones(2))]
)
def test_plain_tensors(tensor: torch.Tensor) -> None:
    (item,) = write_items("w", tensor)
    assert item.type is WriteItemType.TENSOR
    assert item.tensor_data is not None
    assert item.tensor_data.chunk.sizes == item.tensor_data.size == tensor.size()
    found = find_shard(tensor, item.index)
    assert found.data_ptr() == tensor.data_ptr()
    assert not found.requires_grad
    assert find_tensor_shard(tensor, item.index) is tensor
    assert find_shard(tensor, MetadataIndex("w")).data_ptr() == tensor.data_ptr()


def test_objects_have_no_shards() -> None:
    (item,) = write_items("o", {"lr": 1})
    assert item.type is WriteItemType.BYTE_IO
    assert item.index == MetadataIndex("o")
    assert local_tensor("o", 3) is None
    assert find_state_dict_object({"o": 3}, MetadataIndex("o")) == 3
    for call, says in (
        (lambda: find_state_dict_object({"o": 3}, MetadataIndex("o", (0,))), "'o' is a int, not .* ShardedTensor"),
        (lambda: find_state_dict_object({"o": 3}, MetadataIndex("x")), "FQN 'x'"),
        (lambda: find_shard(3, MetadataIndex("o")), "'o' is a int, not .* ShardedTensor"),
        (lambda: find_tensor_shard(torch.ones(2), MetadataIndex("o", (1,))), r"'o': Could not find shard at .*\(1,\)"),
    ):
        with pytest.raises(ShardNotFoundError, match=says):
            call()


def test_meta_tensors_have_boxes_but_no_data() -> None:
    meta = torch.empty(2, 3, device="meta")
    with pytest.raises(UnsupportedValueError, match="'m' is on the meta device"):
        write_items("m", meta)
    found = local_tensor("m", meta, allow_meta=True)
    assert found is not None
    assert found.chunks[0].sizes == (2, 3)


NO_STOCK = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from dcp_core.records.metadata import MetadataIndex
from dcp_core.shards.shards import find_shard
from dcp_core.tables.value_table import local_values
from dcp_core.testing.sharding import distribute
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
tensor = distribute(torch.zeros(8, 8), mesh, [Shard(0), Replicate()])
assert list(local_values({"w": tensor}).items) and find_shard(tensor, MetadataIndex("w", (0, 0))).shape == (4, 8)
sys.exit("torch.distributed.checkpoint" in sys.modules)
"""


def test_dtensors_do_not_import_stock() -> None:
    assert subprocess.run([sys.executable, "-W", "error", "-c", NO_STOCK], check=False).returncode == 0
