"""`DistributedDataParallel` and `DataParallel`: the model is the child `module`, which state dict keys show."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["DdpAdapter"]


class DdpAdapter(ModuleAdapter):
    """Takes `module.` away."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Both replicating wrappers."""
        return issubclass(kind, (DistributedDataParallel, DataParallel))

    def layer(self, module: nn.Module) -> Layer:
        """The replicated module."""
        del module
        return Layer("module", in_keys=True)
