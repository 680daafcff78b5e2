"""Parsed optimizer state dicts, nested or flat: state and hyperparameters by FQN.

Nested: `{"state": {fqn: {name: value}}, "param_groups": [{…, "params": [fqn, …]}]}`.
Flat: keys `state.<fqn>.<name>` and `param_groups.<fqn>.<hyperparameter>`; groups without parameters are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from dcp_state.errors import StateMismatchError

__all__ = ["GROUPS", "PARAMS", "STATE", "SavedOptimizer", "flatten_optimizer_state", "is_flat", "read_saved", "rename"]

STATE = "state"
GROUPS = "param_groups"
PARAMS = "params"


@dataclass(slots=True)
class SavedOptimizer:
    """Optimizer state and hyperparameters by FQN, independent of how parameters were grouped when saved."""

    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    hyperparameters: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """FQN → hyperparameters; parameters of one group may share the same mapping."""
    empty_groups: list[Mapping[str, Any]] = field(default_factory=list)


def is_flat(state_dict: Mapping[str, Any]) -> bool:
    """Whether an optimizer state dict has the flat form."""
    return bool(state_dict) and STATE not in state_dict and GROUPS not in state_dict


def read_saved(state_dict: Mapping[str, Any], known: Collection[str]) -> SavedOptimizer:
    """Parse an optimizer state dict, nested or flat; tensors are not copied.

    Args:
        state_dict: The state dict, which is not changed.
        known: FQNs of the model, which are needed to split flat keys into FQN and name.

    Raises:
        StateMismatchError: The state dict has neither the nested nor the flat form.
    """
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
    """Split `<fqn>.<path>` at the longest known FQN; before the last element if none is known."""
    parts = rest.split(".")
    for length in range(len(parts) - 1, 0, -1):
        fqn = ".".join(parts[:length])
        if fqn in known:
            return fqn, parts[length:]
    return ".".join(parts[:-1]), parts[-1:]


def flatten_optimizer_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested optimizer state dict; tensors are not copied. Groups without parameters are dropped."""
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
    """Rename the parameters in a nested optimizer state dict by `function` (name → new name); copies no tensor.

    An empty dict stays empty.
    """
    if not state_dict:
        return {STATE: {}, GROUPS: []}
    return {
        STATE: {function(fqn): values for fqn, values in state_dict[STATE].items()},
        GROUPS: [{**group, PARAMS: list(map(function, group[PARAMS]))} for group in state_dict[GROUPS]],
    }
