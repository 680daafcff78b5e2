"""Shards of a tensor on this rank: boxes of the global tensor, and their local memory.

Objects may have stock's methods `__create_write_items__`, `__create_chunk_list__` and `__get_tensor_shard__`; DTensor's
own are never called, because they import stock.

Source: torch 2.13 `torch.distributed.checkpoint.{planner_helpers,utils}`, `DTensor.__create_chunk_list__` (contract).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import le
from typing import TYPE_CHECKING, Any

import torch

from dcp_core.errors import PlanError, UnsupportedValueError
from dcp_core.records.foreign_records import as_chunk, as_properties, as_write_item
from dcp_core.records.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from dcp_core.records.protocols import WriteItem
from dcp_core.shards.boxes import LocalBox, declared_boxes, declares_shards, dtensor_boxes, partial_error
from dcp_core.tensors.kinds import (
    DESCRIBING,
    TensorLike,
    as_dtensor,
    check_divisible,
    children_of,
    empty_like_part,
    is_dtensor,
    is_wrapper,
    unwrapped,
)
from dcp_core.tensors.tensor_memory import check_tensor
from dcp_ranks.choose_coordinator import job_size

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PARTIAL = DESCRIBING | {"_is_flat_param", "_fsdp_flattened"}


@dataclass(frozen=True, slots=True)
class LocalShard:
    """A box of the global tensor, and its local memory."""

    offsets: torch.Size
    sizes: torch.Size
    get: Callable[[], torch.Tensor]
    """Returns the memory: detached, of shape `sizes`, on the tensor's device."""


@dataclass(frozen=True, slots=True)
class LocalTensor(TensorLike):
    """This rank's shards of one tensor, perhaps none; replaces it in a worker's state dict."""

    size: torch.Size
    properties: TensorProperties
    whole: bool
    """Whether each rank holds the whole tensor."""
    shards: tuple[LocalShard, ...]
    shared: bool = True
    """Whether other ranks may hold the same boxes."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.properties.dtype

    @property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes, in the order of `shards`."""
        return [ChunkStorageMetadata(shard.offsets, shard.sizes) for shard in self.shards]


def local_tensor(fqn: str, value: object, *, allow_meta: bool = False) -> LocalTensor | None:
    """Return this rank's shards of a tensor, in the order of local memory, or None for an object.

    There are none outside a DTensor's mesh or for an empty local tensor; a tensor without elements has one empty shard
    on every rank.
    """
    if isinstance(value, LocalTensor):
        return value
    if isinstance(value, torch.Tensor):
        value = as_dtensor(value)
    chunk_list = shard_method(value, "__create_chunk_list__")
    if chunk_list is not None:
        return _of_chunks(fqn, value, [as_chunk(chunk) for chunk in chunk_list()])
    if is_dtensor(value):
        held = _of_dtensor(fqn, value, allow_meta=allow_meta)
    elif is_sharded_tensor(value):
        held = _of_sharded_tensor(fqn, value)
    elif isinstance(value, torch.Tensor):
        held = _of_tensor(fqn, value, allow_meta=allow_meta)
    else:
        return None
    if shard_method(value, "__get_tensor_shard__") is None:
        return held
    return replace(held, shards=_shards(fqn, value, held.chunks))


def written_tensor(fqn: str, value: object) -> LocalTensor | None:
    """Return the shards that this rank writes."""
    if isinstance(value, LocalTensor) or shard_method(value, "__create_write_items__") is None:
        return local_tensor(fqn, value)
    written = [item.tensor_data for item in hook_items(fqn, value) if item.tensor_data is not None]
    if not written:
        held = local_tensor(fqn, value)
        return None if held is None else replace(held, shards=())
    shards = _shards(fqn, value, [one.chunk for one in written if _has_elements(one.chunk, one.size)])
    return LocalTensor(written[0].size, written[0].properties, False, shards)


def is_shard(value: object) -> bool:
    """Return whether a value is a part of a tensor."""
    if isinstance(value, LocalTensor):
        return not value.whole
    if isinstance(value, torch.Tensor):
        attributes = value.__dict__
        if attributes and not _PARTIAL.isdisjoint(attributes):
            return True
        return type(value) not in (torch.Tensor, torch.nn.Parameter) and (is_dtensor(value) or is_sharded_tensor(value))
    return is_sharded_tensor(value) or shard_method(value, "__create_chunk_list__") is not None


def holds_shard(value: object) -> bool:
    """Return whether a container holds a part of a tensor."""
    return any(is_shard(child) or holds_shard(child) for _, child in children_of(value) or ())


def shard_method(value: Any, name: str) -> Callable[..., Any] | None:
    """Return one of stock's three methods, or None; a DTensor's only from a subclass or the local tensor."""
    if is_dtensor(value):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - already imported if a DTensor exists

        if type(value) is DTensor or getattr(type(value), name) is getattr(DTensor, name):
            value = value._local_tensor  # noqa: SLF001 - to_local() builds an autograd node
    method: Callable[..., Any] | None = getattr(value, name, None)
    return method


def hook_items(fqn: str, value: Any) -> list[WriteItem]:
    """Return `__create_write_items__`'s items, if any."""
    create = shard_method(value, "__create_write_items__")
    return [] if create is None else [as_write_item(item) for item in create(fqn, value)]


def find_shard(value: object, index: MetadataIndex) -> torch.Tensor:
    """Return the memory of the index's shard, or the only one."""
    get_shard = shard_method(value, "__get_tensor_shard__")
    if get_shard is not None:
        return _from_method(value, get_shard, index)()
    held = local_tensor(index.fqn, value)
    if held is None:
        raise _no_shards(index.fqn, value)
    if index.offset is None and len(held.shards) == 1:
        return held.shards[0].get()
    hint = index.index
    if hint is not None and 0 <= hint < len(held.shards) and held.shards[hint].offsets == index.offset:
        return held.shards[hint].get()
    written = None if shard_method(value, "__create_write_items__") is None else written_tensor(index.fqn, value)
    shards = held.shards if written is None else (*held.shards, *written.shards)
    for shard in shards:
        if shard.offsets == index.offset:
            return shard.get()
    here = ", ".join(str(tuple(shard.offsets)) for shard in shards) or "none"
    if index.offset is None:
        raise PlanError(f"{index.fqn!r}: no offset was provided; shards here: {here}")
    wanted = tuple(index.offset)
    raise PlanError(f"{index.fqn!r}: Could not find shard at offset {wanted} on this rank; shards here: {here}")


def _no_shards(fqn: str, value: object) -> PlanError:
    kind = type(value).__qualname__
    return PlanError(f"{fqn!r} is a {kind}, not a tensor, DTensor or ShardedTensor: it has no shards")


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of torch's classes and has no shards."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    attributes = tensor.__dict__
    return not attributes or DESCRIBING.isdisjoint(attributes)


def box_view(tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], *, key: str) -> torch.Tensor:
    """Return a view of a box; UnsupportedValueError if a tensor cannot be divided."""
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if offset or size != tensor.size(dim):
            check_divisible(key, tensor)
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def find_part(value: object, fqn: str, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a box's local memory, or raise PlanError."""
    held = written_tensor(fqn, value)
    for shard in () if held is None else held.shards:
        within = [begin - start for begin, start in zip(offsets, shard.offsets, strict=True)]
        ends = [at + size for at, size in zip(within, sizes, strict=True)]
        if min(within, default=0) >= 0 and all(map(le, ends, shard.sizes)):
            return box_view(shard.get(), within, sizes, key=fqn)
    raise PlanError(
        f"{fqn!r}: no shard of this rank holds the box at {tuple(offsets)} of {tuple(sizes)}; a planner must leave "
        "it to a rank that holds it"
    )


def find_tensor_shard(tensor: torch.Tensor, index: MetadataIndex) -> torch.Tensor:
    """Return a shard, or an ordinary tensor itself."""
    if is_ordinary(tensor) and not any(index.offset or ()):
        return tensor
    return find_shard(tensor, index)


def find_state_dict_object(state_dict: Mapping[str, Any], index: MetadataIndex) -> Any:
    """Return an object or shard; PlanError if it does not exist."""
    if index.fqn not in state_dict:
        raise PlanError(f"the state dict has no object with the FQN {index.fqn!r}")
    value = state_dict[index.fqn]
    if isinstance(value, LocalTensor):
        return find_shard(value, index)
    if isinstance(value, torch.Tensor) or hasattr(value, "__get_tensor_shard__"):
        return find_tensor_shard(value, index)
    if index.offset is not None:
        raise _no_shards(index.fqn, value)
    return value


def _of_tensor(fqn: str, tensor: torch.Tensor, *, allow_meta: bool) -> LocalTensor:
    tensor = unwrapped(tensor)
    check_tensor(fqn, tensor, allow_meta=allow_meta)
    declared: Any = tensor
    if declares_shards(declared):
        size = torch.Size(declared.global_shape)
        shards = _of_boxes(fqn, tensor, declared_boxes(fqn, declared))
        return LocalTensor(size, TensorProperties.create_from_tensor(tensor), False, shards)
    size = tensor.size()
    none = torch.Size((0,) * len(size))
    shard = LocalShard(none, size, partial(_view, fqn, tensor, none, size))
    return LocalTensor(size, _properties(tensor), True, (shard,))


def _view(fqn: str, local: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """View a box, detached except for wrapper tensors, because some of their classes copy."""
    return box_view(local if is_wrapper(local) else local.detach(), offsets, sizes, key=fqn)


def _properties(tensor: torch.Tensor) -> TensorProperties:
    if is_wrapper(tensor):  # not every class can tell whether its memory is pinned
        return TensorProperties(tensor.dtype, tensor.layout, tensor.requires_grad)
    return TensorProperties.create_from_tensor(tensor)


def _of_boxes(fqn: str, local: torch.Tensor, boxes: Sequence[LocalBox]) -> tuple[LocalShard, ...]:
    return tuple(
        [
            LocalShard(
                torch.Size(box.offsets), torch.Size(box.sizes), partial(_view, fqn, local, box.local_offsets, box.sizes)
            )
            for box in boxes
        ]
    )


def _of_dtensor(fqn: str, tensor: DTensor, *, allow_meta: bool) -> LocalTensor:
    local = tensor._local_tensor  # noqa: SLF001 - to_local() builds an autograd node
    if hasattr(local, "wait"):
        local = local.wait()
    local = unwrapped(local)
    check_tensor(fqn, local, allow_meta=allow_meta)
    properties = _properties(local)
    properties.requires_grad = tensor.requires_grad
    coordinate = tensor.device_mesh.get_coordinate()
    shards: tuple[LocalShard, ...] = ()
    if coordinate is not None:
        shape = tuple(tensor.shape)
        local_shape, boxes = dtensor_boxes(fqn, tensor, coordinate)
        if tuple(local.shape) != local_shape and shard_method(tensor, "__get_tensor_shard__") is None:
            raise UnsupportedValueError(
                f"{fqn!r} is a DTensor of shape {shape} with placements {tensor.placements}: this rank should hold "
                f"{local_shape} of it but holds {tuple(local.shape)}; make it with distribute_tensor, or pass the "
                "right shape to DTensor.from_local"
            )
        shards = _of_boxes(fqn, local, boxes)
        if not tensor.numel():
            # No rank holds a box, but the tensor must not be missing from the checkpoint.
            none = torch.Size((0,) * len(shape))
            shards = (LocalShard(none, tensor.size(), lambda: empty_like_part(fqn, local, shape)),)
    shared = tensor.device_mesh.size() != job_size() or True in [each.is_replicate() for each in tensor.placements]
    return LocalTensor(tensor.size(), properties, False, shards, shared)


def _of_chunks(fqn: str, value: Any, chunks: Sequence[ChunkStorageMetadata]) -> LocalTensor:
    if is_dtensor(value):
        for placement in value.placements:
            if placement.is_partial():
                raise partial_error(fqn, placement)
    written = [item.tensor_data for item in hook_items(fqn, value) if item.tensor_data is not None]
    if written:
        size, properties = written[0].size, written[0].properties
    else:
        size, properties = value.size(), _properties_of(value)
    return LocalTensor(
        size, properties, False, _shards(fqn, value, [chunk for chunk in chunks if _has_elements(chunk, size)])
    )


def _has_elements(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    return len(chunk.sizes) == len(size) and (0 not in chunk.sizes or 0 in size)


def _properties_of(value: Any) -> TensorProperties:
    local = _local(value)
    described = getattr(local, "storage_metadata", None)
    if described is not None:
        return as_properties(described().properties)
    return TensorProperties(dtype=local.dtype)


def _shards(fqn: str, value: Any, chunks: Sequence[ChunkStorageMetadata]) -> tuple[LocalShard, ...]:
    get_shard = shard_method(value, "__get_tensor_shard__")
    if get_shard is not None:
        return tuple(
            LocalShard(
                chunk.offsets,
                chunk.sizes,
                _from_method(value, get_shard, MetadataIndex(fqn, chunk.offsets, position)),
            )
            for position, chunk in enumerate(chunks)
        )
    local = _local(value)
    for chunk in chunks:
        if not isinstance(local, torch.Tensor) or tuple(local.shape) != tuple(chunk.sizes):
            held = f"of shape {tuple(local.shape)}" if isinstance(local, torch.Tensor) else "not a tensor"
            raise UnsupportedValueError(
                f"{fqn!r} describes a shard of sizes {tuple(chunk.sizes)} at {tuple(chunk.offsets)}, and what it holds "
                f"here is {held}: give it the method __get_tensor_shard__, which returns the shard's data"
            )
        check_tensor(fqn, local)
    return tuple(LocalShard(chunk.offsets, chunk.sizes, local.detach) for chunk in chunks)


def _local(value: Any) -> Any:
    return value._local_tensor if is_dtensor(value) else value  # noqa: SLF001 - to_local() builds an autograd node


def _from_method(value: Any, get_shard: Callable[..., Any], index: MetadataIndex) -> Callable[[], torch.Tensor]:
    def get() -> torch.Tensor:
        try:
            found: torch.Tensor = get_shard(index)
        except (LookupError, ValueError) as error:
            kind = type(_local(value)).__qualname__
            raise PlanError(f"{index.fqn!r}: the {kind} has no shard for {index}: {error}") from error
        return found.detach()

    return get


def is_sharded_tensor(value: object) -> bool:
    """Return whether a value is a ShardedTensor."""
    if type(value) is torch.Tensor:
        return False
    # Compare names, because importing ShardedTensor is slow.
    for cls in type(value).__mro__:
        if cls.__name__ == "ShardedTensor" and cls.__module__.startswith("torch.distributed._shard."):
            return True
    return False


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
