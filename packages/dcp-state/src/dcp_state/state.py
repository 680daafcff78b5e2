"""State dicts of a model and its optimizers in one call: get and set.

Source: torch 2.13 `torch.distributed.checkpoint.state_dict` (signatures, meanings).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dcp_core.toolkit import collector_paused
from dcp_state.canonical_names import name_model
from dcp_state.model import model_state, restore_model
from dcp_state.optimizer.inner_optimizers import Optimizers, as_optimizers
from dcp_state.optimizer.optimizer_state_dict import optimizer_state, restore_optimizers
from dcp_state.options import StateDictOptions, check_options
from dcp_state.report import IncompatibleKeys, StateReport

__all__ = ["get_state_dict", "set_state_dict"]


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict of a model, and the state dict of its optimizers.

    They are the results of `get_model_state_dict` and `get_optimizer_state_dict`, which describe the arguments.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `full_state_dict`.
    Source: torch 2.13 `state_dict.get_state_dict`.
    """
    options = check_options(options)
    with collector_paused():
        names = name_model(model, modifiers=options.dsd_fqn_modifiers)
        of_model = model_state(model, names, options, submodules)
        optimizers = as_optimizers(optimizers)
        of_optimizers = optimizer_state([(model, names)], optimizers, options, submodules) if optimizers else {}
    return of_model, of_optimizers


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> IncompatibleKeys:
    """Load optimizer state as `set_optimizer_state_dict` does, then model state as `set_model_state_dict` does.

    These functions describe the arguments. If there are optimizers, an empty `model_state_dict` is accepted, and leaves
    the model unchanged.

    Returns:
        Missing and unexpected names of the model; its `report` also has the optimizer state.

    Ranks: every rank that holds a part of the model; collective for FSDP1 and for `broadcast_from_rank0`.
    Source: torch 2.13 `state_dict.set_state_dict`.
    """
    options = check_options(options)
    with collector_paused():
        names = name_model(model, modifiers=options.dsd_fqn_modifiers)
        optimizers = as_optimizers(optimizers)
        report = StateReport()
        if optimizers:
            report = restore_optimizers([(model, names)], optimizers, optim_state_dict, options)
        keys = restore_model(model, names, model_state_dict, options, may_be_empty=bool(optimizers))
    keys.report.merge(report)
    return keys
