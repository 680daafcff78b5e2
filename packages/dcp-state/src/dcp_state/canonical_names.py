"""Canonical names (FQNs) of a model's parameters and buffers, which do not depend on wrappers.

An FQN is the path of attribute names from the model to the tensor, without attributes of wrappers. A key of
`state_dict()` may contain them (`module.` of DDP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcp_core.errors import UnsupportedValueError
from dcp_state.adapters import Adapters, Layer, ModuleAdapter, installed_adapters
from dcp_state.report import StateMismatchError

_EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class ModelNames:
    """Names of parameters, persistent buffers and extra states."""

    raw_keys: dict[str, str] = field(default_factory=dict)
    """FQN → key of `state_dict()`, in its order."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """A tied tensor has several entries."""
    fqn_of: dict[torch.Tensor, str] = field(default_factory=dict)
    """Parameter → its first FQN in `named_parameters()`."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further FQN of a tied tensor → its first FQN."""
    joined: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    """Flat parameter (FSDP1) → FQNs in it."""
    module_prefixes: dict[nn.Module, list[str]] = field(default_factory=dict)
    """Each prefix is `""` or ends with a dot."""
    adapters: dict[ModuleAdapter, list[nn.Module]] = field(default_factory=dict)
    fqn_prefixes: dict[str, str] = field(default_factory=dict)
    """Prefix of keys → FQN prefix, for each module."""
    raw_prefixes: dict[str, str] = field(default_factory=dict)
    """FQN prefix → prefix of keys; for a wrapper and its child, the child's."""

    def fqn(self, key: str) -> str:
        """Return a key's FQN, also if a state dict hook added the key."""
        return _translated(key, self.fqn_prefixes)

    def raw_key(self, fqn: str) -> str:
        """Return an FQN's key of `state_dict()`."""
        known = self.raw_keys.get(fqn)
        return _translated(fqn, self.raw_prefixes) if known is None else known


def name_model(model: nn.Module, *, modifiers: str = "_fqn_modifiers", adapters: Adapters | None = None) -> ModelNames:
    """Find a model's names without communication; UnsupportedValueError if two tensors have the same."""
    adapters = adapters or installed_adapters()
    for module in model.modules():
        for adapter in adapters.of_module(type(module)):
            adapter.prepare(module)
    names = ModelNames()
    walk = _Walk(names, adapters, modifiers)
    walk.visit(model, "", "")
    walk.name_members()
    return names


def name_models(models: Sequence[nn.Module], *, modifiers: str = "_fqn_modifiers") -> list[ModelNames]:
    """Find the names in several modules of one model, like `name_model`."""
    adapters = installed_adapters()
    parts = [name_model(model, modifiers=modifiers, adapters=adapters) for model in models]
    seen: dict[str, int] = {}
    for index, part in enumerate(parts):
        for fqn in part.raw_keys:
            if fqn in seen:
                raise UnsupportedValueError(
                    f"parts {seen[fqn]} and {index} of the model both hold {fqn!r}; keep the names that the whole "
                    "model gives its layers, for example by holding them in a ModuleDict by their index"
                )
            seen[fqn] = index
    return parts


class _Walk:
    def __init__(self, names: ModelNames, adapters: Adapters, modifiers: str) -> None:
        self._names = names
        self._adapters = adapters
        self._modifiers = modifiers
        self._first: dict[torch.Tensor, str] = {}
        self._members: list[tuple[torch.Tensor, nn.Module, list[str]]] = []

    def name_members(self) -> None:
        """Name the parameters inside flat parameters, after every module has its prefix."""
        for parameter, inner, paths in self._members:
            for path in paths:
                above, _, local = path.rpartition(".")
                self._names.joined[parameter].append(self._names.module_prefixes[inner.get_submodule(above)][0] + local)

    def visit(self, module: nn.Module, fqn_prefix: str, raw_prefix: str) -> None:
        names = self._names
        names.module_prefixes.setdefault(module, []).append(fqn_prefix)
        names.fqn_prefixes[raw_prefix] = fqn_prefix
        names.raw_prefixes[fqn_prefix] = raw_prefix
        skipped = self._layers(module)
        for local, parameter in module._parameters.items():  # noqa: SLF001 - tied ones too, which the public way hides
            if parameter is not None and parameter not in names.joined:
                self._add(fqn_prefix + local, raw_prefix + local, parameter)
                names.fqn_of.setdefault(parameter, fqn_prefix + local)
        transient = module._non_persistent_buffers_set  # noqa: SLF001 - there is no public way
        for local, buffer in module._buffers.items():  # noqa: SLF001 - as above
            if buffer is not None and local not in transient:
                self._add(fqn_prefix + local, raw_prefix + local, buffer)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            self._add(fqn_prefix + _EXTRA_STATE, raw_prefix + _EXTRA_STATE, None)
        for local, child in module._modules.items():  # noqa: SLF001 - shared ones too
            if child is not None:
                layer = skipped.get(local)
                inner_fqn = fqn_prefix if layer is not None else f"{fqn_prefix}{local}."
                shows = layer is None or layer.in_keys
                self.visit(child, inner_fqn, f"{raw_prefix}{local}." if shows else raw_prefix)

    def _layers(self, module: nn.Module) -> dict[str, Layer]:
        """Return the wrapped children of a module that FQNs leave out."""
        layers: dict[str, Layer] = {}
        for adapter in self._adapters.of_module(type(module)):
            self._names.adapters.setdefault(adapter, []).append(module)
            layer = adapter.layer(module)
            for parameter, members in adapter.joined_parameters(module).items():
                self._names.joined[parameter] = []
                self._members.append((parameter, module if layer is None else getattr(module, layer.child), members))
            if layer is not None:
                layers[layer.child] = layer
        modify = getattr(type(module), self._modifiers, None)
        if modify is not None:
            renamed: Mapping[str, Any] = modify(module)
            layers.update({child: Layer(child, in_keys=False) for child in renamed.values()})
        return layers

    def _add(self, fqn: str, raw: str, tensor: torch.Tensor | None) -> None:
        names = self._names
        if fqn in names.raw_keys and names.tensors.get(fqn) is not tensor:
            raise UnsupportedValueError(
                f"{raw!r} and {names.raw_keys[fqn]!r} of the model would both be called {fqn!r} without the names of "
                "their wrappers; rename one of them"
            )
        names.raw_keys[fqn] = raw
        if tensor is None:
            return
        names.tensors[fqn] = tensor
        first = self._first.setdefault(tensor, fqn)
        if first != fqn:
            names.aliases[fqn] = first


def _translated(key: str, prefixes: Mapping[str, str]) -> str:
    prefix, local = _split(key)
    while prefix not in prefixes:
        prefix, above = _split(prefix[:-1])
        local = f"{above}.{local}"
    return prefixes[prefix] + local


def _split(key: str) -> tuple[str, str]:
    above, dot, local = key.rpartition(".")
    return above + dot, local


@dataclass(slots=True)
class OptimizerNames:
    """Names of parameters in modules of a model."""

    fqn_of: dict[torch.Tensor, str] = field(default_factory=dict)
    other_names: dict[str, list[str]] = field(default_factory=dict)
    """First FQN of a tied parameter → its other FQNs."""
    joined: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    """Flat parameter (FSDP1) → FQNs in it."""
    known: set[str] = field(default_factory=set)
    """Every FQN of the model, including buffers."""
    owner: tuple[ModuleAdapter, nn.Module, ModelNames] | None = None
    """Adapter with `owns_optimizer_state`, its model, and the names."""

    def fqn(self, parameter: torch.Tensor, group: int, position: int) -> str:
        """Return a parameter's FQN; StateMismatchError if the model does not hold it."""
        found = self.fqn_of.get(parameter)
        if found is None:
            problem = (
                f"parameter {position} of the optimizer's group {group}, of shape {tuple(parameter.shape)}, is no "
                "parameter of the model; pass the model that the optimizer was made for (all parts of it), and make "
                "optimizers after the model is wrapped"
            )
            raise StateMismatchError("optimizer", [problem])
        return found

    def fqns(self, parameter: torch.Tensor, group: int, position: int) -> list[str]:
        """Return all FQNs in a flat parameter; raise as `fqn` does."""
        return self.joined.get(parameter) or [self.fqn(parameter, group, position)]

    def candidates(self, fqn: str) -> list[str]:
        """Return the FQNs under which state may have been saved: several for a tied parameter."""
        return [fqn, *self.other_names.get(fqn, ())]


def optimizer_names(parts: Sequence[tuple[nn.Module, ModelNames]]) -> OptimizerNames:
    """Join the names in several modules."""
    joined = OptimizerNames()
    for module, names in parts:
        joined.fqn_of.update(names.fqn_of)
        joined.joined.update(names.joined)
        joined.known.update(names.raw_keys)
        for members in names.joined.values():
            joined.known.update(members)
        for alias, first in names.aliases.items():
            joined.other_names.setdefault(first, []).append(alias)
        for adapter in names.adapters:
            if adapter.owns_optimizer_state:
                joined.owner = (adapter, module, names)
    return joined
