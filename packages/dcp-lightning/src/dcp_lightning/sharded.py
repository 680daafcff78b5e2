"""Shards of models and optimizers: their states under canonical names, and loads into them in place.

Shared by the strategies of the Trainer and of Fabric.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dcp_core import DefaultLoadPlanner, LoadMismatchError, LoadProblem, load
from dcp_lightning.checkpoint_io import META_OF_LIGHTNING, DcpCheckpointIO, PathLike
from dcp_state import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

__all__ = ["OwnCheckpointIO", "is_of_lightning", "load_shards", "state_of"]

_Strategy: Any = object  # for the type checker: whatever strategy follows among the bases


class OwnCheckpointIO(_Strategy):
    """Strategy with a `DcpCheckpointIO`: the one among the plugins, or else one with default settings."""

    _checkpoint_io: DcpCheckpointIO | None

    @property
    def checkpoint_io(self) -> DcpCheckpointIO:
        """The plug-in that saves, loads and removes."""
        self._checkpoint_io = self._checkpoint_io or DcpCheckpointIO()
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        if not isinstance(plugin, DcpCheckpointIO):
            raise TypeError(
                f"{type(self).__name__} saves with a DcpCheckpointIO, not with {type(plugin).__name__}; in the "
                "background with DcpCheckpointIO(background='process')"
            )
        self._checkpoint_io = plugin


def is_of_lightning(path: str) -> bool:
    """Whether Lightning's own strategies saved the checkpoint at a path: it is a file, or a folder with `meta.pt`."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, META_OF_LIGHTNING))


def state_of(part: Any, modules: Iterable[nn.Module]) -> Any:
    """Return the state of a module, an optimizer or a list of these by canonical names; each rank gets its shards."""
    if isinstance(part, nn.Module):
        return get_model_state_dict(part)
    if isinstance(part, Optimizer):
        return get_optimizer_state_dict(_trained_by(part, modules), part)
    return [state_of(each, modules) for each in part]


def load_shards(plugin: DcpCheckpointIO, path: PathLike, parts: Mapping[str, Any], *, strict: bool) -> None:
    """Load modules and optimizers in place.

    Args:
        plugin: Plug-in whose settings are used.
        path: Path or URI of the checkpoint.
        parts: Name in the checkpoint → module, optimizer, or list of optimizers.
        strict: Whether a name that only the model or only the checkpoint has is an error.

    Raises:
        LoadMismatchError: The checkpoint does not fit the modules and optimizers, which are unchanged.

    Ranks: every rank of the job; collective.
    """
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    template = {name: state_of(part, modules) for name, part in parts.items()}
    planner = DefaultLoadPlanner(allow_partial_load=not strict, allow_lossy_casts=True)
    report = load(template, checkpoint_id=path, storage_reader=plugin.storage(path, "reader"), planner=planner)
    of_modules = tuple(f"{name}." for name, part in parts.items() if isinstance(part, nn.Module))
    surplus = [name for name in report.unexpected if name.startswith(of_modules)] if strict else []
    if surplus:
        why = "is in the checkpoint, not in the model: load it without strict, or with the same model"
        raise LoadMismatchError([LoadProblem(name, "unexpected", f"{name!r} {why}") for name in surplus])
    for name, part in parts.items():
        _restore(part, template[name], modules, StateDictOptions(strict=strict))


def _restore(part: Any, state: Any, modules: Iterable[nn.Module], options: StateDictOptions) -> None:
    if isinstance(part, nn.Module):
        set_model_state_dict(part, state, options=options)
    elif isinstance(part, Optimizer):
        set_optimizer_state_dict(_trained_by(part, modules), part, optim_state_dict=state, options=options)
    else:
        for each, its_state in zip(part, state, strict=True):
            _restore(each, its_state, modules, options)


def _trained_by(optimizer: Optimizer, modules: Iterable[nn.Module]) -> nn.Module:
    """Return the module whose parameters an optimizer trains."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules:
        if trained <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise ValueError(
        f"{type(optimizer).__name__} trains parameters of no module in this state: pass the model beside it"
    )
