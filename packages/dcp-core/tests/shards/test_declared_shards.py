"""Tensors that declare their shards, as torch 2.15 has them; the attributes are all that is needed."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch

from dcp_core import UnsupportedValueError, load, load_keys, save
from dcp_core.shards.declared_shards import CheckpointableTensor, declares_shards
from dcp_core.testing.memory import MemoryReader, MemoryWriter

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
