"""Adapter of activation checkpointing and offloading wrappers, whose hooks remove their prefix from state dict keys."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["CheckpointedAdapter"]


class CheckpointedAdapter(ModuleAdapter):
    """Adapter that removes `_checkpoint_wrapped_module.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the class is `CheckpointWrapper` or `OffloadWrapper`."""
        return issubclass(kind, ActivationWrapper)

    def layer(self, module: nn.Module) -> Layer:
        """Return the layer that leads to the wrapped module."""
        del module
        return Layer("_checkpoint_wrapped_module", in_keys=False)
