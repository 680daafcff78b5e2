"""Gathering of sharded tensors to whole tensors: on every rank, or in pieces on rank 0 only.

Each rank needs memory for its result and for one more tensor, or for one more piece if only rank 0 gets whole tensors.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dcp_core.toolkit import LocalBox, box_view, is_dtensor, local_boxes, local_tensor, sharded_dims
from dcp_state.options import StateDictOptions
from dcp_state.sharding.together import PIECE_BYTES, Errors, all_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["convert_tensors", "map_tensors", "named_tensors"]


def convert_tensors(state_dict: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
    """Return the state dict with tensors gathered to whole tensors, and moved to the CPU, according to the options.

    Args:
        state_dict: Nested dicts and lists, which are not changed.
        options: Options; `full_state_dict` and `cpu_offload` are used.

    Returns:
        A new state dict; with both options, an empty dict on all ranks except rank 0.

    Raises:
        CheckpointException: A rank failed; raised on all ranks after the last exchange, so no rank hangs.

    Ranks: with `full_state_dict`, every rank that holds shards; collective.
    """
    if not options.full_state_dict:
        return dict(map_tensors(state_dict, _to_cpu)) if options.cpu_offload else state_dict
    found = list(named_tensors(state_dict))
    sharded = [(name, value) for name, value in found if is_dtensor(value)]
    to_first = options.cpu_offload and dist.is_initialized()
    keeps = not to_first or dist.get_rank() == 0
    results: dict[int, torch.Tensor] = {}
    everyone = bool(sharded) and all(value.device_mesh.size() == dist.get_world_size() for _, value in sharded)
    with all_ranks("full state dict", alone=not everyone) as (coordinator, errors):
        described = [(name, tuple(value.shape), str(value.placements)) for name, value in sharded]
        # A digest, as Python's own hash of a string is another one in each process.
        digest = hashlib.sha256(repr(described).encode()).hexdigest()
        coordinator.agree("full state dict: names", digest, "digests of names, shapes and shardings")
        for name, value in sharded:
            whole = _to_rank_0(name, value, errors) if to_first else _to_all(value, errors)
            if whole is not None and keeps:
                results[id(value)] = whole
    if not keeps:
        return {}
    finish: Callable[[torch.Tensor], Any] = _to_cpu if options.cpu_offload else (lambda tensor: tensor)
    return dict(map_tensors(state_dict, lambda tensor: finish(results.get(id(tensor), tensor))))


def map_tensors(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Copy nested dicts, lists and tuples, and replace each tensor by `function(tensor)`."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(each, function) for name, each in value.items()}
    if isinstance(value, list):
        return [map_tensors(each, function) for each in value]
    if type(value) is tuple:
        return tuple(map_tensors(each, function) for each in value)
    return value


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, each with its dotted name: keys and indices joined by dots."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from named_tensors(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from named_tensors(each, f"{name}.{index}")


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu")


def _to_all(value: DTensor, errors: Errors) -> torch.Tensor | None:
    whole = value.full_tensor()
    return errors.attempt(whole.detach)


def _to_rank_0(name: str, value: DTensor, errors: Errors) -> torch.Tensor | None:
    """Gather a whole tensor on the CPU of rank 0 (None elsewhere); no communication if rank 0 holds no shard of it."""
    ranks = value.device_mesh.mesh.flatten().tolist()
    if 0 not in ranks:
        return None
    me = dist.get_rank()
    held = local_tensor(name, value)
    mine = {tuple(shard.offsets): shard.get() for shard in held.shards} if held is not None else {}
    whole = errors.attempt(lambda: torch.empty(value.shape, dtype=value.dtype, device="cpu")) if me == 0 else None
    for box, owner in _owners(name, value).items():
        if 0 < me != owner:
            continue
        part = mine.get(box.offsets)
        if me == 0 and owner == 0:
            if whole is not None and part is not None:
                box_view(whole, box.offsets, box.sizes, key=name).copy_(part)
        else:
            _send_or_receive(name, box, owner, part, whole, value)
    return whole


def _send_or_receive(
    name: str, box: LocalBox, owner: int, part: torch.Tensor | None, whole: torch.Tensor | None, value: DTensor
) -> None:
    """Move one box from its owner to rank 0, in pieces of whole rows."""
    rows = box.sizes[0] if box.sizes else 1
    row_bytes = max(1, value.element_size() * math.prod(box.sizes[1:]))
    step = max(1, PIECE_BYTES // row_bytes)
    device = value.to_local().device
    for start in range(0, rows, step):
        stop = min(rows, start + step)
        shape = (stop - start, *box.sizes[1:]) if box.sizes else ()
        if dist.get_rank() == owner:
            piece = part if part is None or not box.sizes else part[start:stop]
            sent = torch.zeros(shape, dtype=value.dtype, device=device) if piece is None else piece.contiguous()
            dist.send(sent, dst=0)
            continue
        buffer = torch.empty(shape, dtype=value.dtype, device=device)
        dist.recv(buffer, src=owner)
        if whole is not None:
            target = box_view(whole, box.offsets, box.sizes, key=name)
            (target[start:stop] if box.sizes else target).copy_(buffer)


def _owners(name: str, value: DTensor) -> dict[LocalBox, int]:
    """Return each box of a tensor with the first rank that holds it; the same on all ranks."""
    mesh = value.device_mesh.mesh
    placements = sharded_dims(name, value)
    owners: dict[LocalBox, int] = {}
    seen: set[tuple[int, ...]] = set()
    for coordinate in itertools.product(*map(range, mesh.shape)):
        _, boxes = local_boxes(tuple(value.shape), tuple(mesh.shape), coordinate, placements)
        for box in boxes:
            if box.offsets not in seen:
                seen.add(box.offsets)
                owners[box] = int(mesh[coordinate])
    return owners
