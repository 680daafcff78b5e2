"""Adapter of `DistributedDataParallel` and `DataParallel`, whose state dict keys contain the child's name `module`."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["DdpAdapter"]


class DdpAdapter(ModuleAdapter):
    """Adapter that removes `module.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the class is `DistributedDataParallel` or `DataParallel`."""
        return issubclass(kind, (DistributedDataParallel, DataParallel))

    def layer(self, module: nn.Module) -> Layer:
        """Return the layer that leads to the replicated module."""
        del module
        return Layer("module", in_keys=True)
