"""Tensors whose attributes describe them as shards of a global tensor: stock's `CheckpointableTensor`.

Source: torch 2.15 `torch.distributed.checkpoint.protocol` (contract). The module works with every version of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeGuard, runtime_checkable

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.shards.mesh_boxes import LocalBox

__all__ = ["CheckpointableTensor", "copy_declaration", "declared_boxes", "declares_shards"]

_FIELDS = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


@runtime_checkable
class CheckpointableTensor(Protocol):
    """A tensor whose attributes describe it as shards of a global tensor; set them on any `torch.Tensor`."""

    global_shape: tuple[int, ...]
    """Shape of the global tensor, in elements."""
    global_offsets: tuple[tuple[int, ...], ...]
    """Offsets of each shard in the global tensor, in elements."""
    local_offsets: tuple[tuple[int, ...], ...]
    """Offsets of each shard in this local tensor, in elements; there may be padding between shards."""
    local_sizes: tuple[tuple[int, ...], ...]
    """Sizes of each shard, in elements."""


def declares_shards(value: object) -> TypeGuard[CheckpointableTensor]:
    """Return whether an object is a tensor with the attributes of `CheckpointableTensor`."""
    # Checked for every tensor: most lack the first attribute.
    return (
        hasattr(value, "global_shape") and isinstance(value, torch.Tensor) and all(hasattr(value, at) for at in _FIELDS)
    )


def declared_boxes(fqn: str, tensor: CheckpointableTensor) -> tuple[LocalBox, ...]:
    """Return the boxes that a tensor's attributes describe, without empty boxes.

    Args:
        fqn: FQN of the tensor, for error messages.
        tensor: Tensor with the attributes of `CheckpointableTensor`.

    Raises:
        UnsupportedValueError: The attributes contradict each other or the tensor's shape; the message names the FQN.
    """
    shape = tuple(tensor.global_shape)
    columns = (tuple(tensor.global_offsets), tuple(tensor.local_offsets), tuple(tensor.local_sizes))
    if len(set(map(len, columns))) != 1:
        raise UnsupportedValueError(
            f"{fqn!r} declares {len(columns[0])} global_offsets, {len(columns[1])} local_offsets and {len(columns[2])} "
            "local_sizes; give one of each for every shard"
        )
    held = tuple(tensor.shape)  # type: ignore[attr-defined]
    for begin, start, sizes in zip(*columns, strict=True):
        if not (_lies_within(begin, sizes, shape) and _lies_within(start, sizes, held)):
            raise UnsupportedValueError(
                f"{fqn!r} declares a shard of sizes {tuple(sizes)} at {tuple(begin)} of a tensor of shape {shape}, and "
                f"at {tuple(start)} of a local one of shape {held}: it does not lie within both; correct the attributes"
            )
    boxes = (LocalBox(tuple(begin), tuple(sizes), tuple(start)) for begin, start, sizes in zip(*columns, strict=True))
    return tuple(box for box in boxes if 0 not in box.sizes or 0 in shape)


def copy_declaration(source: CheckpointableTensor, target: torch.Tensor) -> None:
    """Copy the attributes of `CheckpointableTensor` from one tensor to another."""
    for name in _FIELDS:
        setattr(target, name, getattr(source, name))


def _lies_within(start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    fits = len(start) == len(sizes) == len(shape)
    return fits and all(
        at >= 0 and length >= 0 and at + length <= all_ for at, length, all_ in zip(start, sizes, shape, strict=True)
    )
