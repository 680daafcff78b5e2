"""Canonical names (FQNs) of a model's parameters and buffers, which do not depend on wrappers.

A canonical name (FQN) is the path of attribute names from the model to the tensor, without attributes of wrappers. A
key of `state_dict()` may contain attributes of wrappers (`module.` of DDP, `_orig_mod.` of `torch.compile`). Adapters
recognise the wrappers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcp_core.errors import DuplicateKeyError
from dcp_state.adapters import Adapters, Layer, ModuleAdapter, installed_adapters

__all__ = ["ModelNames", "name_model", "name_models"]

_EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class ModelNames:
    """Canonical names of one model's parameters, persistent buffers and extra states."""

    raw_keys: dict[str, str] = field(default_factory=dict)
    """FQN → key of `state_dict()`, in the order of `state_dict()`."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """FQN → parameter or buffer; a tied tensor has an entry for each of its names."""
    fqn_of: dict[torch.Tensor, str] = field(default_factory=dict)
    """Parameter → its FQN in optimizer state: the first of its names in the order of `named_parameters()`."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further FQN of a tied parameter or buffer → its first FQN."""
    joined: dict[torch.Tensor, list[str]] = field(default_factory=dict)
    """Flat parameter (FSDP1) → FQNs of the parameters that it contains."""
    module_prefixes: dict[nn.Module, list[str]] = field(default_factory=dict)
    """Module → prefixes of the FQNs of its parameters, each `""` or ending with a dot."""
    adapters: dict[ModuleAdapter, list[nn.Module]] = field(default_factory=dict)
    """Adapter → the modules of the model that it handles."""
    fqn_prefixes: dict[str, str] = field(default_factory=dict)
    """Prefix of keys of `state_dict()` → FQN prefix, for each module."""
    raw_prefixes: dict[str, str] = field(default_factory=dict)
    """FQN prefix → prefix of keys of `state_dict()`; for a wrapper and its child, the prefix of the child."""

    def fqn(self, key: str) -> str:
        """Return the FQN for a key of `state_dict()`; the key may also be one that a state dict hook added."""
        return _translated(key, self.fqn_prefixes)

    def raw_key(self, fqn: str) -> str:
        """Return the key of `state_dict()` for an FQN, also for an unknown FQN."""
        known = self.raw_keys.get(fqn)
        return _translated(fqn, self.raw_prefixes) if known is None else known


def name_model(model: nn.Module, *, modifiers: str = "_fqn_modifiers", adapters: Adapters | None = None) -> ModelNames:
    """Find the canonical names of a model.

    Args:
        model: The model, in any wrappers that adapters handle, at any depth.
        modifiers: Value of `StateDictOptions.dsd_fqn_modifiers`.
        adapters: Adapters of wrappers; None for all installed adapters.

    Raises:
        DuplicateKeyError: Two tensors of the model have the same canonical name.

    Ranks: one; no communication.
    """
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
    """Find the canonical names in each of several modules of one model, such as the pipeline stages of a rank.

    Args:
        models: The modules; see `name_model`.
        modifiers: Value of `StateDictOptions.dsd_fqn_modifiers`.

    Returns:
        The names in each module, in the order of `models`.

    Raises:
        DuplicateKeyError: Two of the modules have a value of the same name.
    """
    adapters = installed_adapters()
    parts = [name_model(model, modifiers=modifiers, adapters=adapters) for model in models]
    seen: dict[str, int] = {}
    for index, part in enumerate(parts):
        for fqn in part.raw_keys:
            if fqn in seen:
                raise DuplicateKeyError(
                    f"parts {seen[fqn]} and {index} of the model both hold {fqn!r}; keep the names that the whole "
                    "model gives its layers, for example by holding them in a ModuleDict by their index"
                )
            seen[fqn] = index
    return parts


class _Walk:
    """Visits modules in the order of `state_dict()`."""

    def __init__(self, names: ModelNames, adapters: Adapters, modifiers: str) -> None:
        self._names = names
        self._adapters = adapters
        self._modifiers = modifiers
        self._first: dict[torch.Tensor, str] = {}
        self._members: list[tuple[torch.Tensor, nn.Module, list[str]]] = []

    def name_members(self) -> None:
        """Name the parameters inside flat parameters; called once every module has its prefix."""
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
        """Yield the wrapped children of a module, whose names are left out of FQNs."""
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
            raise DuplicateKeyError(
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
    """Return a key with its longest known prefix replaced."""
    prefix, local = _split(key)
    while prefix not in prefixes:
        prefix, above = _split(prefix[:-1])
        local = f"{above}.{local}"
    return prefixes[prefix] + local


def _split(key: str) -> tuple[str, str]:
    """Split `a.b.c` into (`a.b.`, `c`)."""
    above, dot, local = key.rpartition(".")
    return above + dot, local
