"""Adapter of activation checkpointing and offloading wrappers, whose hooks keep their prefix out of state dict keys."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["CheckpointedAdapter"]


class CheckpointedAdapter(ModuleAdapter):
    """Removes `_checkpoint_wrapped_module.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the class is `CheckpointWrapper` or `OffloadWrapper`."""
        return issubclass(kind, ActivationWrapper)

    def layer(self, module: nn.Module) -> Layer:
        """Return the wrapped module."""
        del module
        return Layer("_checkpoint_wrapped_module", in_keys=False)
