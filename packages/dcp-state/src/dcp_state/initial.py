"""The optimizer state of a parameter that has not been stepped, found without touching the optimizer.

A template to load into needs it, and a checkpoint that holds it resumes like an optimizer without state. Stock takes a
real step with lr=0 instead, which leaves step counters at 1 and fires hooks.

How: a stand-in of the optimizer, without hooks, gets a parameter and a gradient of zeros of the same kind. One step
tells which values there are; stopped where the update would begin, another tells what they are before it.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp_state.adapters import OptimizerAdapter

__all__ = ["InitialStates", "copy_value"]


class _StopHereError(Exception):
    """Raised where the update would begin."""


class InitialStates:
    """The initial states of one optimizer's parameters; parameters of one kind are tried once."""

    def __init__(self, optimizer: torch.optim.Optimizer, adapter: OptimizerAdapter | None) -> None:
        self._optimizer = optimizer
        self._adapter = adapter
        self._known: dict[Hashable, dict[str, Any]] = {}

    def of(self, group_index: int, parameter: torch.Tensor) -> dict[str, Any]:
        """State by name, in tensors of its own; empty if the optimizer keeps none for such a parameter."""
        group = self._optimizer.param_groups[group_index]
        if self._adapter is not None:
            told = self._adapter.initial_state(self._optimizer, group, parameter)
            if told is not None:
                return told
        kind = (group_index, _kind(parameter))
        if kind not in self._known:
            self._known[kind] = self._try(group, parameter)
        return {name: copy_value(value) for name, value in self._known[kind].items()}

    def _try(self, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return {}
        after = _step(self._optimizer, group, parameter, stop=False)
        if hasattr(self._optimizer, "_init_group"):
            before = _step(self._optimizer, group, parameter, stop=True)
        else:
            before = {"step": _zero(after["step"])} if "step" in after else {}
        return {name: before.get(name, value) for name, value in after.items()}


def _step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor, *, stop: bool
) -> dict[str, Any]:
    """The state that a stand-in has after one step, or before its update."""
    kind = type(optimizer)
    stand_in = kind.__new__(kind)
    values = {
        name: value.copy() if isinstance(value, dict | list) else value for name, value in vars(optimizer).items()
    }
    for name in ("step", "zero_grad"):  # what schedulers and profilers put over the methods of the class
        values.pop(name, None)
    vars(stand_in).update({name: type(value)() if "_hooks" in name else value for name, value in values.items()})
    with torch.no_grad():
        trial = torch.zeros_like(parameter.detach()).requires_grad_()
        trial.grad = torch.zeros_like(parameter.detach())
    stand_in.state = defaultdict(dict)
    stand_in.param_groups = [{**{name: copy_value(value) for name, value in group.items() if name != "params"}}]
    stand_in.param_groups[0]["params"] = [trial]
    if stop:
        vars(stand_in)["_init_group"] = _stopping(kind, stand_in)
    # The decorated method would run hooks that are registered for all optimizers.
    function: Any = kind.step
    while getattr(function, "hooked", False):
        function = function.__wrapped__
    with contextlib.suppress(_StopHereError), torch.random.fork_rng(devices=[]):
        function(stand_in)
    return dict(stand_in.state.get(trial, {}))


def _stopping(kind: type[Any], stand_in: Any) -> Any:
    def initialise(*args: Any, **kwargs: Any) -> None:
        kind._init_group(stand_in, *args, **kwargs)  # noqa: SLF001 - where torch's optimizers make their state
        raise _StopHereError

    return initialise


def _kind(parameter: torch.Tensor) -> Hashable:
    """Equal for parameters whose states begin alike."""
    spec: Hashable = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
    return tuple(parameter.shape), parameter.dtype, parameter.device, parameter.stride(), spec


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)(0)


def copy_value(value: Any) -> Any:
    """A value of optimizer state that shares nothing with the given one."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {name: copy_value(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_value(each) for each in value)
    return value
