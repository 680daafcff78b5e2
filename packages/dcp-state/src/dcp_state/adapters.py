"""How a kind of module or optimizer is taught: the contracts of adapters, and the adapters that are installed.

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
    """A child that a wrapper puts between a module and its canonical names.

    Args:
        child: Its attribute name in the wrapper.
        in_keys: Whether the keys of `wrapper.state_dict()` contain that name.
    """

    child: str
    in_keys: bool


class ModuleAdapter:
    """Teaches one kind of module; every method has a default that changes nothing.

    A plugin names a subclass. One instance serves the process; `handles` is asked once per class of modules.
    """

    def handles(self, kind: type[nn.Module]) -> bool:
        """Whether modules of this class are of this kind."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it handles")

    def layer(self, module: nn.Module) -> Layer | None:
        """The wrapped child whose name is no part of canonical names; None if the module wraps nothing."""
        del module
        return None

    def prepare(self, module: nn.Module) -> None:
        """Called before the names of parameters are looked up, so that the module can show the real ones."""
        del module

    def joined_parameters(self, module: nn.Module) -> Mapping[torch.Tensor, list[str]]:
        """Parameters that stand for several at once → the paths, below the wrapped child, of what they stand for."""
        del module
        return {}

    def around(self, root: nn.Module, options: StateDictOptions) -> contextlib.AbstractContextManager[Any]:
        """What to hold while `root.state_dict()` or `load_state_dict()` runs, once per kind that the root contains."""
        del root, options
        return contextlib.nullcontext()

    gathers: ClassVar[bool] = False
    """Whether `around` already makes whole tensors for `full_state_dict`."""

    owns_optimizer_state: ClassVar[bool] = False
    """Whether the two methods below give the optimizer state of a model that contains such modules."""

    def name_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, packed: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """`packed`, an `optimizer.state_dict()`, with keys of `root.state_dict()` for indices. May be collective."""
        raise NotImplementedError

    def pack_optimizer_state(
        self, root: nn.Module, optimizer: torch.optim.Optimizer, named: dict[str, Any], options: StateDictOptions
    ) -> dict[str, Any]:
        """The reverse: what `optimizer.load_state_dict` takes on this rank. May be collective."""
        raise NotImplementedError


class OptimizerAdapter:
    """Teaches one kind of optimizer; every method but `handles` has a default."""

    def handles(self, kind: type[torch.optim.Optimizer]) -> bool:
        """Whether optimizers of this class are of this kind."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it handles")

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise `UnsupportedOptimizerError` if the state of such optimizers cannot be named."""
        del optimizer

    def inner(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer] | None:
        """The optimizers that hold all state in place of this one; None if it does so itself, or is left to be seen.

        A wrapper that shows the groups and the state of the one that it holds, and a container whose `optimizers` hold
        all that it trains, need no adapter.
        """
        del optimizer
        return None

    def initial_state(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
    ) -> dict[str, Any] | None:
        """The state before the first step of a parameter, in new tensors; None to have it found out by trial."""
        del optimizer, group, parameter
        return None


class Adapters:
    """The adapters of a process, asked by class."""

    def __init__(self, adapters: Mapping[str, ModuleAdapter | OptimizerAdapter]) -> None:
        self._modules = [adapter for adapter in adapters.values() if isinstance(adapter, ModuleAdapter)]
        self._optimizers = [adapter for adapter in adapters.values() if isinstance(adapter, OptimizerAdapter)]
        self._by_class: dict[type[nn.Module], tuple[ModuleAdapter, ...]] = {}

    def of_module(self, kind: type[nn.Module]) -> tuple[ModuleAdapter, ...]:
        """All adapters that handle a class of modules."""
        found = self._by_class.get(kind)
        if found is None:
            found = tuple(adapter for adapter in self._modules if adapter.handles(kind))
            self._by_class[kind] = found
        return found

    def of_optimizer(self, optimizer: torch.optim.Optimizer) -> OptimizerAdapter | None:
        """The first adapter that handles an optimizer."""
        return next((adapter for adapter in self._optimizers if adapter.handles(type(optimizer))), None)


def installed_adapters() -> Adapters:
    """The adapters that plugins offer now. Raises what `dcp_core.plugins.state_adapter` raises."""
    return _load(plugins.names("state_adapters"))


@lru_cache(maxsize=4)
def _load(names: tuple[str, ...]) -> Adapters:
    return Adapters({name: plugins.state_adapter(name)() for name in names})
