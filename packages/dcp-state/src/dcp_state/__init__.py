"""Model and optimizer state dicts by canonical names, the same for every wrapper and parallelism.

This package collects and restores the state of a training run; `dcp_core` saves and loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_state.adapters import Layer, ModuleAdapter, OptimizerAdapter
    from dcp_state.app import app_state, get_state_dict, set_state_dict
    from dcp_state.base_model import TrainableOnly
    from dcp_state.model import get_model_state_dict, set_model_state_dict
    from dcp_state.optimizer.optimizer_state_dict import (
        get_optimizer_state_dict,
        load_sharded_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from dcp_state.options import StateDictOptions
    from dcp_state.random_state import RandomState
    from dcp_state.report import StateMismatchError, StateReport

__all__ = [
    "Layer",
    "ModuleAdapter",
    "OptimizerAdapter",
    "RandomState",
    "StateDictOptions",
    "StateMismatchError",
    "StateReport",
    "TrainableOnly",
    "app_state",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "load_sharded_optimizer_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_state.adapters": ("Layer", "ModuleAdapter", "OptimizerAdapter"),
        "dcp_state.app": ("app_state", "get_state_dict", "set_state_dict"),
        "dcp_state.base_model": ("TrainableOnly",),
        "dcp_state.model": ("get_model_state_dict", "set_model_state_dict"),
        "dcp_state.optimizer.optimizer_state_dict": (
            "get_optimizer_state_dict",
            "load_sharded_optimizer_state_dict",
            "set_optimizer_state_dict",
        ),
        "dcp_state.options": ("StateDictOptions",),
        "dcp_state.random_state": ("RandomState",),
        "dcp_state.report": ("StateMismatchError", "StateReport"),
    },
)
