"""`StateDictOptions`, and the types of state dict values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

FQNS_T: TypeAlias = set[str]
PrimitiveType: TypeAlias = torch.Tensor | int | float | str
ValueType: TypeAlias = Any
"""Type of a state dict value: a `PrimitiveType`, a sharded tensor of FSDP1, or a list, tuple or dict of them."""
DictValueType: TypeAlias = dict[str, ValueType]
ListDictValueType: TypeAlias = list[DictValueType]
OptimizerStateType: TypeAlias = dict[str, Any]
"""Type of optimizer state dicts: nested (`{"state": {FQN: {name: value}}, "param_groups": […]}`) or flat."""


@dataclass
class StateDictOptions:
    """Options for getting and setting state dicts.

    Args:
        full_state_dict: Whether state dicts have whole tensors instead of shards.
        cpu_offload: Whether tensors are on the CPU. With `full_state_dict`, ranks other than 0 get an empty dict.
        ignore_frozen_params: Whether the model's state dict lacks parameters without `requires_grad`.
        keep_submodule_prefixes: Whether names begin with the submodule's.
        strict: Whether missing and unexpected names are errors.
        broadcast_from_rank0: Whether rank 0 broadcasts the state dict to set, tensor by tensor. Requires
            `full_state_dict`.
        flatten_optimizer_state_dict: Whether optimizer state is one flat dict, `state.<FQN>.<name>` and
            `param_groups.<FQN>.<hyperparameter>`, independent of groups.
        dsd_fqn_modifiers: Name of a method of modules that returns name → child module, for the children whose names
            the module's state dict hooks remove from keys.

    Source: torch 2.13 `state_dict.StateDictOptions`.

    Example:
        ```python
        import torch
        from dcp_state import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(torch.nn.Linear(4, 2), options=options)
        assert set(state) == {"weight", "bias"}
        ```
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"


def check_options(options: StateDictOptions | None) -> StateDictOptions:
    """Return the options, or the defaults; ValueError for `broadcast_from_rank0` without `full_state_dict`."""
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0 sends whole tensors: set full_state_dict=True with it")
    return options
