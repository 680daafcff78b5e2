"""Fast path for loading a model; the time of `Module.load_state_dict` grows with modules times names.

The fast path copies each tensor to the parameter or buffer of its name. This is equivalent if no module has load
hooks or overrides methods of loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dcp_state.canonical_names import ModelNames
from dcp_state.errors import StateMismatchError

__all__ = ["can_load_directly", "load_directly"]


def can_load_directly(model: nn.Module, names: ModelNames) -> bool:
    """Whether `load_directly` is equivalent to `load_state_dict`: no load hooks, overrides or meta tensors."""
    if len(names.tensors) != len(names.raw_keys) or any(tensor.is_meta for tensor in names.tensors.values()):
        return False
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return False
    return not any(map(_takes_part, names.module_prefixes))


def _takes_part(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001 - torch's way
    return own or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)  # noqa: SLF001 - as above


def load_directly(names: ModelNames, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Copy each tensor into the model's parameter or buffer of the same FQN.

    Returns:
        The list of missing names, and the list of unexpected names.

    Raises:
        StateMismatchError: A shape differs, or a value is no tensor; the model was not changed.
    """
    unexpected = [name for name in values if name not in names.tensors]
    problems = []
    for name, tensor in names.tensors.items():
        value = values.get(name, tensor)
        if not isinstance(value, torch.Tensor):
            problems.append(f"{name!r} is a {type(value).__name__}; the model needs a tensor")
        elif value.shape != tensor.shape:
            problems.append(
                f"size mismatch for {name!r}: {tuple(value.shape)} here, {tuple(tensor.shape)} in the model"
            )
    if problems:
        raise StateMismatchError("model state", problems)
    with torch.no_grad():
        for name, tensor in names.tensors.items():
            if name in values:
                tensor.copy_(values[name])
    return [name for name in names.tensors if name not in values], unexpected
