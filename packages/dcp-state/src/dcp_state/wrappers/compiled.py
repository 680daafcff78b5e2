"""Adapter of `torch.compile(module)`, whose state dict keys contain the name of its child, `_orig_mod`.

`module.compile()` makes no wrapper, and needs no adapter.
"""

from __future__ import annotations

import sys

from torch import nn

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["CompiledAdapter"]


class CompiledAdapter(ModuleAdapter):
    """Adapter that removes `_orig_mod.` from names."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the class is `OptimizedModule`; False if `torch._dynamo` (slow to import) is not imported."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        return dynamo is not None and issubclass(kind, dynamo.OptimizedModule)

    def layer(self, module: nn.Module) -> Layer:
        """Return the layer that leads to the original module, which `torch.compile` wrapped as `_orig_mod`."""
        del module
        return Layer("_orig_mod", in_keys=True)
