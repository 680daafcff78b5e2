"""`Shell` wraps a module; its adapter keeps it out of the names of parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from dcp_state import Layer, ModuleAdapter

__all__ = ["Shell", "ShellAdapter"]


class Shell(nn.Module):
    """Calls the module that it holds, and counts the calls."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the wrapped module."""
        self.calls += 1
        return self.core(*args, **kwargs)


class ShellAdapter(ModuleAdapter):
    """Saves `core.weight` of a `Shell` as `weight`, as without the wrapper."""

    def handles(self, kind: type[nn.Module]) -> bool:
        """`Shell` and its subclasses."""
        return issubclass(kind, Shell)

    def layer(self, module: nn.Module) -> Layer:
        """The wrapped module; keys of `state_dict()` contain the attribute's name."""
        del module
        return Layer("core", in_keys=True)
