"""What a rank holds of a value. Ranks are fake process groups: nothing is sent."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

from dcp_core.errors import PlanError, UnsupportedValueError
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.protocols import TensorWriteData, WriteItem, WriteItemType
from dcp_core.shards.shards import (
    find_part,
    find_shard,
    find_state_dict_object,
    find_tensor_shard,
    local_tensor,
    written_tensor,
)
from dcp_core.state_dict.holders import find_holders
from dcp_core.tables.value_table import local_values
from dcp_core.tensors.kinds import with_local
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
            assert [type(item).__module__ for item in items] == ["dcp_core.records.protocols"] * 2
            assert [tuple(item.index.offset or ()) for item in items] == [(0, 0), (4, 0)]
            assert {tuple(item.tensor_data.size) for item in items if item.tensor_data} == {size}
            found = local_tensor("w", value)
            assert found is not None
            assert [tuple(chunk.sizes) for chunk in found.chunks] == [(2, 2), (3, 2)]
            assert find_shard(value, MetadataIndex("w", (4, 0))).data_ptr() == parts[1].data_ptr()
            with pytest.raises(PlanError, match=r"^'w'.*(shards here: \(0, 0\), \(4, 0\)|LocalShardsWrapper)"):
                find_shard(value, MetadataIndex("w", (1, 0)))
            with pytest.raises(PlanError, match=r"^'w'.*(no offset was provided|LocalShardsWrapper)"):
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
        with pytest.raises(PlanError, match=says):
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


def ordered(whole: torch.Tensor, order: Sequence[int], mesh_shape: tuple[int, ...]) -> DTensor:
    """Return a DTensor whose dimension 0 is sharded over the mesh dimensions in this order."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh = DeviceMesh("cpu", torch.arange(WORLD).reshape(mesh_shape))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = whole
    for dim in order:
        chunks = [*local.chunk(mesh_shape[dim]), *[local[:0]] * mesh_shape[dim]]
        local = chunks[coordinate[dim]]
    spec = DTensorSpec(
        mesh,
        tuple(Shard(0) if dim in order else Replicate() for dim in range(len(mesh_shape))),
        tensor_meta=TensorMeta(whole.shape, whole.stride(), whole.dtype),
        shard_order=(ShardOrderEntry(tensor_dim=0, mesh_dims=tuple(order)),),
    )
    return DTensor(local.clone(), spec, requires_grad=False)


@pytest.mark.newest
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize(
    ("order", "mesh_shape"),
    [((0, 1), (2, 2)), ((1, 0), (2, 2)), ((1, 0), (4, 1)), ((2, 0), (2, 1, 2)), ((2, 0, 1), (2, 1, 2))],
)
def test_the_order_of_shards_is_followed(rows: int, order: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    whole = torch.arange(rows * 2.0).reshape(rows, 2)
    seen = torch.zeros(rows, dtype=torch.int64)
    for rank in range(WORLD):
        with as_rank(rank):
            value = ordered(whole, order, mesh_shape)
            found, again = (
                local_tensor("w", value),
                local_tensor("w", with_local(value, torch.empty_like(value._local_tensor))),
            )
            assert found is not None
            assert again is not None
            assert found.chunks == again.chunks
            for shard in found.shards:
                start, count = shard.offsets[0], shard.sizes[0]
                assert torch.equal(shard.get(), whole[start : start + count])
                seen[start : start + count] += 1
            held, _ = find_holders({"w": value}, rank)
            assert rows == 0 or all(rank in held[0].boxes[tuple(c.offsets), tuple(c.sizes)] for c in found.chunks)
    assert len(set(seen.tolist())) <= 1


class Interleaved(Shard):
    """Rank r holds rows r, r + n, r + 2n, …"""


class OwnReplica(Replicate):
    pass


def _with_field(value: DTensor, setting: object) -> DTensor:
    """Return the tensor with a spec of a later torch, with one field more."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    later = dataclasses.make_dataclass("Later", [("padding", object, 0)], bases=(DTensorSpec,), eq=False)
    spec = value._spec
    made = later(spec.mesh, spec.placements, spec.tensor_meta)
    made.padding = setting
    value._spec = made
    return value


@pytest.mark.parametrize(
    ("placement", "setting", "words"),
    [
        (Interleaved(0), None, "Interleaved"),
        (OwnReplica(), None, "OwnReplica"),
        (Partial(), None, "sum over ranks"),
        (Shard(0), 1, "padding=1"),
        (Shard(0), 0, None),
    ],
)
def test_layouts_that_are_not_known_are_refused_by_key(placement: Any, setting: object, words: str | None) -> None:
    with as_rank(1):
        mesh = DeviceMesh("cpu", torch.arange(WORLD))
        rows = 8 if isinstance(placement, OwnReplica) else 2
        value = DTensor.from_local(
            torch.zeros(rows, 2), mesh, [placement], run_check=False, shape=(8, 2), stride=(2, 1)
        )
        if setting is not None:
            value = _with_field(value, setting)
        for look in (
            lambda: local_values({"w": value}),
            lambda: local_tensor("w", value),
            lambda: find_holders({"w": value}, 0),
        ):
            with (
                contextlib.nullcontext()
                if words is None
                else pytest.raises(UnsupportedValueError, match=f"^'w' .*{words}")
            ):
                look()


def described(kind: str, methods: Sequence[str], rank: int) -> Any:
    """Return a part of a tensor of 7 rows, uneven or even, which describes itself by some of the three methods."""
    whole = torch.arange(14.0).reshape(7, 2)
    even = "__create_chunk_list__" not in methods and "__create_write_items__" not in methods
    start, stop = ((0, 4), (4, 7))[rank] if even else ((0, 1), (1, 7))[rank]
    local = whole[start:stop].clone()
    if kind == "dtensor":
        mesh = DeviceMesh("cpu", torch.arange(2))
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(7, 2), stride=(2, 1))
        holder = value._local_tensor
    else:
        holder = value = local
    box = torch.Size([start, 0]), torch.Size(local.shape)
    item = WriteItem(
        MetadataIndex("w", box[0]),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(ChunkStorageMetadata(*box), TensorProperties(torch.float32), torch.Size([7, 2])),
    )
    made = {
        "__create_write_items__": lambda fqn, _: [item],
        "__create_chunk_list__": lambda: [ChunkStorageMetadata(*box)],
        "__get_tensor_shard__": lambda index: holder.mul(1),
    }
    for name in methods:
        setattr(holder, name, made[name])
    return value


METHODS = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
SOME_METHODS = [some for count in range(4) for some in itertools.combinations(METHODS, count)]


@pytest.mark.parametrize("kind", ["dtensor", "tensor"])
@pytest.mark.parametrize("methods", SOME_METHODS)
def test_each_method_of_a_shard_stands_for_itself(kind: str, methods: tuple[str, ...]) -> None:
    whole = torch.arange(14.0).reshape(7, 2)
    parts = kind == "dtensor" or {"__create_write_items__", "__create_chunk_list__"} & {*methods}
    for rank in range(2):
        with as_rank(rank):
            value = described(kind, methods, rank)
            (item,) = write_items("w", value)
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            rows = slice(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0])
            if parts and not (kind == "tensor" and "__create_write_items__" not in methods):
                assert item.tensor_data.size == (7, 2)
                assert torch.equal(find_part(value, "w", chunk.offsets, chunk.sizes), whole[rows])
            staged = written_tensor("w", value)
            assert staged is not None
            assert staged.chunks == [chunk]
            if "__get_tensor_shard__" in methods:  # even where the box is the whole tensor
                assert staged.shards[0].get().data_ptr() != value.data_ptr() if kind == "tensor" else True


def test_a_shard_without_data_is_refused_by_key() -> None:
    with as_rank(1):
        value = described("dtensor", METHODS[:2], 1)
        value._local_tensor.__create_chunk_list__ = lambda: [  # type: ignore[attr-defined]
            ChunkStorageMetadata(torch.Size([at, 0]), torch.Size([3, 2])) for at in (1, 4)
        ]
        with pytest.raises(UnsupportedValueError, match=r"^'w' describes a shard .*__get_tensor_shard__"):
            local_tensor("w", value)
