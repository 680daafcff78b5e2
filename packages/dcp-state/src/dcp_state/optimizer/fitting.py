"""Matching of saved optimizer state to the parameters and groups of one optimizer; finds all mismatches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_core.toolkit import is_dtensor, same_value, suggest
from dcp_state.errors import StateMismatchError
from dcp_state.optimizer.copying import copy_value
from dcp_state.optimizer.initial import InitialStates
from dcp_state.optimizer.inner_optimizers import holds_its_own_state
from dcp_state.optimizer.optimizer_names import OptimizerNames
from dcp_state.optimizer.saved import GROUPS, PARAMS, STATE, SavedOptimizer, rename
from dcp_state.options import StateDictOptions
from dcp_state.report import StateReport
from dcp_state.sharding.placing import place

__all__ = ["FittedState", "fit"]


@dataclass(slots=True)
class FittedState:
    """Checked state dict that an optimizer can load."""

    optimizer: torch.optim.Optimizer
    initial: InitialStates
    names: OptimizerNames
    options: StateDictOptions
    state: dict[Any, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    parameters: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    """List over the optimizer's parameter indices: number of the parameter's group, and the parameter."""
    dtypes: dict[Any, dict[str, torch.dtype]] = field(default_factory=dict)
    """Parameter index → name → dtype that the state tensor keeps; torch would cast it to the parameter's dtype."""
    problems: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    report: StateReport = field(default_factory=StateReport)

    def apply(self) -> None:
        """Load the state into the optimizer. Tensors get the dtype that the optimizer uses for its state.

        Torch's `load_state_dict` would cast them to the parameter's dtype, and would garble strings in the state.
        """
        if self.names.owner is not None:
            owner, root, model_names = self.names.owner
            named = rename({STATE: self.state, GROUPS: self.groups}, model_names.raw_key)
            self.optimizer.load_state_dict(owner.pack_optimizer_state(root, self.optimizer, named, self.options))
            return
        groups, state = self.optimizer.param_groups, self.optimizer.state
        # A dict per parameter, as torch writes into them.
        state_for_torch = {index: _without_others(values) for index, values in self.state.items()}
        self.optimizer.load_state_dict({STATE: state_for_torch, GROUPS: self.groups})
        for index, values in self.state.items():
            self._restore_values(self.optimizer.state[self.parameters[index][1]], values, self.dtypes.get(index, {}))
        _keep_objects(self.optimizer, groups, state)

    def _restore_values(
        self, held: dict[str, Any], values: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                if name in held or not _is_for_torch(value):  # a class may have stored its argument elsewhere
                    held[name] = value
            elif name in dtypes and isinstance(held.get(name), torch.Tensor) and held[name].dtype != value.dtype:
                held[name] = value.to(held[name].device)


def _without_others(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that torch can load: tensors, numbers, and containers that can be built from a generator."""
    return {name: value for name, value in values.items() if _is_for_torch(value)}


def _is_for_torch(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float | bool | dict) or type(value) in (list, tuple) or value is None


def _keep_objects(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Put loaded state into the optimizer's existing objects, which wrappers and containers also reference."""
    if not holds_its_own_state(optimizer):
        return
    loaded, loaded_state = optimizer.param_groups, optimizer.state
    if loaded is not groups and len(loaded) == len(groups):
        for group, values in zip(groups, loaded, strict=True):
            if group is not values:
                group.clear()
                group.update(values)
        optimizer.param_groups = groups
    if loaded_state is not state and type(loaded_state) is type(state):
        state.clear()
        state.update(loaded_state)
        optimizer.state = state


def fit(
    optimizer: torch.optim.Optimizer,
    initial: InitialStates,
    names: OptimizerNames,
    saved: SavedOptimizer,
    empty_groups: Iterator[Mapping[str, Any]],
    options: StateDictOptions,
    *,
    adopt: bool,
) -> FittedState:
    """Match saved state to an optimizer; returns the state dict to load, and changes nothing.

    Args:
        optimizer: The optimizer, whose grouping of parameters may differ from that of the save.
        initial: Initial states of the parameters, for the shapes and dtypes of this optimizer's state.
        names: Names of the optimizer's parameters.
        saved: The saved state, which is not changed.
        empty_groups: Hyperparameters of saved groups without parameters, assigned in order to this optimizer's empty
            groups.
        options: Options; only `strict` is used.
        adopt: Whether the optimizer may take the saved tensors themselves, without a copy.
    """
    fitted = FittedState(optimizer, initial, names, options)
    for number, group in enumerate(optimizer.param_groups):
        members = [names.fqns(parameter, number, position) for position, parameter in enumerate(group[PARAMS])]
        fqns = [fqn for each in members for fqn in each]
        hyperparameters = _hyperparameters(fitted, number, fqns, saved, empty_groups)
        start = len(fitted.parameters)
        fitted.groups.append(
            {
                **{name: value for name, value in group.items() if name != PARAMS},
                **{name: _like(name, value, group.get(name)) for name, value in hyperparameters.items()},
                PARAMS: list(range(start, start + len(members))) if names.owner is None else fqns,
            }
        )
        for each, parameter in zip(members, group[PARAMS], strict=True):
            fitted.parameters.append((number, parameter))
            for fqn in each:
                _fit_parameter(fitted, fqn, saved, adopt=adopt)
    return fitted


def _fit_parameter(fitted: FittedState, fqn: str, saved: SavedOptimizer, *, adopt: bool) -> None:
    """Fit the state of the parameter that was added last."""
    index = len(fitted.parameters) - 1
    number, parameter = fitted.parameters[index]
    found = next((name for name in fitted.names.candidates(fqn) if saved.state.get(name)), None)
    if found is not None:
        fitted.taken.update(fitted.names.candidates(fqn))
        key, owned = (index, False) if fitted.names.owner is None else (fqn, True)
        try:
            fitted.state[key] = (
                dict(saved.state[found])
                if owned
                else {
                    name: _take(fitted, f"{fqn}.{name}", name, value, adopt=adopt)
                    for name, value in saved.state[found].items()
                }
            )
        except StateMismatchError as error:
            fitted.problems += error.problems
        if not owned and key in fitted.state and fitted.initial.is_untouched(number, parameter, fitted.state[key]):
            del fitted.state[key]  # the optimizer makes it by itself
        fitted.report.restored.append(f"{STATE}.{fqn}")
    elif parameter.requires_grad and (begins_with := fitted.initial.like(number, parameter)) != {}:
        if fitted.options.strict and begins_with is not None:
            fitted.problems.append(
                f"{fqn!r} is trainable, but has no saved state{suggest(fqn, saved.state)}; use strict=False to let it "
                "begin anew"
            )
        fitted.report.initialised[f"{STATE}.{fqn}"] = "no saved state"


def _take(fitted: FittedState, fqn: str, name: str, value: Any, *, adopt: bool) -> Any:
    index = len(fitted.parameters) - 1
    number, parameter = fitted.parameters[index]
    if not isinstance(value, torch.Tensor):
        return value if adopt else copy_value(value)
    if not hasattr(value, "shape"):
        return value
    like: Any = parameter
    if value.shape != parameter.shape and value.dim():
        like = (fitted.initial.like(number, parameter) or {}).get(name)
        if isinstance(like, torch.Tensor) and like.shape != value.shape:
            raise StateMismatchError(
                fqn, [f"{fqn!r} has the shape {tuple(value.shape)}, this optimizer needs {tuple(like.shape)}"]
            )
    if value.dtype != parameter.dtype and _keeps_dtype(fitted.initial.like(number, parameter), name, value.dtype):
        fitted.dtypes.setdefault(index, {})[name] = value.dtype
    placed = place(fqn, value, like) if value.dim() or is_dtensor(value) else value
    return placed if adopt and placed is value else placed.detach().clone()


def _keeps_dtype(like: Mapping[str, Any] | None, name: str, dtype: torch.dtype) -> bool:
    """Whether the optimizer's initial state has this dtype for a value; True if the initial state is unknown."""
    if like is None:
        return True
    own = like.get(name)
    return isinstance(own, torch.Tensor) and own.dtype == dtype


def _hyperparameters(
    fitted: FittedState,
    number: int,
    fqns: list[str],
    saved: SavedOptimizer,
    empty_groups: Iterator[Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Return the saved hyperparameters for a group; an empty mapping if there are none."""
    if not fqns:
        own = next(empty_groups, {})
        if not own:
            fitted.report.initialised[f"{GROUPS}.{number}"] = "an empty group, of which nothing was saved"
        return own
    chosen: Mapping[str, Any] | None = None
    chosen_by = ""
    for fqn in fqns:
        found = next(
            (saved.hyperparameters[name] for name in fitted.names.candidates(fqn) if name in saved.hyperparameters),
            None,
        )
        if found is None:
            if fitted.options.strict and saved.hyperparameters:
                fitted.problems.append(f"{fqn!r} is in no saved group{suggest(fqn, saved.hyperparameters)}")
            fitted.report.initialised[f"{GROUPS}.{fqn}"] = "no saved hyperparameters"
        elif chosen is None:
            chosen, chosen_by = found, fqn
        elif found is not chosen and (differing := _differing(chosen, found)):
            fitted.problems.append(
                f"{chosen_by!r} and {fqn!r} share group {number}, but were saved with different "
                f"{', '.join(differing)}; make an optimizer with groups like the saved ones"
            )
    return chosen or {}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name)))


def _equal(one: Any, other: Any) -> bool:
    """Whether two hyperparameters are equal: bitwise, or a number and a tensor of the same value."""
    if isinstance(one, torch.Tensor) is not isinstance(other, torch.Tensor):
        return bool(torch.equal(torch.as_tensor(one, device="cpu"), torch.as_tensor(other, device="cpu")))
    return same_value(one, other)


def _like(name: str, value: Any, current: Any) -> Any:
    """Convert a saved hyperparameter to its current type: a tensor stays a tensor, as schedulers and graphs use it.

    A saved tensor becomes a number only for the learning rate: the optimizer may need other ones as tensors.
    """
    if isinstance(current, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(value, torch.Tensor):
        if isinstance(current, torch.Tensor):
            return value.detach().to(current.device, current.dtype).clone()
        to_number = name == "lr" and isinstance(current, int | float) and value.numel() == 1
        return value.item() if to_number else value.detach().clone()
    return value
