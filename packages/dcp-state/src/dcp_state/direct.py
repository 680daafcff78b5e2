"""Fast path for loading a model without `Module.load_state_dict`, whose time grows with modules times names.

It copies each tensor to the parameter or buffer of its name, which is equivalent if no module has hooks for loading or
overrides it.
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
    """Whether the fast path is equivalent: loading involves no hooks or overrides, and all tensors have memory."""
    if len(names.tensors) != len(names.raw_keys) or any(tensor.is_meta for tensor in names.tensors.values()):
        return False
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return False
    return not any(map(_takes_part, names.module_prefixes))


def _takes_part(module: nn.Module) -> bool:
    own = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001 - torch's way
    return own or bool(module._load_state_dict_pre_hooks or module._load_state_dict_post_hooks)  # noqa: SLF001 - as above


def load_directly(names: ModelNames, values: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Copy values into the model by FQN.

    Returns:
        Missing and unexpected names.

    Raises:
        StateMismatchError: A shape differs, or a value is no tensor; nothing was changed.
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
