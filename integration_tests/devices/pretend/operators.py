"""Operators of the pretend device: each is queued on the current stream, and runs as PyTorch's own on host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library
from torch.utils import _pytree as pytree

from integration_tests.devices.pretend.machine import NAME, Stream, machine
from integration_tests.devices.pretend.memory import (
    HostRegistry,
    as_strided,
    block_of,
    borrowed,
    empty,
    extent,
    on_host,
)

__all__ = ["generators", "register", "registry"]

registry = HostRegistry()
generators: dict[int, torch.Generator] = {}
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def register() -> list[object]:
    """Register the operators; they are there as long as what is returned."""
    made: Any = library.Library
    operators, queries = made("_", "IMPL"), made("aten", "IMPL")
    operators.fallback(_operator, "PrivateUse1")
    queries.impl("is_pinned", lambda tensor, device=None: registry.holds(tensor), "CPU")
    storage: Any = torch.UntypedStorage
    clone = storage.clone
    # PyTorch would ask for the device's allocator, which is null, and crash.
    storage.clone = lambda one: _clone(one) if one.device.type == NAME else clone(one)
    resize = storage.resize_
    storage.resize_ = lambda one, size: _resize_storage(one, size) if one.device.type == NAME else resize(one, size)
    return [operators, queries]


def _clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return source.clone().untyped_storage()


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    before = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    made = empty([size], [1], torch.uint8, storage.device.index)
    kept = min(size, storage.nbytes())
    made[:kept].copy_(before[:kept])
    for each in (empty([0], [1], torch.uint8, storage.device.index), made):  # one of the two must have no bytes
        storage._swap_data_ptr_(each.untyped_storage())  # type: ignore[attr-defined]
    return storage


def _operator(operator: Any, *arguments: Any, **named: Any) -> Any:
    special = _SPECIAL.get(operator.name())
    if special is not None:
        return special(*arguments, **named)
    if operator.is_view or operator.name().startswith("aten::set_."):
        return operator.redispatch(_CPU, *arguments, **named)
    return _compute(operator, arguments, named)


def _compute(operator: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    leaves, spec = pytree.tree_flatten((arguments, named))
    first = next((leaf for leaf in leaves if _is_ours(leaf)), None)
    device = machine.index(named.get("device") if first is None else first.device)
    stream = machine.current_stream(device)
    described = _describe(operator, leaves, spec)
    given, options = pytree.tree_unflatten([_as_host(leaf) for leaf in leaves], spec)
    if "generator" in {each.name for each in operator._schema.arguments}:
        options["generator"] = torch.Generator().manual_seed(_next_seed(device))
    if described is None:  # sizes depend on values
        stream.synchronize()
        return pytree.tree_map_only(torch.Tensor, lambda one: _to_device(one, device), operator(*given, **options))
    written = [each.alias_info is not None and each.alias_info.is_write for each in operator._schema.arguments]
    if any(written):
        machine.launch(stream, lambda: operator(*given, **options))
        names = [each.name for each in operator._schema.arguments]
        values = dict(zip(names, arguments, strict=False)) | named
        outputs = [values[name] for name, is_written in zip(names, written, strict=True) if is_written]
        returned = operator._schema.returns
        return None if not returned else outputs[0] if len(returned) == 1 else tuple(outputs)
    made = pytree.tree_map_only(torch.Tensor, lambda one: empty(one.size(), one.stride(), one.dtype, device), described)
    targets = [on_host(one) for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor)]

    def run() -> None:
        results = [one for one in pytree.tree_leaves(operator(*given, **options)) if isinstance(one, torch.Tensor)]
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)

    machine.launch(stream, run)
    return made


def _describe(operator: Any, leaves: list[Any], spec: Any) -> Any:
    """Return meta tensors like what the operator returns, or None."""
    described = [_as_meta(leaf) for leaf in leaves]
    arguments, named = pytree.tree_unflatten(described, spec)
    try:
        found = operator(*arguments, **named)
    except Exception:  # noqa: BLE001 - running it raises the same, or knows the sizes
        return None
    for leaf, meta in zip(leaves, described, strict=True):
        if _is_ours(leaf) and leaf.size() != meta.size():  # an output without memory
            _resize(leaf, meta.size(), stride=meta.stride())
    outputs = pytree.tree_leaves(found)
    return found if all(one is None or isinstance(one, torch.Tensor) for one in outputs) else None


def _is_ours(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == NAME


def _as_host(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if not isinstance(value, torch.Tensor):
        return value
    return on_host(value) if _is_ours(value) else value.clone()


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("meta")
    if not isinstance(value, torch.Tensor):
        return value
    if not value.ndim and not _is_ours(value):
        return value  # a number takes part on every device
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _to_device(value: torch.Tensor, device: int) -> torch.Tensor:
    made = empty(value.size(), value.stride(), value.dtype, device)
    on_host(made).copy_(value)
    return made


def _next_seed(device: int) -> int:
    """Return the seed of a random operator: drawn when it is queued, so that streams do not change it."""
    generator = generators.setdefault(device, torch.Generator().manual_seed(0))
    return int(torch.randint(1 << 62, (), generator=generator))


def _empty(size: Any, **options: Any) -> torch.Tensor:
    layout = torch.empty(size, device="meta", memory_format=options.get("memory_format") or torch.contiguous_format)
    return _empty_strided(size, layout.stride(), **options)


def _empty_strided(size: Any, stride: Any, **options: Any) -> torch.Tensor:
    return empty(size, stride, options.get("dtype") or torch.get_default_dtype(), machine.index(options.get("device")))


def _resize(tensor: torch.Tensor, size: Any, *, memory_format: Any = None, stride: Any = None) -> torch.Tensor:
    if tuple(size) != tuple(tensor.size()):
        steps = (
            stride or torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
        )
        storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
        needed = (offset + extent(size, steps)) * tensor.itemsize
        if needed > storage.nbytes():
            _resize_storage(storage, needed)
        torch.ops.aten.set_.source_Tensor.redispatch(_CPU, tensor, as_strided(tensor, size, steps, offset))
    return tensor


def _copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if _is_ours(source) and _is_ours(target):
        _copy_on_device(source, target)
    elif _is_ours(source):
        _copy_to_host(source, target, non_blocking=non_blocking)
    else:
        _copy_from_host(source, target, non_blocking=non_blocking)
    return target


def _copy_on_device(source: torch.Tensor, target: torch.Tensor) -> None:
    stream = machine.current_stream(source.device.index)
    read, written = on_host(source), on_host(target)
    other = machine.current_stream(target.device.index)
    if other is not stream:
        stream.wait_stream(other)
    machine.launch(stream, lambda: written.copy_(read))
    if other is not stream:
        other.wait_stream(stream)


def _copy_to_host(source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
    stream, read = machine.current_stream(source.device.index), on_host(source)
    if non_blocking and registry.holds(target):
        to = borrowed(target)
        registry.note_copy(target, machine.launch(stream, lambda: to.copy_(read), early=False))
        return
    work = machine.launch(stream, lambda: target.copy_(read), early=False)
    machine.pageable_copies += non_blocking
    machine.complete(work)


def _copy_from_host(source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
    stream, written = machine.current_stream(target.device.index), on_host(target)
    if non_blocking and registry.holds(source):
        from_host = borrowed(source)
        registry.note_copy(source, machine.launch(stream, lambda: written.copy_(from_host), early=False))
        return
    machine.pageable_copies += non_blocking
    copied = source.clone()  # as through a buffer of the driver's: the host may go on, and change its memory
    work = machine.launch(stream, lambda: written.copy_(copied))
    if not non_blocking:
        machine.complete(work)


def _record_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    used: Stream = machine.stream(stream.device_index, stream.stream_id)
    block_of(tensor).users.add(used)


def _item(tensor: torch.Tensor) -> Any:
    machine.current_stream(tensor.device.index).synchronize()
    return on_host(tensor).item()


_SPECIAL: dict[str, Callable[..., Any]] = {
    "aten::empty.memory_format": _empty,
    "aten::empty_strided": _empty_strided,
    "aten::_copy_from": _copy,
    "aten::resize_": _resize,
    "aten::record_stream": _record_stream,
    "aten::_local_scalar_dense": _item,
}
