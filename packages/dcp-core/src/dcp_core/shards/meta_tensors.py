"""Allocate memory for a template's meta tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dcp_core.shards.boxes import copy_declaration, declares_shards
from dcp_core.shards.shards import is_sharded_tensor
from dcp_core.tensors.devices import group_device
from dcp_core.tensors.kinds import children_of, is_dtensor, rebuilt, with_local, zeros_like


def materialise_meta(container: Any, *, path: str = "", made: list[torch.Tensor] | None = None) -> Any:
    """Replace meta tensors in nested containers by uninitialised tensors; append these to `made`.

    Dicts and lists change in place; other containers are rebuilt. DTensors use their mesh's device, others the current
    CUDA device if the default process group communicates only over CUDA, else the CPU.

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
    children = children_of(container)
    if children is None or not _holds_meta(children):
        return container
    items = [materialise_meta(value, path=f"{path}.{key}" if path else str(key), made=made) for key, value in children]
    if isinstance(container, list):
        container[:] = items
        return container
    return rebuilt(container, items)


def _holds_meta(children: Iterable[tuple[Any, Any]]) -> bool:
    return any(
        (isinstance(item, torch.Tensor) and _is_meta(item))
        or isinstance(item, dict)
        or _holds_meta(children_of(item) or ())
        for _, item in children
    )


def _is_meta(tensor: torch.Tensor) -> bool:
    if is_sharded_tensor(tensor):
        return any(shard.tensor.is_meta for shard in tensor.local_shards())  # type: ignore[attr-defined]
    return tensor.is_meta


def _materialised(tensor: torch.Tensor, path: str) -> torch.Tensor:
    if is_dtensor(tensor):
        return with_local(tensor, _empty(path, tensor.to_local(), _device(tensor.device_mesh.device_type)))
    made = _empty(path, tensor, _device(None))
    if declares_shards(tensor):
        copy_declaration(tensor, made)
    return made


def _empty(path: str, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    if type(like) in (torch.Tensor, torch.nn.Parameter):
        return torch.empty_like(like, device=device)
    return zeros_like(path, like, device)


def _device(device_type: str | None) -> torch.device:
    if device_type is None:
        return group_device()
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    return torch.device(device_type, module.current_device())
