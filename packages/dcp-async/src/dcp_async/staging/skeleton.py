"""Skeletons of state dicts: keys, containers, dtypes and shapes without tensor data and objects.

A skeleton is a nested tuple: `("d", keys, nodes)` is a mapping (with one more element if not all keys are strings),
`("l", nodes)` a list, `("t", dtype, shape, stride, requires_grad)` a tensor, `("s", …)` this rank's shard of a sharded
tensor, `("q", …)` a quantized or wrapper tensor, which is archived as an object, and `("o",)` an object.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from dcp_core import TensorProperties
from dcp_core.objects.object_bytes import DumpedObject, dump_object
from dcp_core.planning.replicas import replica_digests, value_digest
from dcp_core.shards.shards import LocalShard, LocalTensor, holds_shard, shard_method, written_tensor
from dcp_core.state_dict.flatten import holds_entry
from dcp_core.tables.value_table import archive_checked, is_plain
from dcp_core.tensors.kinds import (
    ArchivedTensor,
    children_of,
    dtensor_layout,
    is_dtensor,
    is_quantized_dtype,
    is_wrapper,
)
from dcp_core.tensors.tensor_memory import check_memory

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Skeleton: TypeAlias = tuple[Any, ...]

_WRITTEN_BY = ("__create_write_items__", "__create_chunk_list__")
_SCALARS = {int, float, complex, bool, str, bytes, type(None)}
_KEPT_FORMS = 1 << 16


@dataclass(frozen=True, slots=True)
class TensorByValue:
    """A quantized or wrapper tensor, serialized as by `torch.save`."""

    data: bytes
    digest: int | None


@dataclass(slots=True)
class Contents:
    """A skeleton, and the tensors and objects in its order."""

    skeleton: Skeleton = ()
    tensors: list[torch.Tensor] = field(default_factory=list)
    """This rank's local tensors, on any device; conjugate and negative views are resolved."""
    names: list[str] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    """Scalars unchanged; other objects serialized, so that they cannot change."""


def look_through(
    state_dict: Mapping[Any, Any], *, nested: bool = True, forms: dict[Hashable, Any] | None = None
) -> Contents:
    """Split a state dict into skeleton, tensors, and objects, which are serialized. Raises UnsupportedValueError.

    With `nested` False, each top-level container is one object. Pass the same cache `forms` for each save.
    """
    walk = _Walk(nested=nested, forms={} if forms is None else forms)
    walk.contents.skeleton = walk.mapping(state_dict, "", top=True)
    return walk.contents


class _Walk:
    def __init__(self, *, nested: bool, forms: dict[Hashable, Any]) -> None:
        self.contents = Contents()
        self._nested = nested
        self._forms = forms

    def mapping(self, value: Mapping[Any, Any], prefix: str, *, top: bool = False) -> Skeleton:
        keys = tuple(value)
        node = self._node if top or self._nested else self._object
        nodes = tuple([node(item, f"{prefix}{key}") for key, item in value.items()])
        if set(map(type, keys)) <= {str}:
            return ("d", keys, nodes)
        # 1, 1.0 and True are equal, as are 0.0 and -0.0, but each has another name, or another path.
        return ("d", keys, nodes, tuple([(type(key).__qualname__, str(key)) for key in keys]))

    def _node(self, value: Any, name: str) -> Skeleton:
        if is_plain(value) and not value.is_quantized:
            return self._tensor(value, name)
        if isinstance(value, torch.Tensor) or any(shard_method(value, each) is not None for each in _WRITTEN_BY):
            return self._special(value, name)
        if self._nested and isinstance(value, Mapping):
            return self.mapping(value, f"{name}.")
        if self._nested and (holds_entry(value) if isinstance(value, list) else holds_shard(value)):
            # Flattening gives the same names for a list or dict in its place.
            children = children_of(value) or []
            if all(type(key) is int for key, _ in children):
                return ("l", tuple([self._node(item, f"{name}.{key}") for key, item in children]))
            return self.mapping(dict(children), f"{name}.")
        return self._object(value, name)

    def _tensor(self, value: torch.Tensor, name: str) -> Skeleton:
        kept = self._keep(value, name)
        return ("t", kept.dtype, kept.shape, kept.stride(), value.requires_grad)

    def _keep(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Add a tensor; return it with its conjugation resolved, maybe with other strides."""
        if tensor.is_conj() or tensor.is_neg():
            check_memory(name, tensor)
            with torch.no_grad():
                tensor = tensor.resolve_conj().resolve_neg()
        self.contents.tensors.append(tensor)
        self.contents.names.append(name)
        return tensor

    def _special(self, value: Any, name: str) -> Skeleton:
        if is_dtensor(value):
            return self._dtensor(value, name)
        held = written_tensor(name, value)
        return self._object(value, name) if held is None else self._shards(held, name)

    def _dtensor(self, value: DTensor, name: str) -> Skeleton:
        """Describe a DTensor; thousands share a placement, so its boxes are cached."""
        local = value._local_tensor  # noqa: SLF001 - to_local() builds an autograd node
        local = local.wait() if hasattr(local, "wait") else local
        if not is_plain(local) or local.is_quantized:
            held = written_tensor(name, value)
            return self._object(value, name) if held is None else self._shards(held, name)
        form = (dtensor_layout(value), value.shape, local.shape, local.dtype, value.requires_grad, local.is_pinned())
        known = self._forms.get(form)
        if known is None:
            held = written_tensor(name, value)
            if held is None or len(held.shards) != 1 or held.shards[0].sizes != local.shape:
                return self._object(value, name) if held is None else self._shards(held, name)
            if len(self._forms) >= _KEPT_FORMS:
                self._forms.clear()
            known = self._forms[form] = (_facts(held), held.shards[0].offsets)
        facts, offsets = known
        tensor = self._keep(local, name)
        return ("s", facts, ((offsets, tensor.shape, tensor.dtype, tensor.stride()),))

    def _shards(self, held: LocalTensor, name: str) -> Skeleton:
        local = held.shards[0].get() if held.shards else None
        if is_quantized_dtype(held.dtype) or (local is not None and is_wrapper(local)):
            values = [shard.get() for shard in held.shards]
            parts = [archive_checked(name, value).getvalue() for value in values]
            self.contents.objects.extend(map(TensorByValue, parts, replica_digests(values, everything=False)))
            return ("q", _facts(held), tuple([(shard.offsets, shard.sizes) for shard in held.shards]))
        boxes = []
        for shard in held.shards:
            tensor = self._keep(shard.get(), name)
            boxes.append((shard.offsets, tensor.shape, tensor.dtype, tensor.stride()))
        return ("s", _facts(held), tuple(boxes))

    def _object(self, value: Any, name: str) -> Skeleton:
        kept = type(value) in _SCALARS or isinstance(value, DumpedObject)
        self.contents.objects.append(value if kept else DumpedObject(dump_object(value, key=name), value_digest(value)))
        return ("o",)


def _facts(held: LocalTensor) -> tuple[Any, ...]:
    properties = held.properties
    return held.size, held.whole, held.shared, properties.dtype, properties.requires_grad, properties.pin_memory


def leaves_of(node: Skeleton) -> Iterator[tuple[torch.dtype, torch.Size, tuple[int, ...]]]:
    """Yield dtype, shape and strides of each tensor."""
    kind = node[0]
    if kind == "t":
        yield node[1], node[2], node[3]
    elif kind == "s":
        for _, shape, dtype, stride in node[2]:
            yield dtype, shape, stride
    elif kind in "dl":
        for below in node[-1] if kind == "l" else node[2]:
            yield from leaves_of(below)


def fill(skeleton: Skeleton, tensors: Iterator[torch.Tensor], objects: Iterator[Any]) -> dict[Any, Any]:
    """Build a state dict; sharded tensors are `LocalTensor`s."""
    makers: dict[str, Callable[[Skeleton], Any]] = {}

    def mapping(node: Skeleton) -> dict[Any, Any]:
        return {key: make(below) for key, below in zip(node[1], node[2], strict=True)}

    def tensor(node: Skeleton) -> torch.Tensor:
        found = next(tensors)
        return found.requires_grad_() if node[4] else found

    def thing(_: Skeleton) -> Any:
        return next(objects)

    def make(node: Skeleton) -> Any:
        return makers[node[0]](node)

    makers.update(
        d=mapping,
        l=lambda node: [make(below) for below in node[1]],
        t=tensor,
        s=lambda node: _local(node[1], [(offsets, sizes, next(tensors)) for offsets, sizes, _, _ in node[2]]),
        q=lambda node: _local(node[1], [(*box, _by_value(next(objects), node[1], box)) for box in node[2]]),
        o=thing,
    )
    try:
        return mapping(skeleton)
    finally:
        makers.clear()  # a cycle through them would keep the tensors' memory until it is collected


def _local(facts: tuple[Any, ...], boxes: list[tuple[torch.Size, torch.Size, torch.Tensor]]) -> LocalTensor:
    size, whole, shared, dtype, requires_grad, pin_memory = facts
    properties = TensorProperties(dtype=dtype, requires_grad=requires_grad, pin_memory=pin_memory)
    shards = tuple(LocalShard(offsets, sizes, _given(tensor)) for offsets, sizes, tensor in boxes)
    return LocalTensor(size, properties, whole, shards, shared)


def _by_value(stored: TensorByValue, facts: tuple[Any, ...], box: tuple[torch.Size, torch.Size]) -> torch.Tensor:
    return ArchivedTensor(stored.data, box[1], facts[3], stored.digest)


def _given(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor
