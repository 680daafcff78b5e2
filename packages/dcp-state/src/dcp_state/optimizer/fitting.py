"""Saved optimizer state: parsed by FQN, and matched to one optimizer's parameters and groups; finds all mismatches.

Nested: `{"state": {fqn: {name: value}}, "param_groups": [{…, "params": [fqn, …]}]}`.
Flat: keys `state.<fqn>.<name>` and `param_groups.<fqn>.<hyperparameter>`; groups without parameters are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

import torch

from dcp_core.planning.load_report import suggest
from dcp_core.planning.replicas import same_value
from dcp_core.tensors.kinds import is_dtensor
from dcp_state.canonical_names import OptimizerNames
from dcp_state.optimizer.copying import copy_value
from dcp_state.optimizer.initial import InitialStates
from dcp_state.optimizer.inner_optimizers import holds_its_own_state
from dcp_state.options import StateDictOptions
from dcp_state.report import StateMismatchError, StateReport, class_name, refusals
from dcp_state.sharding import place

STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"
PARAM_NAMES = "param_names"
"""Never restored, as groups may differ."""


@dataclass(slots=True)
class SavedOptimizer:
    """Optimizer state and hyperparameters by FQN."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    hyperparameters: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """FQN → hyperparameters; parameters may share a mapping."""
    empty_groups: list[Mapping[str, Any]] = field(default_factory=list)
    unsaved: frozenset[str] = frozenset()
    """FQNs whose hyperparameters may be missing."""


def is_text(value: object) -> bool:
    """Return whether an entry is a string, bytes, a path or a device, or a container of these."""
    if isinstance(value, Mapping):
        return all(map(is_text, value)) and all(map(is_text, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_text, value))
    return isinstance(value, str | bytes | PurePath | torch.device)


def is_bookkeeping(name: str, *values: object, defaults: Collection[str]) -> bool:
    """Return whether an entry identifies a group, or says how to compute a step; `defaults` are the optimizer's."""
    texts = all(value is None or is_text(value) for value in values)
    return name in _IMPLEMENTATIONS or (texts and name not in defaults)


def is_flat(state_dict: Mapping[str, Any]) -> bool:
    """Return whether a state dict has the flat form."""
    return bool(state_dict) and STATE not in state_dict and GROUPS not in state_dict


def read_saved(state_dict: Mapping[str, Any], known: Collection[str]) -> SavedOptimizer:
    """Parse an optimizer state dict, or raise StateMismatchError."""
    if is_flat(state_dict):
        return _read_flat(state_dict, known)
    saved = SavedOptimizer(dict(state_dict.get(STATE, {})))
    for group in state_dict.get(GROUPS, []):
        hyperparameters = {name: value for name, value in group.items() if name != PARAMS}
        if not group.get(PARAMS):
            saved.empty_groups.append(hyperparameters)
        for fqn in group.get(PARAMS) or ():
            saved.hyperparameters[fqn] = hyperparameters
    return saved


def _read_flat(state_dict: Mapping[str, Any], known: Collection[str]) -> SavedOptimizer:
    saved = SavedOptimizer()
    foreign = [key for key in state_dict if not key.startswith((f"{STATE}.", f"{GROUPS}."))]
    if foreign:
        raise StateMismatchError(
            "optimizer state", [f"{key!r} belongs neither to {STATE!r} nor to {GROUPS!r}" for key in foreign]
        )
    for key, value in state_dict.items():
        kind, _, rest = key.partition(".")
        fqn, path = _fqn_and_path(rest, known)
        if kind == STATE:
            entry = saved.state.setdefault(fqn, {})
            for name in path[:-1]:
                entry = entry.setdefault(name, {})
            entry[path[-1]] = value
        else:
            hyperparameters = saved.hyperparameters.setdefault(fqn, {})
            assert isinstance(hyperparameters, dict)
            hyperparameters[".".join(path)] = value
    return saved


def _fqn_and_path(rest: str, known: Collection[str]) -> tuple[str, list[str]]:
    """Split `<fqn>.<path>` at the longest known FQN, or before the last element."""
    parts = rest.split(".")
    for length in range(len(parts) - 1, 0, -1):
        fqn = ".".join(parts[:length])
        if fqn in known:
            return fqn, parts[length:]
    return ".".join(parts[:-1]), parts[-1:]


def flatten_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested optimizer state dict."""
    flat: dict[str, Any] = {}

    def add(prefix: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                add(f"{prefix}.{name}", value)
            else:
                flat[f"{prefix}.{name}"] = value

    for fqn, values in state_dict[STATE].items():
        add(f"{STATE}.{fqn}", values)
    for group in state_dict[GROUPS]:
        for fqn in group[PARAMS]:
            flat.update({f"{GROUPS}.{fqn}.{name}": value for name, value in group.items() if name != PARAMS})
    return flat


def rename(state_dict: Mapping[str, Any], function: Callable[[str], str]) -> dict[str, Any]:
    """Rename the parameters in a nested optimizer state dict. An empty dict stays empty."""
    if not state_dict:
        return {STATE: {}, GROUPS: []}
    return {
        STATE: {function(fqn): values for fqn, values in state_dict[STATE].items()},
        GROUPS: [{**group, PARAMS: list(map(function, group[PARAMS]))} for group in state_dict[GROUPS]],
    }


_NAME = "name"
_IMPLEMENTATIONS = ("foreach", "fused")


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
    """Parameter index → number of its group, and the parameter."""
    dtypes: dict[Any, dict[str, torch.dtype]] = field(default_factory=dict)
    """Parameter index → name → dtype to keep; torch would cast to the parameter's dtype."""
    problems: list[str] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)
    report: StateReport = field(default_factory=StateReport)

    def apply(self) -> None:
        """Load the state, without torch's casts to the parameter's dtype."""
        if self.names.owner is not None:
            owner, root, model_names = self.names.owner
            named = rename({STATE: self.state, GROUPS: self.groups}, model_names.raw_key)
            self.optimizer.load_state_dict(owner.pack_optimizer_state(root, self.optimizer, named, self.options))
            return
        groups, state = self.optimizer.param_groups, self.optimizer.state
        # A dict per parameter, as torch writes into them.
        state_for_torch = {index: _without_others(values) for index, values in self.state.items()}
        try:
            with refusals("optimizer state", f"{class_name(self.optimizer)}.load_state_dict"):
                self.optimizer.load_state_dict({STATE: state_for_torch, GROUPS: self.groups})
        except BaseException:
            if holds_its_own_state(self.optimizer):  # torch sets both before a class looks at them
                self.optimizer.param_groups, self.optimizer.state = groups, state
            raise
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
    """Return the values that torch can load: tensors, numbers, and containers that a generator can fill."""
    return {name: value for name, value in values.items() if _is_for_torch(value)}


def _is_for_torch(value: Any) -> bool:
    return isinstance(value, torch.Tensor | int | float | bool | dict) or type(value) in (list, tuple) or value is None


def _keep_objects(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> None:
    """Set loaded state in the existing objects, which wrappers and containers also reference."""
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
    initial: InitialStates,
    names: OptimizerNames,
    saved: SavedOptimizer,
    empty_groups: Iterator[Mapping[str, Any]],
    options: StateDictOptions,
    *,
    adopt: bool,
) -> FittedState:
    """Match saved state to an optimizer, whose groups may differ; change nothing.

    `empty_groups` has hyperparameters for groups without parameters, in order. With `adopt`, the optimizer may take the
    saved tensors themselves. Of the options, only `strict` is used.
    """
    fitted = FittedState(initial.optimizer, initial, names, options)
    for number, group in enumerate(initial.optimizer.param_groups):
        members = [names.fqns(parameter, number, position) for position, parameter in enumerate(group[PARAMS])]
        fqns = [fqn for each in members for fqn in each]
        hyperparameters = _hyperparameters(fitted, number, group, fqns, saved, empty_groups)
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
    return placed if adopt and placed is value else copy_value(placed)


def _keeps_dtype(like: Mapping[str, Any] | None, name: str, dtype: torch.dtype) -> bool:
    if like is None:
        return True
    own = like.get(name)
    return isinstance(own, torch.Tensor) and own.dtype == dtype


def _hyperparameters(
    fitted: FittedState,
    number: int,
    group: Mapping[str, Any],
    fqns: list[str],
    saved: SavedOptimizer,
    empty_groups: Iterator[Mapping[str, Any]],
) -> Mapping[str, Any]:
    """Return a group's saved hyperparameters, without names and bookkeeping that its parameters do not share."""
    own_names = {PARAM_NAMES, *({_NAME} & group.keys())}
    if not fqns:
        own = next(empty_groups, {})
        if not own:
            fitted.report.initialised[f"{GROUPS}.{number}"] = "an empty group, of which nothing was saved"
        return _without(own, own_names)
    chosen: Mapping[str, Any] | None = None
    chosen_by = ""
    for fqn in fqns:
        found = next(
            (saved.hyperparameters[name] for name in fitted.names.candidates(fqn) if name in saved.hyperparameters),
            None,
        )
        if found is None:
            if fitted.options.strict and saved.hyperparameters and fqn not in saved.unsaved:
                fitted.problems.append(f"{fqn!r} is in no saved group{suggest(fqn, saved.hyperparameters)}")
            fitted.report.initialised[f"{GROUPS}.{fqn}"] = "no saved hyperparameters"
        elif chosen is None:
            chosen, chosen_by = found, fqn
        elif found is not chosen and (differing := set(_differing(chosen, found)) - own_names):
            defaults = fitted.optimizer.defaults
            own_names |= {
                name for name in differing if is_bookkeeping(name, chosen.get(name), found.get(name), defaults=defaults)
            }
            if not (differing := differing - own_names):
                continue
            fitted.problems.append(
                f"{chosen_by!r} and {fqn!r} share group {number}, but were saved with different "
                f"{', '.join(sorted(differing))}; make an optimizer with groups like the saved ones"
            )
    return _without(chosen or {}, own_names)


def _without(hyperparameters: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in hyperparameters.items() if name not in names}


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) is not isinstance(other, torch.Tensor):
        with suppress(TypeError, ValueError, RuntimeError):  # not a number
            return bool(torch.equal(torch.as_tensor(one, device="cpu"), torch.as_tensor(other, device="cpu")))
        return False
    return same_value(one, other)


def _like(name: str, value: Any, current: Any) -> Any:
    """Convert a saved hyperparameter to its current type; of tensors, only a learning rate becomes a number."""
    if isinstance(current, torch.Tensor) and isinstance(value, int | float):
        return torch.full_like(current, value)
    if isinstance(value, torch.Tensor):
        if isinstance(current, torch.Tensor):
            return value.detach().to(current.device, current.dtype).clone()
        to_number = name == "lr" and isinstance(current, int | float) and value.numel() == 1
        return value.item() if to_number else value.detach().clone()
    return value
