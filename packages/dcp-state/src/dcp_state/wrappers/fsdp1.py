"""FSDP1 (`FullyShardedDataParallel`): flat parameters, of which its own hooks make sharded or whole tensors by name."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dcp_state.adapters import Layer, ModuleAdapter
from dcp_state.options import StateDictOptions

__all__ = ["Fsdp1Adapter"]


class Fsdp1Adapter(ModuleAdapter):
    """Takes `_fsdp_wrapped_module.` away, and asks FSDP for sharded (or whole) state."""

    gathers: ClassVar[bool] = True
    owns_optimizer_state: ClassVar[bool] = True

    def handles(self, kind: type[nn.Module]) -> bool:
        """FSDP1's wrapper."""
        return issubclass(kind, FullyShardedDataParallel)

    def layer(self, module: nn.Module) -> Layer:
        """The wrapped module; FSDP's hooks keep its name out of keys."""
        del module
        return Layer("_fsdp_wrapped_module", in_keys=False)
