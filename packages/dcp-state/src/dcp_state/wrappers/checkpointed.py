"""Activation checkpointing and offloading wrappers: their own hooks keep them out of state dict keys."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["CheckpointedAdapter"]


class CheckpointedAdapter(ModuleAdapter):
    """Takes `_checkpoint_wrapped_module.` away."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """`CheckpointWrapper` and `OffloadWrapper`."""
        return issubclass(kind, ActivationWrapper)

    def layer(self, module: nn.Module) -> Layer:
        """The wrapped module."""
        del module
        return Layer("_checkpoint_wrapped_module", in_keys=False)
