"""Allocation of memory for a template's meta tensors, to load into a model that was created on the meta device."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dcp_core.errors import UnsupportedValueError
from dcp_core.shards.declared_shards import copy_declaration, declares_shards
from dcp_core.shards.shards import is_sharded_tensor
from dcp_core.tensors.dtensors import is_dtensor

__all__ = ["materialise_meta"]


def materialise_meta(container: Any, *, path: str = "", made: list[torch.Tensor] | None = None) -> Any:
    """Replace meta tensors in nested dicts and lists, in place, by uninitialised tensors on a device with memory.

    The device is the device of the mesh for a DTensor; for other tensors, the current CUDA device if the job's default
    process group communicates only over CUDA, otherwise the CPU.

    Args:
        container: Nested dicts, lists and tuples (tuples are rebuilt).
        path: Name of the container, for error messages.
        made: List to which the new tensors are appended; None to collect no tensors.

    Returns:
        `container`, or a new container if it is a tuple.

    Raises:
        UnsupportedValueError: A sharded tensor that is no DTensor is on the meta device.

    Source: torch 2.13 `planner_helpers._init_state_dict` (contract).
    """
    if isinstance(container, torch.Tensor):
        if not _is_meta(container):
            return container
        new = _materialised(container, path)
        if made is not None:
            made.append(new)
        return new
    if isinstance(container, dict):
        for key, value in container.items():
            if isinstance(value, torch.Tensor) and not _is_meta(value):
                continue
            container[key] = materialise_meta(value, path=f"{path}.{key}" if path else str(key), made=made)
        return container
    if isinstance(container, list | tuple) and _holds_meta(container):
        items = [
            materialise_meta(value, path=f"{path}.{i}" if path else str(i), made=made)
            for i, value in enumerate(container)
        ]
        if isinstance(container, list):
            container[:] = items
            return container
        return tuple(items)
    return container


def _holds_meta(items: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list may hold meta tensors; other lists stay as they are: a template may hold long lists."""
    return any(
        (isinstance(item, torch.Tensor) and _is_meta(item))
        or isinstance(item, dict)
        or (isinstance(item, list | tuple) and _holds_meta(item))
        for item in items
    )


def _is_meta(tensor: torch.Tensor) -> bool:
    if is_sharded_tensor(tensor):
        return any(shard.tensor.is_meta for shard in tensor.local_shards())  # type: ignore[attr-defined]
    return tensor.is_meta


def _materialised(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if is_dtensor(tensor):
        from torch.distributed.tensor import DTensor  # noqa: PLC0415 - imported long since, as there is one

        device = _device(tensor.device_mesh.device_type)
        local = torch.empty_like(tensor.to_local(), device=device)
        return DTensor.from_local(
            local,
            device_mesh=tensor.device_mesh,
            placements=tensor.placements,
            run_check=False,
            shape=tensor.size(),
            stride=tensor.stride(),
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise UnsupportedValueError(
            f"{path!r} is a {type(tensor).__qualname__} on the meta device; materialise it (to_empty) before loading"
        )
    made = torch.empty_like(tensor, device=_device(None))
    if declares_shards(tensor):
        copy_declaration(tensor, made)
    return made


def _device(device_type: str | None) -> torch.device:
    """Return the device for new memory: the accelerator if the job communicates over it, else the CPU."""
    if device_type is None:
        device_type = "cpu"
        if dist.is_available() and dist.is_initialized():
            world = dist.group.WORLD
            devices = {device.type for device in world._device_types} if world is not None else set()  # noqa: SLF001
            device_type = "cuda" if devices == {"cuda"} else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    return torch.device(device_type, module.current_device())
