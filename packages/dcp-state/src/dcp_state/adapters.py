"""Base classes of adapters for kinds of modules and optimizers, and the registry of installed adapters.

Plugins register adapters by the hook `dcp_register_state_adapters`.
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


@dataclass(frozen=True, slots=True)
class Layer:
    """Attribute `child` of a wrapper that holds the wrapped module.

    `in_keys`: whether the keys of `wrapper.state_dict()` contain this name.
    """

    child: str
    in_keys: bool


class ModuleAdapter:
    """Adapter for one kind of module; the default methods change nothing.

    A process creates one instance, and calls `handles` once per module class.

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
        """Return whether the adapter handles modules of this class."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it handles")

    def layer(self, module: nn.Module) -> Layer | None:
        """Return the layer that canonical names leave out, or None."""
        del module
        return None

    def prepare(self, module: nn.Module) -> None:
        """Prepare a module, for example reshard it, before its parameters are named."""
        del module

    def joined_parameters(self, module: nn.Module) -> Mapping[torch.Tensor, list[str]]:
        """Return flat parameter → paths of its parameters, from the wrapped child."""
        del module
        return {}

    def around(self, root: nn.Module, options: StateDictOptions) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for `root.state_dict()` and `root.load_state_dict()`.

        It is entered once per adapter that handles a module in `root`.
        """
        del root, options
        return contextlib.nullcontext()

    gathers: ClassVar[bool] = False
    """Whether the context of `around` gathers whole tensors if `full_state_dict` is set."""

    owns_optimizer_state: ClassVar[bool] = False
    """Whether `name_optimizer_state` and its inverse convert optimizer state."""

    def name_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return `packed`, an `optimizer.state_dict()`, with keys of `root.state_dict()`. Ranks: may be collective."""
        raise NotImplementedError

    def pack_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, named: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """Return a result of `name_optimizer_state` in the form for `load_state_dict`. Ranks: may be collective."""
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
        """Return whether the adapter handles optimizers of this class."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it handles")

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UnsupportedValueError` if the state cannot be stored by parameter name."""
        del optimizer

    def inner(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer] | None:
        """Return the inner optimizers of a wrapper, which hold all state; None to rely on detection.

        Detected are a wrapper that shares groups and state with the one optimizer inside it, and a container with all
        trained parameters in its attribute `optimizers`.
        """
        del optimizer
        return None

    def initial_state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
    ) -> dict[str, Any] | None:
        """Return a parameter's state before its first step in new tensors; None to find it by a trial.

        A trial is a step of a copy of the optimizer. `group` is the parameter's group.
        """
        del optimizer, group, parameter
        return None


class Adapters:
    """Registry of adapters."""

    def __init__(self, adapters: Mapping[str, ModuleAdapter | OptimizerAdapter]) -> None:
        self._modules = [adapter for adapter in adapters.values() if isinstance(adapter, ModuleAdapter)]
        self._optimizers = [adapter for adapter in adapters.values() if isinstance(adapter, OptimizerAdapter)]
        self._by_class: dict[type[nn.Module], tuple[ModuleAdapter, ...]] = {}

    def of_module(self, kind: type[nn.Module]) -> tuple[ModuleAdapter, ...]:
        """Return all adapters that handle modules of this class."""
        found = self._by_class.get(kind)
        if found is None:
            found = tuple(adapter for adapter in self._modules if adapter.handles(kind))
            self._by_class[kind] = found
        return found

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerAdapter | None:
        """Return the first adapter that handles the optimizer, or None."""
        return next((adapter for adapter in self._optimizers if adapter.handles(type(optimizer))), None)


def installed_adapters() -> Adapters:
    """Return the adapters of installed plugins."""
    return _load(plugins.names("state_adapters"))


@lru_cache(maxsize=4)
def _load(names: tuple[str, ...]) -> Adapters:
    return Adapters({name: plugins.state_adapter(name)() for name in names})
