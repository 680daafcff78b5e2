"""Shards of models and optimizers under canonical names, loaded in place."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

import dcp_io
import dcp_state
from dcp_core import DefaultLoadPlanner, LoadMismatchError, LoadPlan, LoadProblem, load
from dcp_io.saves.cleanup import read_current
from dcp_lightning.checkpoint_io import META_OF_LIGHTNING, DcpCheckpointIO, PathLike

_Strategy: Any = object  # for the type checker: the next base class is a strategy


class OwnCheckpointIO(_Strategy):
    """Strategy with the `DcpCheckpointIO` among the plugins, or a default one."""

    _checkpoint_io: DcpCheckpointIO | None

    @property
    def checkpoint_io(self) -> DcpCheckpointIO:
        """The plug-in."""
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
    """Return whether Lightning saved the checkpoint; after our save over one, only `meta.pt` remains."""
    meta = os.path.isfile(os.path.join(path, META_OF_LIGHTNING))
    return os.path.isfile(path) or (meta and read_current(dcp_io.open_store(path)).save_id is None)


def state_of(part: Any, modules: Iterable[nn.Module]) -> Any:
    """Return this rank's shards of modules or optimizers, by canonical names."""
    if isinstance(part, nn.Module):
        return dcp_state.get_model_state_dict(part)
    if isinstance(part, Optimizer):
        return dcp_state.get_optimizer_state_dict(_trained_by(part, modules), part)
    return [state_of(each, modules) for each in part]


def load_shards(
    plugin: DcpCheckpointIO, path: PathLike, parts: Mapping[str, Any], *, strict: bool, weights_only: bool | None
) -> None:
    """Load modules and optimizers (`parts`, by their names in the checkpoint) in place.

    If `strict`, parameters, buffers and parameter states must match on both sides; else LoadMismatchError (with several
    ranks, in a CheckpointException) is raised, and nothing was changed.

    Ranks: every rank of the job; collective.
    """
    modules = [part for part in parts.values() if isinstance(part, nn.Module)]
    template = {name: state_of(part, modules) for name, part in parts.items()}
    planner = _ShardPlanner(allow_partial_load=not strict, allow_lossy_casts=True, **plugin.trust(weights_only))
    if strict:
        planner.of_parts = tuple(f"{name}." for name in parts)
        planner.of_settings = tuple(f"{place}.param_groups." for place in _places_of_optimizers(parts))
    load(template, checkpoint_id=path, storage_reader=plugin.storage(path, "reader"), planner=planner)
    for name, part in parts.items():
        _restore(part, template[name], modules, dcp_state.StateDictOptions(strict=strict))


_SURPLUS = "is in the checkpoint, not in the model or its optimizers: load it without strict, or with the same ones"


class _ShardPlanner(DefaultLoadPlanner):
    """Refuse names that only the checkpoint has, before any tensor changes."""

    of_parts: tuple[str, ...] = ()
    of_settings: tuple[str, ...] = ()
    """Name prefixes of optimizer settings, which may be unused."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        unexpected = [] if self.local_load is None else sorted(self.local_load.unexpected)
        surplus = [
            name for name in unexpected if name.startswith(self.of_parts) and not name.startswith(self.of_settings)
        ]
        if surplus:
            raise LoadMismatchError([LoadProblem(name, "unexpected", f"{name!r} {_SURPLUS}") for name in surplus])
        return plan


def _places_of_optimizers(parts: Mapping[str, Any]) -> Iterator[str]:
    for name, part in parts.items():
        if isinstance(part, Optimizer):
            yield name
        elif not isinstance(part, nn.Module):
            yield from (f"{name}.{number}" for number in range(len(part)))


def _restore(part: Any, state: Any, modules: Iterable[nn.Module], options: dcp_state.StateDictOptions) -> None:
    if isinstance(part, nn.Module):
        dcp_state.set_model_state_dict(part, state, options=options)
    elif isinstance(part, Optimizer):
        dcp_state.set_optimizer_state_dict(_trained_by(part, modules), part, optim_state_dict=state, options=options)
    else:
        for each, its_state in zip(part, state, strict=True):
            _restore(each, its_state, modules, options)


def _trained_by(optimizer: Optimizer, modules: Iterable[nn.Module]) -> nn.Module:
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in modules:
        if trained <= {id(parameter) for parameter in module.parameters()}:
            return module
    raise ValueError(f"{type(optimizer).__name__} trains parameters of no module in this state: also pass the model")
