"""`torch.compile(module)`: the module is the child `_orig_mod`, which state dict keys show.

`module.compile()` wraps nothing and needs no teaching.
"""

from __future__ import annotations

import sys

from torch import nn

from dcp_state.adapters import Layer, ModuleAdapter

__all__ = ["CompiledAdapter"]


class CompiledAdapter(ModuleAdapter):
    """Takes `_orig_mod.` away."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """`OptimizedModule`; if its module is not imported, which takes seconds, there is none."""
        dynamo = sys.modules.get("torch._dynamo.eval_frame")
        return dynamo is not None and issubclass(kind, dynamo.OptimizedModule)

    def layer(self, module: nn.Module) -> Layer:
        """The compiled module."""
        del module
        return Layer("_orig_mod", in_keys=True)
