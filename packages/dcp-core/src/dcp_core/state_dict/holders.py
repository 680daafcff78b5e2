"""Find which ranks hold each box of a state dict's tensors, without communication, for diagrams."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dcp_core.records.protocols import with_states
from dcp_core.shards.boxes import dtensor_boxes
from dcp_core.shards.shards import is_sharded_tensor, local_tensor, shard_method
from dcp_core.state_dict.flatten import flatten
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.tensors.kinds import is_dtensor
from dcp_core.tensors.tensor_memory import Box


class HeldTensor(NamedTuple):
    """A tensor, and the ranks that hold its boxes."""

    name: str
    dtype: str
    """Name without `torch.`."""
    shape: tuple[int, ...]
    item_bytes: int
    boxes: dict[Box, tuple[int, ...]]
    """Box → ranks that hold it; empty if each rank has a copy."""


def find_holders(state_dict: Mapping[Any, Any], rank: int) -> tuple[list[HeldTensor], int]:
    """Return tensors with their ranks, and the number of objects.

    Only DTensors and ShardedTensors have other ranks' boxes. Ranks: one; collective only if a `state_dict()` is.
    """
    states = with_states(dict(state_dict))
    shared, flat = flatten(states).values.keys(), flatten(with_rank_values(states, rank)).values
    tensors, objects = [], 0
    for name, value in flat.items():
        held = local_tensor(name, value, allow_meta=True)
        if held is None:
            objects += 1
            continue
        dtype = str(held.dtype).removeprefix("torch.")
        boxes: dict[Box, list[int]] = defaultdict(list)
        if held.whole:
            boxes[(0,) * len(held.size), tuple(held.size)] = [] if name in shared else [rank]
        else:
            for box, holder in _boxes(name, value, rank):
                boxes[box].append(holder)
        holders = {box: tuple(sorted(ranks)) for box, ranks in boxes.items()}
        tensors.append(HeldTensor(name, dtype, tuple(held.size), held.dtype.itemsize, holders))
    return tensors, objects


def _boxes(name: str, value: Any, rank: int) -> Iterator[tuple[Box, int]]:
    if is_dtensor(value) and shard_method(value, "__create_chunk_list__") is None:
        mesh = value.device_mesh
        for coordinate in itertools.product(*map(range, mesh.shape)):
            _, parts = dtensor_boxes(name, value, coordinate)
            for part in parts:
                yield (part.offsets, part.sizes), int(mesh.mesh[coordinate])
    elif is_sharded_tensor(value):
        for shard in value.metadata().shards_metadata:
            yield (tuple(shard.shard_offsets), tuple(shard.shard_sizes)), int(shard.placement.rank())
    else:
        held = local_tensor(name, value, allow_meta=True)
        for chunk in () if held is None else held.chunks:
            yield (tuple(chunk.offsets), tuple(chunk.sizes)), rank
