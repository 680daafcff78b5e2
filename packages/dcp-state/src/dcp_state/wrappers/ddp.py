"""Adapter of `DistributedDataParallel` and `DataParallel`: the child `module`, which state dict keys contain."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["DdpAdapter"]


class DdpAdapter(ModuleAdapter):
    """Removes `module.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the class is one of the two replicating wrappers."""
        return issubclass(kind, (DistributedDataParallel, DataParallel))

    def layer(self, module: nn.Module) -> Layer:
        """Return the replicated module."""
        del module
        return Layer("module", in_keys=True)
