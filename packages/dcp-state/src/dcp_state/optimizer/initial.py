"""Initial state of a parameter that was never stepped, found by a trial step on a stand-in optimizer.

The template for a load needs this state. Training from a checkpoint with initial state continues as if the optimizer
had no state yet. Stock takes a real step with lr=0 instead, which sets step counters to 1 and runs hooks.

Method: a stand-in of the optimizer takes a trial step with a parameter and a gradient of zeros, and the first value
under each name of the state is recorded. A second trial with another gradient finds names that zeros do not create.
Trials with another parameter find state that depends on the parameter's numbers, such as a copy of the weights; such
state is found by a trial step for each parameter, with its own numbers. The optimizers of `torch.optim` make their
state before the update, from shapes and dtypes alone: one trial that ends there finds the state of a whole group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from dcp_core.toolkit import is_dtensor
from dcp_state.adapters import OptimizerAdapter
from dcp_state.errors import UnsupportedOptimizerError, class_name, nameless_state
from dcp_state.optimizer.copying import copy_value, same_value
from dcp_state.optimizer.stand_in import Recorded, make_stand_in, prepares_state, step_stand_in

__all__ = ["InitialStates"]

_OTHER_VALUE = 0.375  # exact in every floating dtype of at least four bits
_WEIGHT_DECAY = "weight_decay"
_STATE = "state"
Fill = Callable[[torch.Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Known:
    """Cache entry: the initial state of one kind of parameters."""

    state: dict[str, Any]
    counted: frozenset[str] = frozenset()
    """Names whose values a step with a gradient changes."""
    by_value: frozenset[str] = frozenset()
    """Names whose values depend on the values of the parameter."""


class InitialStates:
    """Initial optimizer states of one optimizer's parameters; parameters of one kind share a trial step.

    Args:
        optimizer: The optimizer, which is never changed.
        adapter: Adapter whose `initial_state` is asked first; None for trial steps only.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, adapter: OptimizerAdapter | None) -> None:
        self._optimizer = optimizer
        self._adapter = adapter
        self._known: dict[Hashable, _Known] = {}
        self._value_free: dict[int, bool] = {}
        """Number of a group → whether the initial state of its parameters depends on no values."""

    @torch.inference_mode(mode=False)  # the tensors are trained with later
    def of(self, group_index: int, parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the initial state (name → value) of each parameter, in new tensors; empty if there is no state.

        Args:
            group_index: Position of the parameters' group in `param_groups`.
            parameters: Parameters of the group.

        Raises:
            UnsupportedOptimizerError: The trial step on the stand-in failed; the optimizer itself was not changed.
        """
        is_packed = type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict
        if parameters and self._adapter is None and not is_packed and self._is_value_free(group_index, parameters[0]):
            made = self._prepared(self._optimizer.param_groups[group_index], parameters)
            if made:  # without a copy, which would take as long as reading the state from a file
                return made
        return [self._of_one(group_index, parameter) for parameter in parameters]

    def _of_one(self, group_index: int, parameter: torch.Tensor) -> dict[str, Any]:
        named = self._of_adapter(group_index, parameter)
        if named is not None:
            return named
        known = self._of_kind(group_index, parameter)
        if known.by_value:
            group = _without_decay(self._optimizer.param_groups[group_index])
            probed = self._probe(group, parameter, lambda trial: trial.copy_(parameter.detach()))
            return self._packed(group, parameter, probed).state
        return {name: copy_value(value) for name, value in known.state.items()}

    def like(self, group_index: int, parameter: torch.Tensor) -> Mapping[str, Any] | None:
        """Return read-only state with the initial state's names, shapes and dtypes; None if the trial step fails."""
        named = self._of_adapter(group_index, parameter)
        if named is not None:
            return named
        try:
            return self._of_kind(group_index, parameter).state
        except UnsupportedOptimizerError:
            return None

    def prepare(self) -> None:
        """Find and cache the initial state of every parameter for which trial steps succeed."""
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                self.like(number, parameter)

    def is_untouched(self, group_index: int, parameter: torch.Tensor, values: Mapping[str, Any]) -> bool:
        """Whether the state `values` of a parameter equals its initial state: the optimizer took no step for it.

        Such state need not be loaded, since the optimizer makes it in its first step. Some optimizers make state from
        the first gradient, or treat parameters without state differently: for them it must not be loaded.
        """
        if self._of_adapter(group_index, parameter) is not None or self._is_value_free(group_index, parameter):
            return False
        if not self.like(group_index, parameter):
            return False
        known = self._of_kind(group_index, parameter)
        size = partial(_size, known.state)
        fixed = sorted(known.state.keys() - known.by_value, key=size)
        return (
            not known.counted.isdisjoint(fixed)
            and values.keys() == known.state.keys()
            and all(same_value(known.state[name], values[name]) for name in fixed)
        )

    def _of_adapter(self, group_index: int, parameter: torch.Tensor) -> dict[str, Any] | None:
        if self._adapter is None:
            return None
        return self._adapter.initial_state(self._optimizer, self._optimizer.param_groups[group_index], parameter)

    @torch.inference_mode(mode=False)
    def _of_kind(self, group_index: int, parameter: torch.Tensor) -> _Known:
        kind = (group_index, _kind(parameter))
        if kind not in self._known:
            group = self._optimizer.param_groups[group_index]
            made = self._prepared(group, [parameter]) if self._is_value_free(group_index, parameter) else []
            found = _Known(made[0]) if made else self._find(group, parameter)
            self._known[kind] = self._packed(group, parameter, found)
        return self._known[kind]

    def _is_value_free(self, group_index: int, parameter: torch.Tensor) -> bool:
        """Whether initial state in a group depends on hyperparameters, shapes and dtypes alone, not on any values."""
        if group_index not in self._value_free:
            small = torch.zeros((1, 1), dtype=parameter.dtype, device=parameter.device)
            group = self._optimizer.param_groups[group_index]
            self._value_free[group_index] = prepares_state(self._optimizer) and any(self._prepared(group, [small]))
        return self._value_free[group_index]

    def _prepared(self, group: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
        """Return the state that torch's own code makes for parameters before any update; empty if it makes none.

        That code uses no values, so that the trial parameters and their gradients can share the parameters' memory.
        """
        try:
            trials = [parameter.detach().requires_grad_() for parameter in parameters]
            for trial in trials:
                trial.grad = trial.detach()
            with make_stand_in(self._optimizer, group, *trials) as (stand_in, _):
                stand_in.state = defaultdict(dict)
                step_stand_in(stand_in, None, only_prepare=True)
                return [stand_in.state[trial] for trial in trials]
        except Exception:  # noqa: BLE001 - foreign code on a stand-in, which is tried in other ways
            return []

    def _packed(self, group: Mapping[str, Any], parameter: torch.Tensor, known: _Known) -> _Known:
        """Convert state to the form of the optimizer's `state_dict()`: some classes rename state there, or nest it."""
        kind: Any = type(self._optimizer)
        if kind.state_dict is torch.optim.Optimizer.state_dict or not known.state:
            return known
        trial = _trial(parameter, torch.Tensor.zero_, 0.0, sparse=False)
        try:
            with make_stand_in(self._optimizer, group, trial) as (stand_in, _):
                stand_in.state[trial] = dict(known.state)
                packed = dict(kind.state_dict(stand_in)[_STATE][0])
        except Exception:  # noqa: BLE001 - foreign code on a stand-in
            return known
        moved, new = known.state.keys() - packed.keys(), packed.keys() - known.state.keys()

        def names(which: frozenset[str]) -> frozenset[str]:
            return (which - moved) | (new if which & moved else frozenset())

        return _Known(packed, names(known.counted), names(known.by_value))

    def _find(self, group: Mapping[str, Any], parameter: torch.Tensor) -> _Known:
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return _Known({})
        of_zeros = self._probe(group, parameter, torch.Tensor.zero_)
        if not of_zeros.state:
            return of_zeros
        of_others = self._probe(_without_decay(group), parameter, lambda trial: trial.fill_(_OTHER_VALUE))
        differing = (
            name for name in of_others.state if not same_value(of_zeros.state.get(name), of_others.state[name])
        )
        state = {**of_zeros.state, **of_others.state}  # decay may make some of it
        return replace(of_zeros, state=state, by_value=frozenset(differing))

    def _probe(self, group: Mapping[str, Any], parameter: torch.Tensor, fill: Fill) -> _Known:
        """Find the state of a trial parameter, and the names whose values a step with a non-zero gradient changes."""
        tried: list[Recorded] = []
        errors: list[UnsupportedOptimizerError] = []
        for gradient, its_group in ((0.0, group), (_OTHER_VALUE, _without_decay(group))):
            try:
                tried.append(self._try(its_group, parameter, fill, gradient))
            except UnsupportedOptimizerError as error:
                errors.append(error)
        if not tried:
            raise errors[0]
        state = {name: value for each in reversed(tried) for name, value in each.initial().items()}
        last = tried[-1]
        counted = frozenset(name for name in last if not same_value(state[name], last[name]))
        return _Known({name: copy_value(value) for name, value in state.items()}, counted)

    def _try(self, group: Mapping[str, Any], parameter: torch.Tensor, fill: Fill, gradient: float) -> Recorded:
        """Record a trial step with a constant gradient; tries without a closure, with one, then a sparse gradient."""
        first_error: Exception | None = None
        missing: list[str] = []
        for sparse, closure in ((False, None), (False, _closure), (True, None)):
            trial = _trial(parameter, fill, gradient, sparse=sparse)
            try:
                with make_stand_in(self._optimizer, group, trial) as (stand_in, missing):
                    step_stand_in(stand_in, closure)
                    state = dict(stand_in.state)
            except Exception as error:  # noqa: BLE001 - foreign code on a stand-in; raised below
                first_error = first_error or error
            else:
                first_error = None  # its traceback holds this frame, and so the tensors
                return self._recorded(state, trial)
        raise self._refusal(first_error, missing) from first_error

    def _recorded(self, state: Mapping[Any, Any], trial: torch.Tensor) -> Recorded:
        others = [key for key in state if key is not trial]
        if others:
            raise nameless_state(self._optimizer, others)
        recorded: Any = state.get(trial)
        return Recorded() if recorded is None else recorded

    def _refusal(self, error: Exception | None, missing: list[str]) -> UnsupportedOptimizerError:
        lacks = f"; it could not be given {', '.join(missing)}" if missing else ""
        return UnsupportedOptimizerError(
            f"{class_name(self._optimizer)} has no state for some parameter, and the state that it would begin "
            f"with cannot be found out on a copy ({type(error).__name__}: {error}){lacks}: take a step before, or "
            "register an OptimizerAdapter with `initial_state` (hook dcp_register_state_adapters); nothing was changed"
        )


def _size(state: Mapping[str, Any], name: str) -> int:
    """Return a value's number of elements, so that small values (step counts) are compared before large tensors."""
    value = state[name]
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _closure() -> torch.Tensor:
    return torch.zeros((), device="cpu")


def _trial(parameter: torch.Tensor, fill: Fill, value: float, *, sparse: bool) -> torch.Tensor:
    """Return a new parameter of the same shape, dtype and device, with a constant gradient."""
    with torch.no_grad():
        trial = torch.zeros_like(parameter.detach())
        fill(trial)
        gradient = torch.full_like(parameter.detach(), value)
    trial.requires_grad_()
    trial.grad = _no_entries(gradient) if sparse and gradient.dim() else gradient
    return trial


def _no_entries(gradient: torch.Tensor) -> torch.Tensor:
    """Return an empty sparse gradient, like that of an embedding."""
    rows = torch.empty((1, 0), dtype=torch.int64, device=gradient.device)
    return torch.sparse_coo_tensor(rows, gradient[:0], gradient.shape, check_invariants=True)


def _without_decay(group: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the group without weight decay, which would make the first momentum depend on the weights."""
    return {**group, _WEIGHT_DECAY: 0.0} if isinstance(group.get(_WEIGHT_DECAY), float) else group


def _kind(parameter: torch.Tensor) -> Hashable:
    """Return a key that is equal for parameters of the same shape, dtype, device, strides and sharding."""
    spec: Hashable = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else None
    return tuple(parameter.shape), parameter.dtype, parameter.device, parameter.stride(), spec
