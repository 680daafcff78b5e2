"""Conversion between whole tensors and this rank's shards, without communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dcp_core.toolkit import LocalShard, box_view, is_dtensor, local_tensor
from dcp_state.errors import StateMismatchError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["box_of", "fill_shards", "place", "same_placement"]


def box_of(fqn: str, whole: torch.Tensor, shard: LocalShard) -> torch.Tensor:
    """Return the region of a whole tensor that a shard holds, as a view."""
    return box_view(whole, shard.offsets, shard.sizes, key=fqn)


def same_placement(value: DTensor, like: DTensor) -> bool:
    """Whether two DTensors have the same boxes of the global tensor on each rank."""
    return value.device_mesh == like.device_mesh and value.placements == like.placements


def fill_shards(fqn: str, whole: torch.Tensor, target: torch.Tensor) -> None:
    """Copy this rank's shards of a whole tensor in place into a tensor or DTensor of the same global shape."""
    held = local_tensor(fqn, target)
    if held is None:
        raise StateMismatchError(fqn, [f"{fqn}: a {type(target).__name__} cannot take a tensor"])
    with torch.no_grad():
        for shard in held.shards:
            shard.get().copy_(box_of(fqn, whole, shard))


def place(fqn: str, value: Any, like: Any) -> Any:
    """Return `value` with the sharding of the tensor `like`; shares memory with `value` if possible.

    Args:
        fqn: FQN, for error messages.
        value: Tensor to shard; a value of another type is returned unchanged.
        like: The tensor whose sharding `value` gets.

    Raises:
        StateMismatchError: The global shapes differ, or `value` is sharded and `like` is not.

    Ranks: every rank with shards of `value` or `like`; collective only if both are sharded, and differently.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(like, torch.Tensor):
        return value
    if is_dtensor(like):
        if is_dtensor(value):
            if same_placement(value, like):
                return value
            if value.device_mesh == like.device_mesh:
                return value.redistribute(like.device_mesh, like.placements)
            raise StateMismatchError(fqn, [f"{fqn}: sharded over another device mesh; get it with full_state_dict"])
        return _shard(fqn, value, like) if value.shape == like.shape else value
    if is_dtensor(value):
        raise StateMismatchError(
            fqn, [f"{fqn}: is sharded here, but a plain tensor in the model; get it with full_state_dict=True"]
        )
    return value


def _shard(fqn: str, whole: torch.Tensor, like: DTensor) -> DTensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - imported long since, as there is one

    held = local_tensor(fqn, like, allow_meta=True)
    shards = held.shards if held is not None else ()
    local_shape = like.to_local().shape
    is_one = len(shards) == 1 and tuple(shards[0].sizes) == tuple(local_shape)
    local = (
        box_of(fqn, whole, shards[0]) if is_one else torch.empty(local_shape, dtype=whole.dtype, device=whole.device)
    )
    made = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    if shards and not is_one:
        fill_shards(fqn, whole, made)
    return made
