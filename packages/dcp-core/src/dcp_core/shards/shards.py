"""Shards of a tensor on this rank: boxes of the global tensor, and the local memory of each box.

Supports plain tensors, `CheckpointableTensor`s, DTensors, ShardedTensors, and objects with stock's three methods
`__create_write_items__`, `__create_chunk_list__` and `__get_tensor_shard__` (such as a LocalShardsWrapper, also inside
a DTensor). These methods are never called on a DTensor itself, because they would import stock.

Source: torch 2.13 `torch.distributed.checkpoint.{planner_helpers,utils}` (contract).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dcp_core.errors import ShardNotFoundError, UnsupportedValueError
from dcp_core.records.foreign_records import as_chunk, as_properties, as_write_item
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.plan import WriteItem
from dcp_core.shards.declared_shards import declared_boxes, declares_shards
from dcp_core.shards.mesh_boxes import LocalBox, ShardedDim, local_boxes
from dcp_core.shards.tensor_checks import check_tensor
from dcp_core.tensors.dtensors import is_dtensor
from dcp_core.tensors.quantized import check_divisible, empty_like_part
from dcp_core.tensors.tensor_like import TensorLike

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = [
    "LocalShard",
    "LocalTensor",
    "box_view",
    "find_part",
    "find_shard",
    "find_state_dict_object",
    "find_tensor_shard",
    "hook_items",
    "is_sharded_tensor",
    "local_tensor",
    "sharded_dims",
]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One shard: a box of the global tensor that this rank holds, and access to its local memory."""

    offsets: torch.Size
    sizes: torch.Size
    get: Callable[[], torch.Tensor]
    """Function that returns the local memory of the box: detached, of shape `sizes`, on its own device."""


@dataclass(frozen=True, slots=True)
class LocalTensor(TensorLike):
    """The shards of one tensor on this rank; `shards` is empty if the rank holds no shard.

    In the state dict of a worker process, which saves for a rank, this record takes the place of the rank's tensor.
    """

    size: torch.Size
    """Shape of the global tensor."""
    properties: TensorProperties
    whole: bool
    """Whether the tensor is an ordinary, unsharded tensor, which each rank holds completely."""
    shards: tuple[LocalShard, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor's elements."""
        return self.properties.dtype

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes of the shards, as `ChunkStorageMetadata` records in the same order."""
        return [ChunkStorageMetadata(shard.offsets, shard.sizes) for shard in self.shards]


def local_tensor(fqn: str, value: object, *, allow_meta: bool = False) -> LocalTensor | None:
    """Return the shards of a tensor that this rank holds; None for an object that is no tensor.

    Args:
        fqn: FQN of the tensor or object, for error messages.
        value: Tensor of any kind, or object.
        allow_meta: Whether to accept tensors on the meta device, which have no data.

    Returns:
        The shards, in the order of the local memory. A rank outside a DTensor's mesh, or whose local tensor is empty,
        holds no shard. A tensor without elements has one empty shard on every rank.

    Raises:
        UnsupportedValueError: The tensor is of a kind that cannot be saved or loaded; the message names the FQN and a
            remedy.

    Ranks: every rank; not collective.
    """
    if isinstance(value, LocalTensor):
        return value
    if is_dtensor(value):
        return _of_dtensor(fqn, value, allow_meta=allow_meta)
    if hasattr(value, "__create_chunk_list__"):
        return _of_hooks(fqn, value, value)
    if is_sharded_tensor(value):
        return _of_sharded_tensor(fqn, value)
    if isinstance(value, torch.Tensor):
        return _of_tensor(fqn, value, allow_meta=allow_meta)
    return None


def hook_items(fqn: str, holder: Any, value: object) -> list[WriteItem]:
    """Return the write items from `holder.__create_write_items__`.

    Args:
        fqn: FQN of the tensor.
        holder: Object with the method: `value`, or the local tensor inside `value`.
        value: Tensor that is passed to the method.
    """
    return [as_write_item(item) for item in holder.__create_write_items__(fqn, value)]


def find_shard(value: object, index: MetadataIndex) -> torch.Tensor:
    """Return the local memory of one shard of a tensor; writing to the result changes the tensor.

    Args:
        value: Tensor of any kind.
        index: FQN (for error messages) and offset of the shard; without an offset, the only shard is returned.

    Raises:
        ShardNotFoundError: This rank holds no shard at this offset.
        UnsupportedValueError: The tensor is of a kind that cannot be saved or loaded.
    """
    if hasattr(value, "__get_tensor_shard__") and not is_dtensor(value):
        return _from_hook(value, index)()
    held = local_tensor(index.fqn, value)
    if held is None:
        raise _no_shards(index.fqn, value)
    if index.offset is None and len(held.shards) == 1:
        return held.shards[0].get()
    hint = index.index
    if hint is not None and 0 <= hint < len(held.shards) and held.shards[hint].offsets == index.offset:
        return held.shards[hint].get()
    for shard in held.shards:
        if shard.offsets == index.offset:
            return shard.get()
    here = ", ".join(str(tuple(shard.offsets)) for shard in held.shards) or "none"
    if index.offset is None:
        raise ShardNotFoundError(f"{index.fqn!r}: no offset was provided; shards here: {here}")
    wanted = tuple(index.offset)
    raise ShardNotFoundError(
        f"{index.fqn!r}: Could not find shard at offset {wanted} on this rank; shards here: {here}"
    )


def _no_shards(fqn: str, value: object) -> ShardNotFoundError:
    kind = type(value).__qualname__
    return ShardNotFoundError(f"{fqn!r} is a {kind}, not a tensor, DTensor or ShardedTensor: it has no shards")


def box_view(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], *, key: str) -> torch.Tensor:
    """Return a view of a box of a tensor; the tensor itself if the box is the whole tensor.

    Args:
        tensor: Strided tensor.
        offsets: Start of the box in each dimension, in elements.
        sizes: Size of the box in each dimension, in elements.
        key: FQN of the tensor, for error messages.

    Raises:
        UnsupportedValueError: The tensor is quantized by a scheme that does not support views.
    """
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if offset or size != tensor.size(dim):
            check_divisible(key, tensor)
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def sharded_dims(fqn: str, tensor: DTensor) -> tuple[ShardedDim | None, ...]:
    """Return for each mesh dimension how it shards a DTensor; None for a mesh dimension that replicates the tensor.

    Raises:
        UnsupportedValueError: A placement is `Partial` or unknown; the message names the FQN and a remedy.
    """
    return tuple(_neutral(fqn, placement) for placement in tensor.placements)


def find_part(value: object, fqn: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the local memory of a box that lies inside one of this rank's shards of a tensor.

    Args:
        value: Tensor of any kind.
        fqn: FQN of the tensor, for error messages.
        offsets: Start of the box in the global tensor, in elements.
        sizes: Sizes of the box, in elements.

    Raises:
        ShardNotFoundError: No shard of this rank contains the box.
        UnsupportedValueError: The tensor is of a kind that cannot be saved or loaded.
    """
    held = local_tensor(fqn, value)
    for shard in () if held is None else held.shards:
        within = tuple(begin - start for begin, start in zip(offsets, shard.offsets, strict=True))
        if all(at >= 0 and at + size <= all_ for at, size, all_ in zip(within, sizes, shard.sizes, strict=True)):
            return box_view(shard.get(), within, sizes, key=fqn)
    raise ShardNotFoundError(f"{fqn!r}: no shard of this rank holds the box at {tuple(offsets)} of {tuple(sizes)}")


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """Return the local memory of one shard of a tensor, as `find_shard` does; a plain tensor is returned itself.

    Source: torch 2.13 `torch.distributed.checkpoint.utils.find_tensor_shard`.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not (any(index.offset or ()) or declares_shards(tensor)):
        return tensor
    return find_shard(tensor, index)


def find_state_dict_object(state_dict: Mapping[str, Any], index: MetadataIndex) -> Any:
    """Return the object with the FQN in `index` from a flat state dict, or the local memory of a tensor's shard.

    Raises:
        ShardNotFoundError: The state dict has no such FQN, or the tensor has no shard at the offset in `index`.

    Source: torch 2.13 `torch.distributed.checkpoint.utils.find_state_dict_object`.
    """
    if index.fqn not in state_dict:
        raise ShardNotFoundError(f"the state dict has no object with the FQN {index.fqn!r}")
    value = state_dict[index.fqn]
    if isinstance(value, LocalTensor):
        return find_shard(value, index)
    if isinstance(value, torch.Tensor) or hasattr(value, "__get_tensor_shard__"):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise _no_shards(index.fqn, value)
    return value


def _of_tensor(fqn: str, tensor: torch.Tensor, *, allow_meta: bool) -> LocalTensor:
    check_tensor(fqn, tensor, allow_meta=allow_meta)
    if declares_shards(tensor):
        return _of_declared(fqn, tensor)
    size = tensor.size()
    shard = LocalShard(torch.Size((0,) * len(size)), size, tensor.detach)
    return LocalTensor(size, TensorProperties.create_from_tensor(tensor), True, (shard,))


def _of_declared(fqn: str, tensor: Any) -> LocalTensor:
    shards = tuple(
        LocalShard(torch.Size(box.offsets), torch.Size(box.sizes), _local_view(fqn, tensor, box))
        for box in declared_boxes(fqn, tensor)
    )
    return LocalTensor(torch.Size(tensor.global_shape), TensorProperties.create_from_tensor(tensor), False, shards)


def _of_dtensor(fqn: str, tensor: DTensor, *, allow_meta: bool) -> LocalTensor:
    placements = sharded_dims(fqn, tensor)
    local = tensor._local_tensor  # noqa: SLF001 - to_local() builds an autograd node
    if hasattr(local, "wait"):
        local = local.wait()
    if hasattr(local, "__create_chunk_list__"):
        return _of_hooks(fqn, local, tensor)
    check_tensor(fqn, local, allow_meta=allow_meta)
    properties = TensorProperties.create_from_tensor(local)
    properties.requires_grad = tensor.requires_grad
    coordinate = tensor.device_mesh.get_coordinate()
    shards: tuple[LocalShard, ...] = ()
    if coordinate is not None:
        shape = tuple(tensor.shape)
        local_shape, boxes = local_boxes(shape, tuple(tensor.device_mesh.shape), tuple(coordinate), placements)
        if tuple(local.shape) != local_shape:
            raise UnsupportedValueError(
                f"{fqn!r} is a DTensor of shape {shape} with placements {tensor.placements}: this rank should hold "
                f"{local_shape} of it but holds {tuple(local.shape)}; make it with distribute_tensor, or pass the "
                "right shape to DTensor.from_local"
            )
        shards = tuple(
            LocalShard(torch.Size(box.offsets), torch.Size(box.sizes), _local_view(fqn, local, box)) for box in boxes
        )
        if not tensor.numel():
            # No rank holds a box of it, but it must not vanish from the checkpoint.
            none = torch.Size((0,) * len(shape))
            shards = (LocalShard(none, tensor.size(), lambda: empty_like_part(fqn, local, shape)),)
    return LocalTensor(tensor.size(), properties, False, shards)


def _neutral(fqn: str, placement: Placement) -> ShardedDim | None:
    if placement.is_replicate():
        return None
    if placement.is_partial():
        raise UnsupportedValueError(
            f"{fqn!r} is a DTensor with the placement {placement}: its value exists only as a sum over ranks; "
            "redistribute it to Replicate or Shard first"
        )
    dim = getattr(placement, "dim", None)
    if not isinstance(dim, int):
        raise UnsupportedValueError(f"{fqn!r} is a DTensor with the unknown placement {placement!r}; redistribute it")
    return ShardedDim(dim, int(getattr(placement, "split_factor", 1)))


def _local_view(fqn: str, local: torch.Tensor, box: LocalBox) -> Callable[[], torch.Tensor]:
    return lambda: box_view(local.detach(), box.local_offsets, box.sizes, key=fqn)


def _of_hooks(fqn: str, holder: Any, value: Any) -> LocalTensor:
    """Return the shards that the hooks of `holder` give; `value` is `holder`, or the DTensor around it."""
    written = [item.tensor_data for item in hook_items(fqn, holder, value) if item.tensor_data is not None]
    if written:
        size, properties = written[0].size, written[0].properties
    else:
        size, properties = value.size(), _properties_of(holder)
    chunks = [as_chunk(chunk) for chunk in holder.__create_chunk_list__()]
    shards = tuple(
        LocalShard(chunk.offsets, chunk.sizes, _from_hook(holder, MetadataIndex(fqn, chunk.offsets, position)))
        for position, chunk in enumerate(chunks)
        if written and len(chunk.sizes) == len(size) and (0 not in chunk.sizes or 0 in size)
    )
    return LocalTensor(size, properties, False, shards)


def _properties_of(holder: Any) -> TensorProperties:
    described = getattr(holder, "storage_metadata", None)
    if described is not None:
        return as_properties(described().properties)
    return TensorProperties(dtype=holder.dtype)


def _from_hook(holder: Any, index: MetadataIndex) -> Callable[[], torch.Tensor]:
    def get() -> torch.Tensor:
        try:
            found: torch.Tensor = holder.__get_tensor_shard__(index)
        except (LookupError, ValueError) as error:
            kind = type(holder).__qualname__
            raise ShardNotFoundError(f"{index.fqn!r}: the {kind} has no shard for {index}: {error}") from error
        return found.detach()

    return get


def is_sharded_tensor(value: object) -> bool:
    """Return whether an object is a ShardedTensor, without calling its methods."""
    # By name: importing ShardedTensor costs time, and no value can be one before its module is imported.
    return any(
        cls.__name__ == "ShardedTensor" and cls.__module__.startswith("torch.distributed._shard.")
        for cls in type(value).__mro__
    )


def _of_sharded_tensor(fqn: str, tensor: Any) -> LocalTensor:
    described = tensor.metadata()
    shards: list[LocalShard] = []
    for shard in tensor.local_shards():
        start = shard.metadata.shard_offsets
        inner = local_tensor(fqn, shard.tensor)
        if inner is None or (inner.whole and list(inner.size) != list(shard.metadata.shard_sizes)):
            raise UnsupportedValueError(
                f"the shard of {fqn!r} at {tuple(start)} does not have the sizes that its ShardedTensor says: "
                f"{tuple(shard.tensor.size())}, not {tuple(shard.metadata.shard_sizes)}"
            )
        shards.extend(
            LocalShard(
                torch.Size(map(sum, itertools.zip_longest(start, part.offsets, fillvalue=0))), part.sizes, part.get
            )
            for part in inner.shards
            if 0 not in part.sizes
        )
    return LocalTensor(torch.Size(described.size), as_properties(described.tensor_properties), False, tuple(shards))
