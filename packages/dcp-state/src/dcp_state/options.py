"""`StateDictOptions`, and the types of state dict values; no behaviour.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict` (names, defaults, meanings).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

__all__ = [
    "FQNS_T",
    "DictValueType",
    "ListDictValueType",
    "OptimizerStateType",
    "PrimitiveType",
    "StateDictOptions",
    "ValueType",
    "check_options",
]

FQNS_T: TypeAlias = set[str]
PrimitiveType: TypeAlias = torch.Tensor | int | float | str
ValueType: TypeAlias = Any
"""A `PrimitiveType`, or a list, tuple or dict of them; sharded tensors of FSDP1 too."""
DictValueType: TypeAlias = dict[str, ValueType]
ListDictValueType: TypeAlias = list[DictValueType]
OptimizerStateType: TypeAlias = dict[str, Any]
"""`state` → FQN → name → value, and `param_groups` → groups with FQNs as `params`; or the flat form of both."""


@dataclass
class StateDictOptions:
    """Options for making and loading state dicts.

    Args:
        full_state_dict: Whether state dicts, when returned and when set, have whole tensors instead of shards.
        cpu_offload: Whether tensors are on the CPU. With `full_state_dict`, only rank 0 gets them, and the other ranks
            get an empty dict.
        ignore_frozen_params: Whether parameters without `requires_grad` are left out of the model's state dict.
        keep_submodule_prefixes: With `submodules`, whether names begin with the submodule's own.
        strict: Whether missing and unexpected names are refused when setting.
        broadcast_from_rank0: Whether, when setting, only rank 0 has the state dict, and sends it tensor by tensor.
            Needs `full_state_dict`.
        flatten_optimizer_state_dict: Whether optimizer state is one flat dict, `state.<FQN>.<name>` and
            `param_groups.<FQN>.<hyperparameter>`, which is independent of how parameters are grouped.
        dsd_fqn_modifiers: Name of the method of a module that returns (as name → child) the children whose names the
            module's state dict hooks leave out.

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
    """Return the options, or the default ones, checked.

    Raises:
        ValueError: `broadcast_from_rank0` without `full_state_dict`.
    """
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise ValueError("broadcast_from_rank0 sends whole tensors: set full_state_dict=True with it")
    return options
