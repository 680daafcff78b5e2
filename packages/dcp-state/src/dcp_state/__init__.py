"""Model and optimizer state dicts by canonical names, the same for every wrapper and parallelism.

This package collects and restores the state of a training run; `dcp_core` saves and loads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dcp_base import import_lazily

if TYPE_CHECKING:
    from dcp_state.adapters import Layer as Layer
    from dcp_state.adapters import ModuleAdapter as ModuleAdapter
    from dcp_state.adapters import OptimizerAdapter as OptimizerAdapter
    from dcp_state.app import app_state as app_state
    from dcp_state.app import get_state_dict as get_state_dict
    from dcp_state.app import set_state_dict as set_state_dict
    from dcp_state.base_model import TrainableOnly as TrainableOnly
    from dcp_state.model import get_model_state_dict as get_model_state_dict
    from dcp_state.model import set_model_state_dict as set_model_state_dict
    from dcp_state.optimizer.optimizer_state_dict import get_optimizer_state_dict as get_optimizer_state_dict
    from dcp_state.optimizer.optimizer_state_dict import (
        load_sharded_optimizer_state_dict as load_sharded_optimizer_state_dict,
    )
    from dcp_state.optimizer.optimizer_state_dict import set_optimizer_state_dict as set_optimizer_state_dict
    from dcp_state.options import StateDictOptions as StateDictOptions
    from dcp_state.random_state import RandomState as RandomState
    from dcp_state.report import StateMismatchError as StateMismatchError
    from dcp_state.report import StateReport as StateReport

__getattr__, __dir__ = import_lazily(
    __name__,
    {
        "dcp_state.adapters": ("Layer", "ModuleAdapter", "OptimizerAdapter"),
        "dcp_state.app": ("app_state", "get_state_dict", "set_state_dict"),
        "dcp_state.base_model": ("TrainableOnly",),
        "dcp_state.model": ("get_model_state_dict", "set_model_state_dict"),
        "dcp_state.optimizer.optimizer_state_dict": (
            *("get_optimizer_state_dict", "load_sharded_optimizer_state_dict", "set_optimizer_state_dict"),
        ),
        "dcp_state.options": ("StateDictOptions",),
        "dcp_state.random_state": ("RandomState",),
        "dcp_state.report": ("StateMismatchError", "StateReport"),
    },
)
