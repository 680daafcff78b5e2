"""Contracts of adapters for kinds of modules and optimizers, and the registry of installed adapters.

Adapters come from the hook `dcp_register_state_adapters`, those of this package too. What each kind needs lives in
`dcp_state.wrappers`, one file per kind; nothing here knows any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import nn

from dcp_core import plugins
from dcp_state.options import StateDictOptions

__all__ = ["Adapters", "Layer", "ModuleAdapter", "OptimizerAdapter", "installed_adapters"]


@dataclass(frozen=True, slots=True)
class Layer:
    """A child module that a wrapper inserts, and its prefix in state dict keys.

    Args:
        child: Its attribute name in the wrapper.
        in_keys: Whether the keys of `wrapper.state_dict()` contain that name.
    """

    child: str
    in_keys: bool


class ModuleAdapter:
    """Adapter for one kind of module; every method has a default that changes nothing.

    A plugin names a subclass. One instance serves the process; `handles` is asked once per class of modules.

    Example:
        ```python
        import torch
        from dcp_state import Layer, ModuleAdapter


        class Lora(torch.nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base


        class LoraAdapter(ModuleAdapter):  # named by the hook `dcp_register_state_adapters`
            def handles(self, kind):
                return issubclass(kind, Lora)

            def layer(self, module):
                return Layer("base", in_keys=True)  # `base.` is no part of names
        ```
    """

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether the adapter handles modules of this class."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it handles")

    def layer(self, module: nn.Module) -> Layer | None:
        """Return the wrapped child whose name is left out of canonical names; None if the module wraps nothing."""
        del module
        return None

    def prepare(self, module: nn.Module) -> None:
        """Prepare a module before the names of its parameters are looked up, such as by resharding."""
        del module

    def joined_parameters(self, module: nn.Module) -> Mapping[torch.Tensor, list[str]]:
        """Return flat parameters that join several, each with the paths of the joined ones below the wrapped child."""
        del module
        return {}

    def around(self, root: nn.Module, options: StateDictOptions) -> contextlib.AbstractContextManager[Any]:
        """Return a context for `root.state_dict()` or `load_state_dict()`, entered once per kind in the root."""
        del root, options
        return contextlib.nullcontext()

    gathers: ClassVar[bool] = False
    """Whether `around` already makes whole tensors for `full_state_dict`."""

    owns_optimizer_state: ClassVar[bool] = False
    """Whether the two methods below give the optimizer state of a model that contains such modules."""

    def name_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return `packed`, an `optimizer.state_dict()`, with keys of `root.state_dict()` for indices.

        May be collective.
        """
        raise NotImplementedError

    def pack_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, named: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return the reverse: the argument of `optimizer.load_state_dict` on this rank. May be collective."""
        raise NotImplementedError


class OptimizerAdapter:
    """Adapter for one kind of optimizer; every method but `handles` has a default.

    Example:
        ```python
        import torch
        from dcp_state import OptimizerAdapter


        class Sketched(torch.optim.SGD):
            pass  # makes its state in a way that a trial step cannot find out


        class SketchedAdapter(OptimizerAdapter):  # named by the hook `dcp_register_state_adapters`
            def handles(self, kind):
                return issubclass(kind, Sketched)

            def initial_state(self, optimizer, group, parameter):
                return {"momentum_buffer": torch.zeros_like(parameter)}
        ```
    """

    def handles(self, kind: type[torch.optim.Optimizer]) -> bool:
        """Whether the adapter handles optimizers of this class."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it handles")

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UnsupportedOptimizerError` if the state of such optimizers cannot be named."""
        del optimizer

    def inner(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer] | None:
        """Return the wrapped optimizers that hold all state; None if this one holds it, or to detect it by inspection.

        A wrapper that shows the groups and the state of the one that it holds, and a container whose `optimizers` hold
        all that it trains, need no adapter.
        """
        del optimizer
        return None

    def initial_state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
    ) -> dict[str, Any] | None:
        """Return the state before a parameter's first step, in new tensors; None to find it by a trial step."""
        del optimizer, group, parameter
        return None


class Adapters:
    """Registry of a process's adapters, by class."""

    def __init__(self, adapters: Mapping[str, ModuleAdapter | OptimizerAdapter]) -> None:
        self._modules = [adapter for adapter in adapters.values() if isinstance(adapter, ModuleAdapter)]
        self._optimizers = [adapter for adapter in adapters.values() if isinstance(adapter, OptimizerAdapter)]
        self._by_class: dict[type[nn.Module], tuple[ModuleAdapter, ...]] = {}

    def of_module(self, kind: type[nn.Module]) -> tuple[ModuleAdapter, ...]:
        """Return all adapters that handle a class of modules."""
        found = self._by_class.get(kind)
        if found is None:
            found = tuple(adapter for adapter in self._modules if adapter.handles(kind))
            self._by_class[kind] = found
        return found

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerAdapter | None:
        """Return the first adapter that handles an optimizer."""
        return next((adapter for adapter in self._optimizers if adapter.handles(type(optimizer))), None)


def installed_adapters() -> Adapters:
    """Return the adapters of installed plugins. Raises as `dcp_core.plugins.state_adapter`."""
    return _load(plugins.names("state_adapters"))


@lru_cache(maxsize=4)
def _load(names: tuple[str, ...]) -> Adapters:
    return Adapters({name: plugins.state_adapter(name)() for name in names})
