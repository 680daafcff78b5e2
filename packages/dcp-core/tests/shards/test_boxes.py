"""Against torch's own splitting, which needs no process group."""

from __future__ import annotations

import itertools
import math
import uuid
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_core import UnsupportedValueError, load, load_keys, save
from dcp_core.shards.boxes import CheckpointableTensor, LocalBox, ShardedDim, declares_shards, local_boxes
from integration_tests.kits.memory import MemoryReader, MemoryWriter


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[ShardedDim | None, ...]]:
    ndim = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=ndim, max_size=ndim)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    dims = st.integers(0, ndim - 1)
    placement = st.none() | st.builds(ShardedDim, dims, st.just(1)) | st.builds(ShardedDim, dims, st.integers(2, 4))
    return shape, mesh, tuple(draw(placement) for _ in mesh)


def torch_local(
    whole: torch.Tensor, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[ShardedDim | None, ...]
) -> torch.Tensor:
    local = whole
    for size, position, placement in zip(mesh, coordinate, placements, strict=True):
        if placement is not None:
            plain = placement.split_factor == 1
            torchs = (
                Shard(placement.dim) if plain else _StridedShard(placement.dim, split_factor=placement.split_factor)
            )
            local = torchs._split_tensor(local, size, with_padding=False, contiguous=True)[0][position]
    return local


@pytest.mark.newest
@settings(max_examples=150, deadline=None)
@given(layouts())
def test_boxes_hold_what_torch_puts_there(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[ShardedDim | None, ...]],
) -> None:
    shape, mesh, placements = layout
    whole = torch.arange(math.prod(shape)).reshape(shape)
    for coordinate in itertools.product(*map(range, mesh)):
        expected = torch_local(whole, mesh, coordinate, placements)
        local_shape, boxes = local_boxes(shape, mesh, coordinate, placements)
        assert local_shape == tuple(expected.shape)
        found = torch.full(local_shape, -1)
        for box in boxes:
            source, target = whole, found
            for dim, size in enumerate(box.sizes):
                source = source.narrow(dim, box.offsets[dim], size)
                target = target.narrow(dim, box.local_offsets[dim], size)
            target.copy_(source)
        assert torch.equal(found, expected)
        assert sum(math.prod(box.sizes) for box in boxes) == expected.numel()


def test_neighbouring_runs_are_one_box() -> None:
    # FSDP over tensor parallelism: cut for the second mesh dimension first, so that each rank holds one run.
    placements = (ShardedDim(0, 2), ShardedDim(0))
    found = {xy: local_boxes((8, 3), (2, 2), xy, placements)[1] for xy in itertools.product(range(2), range(2))}
    assert {xy: [box.offsets[0] for box in boxes] for xy, boxes in found.items()} == {
        (0, 0): [0],
        (0, 1): [4],
        (1, 0): [2],
        (1, 1): [6],
    }


def test_pieces_that_follow_each_other_are_one_box() -> None:
    assert local_boxes((8,), (1,), (0,), (ShardedDim(0, 2),)) == ((8,), (LocalBox((0,), (8,), (0,)),))


def test_rows_that_are_no_run_are_several_boxes() -> None:
    assert local_boxes((8,), (2,), (1,), (ShardedDim(0, 2),)) == (
        (4,),
        (LocalBox((2,), (2,), (0,)), LocalBox((6,), (2,), (2,))),
    )


def test_nothing_left_for_the_last_ranks() -> None:
    assert local_boxes((3, 2), (4,), (3,), (ShardedDim(0),)) == ((0, 2), ())
    assert local_boxes((3, 0), (2,), (0,), (None,)) == ((3, 0), ())


WHOLE = torch.arange(24.0).reshape(6, 4)


def declare(tensor: torch.Tensor, **fields: Any) -> torch.Tensor:
    for name, value in fields.items():
        setattr(tensor, name, value)
    return tensor


def all_shards(values: torch.Tensor) -> torch.Tensor:
    """Both halves of `WHOLE` in one local tensor, in the other order, with a row of padding between them."""
    local = torch.cat([values[3:], torch.full((1, 4), -1.0), values[:3]])
    fields = {"global_offsets": ((0, 0), (3, 0)), "local_offsets": ((4, 0), (0, 0)), "local_sizes": ((3, 4), (3, 4))}
    return declare(local, global_shape=(6, 4), **fields)


def test_a_tensor_without_the_attributes_declares_nothing() -> None:
    assert not declares_shards(WHOLE)
    assert not declares_shards(declare(torch.zeros(2), global_shape=(2,)))
    assert not declares_shards("text")
    declared: Any = all_shards(WHOLE)
    assert declares_shards(declared)
    assert isinstance(declared, CheckpointableTensor)


def test_shards_make_up_the_global_tensor() -> None:
    folder = uuid.uuid4().hex
    save({"w": all_shards(WHOLE), "other": torch.ones(2)}, storage_writer=MemoryWriter(folder))
    assert torch.equal(load_keys(storage_reader=MemoryReader(folder))["w"], WHOLE)
    template = all_shards(torch.zeros(6, 4))
    load({"w": template}, storage_reader=MemoryReader(folder))
    assert torch.equal(template, all_shards(WHOLE))  # the padding included, which no shard covers


def test_a_part_is_loaded_from_what_was_saved_whole() -> None:
    folder = uuid.uuid4().hex
    save({"w": WHOLE}, storage_writer=MemoryWriter(folder))
    part = declare(
        torch.zeros(2, 2), global_shape=(6, 4), global_offsets=((2, 1),), local_offsets=((0, 0),), local_sizes=((2, 2),)
    )
    load({"w": part}, storage_reader=MemoryReader(folder))
    assert torch.equal(part, WHOLE[2:4, 1:3])


def test_meta_tensors_keep_their_declaration() -> None:
    folder = uuid.uuid4().hex
    save({"w": WHOLE}, storage_writer=MemoryWriter(folder))
    meta = all_shards(torch.zeros(6, 4))
    fields = {name: getattr(meta, name) for name in ("global_shape", "global_offsets", "local_offsets", "local_sizes")}
    state = {"w": declare(meta.to("meta"), **fields)}
    load(state, storage_reader=MemoryReader(folder))
    assert torch.equal(state["w"][:3], WHOLE[3:])
    assert torch.equal(state["w"][4:], WHOLE[:3])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_sizes": ((3, 4),)}, "one of each"),
        ({"global_offsets": ((0, 0), (4, 0))}, "within both"),
        ({"local_offsets": ((5, 0), (0, 0))}, "within both"),
        ({"local_offsets": ((-1, 0), (0, 0))}, "within both"),
        ({"global_shape": (24,)}, "within both"),
        ({"local_sizes": ((3,), (3,))}, "within both"),
    ],
)
def test_declarations_that_contradict_themselves(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedValueError, match=f"'w' declares .*{words}"):
        save({"w": declare(all_shards(WHOLE), **change)}, storage_writer=MemoryWriter(uuid.uuid4().hex))
