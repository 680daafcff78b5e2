"""Holders of a state dict's tensors: the ranks that hold each box, as far as one rank can compute it, for diagrams."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dcp_core.records.protocols import with_states
from dcp_core.shards.mesh_boxes import local_boxes
from dcp_core.shards.shards import is_sharded_tensor, local_tensor, sharded_dims
from dcp_core.state_dict.flatten import flatten
from dcp_core.state_dict.per_rank import with_rank_values
from dcp_core.tensors.dtensors import is_dtensor

__all__ = ["HeldTensor", "find_holders"]

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, in elements."""


class HeldTensor(NamedTuple):
    """A tensor of a state dict, and the ranks that hold its boxes.

    `name` is the FQN, `shape` the global shape, and `item_bytes` the size of one element in bytes.
    """

    name: str
    dtype: str
    """Name of the torch dtype without `torch.`."""
    shape: tuple[int, ...]
    item_bytes: int
    boxes: dict[Box, tuple[int, ...]]
    """Box → ranks of the job that hold it; no ranks for an ordinary tensor, of which each rank has its own copy."""


def find_holders(state_dict: Mapping[Any, Any], rank: int) -> tuple[list[HeldTensor], int]:
    """Find the ranks that hold the tensors of a state dict, without communication.

    The result has the boxes of all ranks for DTensors and ShardedTensors, and only this rank's boxes for other tensors.

    Args:
        state_dict: State dict as for `save`.
        rank: Rank of this process in the job.

    Returns:
        The tensors with their holders, and the number of objects in the state dict.

    Raises:
        UnsupportedValueError: A tensor is of a kind that cannot be saved.

    Ranks: one rank; collective only if the `state_dict()` of a `Stateful` in the state dict is.
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
    """Yield each box with the rank that holds it; a box that several ranks hold comes once for each."""
    if is_dtensor(value) and not hasattr(value._local_tensor, "__create_chunk_list__"):  # noqa: SLF001
        mesh, placements = value.device_mesh, sharded_dims(name, value)
        for coordinate in itertools.product(*map(range, mesh.shape)):
            _, parts = local_boxes(tuple(value.shape), tuple(mesh.shape), coordinate, placements)
            for part in parts:
                yield (part.offsets, part.sizes), int(mesh.mesh[coordinate])
    elif is_sharded_tensor(value):
        for shard in value.metadata().shards_metadata:
            yield (tuple(shard.shard_offsets), tuple(shard.shard_sizes)), int(shard.placement.rank())
    else:
        held = local_tensor(name, value, allow_meta=True)
        for chunk in () if held is None else held.chunks:
            yield (tuple(chunk.offsets), tuple(chunk.sizes)), rank
