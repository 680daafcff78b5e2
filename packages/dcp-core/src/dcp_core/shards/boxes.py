"""Boxes of a tensor that a rank holds: of a DTensor, or as attributes declare them.

Source: torch 2.13 `torch.distributed.tensor.placement_types` (`Shard._custom_chunk`, `_StridedShard._split_tensor`);
torch 2.15 `torch.distributed.checkpoint.protocol` (contract of `CheckpointableTensor`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeGuard, runtime_checkable

import torch

from dcp_core.errors import UnsupportedValueError
from dcp_core.tensors.kinds import FIELDS

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Intervals = list[tuple[int, int]]
_SPEC_FIELDS = {"mesh", "placements", "tensor_meta", "shard_order", "use_strided_shard_as_shard_order"}


class ShardedDim(NamedTuple):
    """Sharded tensor dimension; `split_factor` is 1 except for a `_StridedShard`."""

    dim: int
    split_factor: int = 1


class LocalBox(NamedTuple):
    """A box that a rank holds."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


@lru_cache(maxsize=4096)
def local_boxes(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[ShardedDim | None, ...],
) -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
    """Return a sharded tensor's local shape and boxes (row-major) at one mesh position.

    Local rows that are not contiguous globally have several boxes. A placement of None replicates.
    """
    intervals: list[Intervals] = [[(0, extent)] if extent else [] for extent in shape]
    for size, position, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if placement is not None:
            intervals[placement.dim] = _share(intervals[placement.dim], size, position, placement.split_factor)
    local_shape: list[int] = []
    rows: list[list[tuple[int, int, int]]] = []  # per dimension: first row, number of rows, first local row
    for runs in intervals:
        local, dim_rows = 0, []
        for begin, length in runs:
            dim_rows.append((begin, length, local))
            local += length
        local_shape.append(local)
        rows.append(dim_rows)
    boxes = [LocalBox(*zip(*box, strict=True)) if box else LocalBox((), (), ()) for box in itertools.product(*rows)]
    return tuple(local_shape), tuple(boxes)


def _share(runs: Intervals, parts: int, position: int, split_factor: int) -> Intervals:
    """Cut rows into `split_factor` pieces; return share `position` of `parts` of each piece."""
    total = sum([length for _, length in runs])
    taken: Intervals = []
    step = -(-total // split_factor)
    for start in range(0, total, step or 1):
        extent = min(step, total - start)
        share = -(-extent // parts)
        low, high = start + min(extent, share * position), start + min(extent, share * (position + 1))
        at = 0
        for begin, length in runs:
            first, last = max(low, at), min(high, at + length)
            if first < last and taken and sum(taken[-1]) == begin + first - at:
                taken[-1] = (taken[-1][0], taken[-1][1] + last - first)
            elif first < last:
                taken.append((begin + first - at, last - first))
            at += length
    return taken


def dtensor_boxes(fqn: str, tensor: DTensor, coordinate: Sequence[int]) -> tuple[tuple[int, ...], tuple[LocalBox, ...]]:
    """Return local shape and boxes at one mesh position; UnsupportedValueError for unknown layouts."""
    spec: Any = tensor._spec  # noqa: SLF001 - has no public form
    mesh_shape = tensor.device_mesh.shape
    dims = [_sharded_dim(fqn, placement) for placement in spec.placements]
    for each in fields(spec):
        if each.name not in _SPEC_FIELDS:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            if getattr(spec, each.name) != default:
                raise _unknown_layout(fqn, f"{each.name}={getattr(spec, each.name)!r} in its spec")
    for dim in _unordered_dims(spec.mesh):
        if dims[dim] is not None:
            raise UnsupportedValueError(
                f"{fqn!r} is a DTensor with an unknown layout: ranks do not ascend along dimension {dim} of its mesh, "
                "but PyTorch's groups sort them, so its shards are not where the mesh says; build the DeviceMesh with "
                "ascending ranks"
            )
    order = _mesh_order(fqn, getattr(spec, "shard_order", None), dims)
    return local_boxes(
        tuple(tensor.shape),
        tuple([mesh_shape[dim] for dim in order]),
        tuple([coordinate[dim] for dim in order]),
        tuple([dims[dim] for dim in order]),
    )


@lru_cache(maxsize=64)
def _unordered_dims(mesh: DeviceMesh) -> list[int]:
    """Return dimensions in which shards are not where the mesh says: PyTorch's groups sort their ranks."""
    return [dim for dim in range(mesh.ndim) if bool((mesh.mesh.diff(dim=dim) < 0).any())]


def _sharded_dim(fqn: str, placement: Placement) -> ShardedDim | None:
    if placement.is_partial():
        raise partial_error(fqn, placement)
    # A subclass may define another layout.
    kind = type(placement)
    name = kind.__name__ if kind.__module__ == "torch.distributed.tensor.placement_types" else ""
    if name == "Replicate":
        return None
    if name not in ("Shard", "_StridedShard"):
        raise _unknown_layout(fqn, f"the placement {placement!r} of class {kind.__module__}.{kind.__qualname__}")
    return ShardedDim(placement.dim, int(getattr(placement, "split_factor", 1)))  # type: ignore[attr-defined]


def partial_error(fqn: str, placement: Placement) -> UnsupportedValueError:
    """Return the error for values that are summed over ranks."""
    return UnsupportedValueError(
        f"{fqn!r} is a DTensor with the placement {placement}: its value exists only as a sum over ranks; "
        "redistribute it to Replicate or Shard first"
    )


def _unknown_layout(fqn: str, part: str) -> UnsupportedValueError:
    return UnsupportedValueError(
        f"{fqn!r} is a DTensor with an unknown layout, because of {part}: redistribute it to Shard or "
        "Replicate, or give its local tensor the methods __create_write_items__, __create_chunk_list__ and "
        "__get_tensor_shard__"
    )


def _mesh_order(fqn: str, shard_order: Any, dims: Sequence[ShardedDim | None]) -> Sequence[int]:
    """Return the mesh dimensions in sharding order; `shard_order` is None if a `_StridedShard` has it."""
    if shard_order is None:
        return range(len(dims))
    ordered = [(entry.tensor_dim, mesh_dim) for entry in shard_order for mesh_dim in entry.mesh_dims]
    sharded = sorted([(dim.dim, mesh_dim) for mesh_dim, dim in enumerate(dims) if dim is not None])
    if ordered == sharded:
        return range(len(dims))
    strided = any(dim is not None and dim.split_factor > 1 for dim in dims)
    if strided or sorted(ordered) != sharded:
        raise _unknown_layout(fqn, f"the shard order {shard_order}")
    return [*(mesh_dim for _, mesh_dim in ordered), *(at for at, dim in enumerate(dims) if dim is None)]


@runtime_checkable
class CheckpointableTensor(Protocol):
    """Attributes that make any `torch.Tensor` the shards of a global tensor, all in elements."""

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    """Offsets per shard in the local tensor; padding is allowed."""
    local_sizes: tuple[tuple[int, ...], ...]


def declares_shards(value: object) -> TypeGuard[CheckpointableTensor]:
    """Return whether a value has these attributes."""
    # Checked for every tensor: most lack the first attribute.
    return (
        hasattr(value, "global_shape") and isinstance(value, torch.Tensor) and all(hasattr(value, at) for at in FIELDS)
    )


def declared_boxes(fqn: str, tensor: CheckpointableTensor) -> tuple[LocalBox, ...]:
    """Return the non-empty boxes; UnsupportedValueError if attributes are inconsistent."""
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
    """Copy the attributes."""
    for name in FIELDS:
        setattr(target, name, getattr(source, name))


def _lies_within(start: Sequence[int], sizes: Sequence[int], shape: Sequence[int]) -> bool:
    fits = len(start) == len(sizes) == len(shape)
    return fits and all(
        at >= 0 and length >= 0 and at + length <= all_ for at, length, all_ in zip(start, sizes, shape, strict=True)
    )
